"""Files that a store takes in equal parts: which rank puts which part, and the cut of the tensors that follows from it.

# file    | head | weight 0 . . . . . . . | weight 1 . | weight 2 . . . |
# parts   |      0       |       1       |       2        |     3       |     equal, but for the last one
# put by  |    rank 0    |    rank 1     |     rank 1     |   rank 0    |     whoever has the most of a part already

Every rank computes the same owners from the placements. Only elements that lie in a part of another rank are sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_optim.checkpoint.files import File
from fsdp_optim.layout import FlatRuns, Placement
from fsdp_optim.move import Key, StateValue

_MOST_LOOKED_AT = 16
"""Shards, and holders of a shard, that are counted in one part. More of them have small shares of it."""

_AS_GOOD = 0.9
"""A rank that has this share of what the best one has may put a part too, where it has less to do."""


@dataclass(frozen=True)
class Stretch:
    """A value's bytes [start, stop) of a file that one rank puts, and the elements that have them: the outer two in part."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class PartedFile:
    """One file in parts. `owners`: the rank that puts each part."""

    file: File
    part_nbytes: int
    owners: tuple[int, ...]

    @classmethod
    def of(cls, file: File, part_nbytes: int, loads: dict[int, int]) -> PartedFile:
        """Choose the owners. `loads`: by rank the bytes that it puts already, to which those of this file are added."""
        owners: list[int] = []
        values = _Values(file)
        for start in range(0, file.plan.nbytes, part_nbytes):
            stop = min(start + part_nbytes, file.plan.nbytes)
            owner = _owner(values, range(start, stop), owners, part_nbytes, loads)
            owners.append(owner)
            loads[owner] += stop - start
        return cls(file, part_nbytes, tuple(owners))

    def heads_on(self, rank: int) -> Iterator[tuple[int, int]]:
        """The ranges [start, stop) of the file's head that are in parts of a rank."""
        for number, owner in enumerate(self.owners):
            start, stop = number * self.part_nbytes, min((number + 1) * self.part_nbytes, self.file.plan.offset)
            if owner == rank and start < stop:
                yield start, stop

    def stretches(self) -> Iterator[tuple[StateValue, dict[int, Stretch]]]:
        """Each value of the file, with the stretch of every rank that puts some of it, in the order of the elements."""
        for value, begin in zip(self.file.values, self.file.plan.starts, strict=True):
            yield value, self._stretches_of(value, self.file.plan.offset + begin)

    def _stretches_of(self, value: StateValue, begin: int) -> dict[int, Stretch]:
        size, end = value.dtype.itemsize, begin + value.nbytes
        found: dict[int, Stretch] = {}
        if begin == end:
            return found
        numbers = range(begin // self.part_nbytes, (end - 1) // self.part_nbytes + 1)
        for owner, its in itertools.groupby(numbers, self.owners.__getitem__):
            listed = list(its)
            start, stop = max(listed[0] * self.part_nbytes, begin), min((listed[-1] + 1) * self.part_nbytes, end)
            found[owner] = Stretch(start, stop, (start - begin) // size, -((begin - stop) // size))
        return found


def cuts_of(files: Sequence[PartedFile]) -> dict[Key, FlatRuns]:
    """The cut of every value in which its elements reach the ranks that put them."""
    found = {}
    for file in files:
        for value, stretches in file.stretches():
            runs = stretches.values()
            starts, stops = tuple(run.first for run in runs), tuple(run.last for run in runs)
            found[value.key] = FlatRuns(value.placement.shape, starts, stops, tuple(stretches))
    return found


def stretches_on(files: Sequence[PartedFile], rank: int) -> Mapping[Key, Stretch]:
    """The stretch of each value that one rank puts, if any."""
    return {value.key: stretches[rank] for file in files for value, stretches in file.stretches() if rank in stretches}


class _Values:
    """The values of a file by their bytes, asked for from the beginning to the end."""

    def __init__(self, file: File) -> None:
        offset = file.plan.offset
        self._ranges = [
            (offset + start, offset + start + value.nbytes, value)
            for value, start in zip(file.values, file.plan.starts, strict=True)
        ]
        self._first = 0

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, StateValue]]:
        """Those that have bytes in [start, stop), each with its own range. `start` never goes back."""
        while self._first < len(self._ranges) and self._ranges[self._first][1] <= start:
            self._first += 1
        for begin, end, value in itertools.islice(self._ranges, self._first, None):
            if begin >= stop:
                return
            if begin < end:
                yield begin, end, value


def _owner(values: _Values, part: range, owners: Sequence[int], part_nbytes: int, loads: Mapping[int, int]) -> int:
    """The rank that puts a part, a range of bytes, after the parts that have `owners`."""
    shares: dict[int, float] = {}
    excluded: set[int] = set()  # a rank's stretch of one value has no holes
    for begin, end, value in values.within(part.start, part.stop):
        size = value.dtype.itemsize
        if begin < part.start:
            excluded = {*owners[begin // part_nbytes :]}
        first, last = max(part.start - begin, 0) // size, -((begin - min(part.stop, end)) // size)
        for rank, numel in _shares(value.placement, first, last):
            shares[rank] = shares.get(rank, 0) + numel * size
    if owners:
        excluded.discard(owners[-1])
    allowed = {rank: share for rank, share in shares.items() if rank not in excluded}
    if not allowed:
        return owners[-1] if owners else min(loads, key=lambda rank: (loads[rank], rank))
    most = max(allowed.values())
    good = [rank for rank, share in allowed.items() if share >= _AS_GOOD * most]
    return min(good, key=lambda rank: (loads[rank], rank))


def _shares(placement: Placement, first: int, last: int) -> Iterator[tuple[int, float]]:
    """How many of a value's elements [first, last) the ranks have; what several have is shared out among them, run by run."""
    shards = placement.shards_over(first, last)
    for shard in itertools.islice(shards, _MOST_LOOKED_AT):
        holders, run = placement.holders(shard), placement.run(shard)
        if run is None:
            for rank in holders[:_MOST_LOOKED_AT]:
                yield rank, (last - first) / (len(shards) * len(holders))
            continue
        num = run.stop - run.start
        for index, rank in enumerate(holders):
            start, stop = run.start + num * index // len(holders), run.start + num * (index + 1) // len(holders)
            if min(stop, last) > max(start, first):
                yield rank, min(stop, last) - max(start, first)
