"""Short ranges of files, which are read together and then copied to the memory of each: numpy does what is done to each range.

# file    | a a . . b b . . c c . . . . . . d d |   ranges of this rank, and what other ranks need
# buffer  | a a . . b b . . c c | d d |             two reads; then each range is copied to where it belongs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy

from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.protocols import TensorReader
from fsdp_optim.tensors.memory import in_batches
from fsdp_optim.tensors.rows import copy_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.int64]

SHORT_NBYTES = 16 << 10
"""A longer range is read to where it belongs, by itself."""

_GAP_NBYTES = 4 << 10  # of other ranks; a file system reads such a piece between two ranges in any case
_TOGETHER_NBYTES, _TOGETHER = 4 << 20, 512  # bytes and ranges of a file that are read at once


@dataclass(frozen=True, eq=False)
class ShortRanges:
    """Ranges of one file, and the memory of this process in which each belongs.

    Attributes:
        starts, nbytes: the byte of the data at which each range begins, and its length.
        firsts, ends: where the tensor begins and ends of which each range is a part. What lies between two ranges is read with
            them if it is a short piece of tensors that this load needs: the bytes of others may be damaged.
        addresses: where the memory of each range begins. The caller keeps that memory alive.
    """

    starts: Numbers
    nbytes: Numbers
    firsts: Numbers
    ends: Numbers
    addresses: Numbers

    @classmethod
    def of(
        cls, tensors: Sequence[int], memory: Sequence[int], nbytes: int, ranges: Sequence[tuple[int, int, int]]
    ) -> ShortRanges:
        """Return the ranges of some tensors of `nbytes` bytes that have the same ranges.

        Args:
            tensors: the byte of the data at which each tensor begins.
            memory: the address of the memory for each.
            ranges: for each range, its first byte in the tensor and in that memory, and its length.
        """
        begins, addresses = (numpy.array(column, numpy.int64)[:, None] for column in (tensors, memory))
        offsets, places, lengths = numpy.array(ranges, numpy.int64).T
        shape = len(tensors), len(ranges)
        return cls(
            starts=(begins + offsets).ravel(),
            nbytes=numpy.broadcast_to(lengths, shape).ravel(),
            firsts=numpy.broadcast_to(begins, shape).ravel(),
            ends=numpy.broadcast_to(begins + nbytes, shape).ravel(),
            addresses=(addresses + places).ravel(),
        )

    @classmethod
    def joined(cls, parts: Sequence[ShortRanges]) -> ShortRanges:
        """Return the ranges of all parts, in the order of the file."""
        columns = [
            numpy.concatenate([getattr(part, name) for part in parts])
            for name in ("starts", "nbytes", "firsts", "ends", "addresses")
        ]
        order = columns[0].argsort(kind="stable")
        return cls(*(column[order] for column in columns))

    def read(
        self,
        checkpoint: TensorReader,
        file: str,
        most_nbytes: int,
        did_read: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Fill the memory of all ranges, which are in the order of the file, by way of a buffer of about `most_nbytes`."""
        most = max(min(most_nbytes, _TOGETHER_NBYTES), 1)
        stops = self.starts + self.nbytes
        reached = numpy.maximum.accumulate(stops)  # tensors may share bytes, and no byte is read twice at once
        gaps = self.starts[1:] - reached[:-1]
        begins = numpy.ones(len(stops), bool)
        begins[1:] = (
            (gaps > _GAP_NBYTES)
            | ((gaps > 0) & (self.firsts[1:] > self.ends[:-1]))
            | ((gaps >= 0) & (self.starts[1:] // most != self.starts[:-1] // most))
        )
        firsts = begins.nonzero()[0]
        lasts = numpy.append(firsts[1:], len(stops))
        runs = numpy.stack([self.starts[firsts], reached[lasts - 1], firsts, lasts], axis=1)
        for batch in in_batches(map(_Run._make, runs.tolist()), lambda run: run.stop - run.start, most):
            for at in range(0, len(batch), _TOGETHER):
                self._read_runs(checkpoint, file, batch[at : at + _TOGETHER], did_read)

    def _read_runs(
        self, checkpoint: TensorReader, file: str, runs: Sequence[_Run], did_read: Callable[[int], None]
    ) -> None:
        """Read some runs, and copy the ranges in them to their memory."""
        lengths = numpy.array([run.stop - run.start for run in runs])
        places = numpy.cumsum(lengths) - lengths
        buffer = numpy.empty(int(lengths.sum()), numpy.uint8)
        memory, ends = buffer.data, (places + lengths).tolist()
        extents = [Extent(run.start, memory[at:end]) for run, at, end in zip(runs, places.tolist(), ends, strict=True)]
        checkpoint.read({file: extents}, did_read)
        first, last = runs[0].first, runs[-1].last
        moved = places - [run.start for run in runs] + buffer.ctypes.data
        sources = self.starts[first:last] + numpy.repeat(moved, [run.last - run.first for run in runs])
        copy_bytes(sources, self.addresses[first:last], self.nbytes[first:last])


class _Run(NamedTuple):
    """Bytes [start, stop) of the data, which are read in one piece, with the ranges [first, last)."""

    start: int
    stop: int
    first: int
    last: int
