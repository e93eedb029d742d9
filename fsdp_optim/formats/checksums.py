"""A table of checksums beside each file: segments of its data section, each with its hash, so that a reader of a part
verifies what it reads.

On disk: the magic, then for each segment, in order, its end (one past its last byte) and its XXH3 64-bit hash, both as
little-endian 64-bit numbers. Segments begin where the one before ends, so any cut of the data is a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy
import xxhash

from fsdp_optim.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"FSOSUMS1"
MOST_NBYTES = 4 << 20  # of a segment
_FEWEST_NBYTES, _LARGEST_NBYTES = 512, 1 << 20  # of the segments that are written here
_MOST_SEGMENTS_LOG2 = 17  # of a file, about: every reader reads the table
_SEGMENTS_PER_RANK = 32  # of a tensor: a rank's part of it begins and ends inside a segment, which it has to read whole
_ROW = numpy.dtype([("end", "<u8"), ("hash", "<u8")])

Buffer = bytes | bytearray | memoryview


def hash_of(data: Buffer) -> int:
    """XXH3, 64 bits, seed 0."""
    return int(xxhash.xxh3_64_intdigest(data))


def hex_of(data: Buffer) -> str:
    """The same as 16 hexadecimal digits, as it is written in JSON."""
    return f"{hash_of(data):016x}"


def segment_nbytes(sizes: Iterable[int], num_ranks: int) -> int:
    """How long the segments of a file should be whose tensors have these sizes, for readers of about `num_ranks` parts."""
    listed = list(sizes)
    typical = sum(n * n for n in listed) // max(sum(listed), 1)
    wanted = typical // (_SEGMENTS_PER_RANK * max(num_ranks, 8))
    least = max(_FEWEST_NBYTES, sum(listed) >> _MOST_SEGMENTS_LOG2)  # of a file of 4 GB: 32 KiB
    return min(max(1 << max(wanted.bit_length() - 1, 0), least), _LARGEST_NBYTES)


def sums_of(name: str) -> str:
    """The name of the table of a file."""
    return f"{name}.sums"


def num_segments(name: str, table_nbytes: int, data_nbytes: int) -> int:
    """How many segments a table of this length has. Raises CheckpointError for a length that no table has."""
    number, rest = divmod(table_nbytes - len(MAGIC), _ROW.itemsize)
    if number < 0 or rest or number > data_nbytes:  # no segment is empty
        raise CheckpointError(
            f"{name}: has {table_nbytes} bytes, which no table of checksums has: it was cut short or changed"
        )
    return number


Rows: TypeAlias = "NDArray[numpy.uint64]"
"""Segments that one rank wrote, in any order: an array of (start, end, hash)"""

_NUM_COLUMNS = 3


def rows_of(segments: Iterable[tuple[int, int, int]]) -> Rows:
    """Segments given as (start, end, hash)."""
    return numpy.array(list(segments), dtype="<u8").reshape(-1, _NUM_COLUMNS)


def rows_nbytes(number: int) -> int:
    """How many bytes so many segments are in `Rows.tobytes()`."""
    return number * _NUM_COLUMNS * 8


def rows_from(data: Buffer) -> Rows:
    """The inverse of `Rows.tobytes()`."""
    return numpy.frombuffer(data, dtype="<u8").reshape(-1, _NUM_COLUMNS)


def table_nbytes(num_segments: int) -> int:
    """How long a table of so many segments is."""
    return len(MAGIC) + _ROW.itemsize * num_segments


@dataclass(frozen=True)
class Window:
    """Some segments that follow one another: segment i is bytes [borders[i], borders[i+1]) of the data section."""

    borders: list[int]
    hashes: list[int]


@dataclass(frozen=True, eq=False)
class Sums:
    """The table of one file: segment i is bytes [ends[i-1], ends[i]) of the data section."""

    ends: NDArray[numpy.uint64]
    hashes: NDArray[numpy.uint64]

    def encoded(self) -> bytes:
        rows = numpy.empty(len(self.ends), dtype=_ROW)
        rows["end"], rows["hash"] = self.ends, self.hashes
        return MAGIC + rows.tobytes()

    @classmethod
    def parse(cls, name: str, data: bytes, data_nbytes: int) -> Sums:
        """Read a table. Raises CheckpointError unless it covers just the data section."""
        body = len(data) - len(MAGIC)
        if data[: len(MAGIC)] != MAGIC or body % _ROW.itemsize:
            raise CheckpointError(f"{name}: is no table of checksums, or was cut short")
        rows = numpy.frombuffer(data, dtype=_ROW, offset=len(MAGIC))
        ends = rows["end"]
        starts = numpy.concatenate([numpy.zeros(1, dtype=ends.dtype), ends[:-1]])
        if (ends <= starts).any() or (ends > data_nbytes).any() or (ends - starts > MOST_NBYTES).any():
            raise CheckpointError(f"{name}: its segments overlap, or are longer than {MOST_NBYTES} bytes")
        if (int(ends[-1]) if len(ends) else 0) != data_nbytes:
            raise CheckpointError(f"{name}: its segments do not end where the data does, at byte {data_nbytes}")
        return cls(ends, rows["hash"])

    def window(self, start: int, stop: int) -> Window:
        """The segments that have any of the bytes [start, stop), which are not none."""
        first = int(self.ends.searchsorted(numpy.uint64(start), side="right"))
        last = int(self.ends.searchsorted(numpy.uint64(stop), side="left"))
        begin = int(self.ends[first - 1]) if first else 0
        return Window([begin, *self.ends[first : last + 1].tolist()], self.hashes[first : last + 1].tolist())


def join_tables(name: str, parts: Iterable[Rows], data_nbytes: int) -> Sums:
    """The table of a file from what each rank wrote of it.

    Raises CheckpointError where the parts do not make up the file: a byte that nobody wrote, or two did.
    """
    rows = numpy.concatenate([rows_of(()), *parts])
    rows = rows[numpy.lexsort((rows[:, 1], rows[:, 0]))]
    starts, ends = rows[:, 0], rows[:, 1]
    expected = numpy.concatenate([numpy.zeros(1, dtype=ends.dtype), ends])  # where each begins, and where the data ends
    found = numpy.concatenate([starts, numpy.array([data_nbytes], dtype=starts.dtype)])
    wrong = numpy.flatnonzero(found != expected)
    if len(wrong):
        at, start = int(expected[wrong[0]]), int(found[wrong[0]])
        raise CheckpointError(
            f"{name}: bytes [{at}, {start}) were written by no rank"
            if at < start
            else f"{name}: bytes [{start}, {at}) were written by two ranks"
        )
    return Sums(ends, rows[:, 2])
