"""Extents: ranges of a file's data section in this rank's memory, written with checksums or read and verified."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.checksums import Rows, SegmentRange, Sums, hash_of, hash_of_pieces, rows_of
from fsdp_optim.formats.base.frames import Pieces
from fsdp_optim.tensors.memory import in_batches

_WRITE_NBYTES = 1 << 20  # hashed and written at once, so that the write finds the bytes in the processor's cache
_READ_NBYTES = 8 << 20  # read at once, then verified


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of memory, and the byte `start` of the data section at which they belong."""

    start: int
    memory: memoryview

    @property
    def stop(self) -> int:
        return self.start + len(self.memory)


@dataclass(frozen=True)
class DataSection:
    """The data section of a file in a store.

    Attributes:
        name: the name of the file, for errors.
        move: reads pieces of memory from an offset of the file, or writes them there.
        offset: the byte of the file at which the section begins.
        tensors_in: a function that names the tensors in a range [start, stop) of the section, for errors.
        num_reads: how many reads are best under way at the same time; several threads then call `move`.
    """

    name: str
    move: Callable[[Pieces, int], None]
    offset: int
    tensors_in: Callable[[int, int], str]
    num_reads: int = 1


def write_extents(section: DataSection, extents: Iterable[Extent], segment_nbytes: int) -> Rows:
    """Write ranges, and return their segments. `segment_nbytes` 0: nothing is hashed, and all hashes are 0."""
    rows: list[tuple[int, int, int]] = []
    unwritten: list[memoryview] = []
    unwritten_start = at = 0
    for segment in _segments(extents, segment_nbytes):
        if unwritten and (segment[0].start != at or at - unwritten_start >= _WRITE_NBYTES):
            section.move(unwritten, section.offset + unwritten_start)
            unwritten = []
        if not unwritten:
            unwritten_start = segment[0].start
        start, at = segment[0].start, segment[-1].stop
        pieces = [extent.memory for extent in segment]
        if segment_nbytes and at - start > segment_nbytes:  # several whole segments, whose hashes take less than a loop
            (memory,), starts = pieces, range(start, at, segment_nbytes)
            hashes = map(hash_of, [memory[first - start : first - start + segment_nbytes] for first in starts])
            rows += zip(starts, range(start + segment_nbytes, at + 1, segment_nbytes), hashes, strict=True)
        else:
            rows.append((start, at, hash_of_pieces(pieces) if segment_nbytes else 0))
        unwritten += pieces
    if unwritten:
        section.move(unwritten, section.offset + unwritten_start)
    return rows_of(rows)


def _segments(extents: Iterable[Extent], nbytes: int) -> Iterator[list[Extent]]:
    """Cut ranges at multiples of `nbytes`, and join adjacent ranges between these. Whole segments may come together."""
    pending: list[Extent] = []
    grid = nbytes or _WRITE_NBYTES
    for extent in sorted((e for e in extents if len(e.memory)), key=lambda e: e.start):
        if pending and pending[-1].stop != extent.start:
            yield pending
            pending = []
        at = extent.start
        while at < extent.stop:
            if not pending and not at % grid and extent.stop - at >= 2 * grid:
                num = max(min(extent.stop - at, _WRITE_NBYTES) // grid, 1) * grid
                yield [Extent(at, extent.memory[at - extent.start : at - extent.start + num])]
                at += num
                continue
            end = min((at // grid + 1) * grid, extent.stop)
            pending.append(Extent(at, extent.memory[at - extent.start : end - extent.start]))
            at = end
            if not at % grid:
                yield pending
                pending = []
    if pending:
        yield pending


def without_overlaps(ranges: Sequence[Extent]) -> Iterator[Sequence[Extent]]:
    """Yield the same ranges in lists in which no byte is read twice. Tensors of one file may share memory."""
    rest = sorted(ranges, key=lambda extent: extent.start)
    while rest:
        apart: list[Extent] = []
        others: list[Extent] = []
        for extent in rest:
            (others if apart and extent.start < apart[-1].stop else apart).append(extent)
        yield apart
        rest = others


def read_extents(
    section: DataSection, extents: Sequence[Extent], sums: Sums | None, did_read: Callable[[int], None]
) -> None:
    """Fill ranges from the file. `did_read` is called after each read with its number of bytes.

    With `sums`, all segments that the ranges touch are read whole and verified.

    Raises CheckpointError that names the file and the tensor if the bytes are not as they were saved.
    """
    ordered = sorted((extent for extent in extents if len(extent.memory)), key=lambda e: e.start)
    if not ordered:
        return
    for extent, following in itertools.pairwise(ordered):
        if following.start < extent.stop:
            raise ValueError(f"bytes [{following.start}, {extent.stop}) would be read twice at once")
    segments = sums.segments_in(ordered[0].start, ordered[-1].stop) if sums is not None else None
    covered = _with_rest_of_segments(ordered, segments.borders) if segments is not None else ordered
    check = _SumCheck(section, segments) if segments is not None else None
    for batch in _read(section, _batches(covered)):
        if check is not None:
            for extent in batch:
                check.add(extent)
        did_read(batch[-1].stop - batch[0].start)


def _read(section: DataSection, batches: Iterable[list[Extent]]) -> Iterator[list[Extent]]:
    """Fill batches, several at the same time. Yields each batch when it and all before it are filled."""

    def fill(batch: list[Extent]) -> list[Extent]:
        section.move([extent.memory for extent in batch], section.offset + batch[0].start)
        return batch

    if section.num_reads == 1:
        yield from map(fill, batches)
        return
    with ThreadPoolExecutor(section.num_reads, thread_name_prefix="fsdp_optim: read") as pool:
        under_way: deque[Future[list[Extent]]] = deque()
        try:
            for batch in batches:
                if len(under_way) == 2 * section.num_reads:
                    yield under_way.popleft().result()
                under_way.append(pool.submit(fill, batch))
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def _with_rest_of_segments(extents: Sequence[Extent], borders: Sequence[int]) -> Iterator[Extent]:
    """Yield the ranges, and temporary memory for the other bytes of the segments that they touch."""
    at = 0  # all bytes before this one are read, or not needed
    for index, extent in enumerate(extents):
        begin = max(at, borders[bisect.bisect_right(borders, extent.start) - 1])
        if begin < extent.start:
            yield _scratch(begin, extent.start)
        yield extent
        at = extent.stop
        end = borders[bisect.bisect_left(borders, extent.stop)]
        following = extents[index + 1].start if index + 1 < len(extents) else end
        if at < min(end, following) and following >= end:
            yield _scratch(at, end)
            at = end


def _scratch(start: int, stop: int) -> Extent:
    return Extent(start, memoryview(bytearray(stop - start)))


def _batches(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Batches of adjacent ranges, up to a size."""
    parts = (
        Extent(extent.start + first, extent.memory[first : first + _READ_NBYTES])
        for extent in extents
        for first in range(0, len(extent.memory), _READ_NBYTES)
    )
    return in_batches(
        parts, lambda part: len(part.memory), _READ_NBYTES, lambda extent, following: extent.stop == following.start
    )


class _SumCheck:
    """Verifies segments from bytes that arrive in order. A segment may arrive in several parts."""

    def __init__(self, section: DataSection, segments: SegmentRange) -> None:
        self._section, self._segments = section, segments
        self._digest: xxhash.xxh3_64 | None = None

    def add(self, extent: Extent) -> None:
        start, memory = extent.start, extent.memory
        borders = self._segments.borders
        index = bisect.bisect_right(borders, start) - 1
        last = bisect.bisect_right(borders, extent.stop) - 1  # the border at or before its end
        if start == borders[index] and last > index + 1:
            inner = itertools.pairwise(borders[index : last + 1])
            # One view after the other, and not all of them at once.
            hashes = [hash_of(memory[begin - start : end - start]) for begin, end in inner]
            if hashes == self._segments.hashes[index:last]:
                start, index = borders[last], last  # else the loop finds the segment
        while start < extent.stop:
            begin, end = borders[index], borders[index + 1]
            part = memory[start - extent.start : end - extent.start]
            stop = start + len(part)
            if start == begin and stop == end:
                actual = hash_of(part)
            else:
                digest = self._digest if self._digest is not None and start != begin else xxhash.xxh3_64()
                digest.update(part)
                self._digest = digest
                actual = digest.intdigest()
            if stop == end:
                self._digest = None
                if actual != self._segments.hashes[index]:
                    names = self._section.tensors_in(begin, end)
                    raise CheckpointError(
                        f"{self._section.name}: bytes [{begin}, {end}) of its data, in {names}, are not those that were "
                        "saved: the file was damaged; load another checkpoint (verify=False reads the damaged bytes)"
                    )
            start, index = stop, index + 1
