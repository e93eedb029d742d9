"""Many short ranges of a file's data section, as a table: their bytes lie in one buffer, and numpy does what is done to each.

# buffer  | a a a a | b b | c c c c |      at:      0, 4, 6
# section | a a a a . . . . b b c c c c |  starts:  0, 8, 10   ranges that are adjacent in both become one: 0, 8
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from fsdp_optim.formats.base.checksums import Rows, hash_of, hash_of_pieces
from fsdp_optim.formats.base.frames import Pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.int64]

_TOGETHER = 1 << 20
"""Bytes that are hashed and then written at once, so that the write finds them in the processor's cache."""

_MOST_RANGES = 1 << 12


@dataclass(frozen=True, eq=False)
class PackedExtents:
    """Ranges [starts, stops) of a data section, in order and not adjacent, and the byte of `memory` at which each begins."""

    starts: Numbers
    stops: Numbers
    at: Numbers
    memory: memoryview

    @classmethod
    def of(cls, starts: Numbers, nbytes: Numbers, at: Numbers, memory: memoryview) -> PackedExtents:
        """Sort ranges, drop the empty ones, and join those that are adjacent in the section and in memory."""
        kept = nbytes > 0
        if not kept.all():
            starts, nbytes, at = starts[kept], nbytes[kept], at[kept]
        if not len(starts):
            return cls(starts, starts, at, memory)
        if (starts[1:] < starts[:-1]).any():
            order = starts.argsort(kind="stable")
            starts, nbytes, at = starts[order], nbytes[order], at[order]
        stops = starts + nbytes
        begins = numpy.ones(len(starts), bool)
        begins[1:] = (starts[1:] != stops[:-1]) | (at[1:] != at[:-1] + nbytes[:-1])
        first = begins.nonzero()[0]
        last = numpy.append(first[1:], len(starts)) - 1
        return cls(starts[first], stops[last], at[first], memory)

    @property
    def nbytes(self) -> int:
        """The bytes of all ranges together."""
        return int((self.stops - self.starts).sum())

    def cut_at(self, grid: int) -> PackedExtents:
        """Return the same ranges, cut at the multiples of `grid` in the section."""
        first, last = self.starts // grid, (self.stops - 1) // grid
        if (first == last).all():
            return self
        counts = last - first + 1
        of = numpy.arange(len(first)).repeat(counts)
        number = numpy.arange(len(of)) - (counts.cumsum() - counts)[of]  # of the piece in its range
        starts = numpy.maximum(self.starts[of], (first[of] + number) * grid)
        stops = numpy.minimum(self.stops[of], (first[of] + number + 1) * grid)
        return PackedExtents(starts, stops, self.at[of] + starts - self.starts[of], self.memory)

    def parts(self, first: int = 0, end: int | None = None) -> list[memoryview]:
        """Return the bytes of each range, from the range `first` up to the range `end`."""
        memory, begins = self.memory, self.at[first:end]
        ends = begins + self.stops[first:end] - self.starts[first:end]
        return [memory[start:stop] for start, stop in zip(begins.tolist(), ends.tolist(), strict=True)]

    def runs(self, grid: int) -> list[int]:
        """Return the borders of runs of ranges that are adjacent in the section. A multiple of `grid` ends a run."""
        starts, stops = self.starts, self.stops
        begins = numpy.ones(len(starts), bool)
        begins[1:] = (starts[1:] != stops[:-1]) | (starts[1:] // grid != starts[:-1] // grid)
        return [*begins.nonzero()[0].tolist(), len(starts)]


def write_packed(packed: PackedExtents, segment_nbytes: int, write: Callable[[Pieces, int], None], offset: int) -> Rows:
    """Write ranges, and return their segments, as `write_extents` does.

    `segment_nbytes` 0: nothing is hashed, and all hashes are 0. `write(pieces, place)` writes at a byte of the file, in which
    the section begins at `offset`.
    """
    grid = segment_nbytes or _TOGETHER
    pieces = packed.cut_at(grid)
    borders = pieces.runs(grid)
    starts, stops = pieces.starts[borders[:-1]], pieces.stops[numpy.array(borders[1:], numpy.intp) - 1]
    hashes = numpy.zeros(len(starts), numpy.uint64)
    written = packed.cut_at(_TOGETHER)
    of_writes = written.runs(_TOGETHER)
    last_bytes = written.stops[numpy.array(of_writes[1:], numpy.intp) - 1]
    ends = starts.searchsorted(last_bytes).tolist()  # of the segments that begin before the end of each write
    bodies, memory, first = _Parts(pieces), _Parts(written), 0
    places = (written.starts[of_writes[:-1]] + offset).tolist()
    for (begin, end), last, place in zip(itertools.pairwise(of_writes), ends, places, strict=True):
        if segment_nbytes and last > first:
            hashes[first:last] = _hashes_of(bodies, borders[first : last + 1])
            first = last
        write(memory.between(begin, end), place)
    return numpy.stack([starts, stops, hashes.view(numpy.int64)], axis=1).astype("<i8").view("<u8")


class _Parts:
    """The bytes of ranges, made for some thousand ranges at a time, so that memory does not grow with their number."""

    def __init__(self, packed: PackedExtents) -> None:
        self._packed, self._first, self._made = packed, 0, list[memoryview]()

    def between(self, begin: int, end: int) -> list[memoryview]:
        """Return those of the ranges [begin, end), which begin no earlier than those of the call before."""
        if end > self._first + len(self._made):
            self._first, self._made = begin, self._packed.parts(begin, max(end, begin + _MOST_RANGES))
        return self._made[begin - self._first : end - self._first]


def _hashes_of(parts: _Parts, borders: list[int]) -> list[int]:
    """Return the hash of each segment, which consists of the parts between two borders."""
    bodies, begin = parts.between(borders[0], borders[-1]), borders[0]
    if len(bodies) == len(borders) - 1:  # nearly always one each
        return [*map(hash_of, bodies)]
    return [hash_of_pieces(bodies[first - begin : last - begin]) for first, last in itertools.pairwise(borders)]
