"""A table of checksums beside each file: segments of its data section, each with its hash, so that a reader of a part
verifies what it reads.

On disk: the magic, then for each segment, in order, its end (one past its last byte) and its XXH3 64-bit hash, both as
little-endian 64-bit numbers. Segments begin where the one before ends, so any cut of the data is a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy
import xxhash

from fsdp_optim.errors import CheckpointError

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


def most_sums_nbytes(data_nbytes: int) -> int:
    """How long a table can be: no segment is empty."""
    return len(MAGIC) + _ROW.itemsize * data_nbytes


@dataclass(frozen=True)
class Sums:
    """The table of one file: segment i is bytes [ends[i-1], ends[i]) of the data section."""

    ends: list[int]
    hashes: list[int]

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
        return cls(ends.tolist(), rows["hash"].tolist())


def join_tables(name: str, parts: Iterable[list[tuple[int, int, int]]], data_nbytes: int) -> Sums:
    """The table of a file from what each rank wrote of it, as (start, end, hash).

    Raises CheckpointError where the parts do not make up the file: a byte that nobody wrote, or two did.
    """
    rows = sorted(row for part in parts for row in part)
    at = 0
    for start, end, _ in rows:
        if start != at:
            raise CheckpointError(f"{name}: bytes [{at}, {start}) were written by no rank, or by two")
        at = end
    if at != data_nbytes:
        raise CheckpointError(f"{name}: bytes [{at}, {data_nbytes}) were written by no rank")
    return Sums([end for _, end, _ in rows], [digest for *_, digest in rows])
