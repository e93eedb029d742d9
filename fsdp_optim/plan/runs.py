"""Many contiguous copies of a plan, as arrays: a recipient of thousands of shards has a copy for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy
from numpy.typing import NDArray

from fsdp_optim.layout import Placement, RunTable, number_array
from fsdp_optim.plan.copies import Copy

BULK_FROM = 48
"""The number of copies from which arrays are quicker than single copies."""

Numbers = NDArray[numpy.int64]


@dataclass(frozen=True, eq=False)
class Runs(Sequence[Copy]):
    """Copies that are contiguous on both sides: a sequence of `Copy` without FQNs, stored as columns of numbers."""

    source_ranks: Numbers
    target_ranks: Numbers
    numels: Numbers
    source_offsets: Numbers
    target_offsets: Numbers

    @classmethod
    def none(cls) -> Runs:
        """An empty sequence of copies."""
        return cls(*[numpy.empty(0, numpy.int64)] * 5)

    @property
    def columns(self) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
        """The source rank, target rank, number of elements, source offset and target offset of each copy."""
        return self.source_ranks, self.target_ranks, self.numels, self.source_offsets, self.target_offsets

    def joined(self, other: Runs) -> Runs:
        """These copies, followed by those of `other`."""
        if not len(self) or not len(other):
            return self if len(self) else other
        return Runs(*(numpy.concatenate(pair) for pair in zip(self.columns, other.columns, strict=True)))

    def rows(self) -> Iterator[tuple[int, int, int, int, int]]:
        """The numbers of each copy, in the order of `columns`."""
        return zip(*(column.tolist() for column in self.columns), strict=True)

    def __len__(self) -> int:
        return len(self.numels)

    @overload
    def __getitem__(self, index: int) -> Copy: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Copy, ...]: ...
    def __getitem__(self, index: int | slice) -> Copy | tuple[Copy, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        return _copy(*(int(column[index]) for column in self.columns))

    def __iter__(self) -> Iterator[Copy]:
        return (_copy(*row) for row in self.rows())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Copy.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # Runs are equal to tuples of copies, whose hashes would differ


def _copy(source_rank: int, target_rank: int, numel: int, source_offset: int, target_offset: int) -> Copy:
    return Copy("", source_rank, target_rank, (numel,), source_offset, (1,), target_offset, (1,))


def has_from(copies: Sequence[Copy], rank: int) -> bool:
    """Whether a rank is the source of any of the copies."""
    if isinstance(copies, Runs):
        return bool((copies.source_ranks == rank).any())
    return any(copy.source_rank == rank for copy in copies)


def num_into(copies: Sequence[Copy], rank: int) -> int:
    """The number of elements that the copies bring to a rank."""
    if isinstance(copies, Runs):
        return int(copies.numels[copies.target_ranks == rank].sum())
    return sum(copy.numel for copy in copies if copy.target_rank == rank)


def runs_into(source: Placement, target: Placement, shard: int, rank: int, replica: int) -> Runs | None:
    """All copies that fill a shard on a target rank, in the order of the source's shards; None where some are strided.

    The shards of `source` must not overlap.
    """
    wanted = target.run(shard)
    if wanted is None:
        return None
    shards = source.shards_over(wanted.start, wanted.stop)
    table = source.runs(shards) if shards else None
    if table is None:
        return None if shards else Runs.none()
    targets = numpy.full(len(shards), rank)
    senders = _senders(source, shards, targets, target, replica)
    return _between(table, senders, RunTable.of(wanted, len(shards)), targets)


def runs_out_of(source: Placement, target: Placement, shard: int, rank: int, replica: int) -> Runs | None:
    """All copies that a source rank sends to others, in the order of the target's shards; None where some are strided."""
    held = source.run(shard)
    if held is None:
        return None
    shards = target.shards_over(held.start, held.stop)
    table = target.runs(shards) if shards else None
    if table is None:
        return None if shards else Runs.none()
    holders = target.holders_of(shards)  # by replica and shard
    ranks = holders.T.reshape(-1)
    senders = _senders(source, range(shard, shard + 1), ranks, target, replica)
    mine = (senders == rank) & (ranks != rank)
    rows = numpy.repeat(numpy.arange(len(shards)), len(holders))[mine]
    return _between(RunTable.of(held, len(rows)), senders[mine], table.rows(rows), ranks[mine])


def _senders(source: Placement, shards: Sequence[int], to: Numbers, target: Placement, replica: int) -> Numbers:
    """The sender of `shards[i]` to the rank `to[i]`, or of a single shard to each rank in `to`.

    A rank that holds a shard sends that shard to itself; other ranks take the shard from the replicas in turn.
    """
    holders = source.holders_of(shards)
    if len(holders) == 1:
        return numpy.broadcast_to(holders[0], to.shape)
    indices = numpy.searchsorted(numpy.array(target.ranks), to)
    turn = (replica + number_array(shards) + indices) % len(holders)
    columns = numpy.broadcast_to(numpy.arange(len(shards)), turn.shape)
    is_held = numpy.isin(to, holders) if len(shards) == 1 else (holders == to).any(axis=0)
    return numpy.where(is_held, to, holders[turn, columns])


def _between(source: RunTable, source_ranks: Numbers, target: RunTable, target_ranks: Numbers) -> Runs:
    """The copies of the elements that each pair of runs has in common."""
    start = numpy.maximum(source.starts, target.starts)
    numels = numpy.minimum(source.stops, target.stops) - start
    some = numels > 0
    return Runs(
        source_ranks[some],
        target_ranks[some],
        numels[some],
        (source.offsets + start - source.starts)[some],
        (target.offsets + start - target.starts)[some],
    )
