"""Files that a store takes in equal parts: which rank puts which part, and the cut of the tensors that follows from it.

# file    | head | weight 0 . . . . . . . | weight 1 . | weight 2 . . . |
# parts   |      0       |       1       |       2        |     3       |     equal, but for the last one
# put by  |    rank 0    |    rank 1     |     rank 1     |   rank 0    |     who has some of a part, and put the least so far

Every rank computes the same owners from the placements. Only elements that lie in a part of another rank are sent. Bytes of
values are counted in the data, without the head and the frames, so that the parts have different numbers of these bytes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdp_optim.checkpoint.common.files import File
from fsdp_optim.layout import FlatRuns, Placement
from fsdp_optim.move import Key, StateValue

_MOST_LOOKED_AT = 16
"""Shards, and holders of a shard, that are counted in one part. More of them have small shares of it."""

HeadOfParts: TypeAlias = Sequence[tuple[int, memoryview]]
"""The ranges of a file's head that one rank puts: each range's first byte in the file, and its bytes."""

FramesOfParts: TypeAlias = dict[int, list[tuple[int, memoryview]]]
"""The ranges of a file's frames that one rank puts, by frame: each range's first byte in the file, and its bytes."""


@dataclass(frozen=True)
class PartRange:
    """A value's bytes [start, stop) of the data that one rank puts, and the elements that have them: the outer two in part."""

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
    def of(cls, file: File, part_nbytes: int, loads: dict[int, float]) -> PartedFile:
        """Choose the owners. `loads`: by rank the bytes that it puts beyond those that it has, to which this file's are added."""
        owners: list[int] = []
        values = _Values(file)
        borders = _borders(file, part_nbytes)
        for number, (start, stop) in enumerate(itertools.pairwise(borders)):
            shares, excluded = _shares_of_part(values, start, stop, owners, borders)
            owner = _owner(shares, excluded, owners, loads)
            owners.append(owner)
            loads[owner] += min(part_nbytes, file.plan.nbytes - number * part_nbytes)
            for rank, share in shares.items():
                loads[rank] -= share
        return cls(file, part_nbytes, tuple(owners))

    def head_on(self, rank: int) -> Iterator[tuple[int, memoryview]]:
        """The range of the file's head that a rank puts: the byte of the file at which it begins, and the bytes."""
        return self._on(rank, 0, self.file.plan.head)

    def frames_on(self, rank: int) -> FramesOfParts:
        """The ranges of the file's frames that a rank puts."""
        frames = self.file.plan.frames
        parts = (list(self._on(rank, *one)) for one in zip(frames.starts, frames.contents, strict=True))
        return {index: found for index, found in enumerate(parts) if found}

    def _on(self, rank: int, start: int, content: bytes) -> Iterator[tuple[int, memoryview]]:
        """The ranges of some bytes of the file that are in parts of a rank."""
        memory, stop = memoryview(content), start + len(content)
        for number in range(start // self.part_nbytes, -(-stop // self.part_nbytes)):
            first, last = max(start, number * self.part_nbytes), min(stop, (number + 1) * self.part_nbytes)
            if self.owners[number] == rank and first < last:
                yield first, memory[first - start : last - start]

    def stretches(self) -> Iterator[tuple[StateValue, list[tuple[int, PartRange]]]]:
        """Each value of the file, with its stretches, each with the rank that puts it, in the order of the elements."""
        borders = _borders(self.file, self.part_nbytes)
        for value, begin in zip(self.file.values, self.file.plan.starts, strict=True):
            yield value, self._stretches_of(value, begin, borders)

    def _stretches_of(self, value: StateValue, begin: int, borders: Sequence[int]) -> list[tuple[int, PartRange]]:
        size, end = value.dtype.itemsize, begin + value.nbytes
        found: list[tuple[int, PartRange]] = []
        if begin == end:
            return found
        numbers = range(_part_with(begin, borders), _part_with(end - 1, borders) + 1)
        for owner, its in itertools.groupby(numbers, self.owners.__getitem__):
            listed = list(its)
            start, stop = max(borders[listed[0]], begin), min(borders[listed[-1] + 1], end)
            found.append((owner, PartRange(start, stop, (start - begin) // size, -((begin - stop) // size))))
        return found


def _borders(file: File, part_nbytes: int) -> list[int]:
    """The byte of the data at which each part begins, and the end of the data."""
    frames, nbytes = file.plan.frames, file.plan.nbytes
    return [frames.data_before(start) for start in range(0, nbytes, part_nbytes)] + [file.plan.nbytes_of_data]


def _part_with(byte: int, borders: Sequence[int]) -> int:
    """The number of the part that has a byte of the data."""
    return bisect.bisect_right(borders, byte) - 1


def cuts_of(files: Sequence[PartedFile]) -> dict[Key, FlatRuns]:
    """The cut of every value in which its elements reach the ranks that put them."""
    found: dict[Key, FlatRuns] = {}
    for file in files:
        for value, stretches in file.stretches():
            by = tuple(rank for rank, _ in stretches)
            starts, stops = tuple(run.first for _, run in stretches), tuple(run.last for _, run in stretches)
            found[value.key] = FlatRuns(value.placement.shape, starts, stops, by)
    return found


def stretches_on(files: Sequence[PartedFile], rank: int) -> Mapping[Key, tuple[PartRange, ...]]:
    """The stretches of each value that one rank puts, if any, in the order in which its local tensor has their elements."""
    found = {}
    for file in files:
        for value, stretches in file.stretches():
            its = tuple(run for owner, run in stretches if owner == rank)
            if its:
                found[value.key] = its
    return found


class _Values:
    """The values of a file by their bytes, asked for from the beginning to the end."""

    def __init__(self, file: File) -> None:
        self._ranges = [
            (start, start + value.nbytes, value) for value, start in zip(file.values, file.plan.starts, strict=True)
        ]
        self._first = 0

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, StateValue]]:
        """The values that have bytes in [start, stop), each with its own range. `start` never goes back."""
        while self._first < len(self._ranges) and self._ranges[self._first][1] <= start:
            self._first += 1
        for begin, end, value in itertools.islice(self._ranges, self._first, None):
            if begin >= stop:
                return
            if begin < end:
                yield begin, end, value


def _shares_of_part(
    values: _Values, start: int, stop: int, owners: Sequence[int], borders: Sequence[int]
) -> tuple[dict[int, float], set[int]]:
    """How many bytes each rank has of the part with the bytes [start, stop) of the data, and the ranks that cannot put it.

    `owners`: those of the parts before. Of one value, a rank puts one stretch, and the beginning, which is in the part that has
    the end of the value before.
    """
    shares: dict[int, float] = {}
    excluded: set[int] = set()
    for begin, end, value in values.within(start, stop) if start < stop else ():
        size = value.dtype.itemsize
        if begin < start:
            excluded = {*owners[_part_with(begin, borders) + 1 :]}
        first, last = max(start - begin, 0) // size, -((begin - min(stop, end)) // size)
        for rank, numel in _shares(value.placement, first, last):
            shares[rank] = shares.get(rank, 0) + numel * size
    return shares, excluded - {*owners[-1:]}


def _owner(shares: Mapping[int, float], excluded: set[int], owners: Sequence[int], loads: Mapping[int, float]) -> int:
    """The rank that puts a part: of those that have some of it, the one that has put the least share of its bytes so far.

    So each rank puts as much as it has, in every stretch of a file, and none waits for another one.
    """
    allowed = {rank: share for rank, share in shares.items() if rank not in excluded}
    if not allowed:
        return owners[-1] if owners else min(loads, key=lambda rank: (loads[rank], rank))
    return min(allowed, key=lambda rank: (loads[rank] - allowed[rank], rank))


def _shares(placement: Placement, first: int, last: int) -> Iterator[tuple[int, float]]:
    """How many of a value's elements [first, last) the ranks have; elements of several ranks are shared out, run by run."""
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
