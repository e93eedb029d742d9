"""`fsdp-optim show`: figures about one value of a checkpoint, and a histogram as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from fsdp_optim.cli.options import PATH, json_option, memory_option, storage_options
from fsdp_optim.cli.output import plain, print_json, print_lines
from fsdp_optim.cli.units import counted, sized

if TYPE_CHECKING:
    from fsdp_optim.api import ValueStatistics

_BAR = 48  # characters of the longest bar
_BLOCKS = " ▏▎▍▌▋▊▉█"


@click.command("show")
@click.argument("path", type=PATH, metavar="CKPT")
@click.argument("name")
@click.option("--slice", "part", metavar="SLICE", help='some of the elements, and print them: "0:3, :5"')
@click.option("--bins", type=int, default=20, metavar="N", help="the number of bins of the histogram (20)")
@click.option("--allow-pickle", is_flag=True, help="unpickle values, which can run any code of their author")
@json_option
@memory_option
@storage_options
def command(path: str, name: str, part: str | None, as_json: bool, memory: int, bins: int, **options: Any) -> None:
    """Describe the value NAME of the checkpoint CKPT: layers.0.weight is a weight, layers.0.weight:exp_avg a value of the
    optimizer's state.
    """
    from fsdp_optim import api

    shown = api.show(path, name, slice=part, bins=bins, bucket_nbytes=memory, **options)
    if as_json:
        elements = shown.elements.tolist() if shown.elements is not None else None
        print_json({**plain(shown), "elements": _in_json(elements)})
    else:
        print_lines(_lines(shown))


def _in_json(elements: Any) -> Any:
    """Return elements for JSON, complex ones as pairs."""
    if isinstance(elements, list):
        return [_in_json(element) for element in elements]
    return [elements.real, elements.imag] if isinstance(elements, complex) else elements


def _lines(shown: ValueStatistics) -> Iterator[str]:
    numel = 1
    for size in shown.shape:
        numel *= size
    part = f"[{shown.slice}]" if shown.slice is not None else ""
    yield f"{shown.name}{part}: {shown.dtype} {shown.shape}, {counted(numel, 'element')}, {sized(shown.nbytes)}"
    for name, value in (("min", shown.min), ("max", shown.max), ("mean", shown.mean), ("norm", shown.norm)):
        yield f"{name:9}{'-' if value is None else value if isinstance(value, int) else f'{value:.9g}'}"
    yield f"zeros    {shown.num_zeros:,}"
    yield f"NaN      {shown.num_nans:,}"
    yield f"infinite {shown.num_infinities:,}"
    yield from _histogram(shown)
    if shown.elements is not None:
        yield from ("", str(shown.elements))


def _histogram(shown: ValueStatistics) -> Iterator[str]:
    """Yield a line for each bin: where it begins, a bar, and its number of elements."""
    if len(shown.histogram) < 2 or shown.min is None or shown.max is None:
        return
    yield ""
    num, most = len(shown.histogram), max(shown.histogram)
    for index, number in enumerate(shown.histogram):
        start = shown.min * (1 - index / num) + shown.max * (index / num)  # the range may be longer than a float
        yield f"{start:>12.4g} {_bar(number * _BAR / most):{_BAR}} {number:,}"


def _bar(length: float) -> str:
    full, eighths = divmod(round(length * 8), 8)
    return _BLOCKS[-1] * full + (_BLOCKS[eighths] if eighths else "")
