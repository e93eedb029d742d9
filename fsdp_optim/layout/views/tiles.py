"""Tiles: the elements that a part and its live parameter have in common, as boxes with steps on both sides.

Both are one tensor of factors, in two orders. A row-major range of one side is a few boxes of factors, so it is a few Tiles,
however short its rows are on the other side: a transposed stack is one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_optim.layout.boxes import Shape, boxes_of_run, row_major_strides
from fsdp_optim.layout.views.part import Part

_MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class Tile:
    """Elements `source_at + i . source_steps` of one tensor, which are `target_at + i . target_steps` of another."""

    sizes: Shape
    source_at: int
    source_steps: Shape
    target_at: int
    target_steps: Shape

    @property
    def is_run(self) -> bool:
        """Whether the elements follow one another on both sides."""
        return len(self.sizes) == 1 and self.source_steps == (1,) == self.target_steps


@functools.lru_cache(maxsize=_MOST_KNOWN)
def tiles_of_part(part: Part, start: int, stop: int) -> tuple[Tile, ...]:
    """Return the row-major elements [start, stop) of a part, from their places in the live parameter.

    The target is the range: its first element is element 0 there.
    """
    order = [factor for dim in part.dims for factor in dim]
    sizes, live, own = tuple(part.sizes[factor] for factor in order), _live_steps(part), _own_steps(part)
    origin = sum(low * step for low, step in zip(part.lows, live, strict=True))
    return tuple(
        _tile(
            box.sizes,
            origin + sum(at * live[factor] for at, factor in zip(box.offsets, order, strict=True)),
            [live[factor] for factor in order],
            sum(at * own[factor] for at, factor in zip(box.offsets, order, strict=True)) - start,
            [own[factor] for factor in order],
        )
        for box in boxes_of_run(sizes, start, stop)
    )


@functools.lru_cache(maxsize=_MOST_KNOWN)
def tiles_of_live(part: Part, start: int, stop: int) -> tuple[Tile, ...]:
    """Return what a part has of the row-major elements [start, stop) of the live parameter, from their places in the part.

    The target is the range: its first element is element 0 there.
    """
    live, own = _live_steps(part), _own_steps(part)
    tiles = []
    for box in boxes_of_run(tuple(size for factors in part.factors for size in factors), start, stop):
        lows = [max(at, low) for at, low in zip(box.offsets, part.lows, strict=True)]
        ends = [
            min(at + num, low + size)
            for at, num, low, size in zip(box.offsets, box.sizes, part.lows, part.sizes, strict=True)
        ]
        sizes = tuple(end - low for low, end in zip(lows, ends, strict=True))
        if min(sizes, default=1) < 1:
            continue
        source = sum((low - first) * step for low, first, step in zip(lows, part.lows, own, strict=True))
        target = sum(low * step for low, step in zip(lows, live, strict=True)) - start
        tiles.append(_tile(sizes, source, own, target, live))
    return tuple(tiles)


@functools.lru_cache(maxsize=_MOST_KNOWN)
def run_in_live(part: Part) -> int | None:
    """Return the element of the live parameter at which a part begins that is one run of it; None for all other parts."""
    numel = 1
    for size in part.sizes:
        numel *= size
    tiles = tiles_of_part(part, 0, numel)
    return tiles[0].source_at if len(tiles) == 1 and tiles[0].is_run else None


@functools.lru_cache(maxsize=_MOST_KNOWN)
def _live_steps(part: Part) -> Shape:
    """Return, by factor, the number of elements of the live parameter from one index to the next."""
    strides = row_major_strides(part.live_shape)
    pairs = zip(strides, part.factors, strict=True)
    return tuple(stride * step for stride, factors in pairs for step in row_major_strides(factors))


@functools.lru_cache(maxsize=_MOST_KNOWN)
def _own_steps(part: Part) -> Shape:
    """Return, by factor, the number of elements of the part from one index to the next; 0 for one that is in no dimension."""
    steps = [0] * len(part.sizes)
    for dim, stride in zip(part.dims, row_major_strides(part.shape), strict=True):
        inner = row_major_strides(tuple(part.sizes[factor] for factor in dim))
        for factor, step in zip(dim, inner, strict=True):
            steps[factor] = stride * step
    return tuple(steps)


def _tile(
    sizes: Shape, source_at: int, source_steps: Iterable[int], target_at: int, target_steps: Iterable[int]
) -> Tile:
    """Return a Tile with as few dimensions as its steps allow, the slowest of the target first."""
    dims = [dim for dim in zip(sizes, source_steps, target_steps, strict=True) if dim[0] > 1]
    dims.sort(key=lambda dim: -dim[2])
    merged: list[tuple[int, int, int]] = []
    for size, source, target in dims:
        if merged and merged[-1][1:] == (size * source, size * target):
            size *= merged.pop()[0]
        merged.append((size, source, target))
    listed = merged or [(1, 1, 1)]
    return Tile(
        tuple(size for size, _, _ in listed),
        source_at,
        tuple(source for _, source, _ in listed),
        target_at,
        tuple(target for _, _, target in listed),
    )
