"""A parameter inside a flat parameter, which is cut into equal chunks without regard for parameter borders."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.boxes import Block, Run, Shape, boxes_of_run
from fsdp_optim.layout.placement import Placement, hash_once
from fsdp_optim.layout.ranks import Ranks, check_distinct, join_replicas, ranks_at, ranks_in_order
from fsdp_optim.layout.tables import BoxTable, Columns, Numbers


@hash_once
@dataclass(frozen=True)
class FlatChunks(Placement):
    """A parameter that begins at element `start` of a flat parameter, which is cut into equal chunks.

    # flat parameter  | a a a a a b b b c c |     chunk_numel = 4, three ranks
    # rank 0          | a a a a |
    # rank 1                    | a b b b |
    # rank 2                              | c c . . |   dots are padding: they belong to no parameter, and are never saved

    Shard `i` is elements [i * chunk_numel, (i + 1) * chunk_numel) of the flat parameter, held by `replicas[k][i]` for
    every k. `own_tensor`: the rank keeps this parameter's elements in a separate tensor (torch FSDP1 with
    use_orig_params), not in the chunk of the flat parameter.
    """

    full_shape: Shape
    start: int
    chunk_numel: int
    replicas: tuple[Ranks, ...]
    own_tensor: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "replicas", tuple(map(ranks_in_order, self.replicas)))
        sizes = {len(group) for group in self.replicas}
        if len(sizes) != 1 or 0 in sizes:
            raise LayoutError(
                f"the replicas of a flat parameter need groups of ranks of equal size, not {self.replicas}"
            )
        if self.start < 0 or self.chunk_numel < 0:
            raise LayoutError(f"start and chunk_numel must be at least 0, not {self.start} and {self.chunk_numel}")
        check_distinct(self.replicas)

    @property
    def num_shards(self) -> int:
        return len(self.replicas[0])

    @property
    def ranks(self) -> tuple[int, ...]:
        if len(self.replicas) == 1 and isinstance(self.replicas[0], range):
            return tuple(self.replicas[0])
        return tuple(sorted({rank for group in self.replicas for rank in group}))

    @property
    def num_replicas(self) -> int:
        return len(self.replicas)

    @property
    def rank_groups(self) -> tuple[Ranks, ...]:
        return self.replicas

    def holders(self, shard: int) -> tuple[int, ...]:
        return tuple(group[shard] for group in self.replicas)

    def shard_of(self, rank: int) -> int | None:
        for group in self.replicas:
            try:
                return group.index(rank)  # one search, where `in` would be another
            except ValueError:
                continue
        return None

    @property
    def in_runs(self) -> bool:
        return True

    def run(self, shard: int) -> Run:
        chunk_start = shard * self.chunk_numel - self.start
        numel = self.numel
        start = min(max(chunk_start, 0), numel)
        stop = max(min(chunk_start + self.chunk_numel, numel), start)
        return Run(start, stop, 0 if self.own_tensor or start == stop else start - chunk_start)

    @property
    def kind(self) -> tuple[object, ...]:
        return type(self), self.replicas, self.own_tensor

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.start, self.chunk_numel, self.numel

    def run_table(self, shards: Numbers, numbers: Columns | None = None) -> BoxTable:
        start, chunk_numel, numel = self.numbers if numbers is None else numbers
        chunk_starts = shards * chunk_numel - start
        starts = numpy.minimum(numpy.maximum(chunk_starts, 0), numel)
        stops = numpy.maximum(numpy.minimum(chunk_starts + chunk_numel, numel), starts)
        return BoxTable.of_runs(starts, stops, numpy.zeros_like(starts) if self.own_tensor else starts - chunk_starts)

    def box_table(self, shards: Numbers, numbers: Columns | None = None) -> None:
        return None

    def holders_of(self, shards: Numbers) -> Numbers:
        return numpy.stack([ranks_at(group, shards) for group in self.replicas])

    def blocks(self, shard: int) -> tuple[Block, ...]:
        run = self.run(shard)
        blocks, offset = [], run.offset
        for box in boxes_of_run(self.shape, run.start, run.stop):
            blocks.append(Block(box, offset))
            offset += box.numel
        return tuple(blocks)

    def shards_over(self, start: int, stop: int) -> Sequence[int]:
        if start >= stop or not self.chunk_numel:
            return range(0)
        last = (self.start + stop - 1) // self.chunk_numel
        return range((self.start + start) // self.chunk_numel, min(last + 1, self.num_shards))

    def join(self, other: Placement) -> Placement | None:
        if not isinstance(other, FlatChunks) or self._cut != other._cut:
            return None
        return join_replicas(self, other)

    @property
    def most_numel(self) -> int:
        return min(self.chunk_numel, self.numel)

    def on_lowest_ranks(self) -> FlatChunks:
        return replace(self, replicas=(tuple(min(self.holders(shard)) for shard in range(self.num_shards)),))

    def without_ranks(self) -> FlatChunks:
        return replace(self, replicas=(range(self.num_shards),))

    @property
    def _cut(self) -> tuple[object, ...]:
        return self.full_shape, self.start, self.chunk_numel, self.own_tensor, self.num_shards

    def gap(self) -> tuple[int, int] | None:
        held = max(self.num_shards * self.chunk_numel - self.start, 0)
        return (held, self.numel) if held < self.numel else None

    def __str__(self) -> str:
        return (
            f"of shape {list(self.shape)}, {self.start} elements into a flat parameter that is cut into {self.num_shards} "
            f"chunks of {self.chunk_numel},"
        )


@functools.lru_cache(maxsize=4096)
def flat_chunks(
    shape: Shape, start: int, chunk_numel: int, replicas: tuple[Ranks, ...], own_tensor: bool = False
) -> FlatChunks:
    """Return `FlatChunks(...)` from a cache: equal layers share one value, and with it its hash."""
    return FlatChunks(shape, start, chunk_numel, replicas, own_tensor)
