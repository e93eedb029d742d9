"""Draw the tables of docs/benchmarks.md as bars, in docs/plots/: `python benchmarks/plots.py`.

The figures are read from the page, so that none is typed twice. The pictures are plain SVG, the same bytes for the same
figures, so that a test can compare them with the page. They are readable on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
WIDTH, LABELS, ROW, TOP = 860, 330, 26, 56
OURS, OTHERS, PLAIN = "#3f6fb5", "#c77d3a", "#8a8a8a"
DARK = """  <style>
    @media (prefers-color-scheme: dark) {
      [fill="white"] { fill: #161b22; }
      [fill="#222"] { fill: #e6edf3; }
      [fill="#444"], [fill="#555"] { fill: #b7bfc8; }
      [fill="#3f6fb5"] { fill: #5b8fd9; }
    }
  </style>"""


class Plot(NamedTuple):
    """One picture: the table, its rows, and the column with the figures."""

    file: str
    title: str
    section: str
    call: str
    figures: str
    unit: str
    table: int = 0
    plain: tuple[str, ...] = ("plain", "bare", "cp -r", "one memcpy")


PLOTS = (
    Plot(
        "save.svg", "Save at 4 ranks on 2 cores, 1.1 GiB: seconds", "Checkpoints", "big, save, 4 ranks", "median s", "s"
    ),
    Plot(
        "load.svg",
        "Load from 2 ranks to 4 on 2 cores, 1.1 GiB: seconds",
        "Checkpoints",
        "big, load, 2 to 4 ranks",
        "median s",
        "s",
    ),
    Plot(
        "save-memory.svg",
        "Save at 4 ranks on 2 cores: most extra memory on a rank, MiB",
        "Checkpoints",
        "big, save, 4 ranks",
        "most extra MiB on a rank",
        "MiB",
    ),
    Plot(
        "many.svg",
        "4,000 parameters, FSDP2, 2 ranks on 2 cores: processor us per value",
        "Many small tensors",
        "4,000 parameters, FSDP2, 2 ranks",
        "processor us / value",
        "us",
    ),
    Plot(
        "convert.svg",
        "Conversions without ranks on 2 cores, 1.2 GB: seconds",
        "Conversions without ranks",
        "",
        "median s",
        "s",
    ),
    Plot(
        "gather.svg",
        "Gather 763 MiB to rank 0, fairscale, 4 ranks on 2 cores: seconds",
        "Gather",
        "big, fairscale, 4 ranks",
        "median s",
        "s",
    ),
    Plot(
        "gather-small.svg",
        "Gather 400 units, fairscale, 4 ranks on 2 cores: seconds",
        "Gather",
        "small, fairscale, 4 ranks",
        "median s",
        "s",
    ),
)


def tables(page: str, section: str) -> list[list[dict[str, str]]]:
    """The tables below a heading of a page: a dict for each row, by the heads of the columns."""
    lines = page[page.index(f"\n## {section}\n") + 1 :].splitlines()[1:]
    found: list[list[dict[str, str]]] = []
    heads: list[str] = []
    for line in lines:
        if line.startswith("## "):
            break
        if not line.startswith("|"):
            heads = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not heads:
            heads = cells
            found.append([])
        elif not set(line) <= set("|-: "):
            found[-1].append(dict(zip(heads, cells, strict=True)))
    return found


def rows_of(plot: Plot, page: str) -> list[tuple[str, str]]:
    """The bars: who, and the figure as it is on the page."""
    table = tables(page, plot.section)[plot.table]
    where = next(iter(table[0]))
    chosen = [row for row in table if not plot.call or row[where] == plot.call]
    if not chosen:
        raise ValueError(f"docs/benchmarks.md: no row {plot.call!r} below {plot.section!r}")
    return [(row["who"], row[plot.figures]) for row in chosen]


def drawn(plot: Plot, rows: Sequence[tuple[str, str]]) -> str:
    """The picture. Bars are proportional; each has its figure beside it."""
    most = max(float(figure) for _, figure in rows)
    height = TOP + ROW * len(rows) + 12
    space = WIDTH - LABELS - 90
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14" role="img">',
        f"  <title>{escape(plot.title)}</title>",
        DARK,
        f'  <rect width="{WIDTH}" height="{height}" rx="6" fill="white"/>',
        f'  <text x="20" y="30" font-size="16" font-weight="bold" fill="#222">{escape(plot.title)}</text>',
    ]
    for number, (who, figure) in enumerate(rows):
        y = TOP + ROW * number
        length = max(space * float(figure) / most, 1.0)
        colour = PLAIN if who.startswith(plot.plain) else OURS if ours(who) else OTHERS
        lines += [
            f'  <text x="{LABELS - 10}" y="{y + 14}" text-anchor="end" fill="#222">{escape(who)}</text>',
            f'  <rect x="{LABELS}" y="{y}" width="{length:.1f}" height="18" rx="2" fill="{colour}"/>',
            f'  <text x="{LABELS + length + 8:.1f}" y="{y + 14}" fill="#444">{escape(figure)} {plot.unit}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def ours(who: str) -> bool:
    return who.startswith(("fsdp_optim", "async_save"))


def pictures(page: str) -> dict[str, str]:
    """All pictures of the page, by file name."""
    return {plot.file: drawn(plot, rows_of(plot, page)) for plot in PLOTS}


def main() -> None:
    (DOCS / "plots").mkdir(exist_ok=True)
    for name, global_state in pictures((DOCS / "benchmarks.md").read_text(encoding="utf-8")).items():
        (DOCS / "plots" / name).write_text(global_state, encoding="utf-8")


if __name__ == "__main__":
    main()
