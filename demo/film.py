"""The moving picture of README.md, from real runs: `python -m demo.film` writes docs/demo.gif.

The program that README.md prints runs under torchrun, is killed (SIGKILL) and started again on another number of ranks, twice. It
also runs once without a stop: that is the wide grey line. What the frames show as a terminal is what the program printed.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot
from matplotlib.colors import to_rgb
from PIL import Image

ROOT = Path(__file__).parents[1]
RUNS = ((4, 187), (3, 353), (5, 500))
"""The number of ranks of each run, and the step after which it is killed."""
COLOURS = {4: "#4fc3f7", 3: "#ffb74d", 5: "#81c784"}
BACK, TEXT, FAINT = "#12161c", "#e6edf3", "#8b949e"  # dark itself, so that it fits on a light page and on a dark one
RED, WHOLE, EDGE = "#ff5252", "#484f58", "#30363d"
SHADES = 8
LINES = 11
STEPS_A_FRAME = 17
STEP = re.compile(r"^step (\d+)  loss (\S+)$")


@dataclass(frozen=True)
class Leg:
    """One run of the program: its ranks, and the lines that it printed."""

    ranks: int
    lines: list[str]

    def losses(self) -> dict[int, float]:
        """The printed loss of each step."""
        return {int(match[1]): float(match[2]) for match in map(STEP.match, self.lines) if match}


def printed() -> str:
    """The program of the first page."""
    found = re.search(r"^```python[^\n]*\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit("README.md has no program")
    return found[1]


def run(folder: Path, ranks: int, last: int) -> Leg:
    """Run the program until it has printed the step `last`, and kill all of its processes."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "train.py",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    lines = []
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None  # a pipe was asked for
        for line in job.stdout:
            lines.append(line.rstrip())
            match = STEP.match(lines[-1])
            if match and int(match[1]) >= last:
                break
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        for pid in [*map(int, children), job.pid]:
            os.kill(pid, signal.SIGKILL)
    return Leg(ranks, lines)


def film() -> tuple[list[Leg], Leg]:
    """The runs that are killed, and the run that is not."""
    with tempfile.TemporaryDirectory() as name:
        for folder in ("killed", "whole"):
            Path(name, folder).mkdir()
            Path(name, folder, "train.py").write_text(printed())
        legs = [run(Path(name, "killed"), ranks, last) for ranks, last in RUNS]
        return legs, run(Path(name, "whole"), RUNS[0][0], RUNS[-1][1])


def palette() -> Image.Image:
    """The same colours for all frames: shades from the background to each colour that is drawn."""
    colours = [to_rgb(name) for name in (*COLOURS.values(), TEXT, FAINT, RED, WHOLE, EDGE)]
    back = to_rgb(BACK)
    table = [
        round(255 * (back[part] + (colour[part] - back[part]) * shade / (SHADES - 1)))
        for colour in colours
        for shade in range(SHADES)
        for part in range(3)
    ]
    image = Image.new("P", (1, 1))
    image.putpalette(table)
    return image


def frame(terminal: list[tuple[str, str]], shown: list[tuple[Leg, int]], whole: dict[int, float]) -> Image.Image:
    """One frame: the end of the terminal, and the losses up to a number of printed lines of each run."""
    figure = pyplot.figure(figsize=(8.6, 3.5), facecolor=BACK)
    for number, (line, colour) in enumerate(terminal[-LINES:]):
        figure.text(0.02, 0.91 - number * 0.08, line, color=colour, family="monospace", fontsize=10, va="center")
    axes = figure.add_axes((0.52, 0.13, 0.46, 0.76), facecolor=BACK)
    axes.plot(list(whole), list(whole.values()), color=WHOLE, linewidth=5, label="never stopped")
    for leg, count in shown:
        losses = Leg(leg.ranks, leg.lines[:count]).losses()
        axes.plot(
            list(losses), list(losses.values()), color=COLOURS[leg.ranks], linewidth=1.6, label=f"{leg.ranks} ranks"
        )
        if count == len(leg.lines) and leg.ranks != RUNS[-1][0]:
            step = max(losses)
            axes.plot([step], [losses[step]], "x", color=RED, markersize=9, markeredgewidth=2.5, zorder=5)
    axes.set(yscale="log", xlim=(0, max(whole)), ylim=(min(whole.values()) / 1.5, max(whole.values()) * 1.5))
    axes.set_title("loss by step, on 4, 3 and 5 ranks", color=TEXT, fontsize=10)
    axes.tick_params(colors=FAINT, labelsize=8, which="both")
    for spine in axes.spines.values():
        spine.set_color(EDGE)
    axes.legend(facecolor=BACK, edgecolor=EDGE, labelcolor=TEXT, fontsize=8, loc="upper right")
    file = io.BytesIO()
    figure.savefig(file, dpi=96, facecolor=BACK)
    pyplot.close(figure)
    return Image.open(file).convert("RGB").quantize(palette=palette(), dither=Image.Dither.NONE)


def draw(to: Path, legs: list[Leg], whole: Leg) -> None:
    """Write all frames as a GIF that plays again and again."""
    frames, times = [], []
    terminal: list[tuple[str, str]] = []
    shown: list[tuple[Leg, int]] = []

    def add(milliseconds: int) -> None:
        frames.append(frame(terminal, shown, whole.losses()))
        times.append(milliseconds)

    for leg in legs:
        terminal.append((f"$ torchrun --nproc-per-node {leg.ranks} train.py", TEXT))
        add(900)
        shown.append((leg, 0))
        for number, line in enumerate(leg.lines, 1):
            terminal.append((line, COLOURS[leg.ranks]))
            if line.startswith("resumed"):
                add(1500)
            elif number % STEPS_A_FRAME == 0:
                shown[-1] = (leg, number)
                add(90)
        shown[-1] = (leg, len(leg.lines))
        if leg is not legs[-1]:
            terminal.append(("Killed", RED))
        add(1400 if leg is not legs[-1] else 4000)
    frames[0].save(to, save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)


def main() -> None:
    """Run, compare what was printed with the run that was not stopped, and draw."""
    parser = argparse.ArgumentParser(prog="python -m demo.film", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "demo.gif", help="file (default: %(default)s)")
    asked = parser.parse_args()
    legs, whole = film()
    expected = whole.losses()
    for leg in legs:
        for step, loss in leg.losses().items():
            if step in expected and abs(loss - expected[step]) > 2e-6:  # printed with six digits
                raise SystemExit(f"the loss of step {step} is {loss} on {leg.ranks} ranks, and not {expected[step]}")
    draw(asked.out, legs, whole)
    print(f"{asked.out}: {asked.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
