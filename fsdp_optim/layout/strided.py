"""A parameter on a mesh of ranks, where a rank may hold a part of each of several groups of rows (DTensor)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.boxes import Block, Box, Run, Shape, row_major_strides
from fsdp_optim.layout.mesh import OnMesh, run_of_box
from fsdp_optim.layout.placement import hash_once

_Cut = tuple[int, int, int]
"""(parameter dimension, number of groups, number of parts of each group)"""

_Spans = tuple[tuple[int, int], ...]
"""The ranges [start, stop) of one dimension that a rank has, in the order of its local tensor."""


@hash_once
@dataclass(frozen=True)
class StridedBoxes(OnMesh):
    """A parameter on a mesh of ranks, as DTensor's `_StridedShard` places fused weights under tensor parallel.

    The split `i` cuts the rows that the splits before it have left into `factors[i]` groups of equal size, and each group into
    a part for every rank; a rank's parts lie one after the other. The last group, and the last parts, may be shorter or empty.

    # shape (6,), mesh (2,), splits ((0, 0),), factors (2,):   | g g g | u u u |    a fused gate and up projection
    # rank 0                                                   | g g     u u     |  local tensor: g g u u
    # rank 1                                                   |     g       u   |  local tensor: g u
    """

    factors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.factors) != len(self.splits) or min(self.factors, default=1) < 1:
            raise LayoutError(f"the splits {self.splits} need a factor of at least 1 each, not {self.factors}")

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        pairs = zip(self.splits, self.factors, strict=True)
        return tuple((*split, factor) if factor > 1 else split for split, factor in pairs)

    def _spans(self, shard: int) -> tuple[_Spans, ...]:
        cuts = tuple((dim, factor, n) for (dim, n), factor in zip(self._split_parts, self.factors, strict=True))
        return _spans_of_shard(self.full_shape, cuts, shard)

    def local_shape(self, shard: int) -> Shape:
        return tuple(sum(stop - start for start, stop in spans) for spans in self._spans(shard))

    def blocks(self, shard: int) -> tuple[Block, ...]:
        return _blocks_of(self._spans(shard))

    def run(self, shard: int) -> Run | None:
        blocks = self.blocks(shard)
        if not blocks:
            return Run(0, 0, 0)
        return run_of_box(self.full_shape, blocks[0].box) if len(blocks) == 1 else None


@functools.lru_cache(maxsize=4096)
def _spans_of_shard(shape: Shape, cuts: tuple[_Cut, ...], shard: int) -> tuple[_Spans, ...]:
    """Return the indices that a shard has of each dimension. Cached, because layers are equal."""
    indices = []
    for _, _, parts in reversed(cuts):
        shard, index = divmod(shard, parts)
        indices.append(index)
    spans: list[_Spans] = [((0, size),) for size in shape]
    for (dim, factor, parts), index in zip(cuts, reversed(indices), strict=True):
        spans[dim] = _part(spans[dim], factor, parts, index)
    return tuple(spans)


def _part(spans: _Spans, factor: int, parts: int, index: int) -> _Spans:
    """Return one part of each of `factor` groups of the rows in `spans`."""
    size = sum(stop - start for start, stop in spans)
    group = -(-size // factor)
    taken: list[tuple[int, int]] = []
    for number in range(factor):
        first, last = min(number * group, size), min((number + 1) * group, size)
        chunk = -(-(last - first) // parts)
        taken += _within(spans, min(first + index * chunk, last), min(first + (index + 1) * chunk, last))
    joined: list[tuple[int, int]] = []
    for start, stop in taken:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _within(spans: _Spans, first: int, last: int) -> list[tuple[int, int]]:
    """Return the rows [first, last), counted along the spans, as ranges of the dimension."""
    rows, at = [], 0
    for start, stop in spans:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            rows.append((start + low, start + high))
        at += stop - start
    return rows


@functools.lru_cache(maxsize=4096)
def _blocks_of(spans: tuple[_Spans, ...]) -> tuple[Block, ...]:
    """Return the Boxes that the spans of all dimensions make, in a local tensor with all of them."""
    local = tuple(sum(stop - start for start, stop in dim) for dim in spans)
    if not prod(local):
        return ()
    strides = row_major_strides(local)
    starts = [list(itertools.accumulate((stop - start for start, stop in dim), initial=0))[:-1] for dim in spans]
    blocks = []
    for index in itertools.product(*(range(len(dim)) for dim in spans)):
        taken = [dim[i] for dim, i in zip(spans, index, strict=True)]
        box = Box(tuple(start for start, _ in taken), tuple(stop - start for start, stop in taken))
        offset = sum(dim[i] * stride for dim, i, stride in zip(starts, index, strides, strict=True))
        blocks.append(Block(box, offset, None if strides == row_major_strides(box.sizes) else strides))
    return tuple(blocks)


def contiguous_order(cuts: Sequence[tuple[int, int]], mesh_shape: Shape) -> list[int] | None:
    """Return the order in which mesh dimensions cut a dimension of a tensor into contiguous parts; None if there is none.

    `cuts`: pairs (mesh dimension, split factor), ascending. A factor is the number of parts before its cut, as torch encodes an
    order in `_StridedShard`; where no order fits the factors, they are the numbers of groups of interleaved rows.
    """
    order: list[int] = []
    for mesh_dim, factor in reversed(cuts):
        parts = [prod(mesh_shape[before] for before in order[:place]) for place in range(len(order) + 1)]
        if factor not in parts:
            return None
        order.insert(parts.index(factor), mesh_dim)
    return order
