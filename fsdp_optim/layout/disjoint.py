"""A parameter cut into Boxes that have no element in common, each on a rank of its own, as files list them by the thousand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy
from numpy.typing import NDArray

from fsdp_optim.layout.boxes import Block, Box, Run, Shape
from fsdp_optim.layout.listed import Boxes
from fsdp_optim.layout.mesh import run_of_box
from fsdp_optim.layout.placement import Placement


@dataclass(frozen=True)
class DisjointBoxes(Placement):
    """The Box `boxes[i]` on the rank `by[i]`, in a separate tensor. The maker has checked that no two Boxes overlap."""

    full_shape: Shape
    boxes: tuple[Box, ...]
    by: tuple[int, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.full_shape, self.boxes, self.by))

    def __hash__(self) -> int:
        return self._hash

    @property
    def shape(self) -> Shape:
        return self.full_shape

    @property
    def num_shards(self) -> int:
        return len(self.boxes)

    @property
    def num_listed(self) -> int:
        return len(self.boxes)

    def holders(self, shard: int) -> tuple[int, ...]:
        return (self.by[shard],)

    def shard_of(self, rank: int) -> int | None:
        return self._shards.get(rank)

    @cached_property
    def _shards(self) -> dict[int, int]:
        return {rank: shard for shard, rank in enumerate(self.by)}

    def blocks(self, shard: int) -> tuple[Block, ...]:
        return (Block(self.boxes[shard], 0),) if self.boxes[shard].numel else ()

    def run(self, shard: int) -> Run | None:
        return run_of_box(self.full_shape, self.boxes[shard])

    def shards_over(self, start: int, stop: int) -> Sequence[int]:
        if start >= stop or not self.shape:
            return range(self.num_shards if start < stop else 0)
        row = prod(self.shape[1:])
        first, last = self._bounds
        found: list[int] = numpy.flatnonzero((first <= (stop - 1) // row) & (last > start // row)).tolist()
        return found

    @cached_property
    def _bounds(self) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        """The rows, in the first dimension, at which each Box begins and ends."""
        firsts = numpy.array([box.offsets[0] for box in self.boxes], numpy.int64)
        return firsts, firsts + numpy.array([box.sizes[0] for box in self.boxes], numpy.int64)

    def gap(self) -> tuple[int, int] | None:
        if sum(box.numel for box in self.boxes) == self.numel:
            return None
        by_rank = tuple((rank, self.blocks(shard)) for shard, rank in enumerate(self.by))
        return Boxes(self.full_shape, by_rank).gap()

    def on_lowest_ranks(self) -> DisjointBoxes:
        return self
