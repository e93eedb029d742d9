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

from fsdp_optim.formats.base.checksums import Rows, hash_of
from fsdp_optim.formats.base.frames import Pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.int64]

_TOGETHER = (
    1 << 20
)  # bytes; hashed and then written at once, so that the write finds the bytes in the processor's cache


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

    def parts(self) -> list[memoryview]:
        """Return the bytes of each range."""
        memory, ends = self.memory, self.at + self.stops - self.starts
        return [memory[start:stop] for start, stop in zip(self.at.tolist(), ends.tolist(), strict=True)]


def write_packed(packed: PackedExtents, segment_nbytes: int, write: Callable[[Pieces, int], None], offset: int) -> Rows:
    """Write ranges, and return their segments, as `write_extents` does.

    `segment_nbytes` 0: nothing is hashed, and all hashes are 0. `write(pieces, place)` writes at a byte of the file, in which
    the section begins at `offset`.
    """
    pieces = packed.cut_at(segment_nbytes) if segment_nbytes else packed
    hashes = numpy.zeros(len(pieces.starts), numpy.uint64)
    written = packed.cut_at(_TOGETHER)
    ends = pieces.starts.searchsorted(written.stops).tolist()  # of the segments that begin before the end of each
    segments, first = pieces.parts() if segment_nbytes else [], 0
    bodies, starts = written.parts(), written.starts.tolist()
    for begin, end in _together(written):
        if segment_nbytes:
            last = ends[end - 1]
            hashes[first:last] = [*map(hash_of, segments[first:last])]
            first = last
        write(bodies[begin:end], starts[begin] + offset)
    return numpy.stack([pieces.starts, pieces.stops, hashes.view(numpy.int64)], axis=1).astype("<i8").view("<u8")


def _together(packed: PackedExtents) -> list[tuple[int, int]]:
    """Return the runs [begin, end) of ranges that are adjacent in the section. A multiple of `_TOGETHER` ends a run."""
    starts, stops = packed.starts, packed.stops
    begins = numpy.ones(len(starts), bool)
    begins[1:] = (starts[1:] != stops[:-1]) | (starts[1:] // _TOGETHER != starts[:-1] // _TOGETHER)
    borders = [*begins.nonzero()[0].tolist(), len(starts)]
    return [*itertools.pairwise(borders)]
