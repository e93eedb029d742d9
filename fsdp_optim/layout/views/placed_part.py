"""The Placement of a part: where the ranks have its elements, in the local tensors of the live parameter."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fsdp_optim.layout.boxes import Block, Run, Shape
from fsdp_optim.layout.listed import Boxes
from fsdp_optim.layout.placement import Placement, hash_once
from fsdp_optim.layout.ranks import Ranks
from fsdp_optim.layout.tables import Numbers
from fsdp_optim.layout.views.part import Part, blocks_in_part, run_in


@hash_once
@dataclass(frozen=True)
class PlacedPart(Placement):
    """A part of a live parameter: its shards are on the ranks that have the shards of `live`, and in their local tensors.

    `packed`: the elements are in tensors of their own, the Blocks one after the other, as a rank reads or writes them.
    """

    live: Placement
    part: Part
    packed: bool = False

    @cached_property
    def full_shape(self) -> Shape:  # type: ignore[override]
        return self.part.shape

    @property
    def num_shards(self) -> int:
        return self.live.num_shards

    def holders(self, shard: int) -> tuple[int, ...]:
        return self.live.holders(shard)

    def shard_of(self, rank: int) -> int | None:
        return self.live.shard_of(rank)

    def blocks(self, shard: int) -> tuple[Block, ...]:
        blocks = blocks_in_part(self.part, self.live.blocks(shard))
        if not self.packed:
            return blocks
        packed, offset = [], 0
        for block in sorted(blocks, key=lambda block: block.box.offsets):
            packed.append(Block(block.box, offset))
            offset += block.box.numel
        return tuple(packed)

    def run(self, shard: int) -> Run | None:
        return run_in(self.part.shape, self.blocks(shard))

    def holders_of(self, shards: Numbers) -> Numbers:
        return self.live.holders_of(shards)

    def shards_over(self, start: int, stop: int) -> Sequence[int]:
        if start >= stop:
            return range(0)
        return self.live.shards_over(*self.part.live_bounds(start, stop))

    @property
    def has_tables(self) -> bool:
        return self.live.has_tables

    @property
    def overlapping(self) -> bool:
        return self.live.overlapping

    @property
    def has_replicas(self) -> bool:
        return self.live.has_replicas

    @property
    def num_replicas(self) -> int:
        return self.live.num_replicas

    @cached_property
    def _most_numel(self) -> int:
        return super().most_numel

    @property
    def most_numel(self) -> int:
        return self._most_numel

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.live.ranks

    @property
    def first_holders(self) -> Ranks:
        return self.live.first_holders

    @property
    def rank_groups(self) -> tuple[Ranks, ...]:
        return self.live.rank_groups

    @property
    def num_listed(self) -> int:
        return 1 + self.live.num_listed

    def join(self, other: Placement) -> Placement | None:
        if not isinstance(other, PlacedPart) or (other.part, other.packed) != (self.part, self.packed):
            return None
        joined = self.live.join(other.live)
        return replace(self, live=joined) if joined is not None else None

    def on_lowest_ranks(self) -> PlacedPart:
        return replace(self, live=self.live.on_lowest_ranks())

    def without_ranks(self) -> PlacedPart:
        return replace(self, live=self.live.without_ranks())

    def gap(self) -> tuple[int, int] | None:
        if self.live.gap() is None:
            return None
        listed = tuple((shard, tuple(self.blocks(shard))) for shard in range(self.num_shards))
        return Boxes(self.part.shape, listed).gap()

    def rows(self, *, in_memory: bool) -> tuple[int, int]:
        """Return how many elements a rank has, and in how many rows that are contiguous in the part: those of the first shard.

        `in_memory`: rows that are contiguous in the local tensor too.
        """
        for shard in self.shards_over(0, 1):
            blocks = [block for block in self.blocks(shard) if block.box.numel]
            if blocks:
                numel = sum(block.box.numel for block in blocks)
                rows = sum(block.box.numel // _row_of(self.shape, block, in_memory=in_memory) for block in blocks)
                return numel, rows
        return 0, 0

    def in_memory_of_its_own(self) -> PlacedPart:
        """Return the same elements on the same ranks, in the order of the part."""
        return placed_part(self.live, self.part, packed=True)

    def __str__(self) -> str:
        return f"of shape {list(self.shape)}, a part of a parameter {self.live}"


def _row_of(shape: Shape, block: Block, *, in_memory: bool) -> int:
    """Return the length of the rows of a Block that are contiguous in the part and, with `in_memory`, in the local tensor."""
    row, is_full = 1, True
    dims = list(zip(block.box.sizes, shape, block.local_strides, strict=True))
    for size, full, stride in reversed(dims):
        if size > 1:
            if not is_full or (in_memory and stride != row):
                break
            row *= size
        is_full = is_full and size == full
    return row


@functools.lru_cache(maxsize=8192)
def placed_part(live: Placement, part: Part, *, packed: bool = False) -> PlacedPart:
    """Return `PlacedPart(...)` from a cache: equal layers share one value, and with it the plans that are made from it."""
    return PlacedPart(live, part, packed)


def placement_of_part(live: Placement, part: Part) -> Placement:
    """Return where a part of a parameter lives, from where the parameter does. Listed Boxes are listed again."""
    if isinstance(live, Boxes):
        by_rank = tuple((rank, blocks_in_part(part, blocks)) for rank, blocks in live.by_rank)
        return Boxes(part.shape, by_rank, is_open=live.is_open, apart=live.apart)
    return placed_part(live, part)


def live_placement(placement: Placement) -> Placement:
    """Return where the live parameter is that a part belongs to; the placement itself for all others."""
    return placement.live if isinstance(placement, PlacedPart) else placement
