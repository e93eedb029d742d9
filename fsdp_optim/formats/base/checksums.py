"""Tables of checksums: a hash for each segment of a file's data section, so that a reader of a part of the file can verify the
part.

On disk: the magic, then for each segment, in order, its end (one past its last byte) and its XXH3 64-bit hash, both as
little-endian 64-bit numbers. Each segment begins at the end of the one before, so any cut of the data has a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy
import xxhash
from msgspec import Struct

from fsdp_optim.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"FSOSUMS1"
MOST_NBYTES = 4 << 20  # in a segment
_FEWEST_NBYTES, _LARGEST_NBYTES = 2048, 1 << 20  # in the segments that this library writes
_MOST_SEGMENTS_LOG2 = 17  # in a file, about; every reader reads the whole table
_SEGMENTS_PER_RANK = 32  # in a tensor; a rank reads the first and the last segment of its part whole
_ROW = numpy.dtype([("end", "<u8"), ("hash", "<u8")])

Buffer = bytes | bytearray | memoryview


def hash_of(data: Buffer) -> int:
    """Return the XXH3 hash, 64 bits, seed 0."""
    return xxhash.xxh3_64_intdigest(data)


def hash_of_pieces(pieces: Sequence[memoryview]) -> int:
    """Return the hash of some bytes, in pieces."""
    if len(pieces) == 1:
        return hash_of(pieces[0])
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return int(digest.intdigest())


def hex_of(data: Buffer) -> str:
    """Return the hash as 16 hexadecimal digits, its form in JSON."""
    return f"{hash_of(data):016x}"


class Digest:
    """The hash of bytes that come in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def add(self, piece: Buffer) -> None:
        """Add the next bytes."""
        self._state.update(piece)

    @property
    def hex(self) -> str:
        """The hash of all bytes so far, as `hex_of`."""
        return f"{self._state.intdigest():016x}"


def segment_nbytes(sizes: Iterable[int], num_ranks: int) -> int:
    """Return the length of segments in bytes, for a file whose tensors have these sizes and about `num_ranks` readers."""
    listed = list(sizes)
    typical = sum(n * n for n in listed) // max(sum(listed), 1)
    suitable = typical // (_SEGMENTS_PER_RANK * max(num_ranks, 8))
    least = max(_FEWEST_NBYTES, sum(listed) >> _MOST_SEGMENTS_LOG2)  # 32 KiB in a file of 4 GB
    return min(max(1 << max(suitable.bit_length() - 1, 0), least), _LARGEST_NBYTES)


def sums_of(name: str) -> str:
    """Return the name of the file with the table of `name`."""
    return f"{name}.sums"


def num_segments(name: str, table_nbytes: int, data_nbytes: int) -> int:
    """Return the number of segments in a table of this length. Raises CheckpointError for an impossible length."""
    num, rest = divmod(table_nbytes - len(MAGIC), _ROW.itemsize)
    if num < 0 or rest or num > data_nbytes:  # no segment is empty
        raise CheckpointError(
            f"{name}: has {table_nbytes} bytes, which is no length of a table of checksums: the file was cut short or changed"
        )
    return num


Rows: TypeAlias = "NDArray[numpy.uint64]"
"""The segments that one rank wrote, in any order: an array of (start, end, hash)."""

_NUM_COLUMNS = 3


def rows_of(segments: Iterable[tuple[int, int, int]]) -> Rows:
    """Return an array of segments that are given as (start, end, hash)."""
    return numpy.array(list(segments), dtype="<u8").reshape(-1, _NUM_COLUMNS)


def rows_nbytes(num_segments: int) -> int:
    """Return the length of `Rows.tobytes()` for this number of segments."""
    return num_segments * _NUM_COLUMNS * 8


def rows_from(data: Buffer) -> Rows:
    """The inverse of `Rows.tobytes()`."""
    return numpy.frombuffer(data, dtype="<u8").reshape(-1, _NUM_COLUMNS)


def table_nbytes(num_segments: int) -> int:
    """Return the length of a table with this number of segments, in bytes."""
    return len(MAGIC) + _ROW.itemsize * num_segments


class SegmentRange(Struct, frozen=True):
    """Consecutive segments of a table: segment i is the bytes [borders[i], borders[i+1]) of the data section."""

    borders: list[int]
    hashes: list[int]


@dataclass(frozen=True, eq=False)
class Sums:
    """The table of one file: segment i is the bytes [ends[i-1], ends[i]) of the data section."""

    ends: NDArray[numpy.uint64]
    hashes: NDArray[numpy.uint64]

    def encoded(self) -> bytes:
        rows = numpy.empty(len(self.ends), dtype=_ROW)
        rows["end"], rows["hash"] = self.ends, self.hashes
        return MAGIC + rows.tobytes()

    @classmethod
    def parse(cls, name: str, data: bytes, data_nbytes: int) -> Sums:
        """Decode a table. Raises CheckpointError unless the table covers exactly the data section."""
        body = len(data) - len(MAGIC)
        if data[: len(MAGIC)] != MAGIC or body % _ROW.itemsize:
            raise CheckpointError(f"{name}: is not a table of checksums, or was cut short")
        rows = numpy.frombuffer(data, dtype=_ROW, offset=len(MAGIC))
        ends = rows["end"]
        starts = numpy.concatenate([numpy.zeros(1, dtype=ends.dtype), ends[:-1]])
        if (ends <= starts).any() or (ends > data_nbytes).any() or (ends - starts > MOST_NBYTES).any():
            raise CheckpointError(f"{name}: its segments overlap, or are longer than {MOST_NBYTES} bytes")
        if (int(ends[-1]) if len(ends) else 0) != data_nbytes:
            raise CheckpointError(f"{name}: its segments do not end at the end of the data, byte {data_nbytes}")
        return cls(ends, rows["hash"])

    def segments_in(self, start: int, stop: int) -> SegmentRange:
        """Return the segments that contain any of the bytes [start, stop). The range must not be empty."""
        first = int(self.ends.searchsorted(numpy.uint64(start), side="right"))
        last = int(self.ends.searchsorted(numpy.uint64(stop), side="left"))
        begin = int(self.ends[first - 1]) if first else 0
        return SegmentRange([begin, *self.ends[first : last + 1].tolist()], self.hashes[first : last + 1].tolist())


def join_tables(name: str, parts: Iterable[Rows], data_nbytes: int) -> Sums:
    """Join the segments of all ranks to the table of a file.

    Raises CheckpointError if a byte of the file was written by no rank or by two.
    """
    rows = numpy.concatenate([rows_of(()), *parts])
    rows = rows[numpy.lexsort((rows[:, 1], rows[:, 0]))]
    starts, ends = rows[:, 0], rows[:, 1]
    expected = numpy.concatenate([numpy.zeros(1, dtype=ends.dtype), ends])  # where each begins, and where the data ends
    actual = numpy.concatenate([starts, numpy.array([data_nbytes], dtype=starts.dtype)])
    wrong = numpy.flatnonzero(actual != expected)
    if len(wrong):
        at, start = int(expected[wrong[0]]), int(actual[wrong[0]])
        raise CheckpointError(
            f"{name}: bytes [{at}, {start}) were written by no rank"
            if at < start
            else f"{name}: bytes [{start}, {at}) were written by two ranks"
        )
    return Sums(ends, rows[:, 2])
