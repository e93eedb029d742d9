"""Ranges of a file's data section that this rank holds in memory: written with checksums, read and verified."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.checksums import Rows, Sums, Window, hash_of, rows_of
from fsdp_optim.memory import in_batches

_BLOCK_NBYTES = 1 << 20  # hashed and written at once, so that the second finds it in the processor's cache
_READ_NBYTES = 8 << 20  # read at once, then verified


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of memory, and where in the data section they belong."""

    start: int
    memory: memoryview

    @property
    def stop(self) -> int:
        return self.start + len(self.memory)


Pieces = Sequence[memoryview]


@dataclass(frozen=True)
class DataSection:
    """The data section of a file in a store.

    Attributes:
        name: of the file, for errors.
        move: fills pieces of memory from a place in the file, where it is read, and puts them there, where it is written.
        offset: where in the file the section begins.
        tensors_in: the names of the tensors in a range [start, stop) of it, for errors.
    """

    name: str
    move: Callable[[Pieces, int], None]
    offset: int
    tensors_in: Callable[[int, int], str]


def write_extents(section: DataSection, extents: Iterable[Extent], segment_nbytes: int) -> Rows:
    """Write ranges to their place; returns their segments. With `segment_nbytes` 0 nothing is hashed: their hashes are 0."""
    rows: list[tuple[int, int, int]] = []
    block: list[memoryview] = []
    block_start = at = 0
    for segment in _segments(extents, segment_nbytes):
        if block and (segment[0].start != at or at - block_start >= _BLOCK_NBYTES):
            section.move(block, section.offset + block_start)
            block = []
        if not block:
            block_start = segment[0].start
        at = segment[-1].stop
        pieces = [extent.memory for extent in segment]
        rows.append((segment[0].start, at, _hash_of_pieces(pieces) if segment_nbytes else 0))
        block += pieces
    if block:
        section.move(block, section.offset + block_start)
    return rows_of(rows)


def _segments(extents: Iterable[Extent], nbytes: int) -> Iterator[list[Extent]]:
    """Ranges cut at multiples of `nbytes`, and joined up to there where one begins at the end of another."""
    pending: list[Extent] = []
    grid = nbytes or _BLOCK_NBYTES
    for extent in sorted((e for e in extents if len(e.memory)), key=lambda e: e.start):
        if pending and pending[-1].stop != extent.start:
            yield pending
            pending = []
        at = extent.start
        while at < extent.stop:
            end = min((at // grid + 1) * grid, extent.stop)
            pending.append(Extent(at, extent.memory[at - extent.start : end - extent.start]))
            at = end
            if not at % grid:
                yield pending
                pending = []
    if pending:
        yield pending


def read_extents(
    section: DataSection, extents: Sequence[Extent], sums: Sums | None, did_read: Callable[[int], None]
) -> None:
    """Fill ranges from their place; `did_read` is called with how many bytes were read, again and again.

    With `sums`, segments of which only a part is wanted are read whole, and all are verified.

    Raises CheckpointError that names the file and the tensor where the bytes are not those that were saved.
    """
    wanted = sorted((extent for extent in extents if len(extent.memory)), key=lambda e: e.start)
    if not wanted:
        return
    for one, following in itertools.pairwise(wanted):
        if following.start < one.stop:
            raise ValueError(f"bytes [{following.start}, {one.stop}) are to be read twice at once")
    window = sums.window(wanted[0].start, wanted[-1].stop) if sums is not None else None
    covered = _with_rest_of_segments(wanted, window.borders) if window is not None else wanted
    check = _Check(section, window) if window is not None else None
    for batch in _batches(covered):
        section.move([e.memory for e in batch], section.offset + batch[0].start)
        if check is not None:
            for extent in batch:
                check.add(extent)
        did_read(batch[-1].stop - batch[0].start)


def _with_rest_of_segments(wanted: Sequence[Extent], borders: Sequence[int]) -> Iterator[Extent]:
    """The ranges, and memory for what else is in the segments that they touch."""
    at = 0  # all bytes before are read, or not needed
    for index, extent in enumerate(wanted):
        begin = max(at, borders[bisect.bisect_right(borders, extent.start) - 1])
        if begin < extent.start:
            yield _scratch(begin, extent.start)
        yield extent
        at = extent.stop
        end = borders[bisect.bisect_left(borders, extent.stop)]
        following = wanted[index + 1].start if index + 1 < len(wanted) else end
        if at < min(end, following) and following >= end:
            yield _scratch(at, end)
            at = end


def _scratch(start: int, stop: int) -> Extent:
    return Extent(start, memoryview(bytearray(stop - start)))


def _batches(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Ranges that lie end to end, up to a size."""
    parts = (
        Extent(extent.start + first, extent.memory[first : first + _READ_NBYTES])
        for extent in extents
        for first in range(0, len(extent.memory), _READ_NBYTES)
    )
    return in_batches(parts, lambda part: len(part.memory), _READ_NBYTES, lambda one, other: one.stop == other.start)


class _Check:
    """Verifies segments, from bytes that come in order; a segment may come in several parts."""

    def __init__(self, section: DataSection, window: Window) -> None:
        self._section, self._window = section, window
        self._digest: xxhash.xxh3_64 | None = None

    def add(self, extent: Extent) -> None:
        start, memory = extent.start, extent.memory
        borders = self._window.borders
        index = bisect.bisect_right(borders, start) - 1
        while start < extent.stop:
            begin, end = borders[index], borders[index + 1]
            part = memory[start - extent.start : end - extent.start]
            stop = start + len(part)
            if start == begin and stop == end:
                found = hash_of(part)
            else:
                digest = self._digest if self._digest is not None and start != begin else xxhash.xxh3_64()
                digest.update(part)
                self._digest = digest
                found = digest.intdigest()
            if stop == end:
                self._digest = None
                if found != self._window.hashes[index]:
                    names = self._section.tensors_in(begin, end)
                    raise CheckpointError(
                        f"{self._section.name}: bytes [{begin}, {end}) of its data, in {names}, are not those that were "
                        "saved: the file was damaged; load another checkpoint (verify=False reads it as it is)"
                    )
            start, index = stop, index + 1


def _hash_of_pieces(pieces: Sequence[memoryview]) -> int:
    if len(pieces) == 1:
        return hash_of(pieces[0])
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return int(digest.intdigest())
