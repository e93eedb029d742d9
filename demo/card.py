"""The picture that links to the site show: `python -m demo.card` writes website/card.png, 1200 by 630 pixels."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

FILE = Path(__file__).parents[1] / "website" / "card.png"
BACK, TEXT, FAINT, WHOLE = "#1a237e", "#ffffff", "#c5cae9", "#ffca28"
RANKS = ("#4fc3f7", "#81c784", "#ffb74d", "#e57373")
WIDTH, HEIGHT, DOTS = 12.0, 6.3, 100


def draw(file: Path) -> None:
    """Draw shards on four ranks, one complete copy, and shards on three ranks, below the name and what it is for."""
    figure = pyplot.figure(figsize=(WIDTH, HEIGHT), dpi=DOTS, facecolor=BACK)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.axis("off")
    axes.text(0.7, 5.05, "fsdp_optim", color=TEXT, fontsize=54, fontweight="bold", va="center")
    axes.text(0.7, 4.1, "Save FSDP weights and optimizer state once, unsharded;", color=FAINT, fontsize=22, va="center")
    axes.text(
        0.7,
        3.55,
        "resume on any number of ranks, under any wrapper, bit for bit.",
        color=FAINT,
        fontsize=22,
        va="center",
    )
    for left, num, label in ((0.7, 4, "4 ranks"), (8.3, 3, "3 ranks")):
        each = 3.0 / num
        for index in range(num):
            _box(axes, left + index * each, each - 0.12, RANKS[index])
        axes.text(left + 1.45, 0.65, label, color=TEXT, fontsize=20, ha="center", va="center")
    _box(axes, 4.6, 2.8, WHOLE)
    axes.text(6.0, 0.65, "one complete copy", color=TEXT, fontsize=20, ha="center", va="center")
    for left in (3.85, 7.6):
        axes.annotate("", (left + 0.55, 1.75), (left, 1.75), arrowprops={"arrowstyle": "-|>", "color": TEXT, "lw": 3})
    figure.savefig(file, dpi=DOTS, facecolor=BACK)
    pyplot.close(figure)


def _box(axes: pyplot.Axes, left: float, width: float, colour: str) -> None:
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((left, 1.15), width, 1.2, boxstyle=style, facecolor=colour, edgecolor="none"))


if __name__ == "__main__":
    draw(FILE)
    sys.exit(0)
