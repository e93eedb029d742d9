"""A parameter whose shards are listed box by box."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.boxes import Block, Box, Run, Shape, runs_of_box
from fsdp_optim.layout.mesh import run_of_box
from fsdp_optim.layout.placement import Placement, hash_once
from fsdp_optim.layout.tables import Numbers


@hash_once
@dataclass(frozen=True)
class Boxes(Placement):
    """Any Blocks on any ranks, as a file or a peer lists them. Ranks may hold the same Boxes, or overlapping Boxes.

    `is_open`: the list may be incomplete, because other ranks list their own Blocks; `join` merges the lists.
    `apart`: ranks may hold the same Boxes, but Boxes that overlap in part are a mistake.
    """

    full_shape: Shape
    by_rank: tuple[tuple[int, tuple[Block, ...]], ...]
    is_open: bool = False
    apart: bool = False

    def __post_init__(self) -> None:
        ranks = [rank for rank, _ in self.by_rank]
        if len(ranks) != len(set(ranks)):
            raise LayoutError(f"each rank may be listed only once, not as in {ranks}")
        for rank, blocks in self.by_rank:
            for block in blocks:
                ends = [o + n for o, n in zip(block.box.offsets, block.box.sizes, strict=True)]
                if len(ends) != len(self.full_shape) or any(e > n for e, n in zip(ends, self.full_shape, strict=True)):
                    raise LayoutError(f"rank {rank}: {block.box} lies outside the shape {self.full_shape}")

    @cached_property
    def _shards(self) -> tuple[tuple[tuple[Block, ...], tuple[int, ...]], ...]:
        """(Blocks, ranks) of each shard: ranks that list the same Blocks hold one shard."""
        holders: dict[tuple[Block, ...], list[int]] = {}
        for rank, blocks in self.by_rank:
            holders.setdefault(blocks, []).append(rank)
        return tuple((blocks, tuple(ranks)) for blocks, ranks in holders.items())

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def holders(self, shard: int) -> tuple[int, ...]:
        return self._shards[shard][1]

    @cached_property
    def _shard_of(self) -> dict[int, int]:
        return {rank: shard for shard, (_, ranks) in enumerate(self._shards) for rank in ranks}

    def shard_of(self, rank: int) -> int | None:
        return self._shard_of.get(rank)

    def blocks(self, shard: int) -> tuple[Block, ...]:
        return self._shards[shard][0]

    def run(self, shard: int) -> Run | None:
        blocks = self.blocks(shard)
        if len(blocks) != 1 or blocks[0].strides is not None:
            return None
        run = run_of_box(self.full_shape, blocks[0].box)
        return run and replace(run, offset=blocks[0].offset)

    def shards_over(self, start: int, stop: int) -> Sequence[int]:
        if start >= stop or not self.shape:
            return range(self.num_shards if start < stop else 0)
        row = prod(self.shape[1:])
        first, last = self._rows
        over: list[int] = numpy.flatnonzero((first <= (stop - 1) // row) & (last > start // row)).tolist()
        return over

    @cached_property
    def _rows(self) -> tuple[Numbers, Numbers]:
        """The rows, in the first dimension, at which the Boxes of each shard begin and end."""
        boxes = [[block.box for block in blocks if block.box.numel] for blocks, _ in self._shards]
        firsts = [min((box.offsets[0] for box in listed), default=0) for listed in boxes]
        lasts = [max((box.offsets[0] + box.sizes[0] for box in listed), default=0) for listed in boxes]
        return numpy.array(firsts, numpy.int64), numpy.array(lasts, numpy.int64)

    @property
    def num_listed(self) -> int:
        return sum(1 + len(blocks) for _, blocks in self.by_rank)

    @property
    def has_tables(self) -> bool:
        return len({len(ranks) for _, ranks in self._shards}) == 1

    @property
    def has_replicas(self) -> bool:
        return any(len(ranks) > 1 for _, ranks in self._shards)

    def join(self, other: Placement) -> Placement | None:
        if not isinstance(other, Boxes) or (other.full_shape, other.apart) != (self.full_shape, self.apart):
            return None
        own_blocks, other_blocks = dict(self.by_rank), dict(other.by_rank)
        if self.is_open and other.is_open:
            if any(own_blocks[rank] != other_blocks[rank] for rank in own_blocks.keys() & other_blocks.keys()):
                return None
            return replace(self, by_rank=tuple(sorted((own_blocks | other_blocks).items())))
        if set(filter(None, own_blocks.values())) != set(filter(None, other_blocks.values())):
            return None
        if any(own_blocks[rank] != other_blocks[rank] for rank in own_blocks.keys() & other_blocks.keys()):
            return None
        return replace(self, by_rank=tuple(sorted((own_blocks | other_blocks).items())))

    @property
    def num_replicas(self) -> int:
        return max((len(ranks) for _, ranks in self._shards), default=1)

    @property
    def overlapping(self) -> bool:
        return self.overlap is not None

    @cached_property
    def overlap(self) -> tuple[Box, Box] | None:
        """Two Boxes of the list that have a common element, in the order of their offsets; None where there are none."""
        current: list[Box] = []  # the Boxes that reach the row of the next Box
        for box in sorted((block.box for blocks, _ in self._shards for block in blocks), key=lambda box: box.offsets):
            if box.offsets:
                current = [other for other in current if other.offsets[0] + other.sizes[0] > box.offsets[0]]
            for other in current:
                if other.intersect(box) is not None:
                    return other, box
            current.append(box)
        return None

    def partly_common(self) -> tuple[tuple[int, Box], tuple[int, Box]] | None:
        """Return two ranks with Boxes that overlap and are not the same Box; None where there are none."""
        held = [(ranks[0], block.box) for blocks, ranks in self._shards for block in blocks]
        if sum(box.numel for box in {box for _, box in held}) == self.numel and self.gap() is None:
            return None
        pairs = itertools.combinations(held, 2)
        return next((pair for pair in pairs if pair[0][1] != pair[1][1] and pair[0][1].intersect(pair[1][1])), None)

    def closed(self) -> Boxes:
        """Return the same Placement, as the complete list of all ranks."""
        return replace(self, is_open=False) if self.is_open else self

    def on_lowest_ranks(self) -> Boxes:
        lowest = {min(ranks) for _, ranks in self._shards}
        return replace(self, by_rank=tuple((rank, blocks) for rank, blocks in self.by_rank if rank in lowest))

    def gap(self) -> tuple[int, int] | None:
        if (
            not self.overlapping
            and sum(block.box.numel for blocks, _ in self._shards for block in blocks) == self.numel
        ):
            return None
        missing: tuple[Box, ...] = (Box((0,) * len(self.shape), self.shape),) if self.numel else ()
        for blocks, _ in self._shards:
            for block in blocks:
                missing = tuple(rest for box in missing for rest in box.subtract(block.box))
        runs = sorted(run for box in missing for run in runs_of_box(self.shape, box))
        if not runs:
            return None
        start, stop = runs[0]
        for run_start, run_stop in runs[1:]:
            if run_start > stop:
                break
            stop = max(stop, run_stop)
        return start, stop
