"""A canonical part of a live parameter: which of its elements are the part's, by arithmetic on the sizes of axes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from fsdp_optim.layout.boxes import Block, Box, Run, Shape, boxes_of_run, row_major_strides
from fsdp_optim.layout.mesh import run_of_box
from fsdp_optim.layout.placement import PickledByFields, hash_once


@hash_once
@dataclass(frozen=True)
class Part(PickledByFields):
    """The elements of a live parameter that are one canonical parameter, and the order in which they are it.

    The dimensions of the live parameter are cut into factors. The part has a range of each factor's indices, and its own
    dimensions are products of factors, in another order perhaps. So each element of the part is one of the live parameter.

    # live (g (q + k + v) d) c, part (g q d) c, g=2, q=2, k=v=1, d=128:
    #   factors ((2, 4, 128), (c,)), lows (0, 0, 0, 0), sizes (2, 2, 128, c), dims ((0, 1, 2), (3,))

    Attributes:
        factors: the sizes of the factors of each dimension of the live parameter.
        lows, sizes: the first index of each factor that the part has, and the number of its indices.
        dims: for each dimension of the part the factors that make it, the slowest first, as numbers among all factors. Factors
            of which the part has one index may be in no dimension.
    """

    factors: tuple[Shape, ...]
    lows: Shape
    sizes: Shape
    dims: tuple[Shape, ...]

    @cached_property
    def live_shape(self) -> Shape:
        """The shape of the live parameter."""
        return tuple(prod(factors) for factors in self.factors)

    @cached_property
    def shape(self) -> Shape:
        """The shape of the part."""
        return tuple(prod(self.sizes[factor] for factor in dim) for dim in self.dims)

    @cached_property
    def _live_steps(self) -> Shape:
        """By factor, the number of row-major elements of the live parameter between two neighbouring indices."""
        strides = row_major_strides(self.live_shape)
        return tuple(
            stride * step
            for stride, factors in zip(strides, self.factors, strict=True)
            for step in row_major_strides(factors)
        )

    def blocks(self, block: Block) -> Iterator[Block]:
        """Yield the part's elements of a Block of the live parameter, as Blocks of the part in the same local tensor."""
        steps = [
            stride * step
            for stride, factors in zip(block.local_strides, self.factors, strict=True)
            for step in row_major_strides(factors)
        ]
        # The local offset at which the live element with all indices 0 would be.
        origin = block.offset - sum(o * s for o, s in zip(block.box.offsets, block.local_strides, strict=True))
        by_dim = [
            boxes_of_run(factors, offset, offset + size)
            for factors, offset, size in zip(self.factors, block.box.offsets, block.box.sizes, strict=True)
        ]
        for boxes in itertools.product(*by_dim):
            lows = [low for box in boxes for low in box.offsets]
            highs = [low + size for box in boxes for low, size in zip(box.offsets, box.sizes, strict=True)]
            ranges = [
                _Range(max(low, first) - first, min(high, first + size) - first, size, step)
                for low, high, first, size, step in zip(lows, highs, self.lows, self.sizes, steps, strict=True)
            ]
            if all(taken.start < taken.stop for taken in ranges):
                offset = origin + sum(first * step for first, step in zip(self.lows, steps, strict=True))
                yield from self._blocks_of(ranges, offset)

    def _blocks_of(self, ranges: list[_Range], origin: int) -> Iterator[Block]:
        """Yield the Blocks of a range of each factor. `origin`: the local offset of the part's element with all indices 0."""
        for dims in itertools.product(*(_merged([ranges[factor] for factor in dim]) for dim in self.dims)):
            sizes = tuple(dim.stop - dim.start for dim in dims)
            strides, inner = [0] * len(dims), 1
            for number in range(len(dims) - 1, -1, -1):
                strides[number] = dims[number].step if sizes[number] > 1 else inner
                inner = strides[number] * sizes[number]
            offset = origin + sum(dim.at + dim.start * dim.step for dim in dims)
            listed = tuple(strides)
            box = Box(tuple(dim.start for dim in dims), sizes)
            yield Block(box, offset, None if listed == row_major_strides(sizes) else listed)

    def live_bounds(self, start: int, stop: int) -> tuple[int, int]:
        """Return a row-major range of the live parameter that has the row-major elements [start, stop) of the part."""
        order = [factor for dim in self.dims for factor in dim]
        steps = self._live_steps
        origin = sum(low * step for low, step in zip(self.lows, steps, strict=True))
        firsts, lasts = [], []
        for box in boxes_of_run(tuple(self.sizes[factor] for factor in order), start, stop):
            first = sum(low * steps[factor] for low, factor in zip(box.offsets, order, strict=True))
            firsts.append(origin + first)
            lasts.append(
                origin + first + sum((n - 1) * steps[factor] for n, factor in zip(box.sizes, order, strict=True))
            )
        return min(firsts), max(lasts) + 1


class _Range(NamedTuple):
    """Indices [start, stop) of `size`. One index is `step` elements of the local tensor from the next."""

    start: int
    stop: int
    size: int
    step: int
    at: int = 0  # elements to add to the local offset, for an index of an outer factor


def _merged(factors: list[_Range]) -> list[_Range]:
    """Return ranges of a product of factors, the slowest first: as few as their steps allow."""
    merged = list[_Range]()
    for outer in reversed(factors):
        if outer.size == 1:
            continue
        if not merged:
            merged = [outer]
        elif len(merged) == 1 and _are_even(outer, merged[0]):
            (inner,) = merged
            stop = outer.stop * inner.size
            merged = [_Range(outer.start * inner.size, stop, outer.size * inner.size, inner.step, inner.at)]
        else:
            merged = [
                _Range(
                    index * inner.size + inner.start,
                    index * inner.size + inner.stop,
                    outer.size * inner.size,
                    inner.step,
                    inner.at + index * (outer.step - inner.size * inner.step),
                )
                for index in range(outer.start, outer.stop)
                for inner in merged
            ]
    return merged or [_Range(0, 1, 1, 0)]


def _are_even(outer: _Range, inner: _Range) -> bool:
    """Whether all indices of two factors have one step: the inner ones are complete, and follow one another."""
    return inner.start == 0 and inner.stop == inner.size and outer.step == inner.size * inner.step


def run_in(shape: Shape, blocks: tuple[Block, ...]) -> Run | None:
    """Return Blocks as one Run; None where they are several, or are not contiguous."""
    if len(blocks) != 1 or blocks[0].strides is not None:
        return None if blocks else Run(0, 0, 0)
    run = run_of_box(shape, blocks[0].box)
    return replace(run, offset=blocks[0].offset) if run is not None else None


@functools.lru_cache(maxsize=8192)
def blocks_in_part(part: Part, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return the part's elements of some Blocks of the live parameter. Cached, because layers are equal."""
    return tuple(piece for block in blocks for piece in part.blocks(block))
