"""The units of a conversion: ranges of the bytes of new files, each read and written by itself.

# file of the target | head | weight 0 . . . . . . . . | weight 1 | weight 2 . . . |
# units              |      |   0   |   1   |   2   |   3   |   4   |   5   |  6  |     bounded; no segment of checksums is cut
# done by            |      |      rank 0       |        rank 1       |    rank 2 |     in several worker threads of each rank

Every rank plans the same units, so that the files do not depend on how many ranks and threads there are.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fsdp_optim.checkpoint.common.contents import SavedValue
from fsdp_optim.checkpoint.common.files import File
from fsdp_optim.checkpoint.common.local_extents import bytes_of
from fsdp_optim.formats.base.checksums import Rows
from fsdp_optim.formats.base.extents import DataSection, Extent, write_extents
from fsdp_optim.offline.conversion.unit_sources import MARGIN, Fill, UnitPart
from fsdp_optim.storage.base import StoreWriter
from fsdp_optim.tensors.allocation import empty

_GRID_NBYTES = 1 << 20  # bytes; units of files whose format has no checksums end at multiples of it
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Bytes [start, stop) of the data section of a file, and its values [first, last), which have bytes there.

    Attributes:
        others: if the unit is a part of the file for the store, the bytes of the head and the frames in it, each with the byte of
            the file at which they begin; None: frames are written with the data beside them, and the head is there.
    """

    file: File
    start: int
    stop: int
    first: int
    last: int
    others: tuple[tuple[int, memoryview], ...] | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def values(self) -> Iterator[tuple[SavedValue, int, int, int]]:
        """Yield each value with bytes here, the byte of its element 0 in the data, the first element here, and one past the last.

        Where the file has a slice of the value, its element 0 may lie before the data section.
        """
        for index in range(self.first, self.last):
            value, begin, (first, stop) = (
                self.file.values[index],
                self.file.plan.starts[index],
                self.file.elements(index),
            )
            size = value.dtype.itemsize
            end = begin + (stop - first) * size
            if begin < end:
                skipped, until = max(self.start - begin, 0) // size, -((begin - min(self.stop, end)) // size)
                yield value, begin - first * size, first + skipped, first + until


def plan_units(files: Sequence[File], most_nbytes: int, part_nbytes: Mapping[str, int]) -> list[CopyRange]:
    """Cut files into units of about `most_nbytes`. `part_nbytes`: by file, the size of the parts in which the store takes it."""
    return [unit for file in files for unit in _units_of(file, most_nbytes, part_nbytes.get(file.name, 0))]


def _units_of(file: File, most_nbytes: int, part_nbytes: int) -> Iterator[CopyRange]:
    plan = file.plan
    if part_nbytes:
        places = [*range(0, plan.nbytes, part_nbytes), plan.nbytes]
        borders = [plan.frames.data_before(place) for place in places]
    else:
        places = []
        borders = [
            *range(0, plan.nbytes_of_data, max(most_nbytes // _grid_of(file), 1) * _grid_of(file)),
            plan.nbytes_of_data,
        ]
    starts, values, first = plan.starts, file.values, 0
    for index, (start, stop) in enumerate(itertools.pairwise(borders)):
        while first < len(values) and starts[first] + _nbytes_at(file, first) <= start:
            first += 1
        last = first
        while last < len(values) and starts[last] < stop:
            last += 1
        others = _others(file, places[index], places[index + 1]) if places else None
        yield CopyRange(file, start, stop, first, last, others)


def _nbytes_at(file: File, index: int) -> int:
    first, stop = file.elements(index)
    return (stop - first) * file.values[index].dtype.itemsize


def _others(file: File, start: int, stop: int) -> tuple[tuple[int, memoryview], ...]:
    """Return the bytes of the head and of the frames that are in the bytes [start, stop) of the file."""
    frames, pieces = file.plan.frames, []
    first = max(bisect.bisect_right(frames.starts, start) - 1, 0)
    last = bisect.bisect_left(frames.starts, stop)
    for begin, content in (
        (0, file.plan.head),
        *zip(frames.starts[first:last], frames.contents[first:last], strict=True),
    ):
        piece = memoryview(content)[max(start - begin, 0) : max(stop - begin, 0)]
        if piece:
            pieces.append((max(begin, start), piece))
    return tuple(pieces)


def _grid_of(file: File) -> int:
    return file.plan.segment_nbytes or _GRID_NBYTES


class Copier:
    """Copies units, one after the other, in one worker thread of a rank.

    Args:
        fill: reads the elements of a unit.
        most_nbytes: the length of the longest unit.
    """

    def __init__(self, fill: Fill, writer: StoreWriter, most_nbytes: int) -> None:
        self._fill, self._writer = fill, writer
        self._memory = bytes_of(empty((most_nbytes + 2 * MARGIN,), torch.uint8, _CPU))

    def copy(self, unit: CopyRange) -> Rows:
        """Read a unit, write it, and return its segments."""
        base, parts, extents = unit.start - MARGIN, list[UnitPart](), list[Extent]()
        for value, begin, first, last in unit.values():
            size, num = value.dtype.itemsize, last - first
            start = begin + first * size
            self._add(extents, max(start, unit.start), min(start + num * size, unit.stop), base)
            if value.constant is not None:
                self._memory[start - base : start - base + size] = bytes_of(value.constant.view(1))
                continue
            flat = torch.frombuffer(self._memory, dtype=value.dtype, count=num, offset=start - base)
            parts.append(UnitPart(value, first, flat))
        self._fill(parts)
        for place, content in unit.others or ():
            self._writer.write(unit.file.name, [content], place)
        return write_extents(self._section(unit), extents, unit.file.plan.segment_nbytes)

    def _section(self, unit: CopyRange) -> DataSection:
        """Return the data section of a file, through which a unit is written."""
        plan, write = unit.file.plan, partial(self._writer.write, unit.file.name)
        if unit.others is None:
            return plan.section(write)

        def write_data(pieces: Sequence[memoryview], start: int) -> None:
            for place, parts in plan.frames.without_frames(pieces, start):
                write(parts, place)

        return DataSection(plan.name, write_data, 0, plan.tensors_in)

    def _add(self, extents: list[Extent], start: int, stop: int, base: int) -> None:
        """Add a range of the data section. A range that continues the last one is joined to it."""
        if extents and extents[-1].stop == start:
            start = extents.pop().start
        extents.append(Extent(start, self._memory[start - base : stop - base]))
