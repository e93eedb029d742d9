"""The picture of how trainers fuse parameters, drawn from real Views: `python -m demo.names` writes docs/names.svg.

Each cell is an element of a small parameter. Its colour is that of the part to which the View gives it: the elements of the live
parameter are numbered, and the library says under which name it finds each number.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from fsdp_optim import CallOptions, View, gather_full_model_state_dict

FILE = Path(__file__).parents[1] / "docs" / "names.svg"
_CELL, _GAP, _WIDTH, _TOP = 17, 14, 960, 74  # pixels
_COLOURS = ("q", "k", "v")
_STYLE = """
    .bg { fill: #ffffff; } .t { fill: #1f2328; font-weight: bold; font-size: 14px; } .s { fill: #424a53; font-size: 12px; }
    .m { fill: #1f2328; font-family: monospace; font-size: 12px; } .c { stroke: #ffffff; stroke-width: 1.2; }
    .q { fill: #6baed6; } .k { fill: #fdae6b; } .v { fill: #a1d99b; } .e { opacity: 0.55; }
    @media (prefers-color-scheme: dark) {
      .bg { fill: #161b22; } .t, .m { fill: #e6edf3; } .s { fill: #b7bfc8; } .c { stroke: #161b22; }
      .q { fill: #2b7bb0; } .k { fill: #b0601a; } .v { fill: #3f8a50; }
    }
"""


class Layout(NamedTuple):
    """One way to fuse: what it is called, the shape of a small parameter, and its View."""

    title: str
    about: str
    shape: tuple[int, ...]
    view: View


_QKV = {f"w{part}": f"(g {part} d) c" for part in "qkv"}
LAYOUTS = (
    Layout(
        "interleaved by heads",
        "torchtitan, Megatron",
        (8, 4),
        View("w", "(g (q + k + v) d) c", _QKV, g=2, q=2, k=1, v=1),
    ),
    Layout(
        "end to end",
        "phi3, many others",
        (8, 4),
        View("w", "(q + k + v) c", {f"w{p}": f"{p} c" for p in "qkv"}, q=4, k=2, v=2),
    ),
    Layout(
        "alternating rows",
        "torchtitan's w13",
        (8, 4),
        View("w", "(f (a + b)) c", {"w1": "(f a) c", "w3": "(f b) c"}, a=1, b=1),
    ),
    Layout("halves", "Megatron's linear_fc1", (8, 4), View("w", "(a + b) c", {"gate": "a c", "up": "b c"})),
    Layout(
        "stacked experts",
        "Mixtral, Qwen-MoE, DeepSeek",
        (2, 4, 4),
        View("w", "e (a + b) c", {"experts.{e}.gate": "a c", "experts.{e}.up": "b c"}),
    ),
    Layout(
        "stacked, transposed, alternating",
        "gpt-oss",
        (2, 4, 4),
        View("w", "e c (f (a + b))", {"experts.{e}.w1": "(f a) c", "experts.{e}.w3": "(f b) c"}, a=1, b=1),
    ),
)


def parts_of(layout: Layout) -> dict[str, torch.Tensor]:
    """Return the numbers of the live elements that each part has, in its shape."""
    numbers = torch.arange(torch.Size(layout.shape).numel(), dtype=torch.float32).reshape(layout.shape)
    model = nn.ParameterDict({"w": nn.Parameter(numbers)})
    full = gather_full_model_state_dict(model, options=CallOptions(views=[layout.view]))
    return {name: part.long() for name, part in (full or {}).items()}


def drawn() -> str:
    """Return the picture of all layouts."""
    columns = 3
    height = _TOP + 2 * 280
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="Helvetica, Arial, sans-serif" '
        'role="img">',
        "  <title>Six ways to fuse parameters: the live parameter on the left, its canonical parts on the right</title>",
        f"  <style>{_STYLE}  </style>",
        f'  <rect width="{_WIDTH}" height="{height}" rx="8" class="bg"/>',
        '  <text x="24" y="34" class="t">The live parameter, and the canonical parts that a View finds in it</text>',
        '  <text x="24" y="54" class="s">Each cell is an element; a row of a part comes from the row of the same colour and '
        "order. The number in a cell is the live row.</text>",
    ]
    for index, layout in enumerate(LAYOUTS):
        left, top = 24 + (index % columns) * 312, _TOP + (index // columns) * 280
        parts += _panel(layout, left, top)
    return "\n".join([*parts, "</svg>", ""])


def _panel(layout: Layout, left: int, top: int) -> list[str]:
    """Draw one layout: all matrices of the live parameter, then its parts."""
    width = layout.shape[-1]
    parts = parts_of(layout)
    owner = {int(number): name for name, part in parts.items() for number in part.flatten()}
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in parts))
    lines = [
        f'  <text x="{left}" y="{top + 16}" class="t">{escape(layout.title)}</text>',
        f'  <text x="{left}" y="{top + 33}" class="s">{escape(layout.about)}</text>',
        f'  <text x="{left}" y="{top + 51}" class="m">{escape(layout.view.axes)}</text>',
    ]

    def cell(number: int, x: int, y: int) -> list[str]:
        name = owner[number]
        colour = _COLOURS[kinds.index(name.rpartition(".")[2])]
        second = " e" if ".1." in name else ""  # the second expert
        return [
            f'  <rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" class="c {colour}{second}"/>',
            f'  <text x="{x + _CELL / 2}" y="{y + 12.5}" class="m" font-size="9" text-anchor="middle">{number // width}</text>',
        ]

    y = top + 62
    for row in range(torch.Size(layout.shape).numel() // width):
        gap = 6 * (row // layout.shape[-2])
        for column in range(width):
            lines += cell(row * width + column, left + column * _CELL, y + row * _CELL + gap)
    y, x = top + 62, left + width * _CELL + 40
    lines.append(f'  <text x="{x - 27}" y="{y + 80}" class="t">→</text>')
    for name, part in parts.items():
        lines.append(f'  <text x="{x + part.shape[1] * _CELL + 8}" y="{y + 12}" class="m">{escape(name)}</text>')
        for row, numbers in enumerate(part.tolist()):
            for column, number in enumerate(numbers):
                lines += cell(number, x + column * _CELL, y + row * _CELL)
        y += len(part) * _CELL + _GAP
    return lines


if __name__ == "__main__":
    FILE.write_text(drawn(), encoding="utf-8")
