"""The rows of a live matrix, as blocks that belong to one part each: for optimizers that update a matrix as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.boxes import Shape, row_major_strides
from fsdp_optim.layout.views.inverse import SomeView
from fsdp_optim.layout.views.part import Part


def row_blocks_of(view: SomeView, shape: Shape) -> tuple[tuple[str, int], ...]:
    """Return as `View.row_blocks`."""
    blocks: list[tuple[int, int, str]] = []
    for pattern, _, part in view.parts_for(shape):
        if not shape or not _has_all_columns(part):
            raise LayoutError(
                f"the View of {view.name}: its part {pattern} has some of the columns of a row of shape {list(shape)}, so rows "
                "do not belong to one part each"
            )
        blocks += [(start, start + num, pattern) for start, num in _row_runs(part)]
    joined: list[tuple[str, int]] = []
    for start, stop, pattern in sorted(blocks):
        num = stop - start
        if joined and joined[-1][0] == pattern:
            num += joined.pop()[1]
        joined.append((pattern, num))
    return tuple(joined)


def _has_all_columns(part: Part) -> bool:
    first = len(part.factors[0])
    sizes = [size for factors in part.factors for size in factors]
    return all(not low for low in part.lows[first:]) and list(part.sizes[first:]) == sizes[first:]


def _row_runs(part: Part) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows of each run of rows that a part has."""
    factors = part.factors[0]
    lows, sizes, steps = part.lows[: len(factors)], part.sizes[: len(factors)], row_major_strides(factors)
    inner = len(factors) - 1
    while inner > 0 and sizes[inner] == factors[inner]:
        inner -= 1
    outer = [range(low, low + size) for low, size in zip(lows[:inner], sizes[:inner], strict=True)]
    for index in itertools.product(*outer):
        first = sum(at * step for at, step in zip((*index, lows[inner]), steps, strict=False))
        yield first, sizes[inner] * prod(factors[inner + 1 :])
