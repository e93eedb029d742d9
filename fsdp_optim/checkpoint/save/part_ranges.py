"""Files that a store takes in equal parts: which rank puts which part, and the resulting cut of the tensors.

# file    | head | weight 0 . . . . . . . | weight 1 . | weight 2 . . . |
# parts   |      0       |       1       |       2        |     3       |     equal, but for the last one
# put by  |    rank 0    |    rank 1     |     rank 1     |   rank 0    |     has some of the part, and put the least so far

Every rank computes the same owners from the placements. Only elements that lie in a part of another rank are sent. Bytes of
values are counted in the data, without the head and the frames, so that the parts have different numbers of these bytes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from fsdp_optim.checkpoint.common.files import File
from fsdp_optim.layout import FlatRuns, Placement
from fsdp_optim.move import Key, StateValue

_MOST_LOOKED_AT = 16
"""The most shards, and holders of a shard, that are counted in one part. With more, each has a small share of it."""

HeadOfParts: TypeAlias = Sequence[tuple[int, memoryview]]
"""The ranges of a file's head that one rank puts: each range's first byte in the file, and its bytes."""

FramesOfParts: TypeAlias = dict[int, list[tuple[int, memoryview]]]
"""The ranges of a file's frames that one rank puts, by frame: each range's first byte in the file, and its bytes."""


class PartRange(Struct, frozen=True):
    """A value's bytes [start, stop) of the data that one rank puts, and their elements; the outer two may lie in it in part."""

    start: int
    stop: int
    first: int
    last: int


class PartedFile(Struct, frozen=True):
    """One file in parts. `owners`: the rank that puts each part."""

    file: File
    part_nbytes: int
    owners: tuple[int, ...]

    @classmethod
    def of(cls, file: File, part_nbytes: int, loads: dict[int, float]) -> PartedFile:
        """Choose the owners. `loads`: by rank, the bytes that it puts less the bytes that it has; this file's are added."""
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
        """Return the ranges of the file's head that a rank puts: the byte of the file at which each begins, and the bytes."""
        return self._on(rank, 0, self.file.plan.head)

    def frames_on(self, rank: int) -> FramesOfParts:
        """Return the ranges of the file's frames that a rank puts."""
        frames = self.file.plan.frames
        parts = (list(self._on(rank, *frame)) for frame in zip(frames.starts, frames.contents, strict=True))
        return {index: ranges for index, ranges in enumerate(parts) if ranges}

    def _on(self, rank: int, start: int, content: bytes) -> Iterator[tuple[int, memoryview]]:
        """Yield the ranges of some bytes of the file that are in parts of a rank."""
        memory, stop = memoryview(content), start + len(content)
        for number in range(start // self.part_nbytes, -(-stop // self.part_nbytes)):
            first, last = max(start, number * self.part_nbytes), min(stop, (number + 1) * self.part_nbytes)
            if self.owners[number] == rank and first < last:
                yield first, memory[first - start : last - start]

    def part_ranges(self) -> Iterator[tuple[StateValue, list[tuple[int, PartRange]]]]:
        """Yield each value of the file with its ranges, each with the rank that puts it, in the order of the elements."""
        borders = _borders(self.file, self.part_nbytes)
        for value, begin in zip(self.file.values, self.file.plan.starts, strict=True):
            yield value, self._ranges_of(value, begin, borders)

    def _ranges_of(self, value: StateValue, begin: int, borders: Sequence[int]) -> list[tuple[int, PartRange]]:
        size, end = value.dtype.itemsize, begin + value.nbytes
        ranges: list[tuple[int, PartRange]] = []
        if begin == end:
            return ranges
        numbers = range(_part_with(begin, borders), _part_with(end - 1, borders) + 1)
        for owner, owned in itertools.groupby(numbers, self.owners.__getitem__):
            listed = list(owned)
            start, stop = max(borders[listed[0]], begin), min(borders[listed[-1] + 1], end)
            ranges.append((owner, PartRange(start, stop, (start - begin) // size, -((begin - stop) // size))))
        return ranges


def _borders(file: File, part_nbytes: int) -> list[int]:
    """Return the byte of the data at which each part begins, and the end of the data."""
    frames, nbytes = file.plan.frames, file.plan.nbytes
    return [frames.data_before(start) for start in range(0, nbytes, part_nbytes)] + [file.plan.nbytes_of_data]


def _part_with(byte: int, borders: Sequence[int]) -> int:
    """Return the number of the part that has a byte of the data."""
    return bisect.bisect_right(borders, byte) - 1


def cuts_of(files: Sequence[PartedFile]) -> dict[Key, FlatRuns]:
    """Return the cut of every value in which its elements reach the ranks that put them."""
    cuts: dict[Key, FlatRuns] = {}
    for file in files:
        for value, part_ranges in file.part_ranges():
            by = tuple(rank for rank, _ in part_ranges)
            starts, stops = tuple(run.first for _, run in part_ranges), tuple(run.last for _, run in part_ranges)
            cuts[value.key] = FlatRuns(value.placement.shape, starts, stops, by)
    return cuts


def ranges_on(files: Sequence[PartedFile], rank: int) -> Mapping[Key, tuple[PartRange, ...]]:
    """Return the ranges of each value that one rank puts, if any, in the order of their elements in its local tensor."""
    by_key = {}
    for file in files:
        for value, part_ranges in file.part_ranges():
            runs = tuple(run for owner, run in part_ranges if owner == rank)
            if runs:
                by_key[value.key] = runs
    return by_key


class _Values:
    """The values of a file by their bytes, looked up from the beginning to the end."""

    def __init__(self, file: File) -> None:
        self._ranges = [
            (start, start + value.nbytes, value) for value, start in zip(file.values, file.plan.starts, strict=True)
        ]
        self._first = 0

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, StateValue]]:
        """Yield the values that have bytes in [start, stop), each with its own range. `start` never goes back."""
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
    """Return the bytes that each rank has of the part [start, stop) of the data, and the ranks that cannot put the part.

    `owners`: the owners of the earlier parts. Of one value, a rank puts one range and, in the part that ends the previous value,
    the beginning.
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
    """Return the rank that puts a part: of the ranks that have some of it, the rank with the lowest load.

    So each rank puts as much as it has, all along the file, and no rank waits for another.
    """
    allowed = {rank: share for rank, share in shares.items() if rank not in excluded}
    if not allowed:
        return owners[-1] if owners else min(loads, key=lambda rank: (loads[rank], rank))
    return min(allowed, key=lambda rank: (loads[rank] - allowed[rank], rank))


def _shares(placement: Placement, first: int, last: int) -> Iterator[tuple[int, float]]:
    """Yield how many of a value's elements [first, last) each rank has; elements of several ranks are shared out run by run."""
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
