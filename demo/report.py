"""The output of the demo: a table, and a picture of the loss curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot
from tabulate import tabulate

from demo.compare import LOSS_TOLERANCE, Comparison
from demo.train import Run

HEADER = (
    *("resumed on", "steps", "loss:\nnot stopped", "loss:\nresumed", "largest loss\ndifference"),
    *("state, right\nafter load", "state,\nat the end", "seconds", ""),
)


def table(comparisons: Sequence[Comparison]) -> str:
    """One line per resumed run. The state's columns are the largest absolute difference of any value."""
    return tabulate([row(comparison) for comparison in comparisons], HEADER, tablefmt="simple", disable_numparse=True)


def row(comparison: Comparison) -> tuple[str, ...]:
    return (
        comparison.name,
        str(comparison.steps),
        f"{comparison.uninterrupted_loss:.7f}",
        f"{comparison.loss:.7f}",
        number(comparison.largest_loss_difference),
        number(comparison.state_difference_after_load),
        number(comparison.state_difference_at_end),
        f"{comparison.seconds:.1f}",
        verdict(comparison),
    )


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def verdict(comparison: Comparison) -> str:
    if comparison.failures():
        return "FAILED"
    return "bit-exact" if comparison.must_be_bit_exact else "equal"


def draw(path: Path, whole: Run, resumed: dict[str, Run], save_after: int) -> None:
    """Draw the curves on top of each other, and their differences below."""
    figure, (losses, differences) = pyplot.subplots(
        2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    losses.plot(whole.losses, color="black", linewidth=3, alpha=0.3, label="4 ranks, not stopped")
    for name, run in resumed.items():
        steps = range(run.first_step, run.first_step + len(run.losses))
        losses.plot(steps, run.losses, linewidth=1, label=f"resumed: {name}")
        relative = [abs(a - b) / b for a, b in zip(run.losses, whole.losses[run.first_step :], strict=True)]
        differences.plot(steps, relative, ".", markersize=3)
    differences.axhline(LOSS_TOLERANCE, color="grey", linestyle=":", label=f"allowed: {LOSS_TOLERANCE:g}")
    differences.set_yscale("symlog", linthresh=1e-8)
    losses.set(title="Resuming from one full optimizer state", ylabel="loss per character")
    differences.set(xlabel="step", ylabel="relative difference to\nthe run not stopped")
    losses.legend(loc="center right")
    differences.legend(loc="center left")
    losses.text(save_after, 0.97, " saved and resumed", color="red", va="top", transform=losses.get_xaxis_transform())
    for axes in (losses, differences):
        axes.axvline(save_after, color="red", linestyle="--", linewidth=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
