"""Many Boxes or runs of a parameter as arrays, so that plans compute thousands of copies at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from fsdp_optim.layout.boxes import Block

Numbers = NDArray[numpy.int64]
Mask = NDArray[numpy.bool_]
Columns = Sequence[int | Numbers] | Numbers
"""Some numbers, such as the sizes of a shape: each one number for all rows of a table, or one for each row."""


@dataclass(frozen=True, eq=False)
class BoxTable:
    """Many Boxes, by dimension and row: element `i` is inside where `lows <= i < highs`, at `bases + i . strides` locally.

    A run is a Box with a single dimension: the flattened parameter.

    Attributes:
        columns: `lows`, `highs` and `strides`, each by dimension and row.
        owners: for each row, the index of the asked shard that has the Box; None where each row is one shard, in the order of
            asking.
    """

    columns: Numbers
    bases: Numbers
    owners: Numbers | None = None

    @classmethod
    def of_runs(cls, starts: Numbers, stops: Numbers, offsets: Numbers) -> BoxTable:
        """Runs of row-major elements [starts, stops), which begin at `offsets` in the local tensors."""
        columns = numpy.ones((3, 1, len(starts)), numpy.int64)
        columns[0, 0], columns[1, 0] = starts, stops
        return cls(columns, offsets - starts)

    @classmethod
    def of_boxes(cls, num: int, lows: Columns, highs: Columns, offset: int | Numbers = 0) -> BoxTable:
        """Return Boxes that are row-major in separate local tensors, from `offset` on; a number stands for `num` equal ones."""
        columns = numpy.empty((3, len(lows), num), numpy.int64)
        bases, stride = numpy.full(num, offset), numpy.ones(num, numpy.int64)
        for dim in range(len(lows) - 1, -1, -1):
            columns[0, dim], columns[1, dim], columns[2, dim] = lows[dim], highs[dim], stride
            bases -= lows[dim] * stride
            if dim:
                stride = stride * (highs[dim] - lows[dim])
        return cls(columns, bases)

    @classmethod
    def of_blocks(cls, blocks: Sequence[Sequence[Block]], num_dims: int) -> BoxTable:
        """Return the listed Blocks of each of some shards."""
        listed = [block for shard_blocks in blocks for block in shard_blocks]
        numbers = [(block.box.offsets, block.box.sizes, block.local_strides) for block in listed]
        columns = numpy.array(numbers, numpy.int64).reshape(len(listed), 3, num_dims).transpose(1, 2, 0)
        columns[1] += columns[0]
        bases = numpy.array([block.offset for block in listed], numpy.int64) - along(columns[0], columns[2])
        return cls(
            columns, bases, numpy.repeat(numpy.arange(len(blocks)), [len(shard_blocks) for shard_blocks in blocks])
        )

    @property
    def lows(self) -> Numbers:
        lows: Numbers = self.columns[0]
        return lows

    @property
    def highs(self) -> Numbers:
        highs: Numbers = self.columns[1]
        return highs

    @property
    def strides(self) -> Numbers:
        strides: Numbers = self.columns[2]
        return strides

    @property
    def num_dims(self) -> int:
        return int(self.columns.shape[1])

    def __len__(self) -> int:
        return len(self.bases)

    def rows(self, index: Numbers | None) -> BoxTable:
        """Return the Boxes at some indices, in the order of `index`; all Boxes for None."""
        return self if index is None else BoxTable(self.columns[:, :, index], self.bases[index])

    def are_runs(self, shape: Columns) -> Mask:
        """Return whether each Box of a parameter is a run, there and locally.

        All dimensions after the first one with several elements are full, and the local strides are those of contiguous rows.

        `shape`: the shape of the parameter; or by dimension and row, where the rows are Boxes of several parameters.
        """
        sizes = self.highs - self.lows
        are_runs = behind = numpy.ones(len(self), bool)  # `behind`: the dimensions behind the current one are full
        are_contiguous, row = numpy.ones(len(self), bool), numpy.ones(len(self), numpy.int64)
        for dim in range(len(shape) - 1, -1, -1):
            are_runs = are_runs & (sizes[dim] == 1) | behind
            are_contiguous &= (sizes[dim] == 1) | (self.strides[dim] == row)
            if dim:
                behind = behind & (sizes[dim] == shape[dim])
                row = row * sizes[dim]
        return are_runs & are_contiguous

    def as_runs(self, shape: Columns) -> BoxTable:
        """Return Boxes that are runs as runs. `shape`: as for `are_runs`."""
        starts = along(self.lows, _steps(shape))
        numels = (self.highs - self.lows).prod(axis=0)
        return BoxTable.of_runs(starts, starts + numels, self.bases + along(self.lows, self.strides))

    def as_boxes(self, shape: Columns) -> BoxTable:
        """Return the runs as Boxes of the parameter, in the order of their elements, as `boxes_of_run` cuts; some are empty.

        `shape`: as for `are_runs`.
        """
        steps = _steps(shape)
        edges = numpy.empty((len(self), 2 * max(len(shape), 1)), numpy.int64)
        first, last = self.columns[:2, 0]
        edges[:, 0], edges[:, -1] = first, last
        # Of each dimension the rest of a row, and the beginning of a row.
        for number, row in enumerate(steps[-2::-1], start=1):
            first = numpy.minimum((first + row - 1) // row * row, last)
            last = numpy.maximum(last // row * row, first)
            edges[:, number], edges[:, -1 - number] = first, last
        starts, numels = edges[:, :-1].ravel(), (edges[:, 1:] - edges[:, :-1]).ravel()
        owners = numpy.arange(len(starts)) // (edges.shape[1] - 1)
        columns = numpy.empty((3, len(shape), len(starts)), numpy.int64)
        for dim in range(len(shape)):
            step, size = (column if isinstance(column, int) else column[owners] for column in (steps[dim], shape[dim]))
            low, rows = (starts // step, (numels + step - 1) // step) if dim < len(shape) - 1 else (starts, numels)
            columns[0, dim] = low = low % size if dim else low
            columns[1, dim] = low + numpy.minimum(rows, size)
            columns[2, dim] = step
        return BoxTable(columns, self.bases[owners], owners)


def at(columns: Columns, index: Numbers) -> Columns:
    """Return columns at some rows; numbers that all rows share stay as they are."""
    return columns[:, index] if isinstance(columns, numpy.ndarray) else columns


def _steps(shape: Columns) -> list[int | Numbers]:
    """Return the row-major strides of a shape."""
    steps: list[int | Numbers] = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * shape[dim + 1]
    return steps


def along(indices: Numbers, strides: Columns) -> Numbers:
    """Return the sum of `indices * strides` over the dimensions: quicker for few rows than a sum of numpy."""
    total = numpy.zeros(indices.shape[1], numpy.int64) if not len(indices) else indices[-1] * strides[-1]
    for dim in range(len(indices) - 1):
        total += indices[dim] * strides[dim]
    return total
