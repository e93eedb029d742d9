"""Many copies of a plan as arrays: a recipient of thousands of shards has a copy for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy

from fsdp_optim.layout import Mask, Numbers
from fsdp_optim.plan.copies import Copy, runs_of

Row = tuple[int, int, int, int, int, Copy | None]
"""Source rank, target rank, number of elements, source offset, target offset, and the Copy itself if it is strided."""


@dataclass(frozen=True, eq=False)
class CopyTable(Sequence[Copy]):
    """Copies without FQNs as columns of numbers: a sequence of `Copy`, made one by one when the sequence is read.

    `columns`: by copy, the source rank, target rank, source offset and target offset; then the sizes, the strides in the
    source and the strides in the target, by dimension. Copies that are all runs have one size and no strides. In a Copy,
    dimensions of one element are left out.
    """

    columns: Numbers

    @property
    def source_ranks(self) -> Numbers:
        ranks: Numbers = self.columns[0]
        return ranks

    @property
    def target_ranks(self) -> Numbers:
        ranks: Numbers = self.columns[1]
        return ranks

    @property
    def are_runs(self) -> bool:
        """Whether all copies are runs."""
        return len(self.columns) == 5

    @property
    def numels(self) -> Numbers:
        """The number of elements of each copy."""
        numels: Numbers = self.columns[4] if self.are_runs else self._dims[0].prod(axis=0)
        return numels

    @property
    def _dims(self) -> Numbers:
        """The sizes, the source strides and the target strides, by dimension and copy."""
        if self.are_runs:
            unit_strides = numpy.ones_like(self.columns[4])
            return numpy.stack((self.columns[4], unit_strides, unit_strides))[:, None]
        return self.columns[4:].reshape(3, len(self.columns) // 3 - 1, len(self))

    def merged(self) -> CopyTable:
        """Merge neighbouring dimensions over which both sides are contiguous. Changes this table.

        A merged dimension takes the place of the outer dimension; the inner dimension then has one element.
        """
        if self.are_runs:
            return self
        sizes, strides = self._dims[0], self._dims[1:]
        for dim in range(len(sizes) - 2, -1, -1):
            outer, inner = sizes[dim], sizes[dim + 1]
            are_even = strides[:, dim] == inner * strides[:, dim + 1]
            is_merged = are_even[0] & are_even[1] | (outer == 1)
            numpy.copyto(strides[:, dim], strides[:, dim + 1], where=is_merged)
            numpy.multiply(outer, inner, out=outer, where=is_merged)
            inner[is_merged] = 1
        if _are_runs(sizes, *strides).all():
            return CopyTable(self.columns[:5].copy())
        return self

    def joined(self, other: CopyTable) -> CopyTable:
        """Return these copies, followed by the copies of `other`."""
        if self.are_runs and other.are_runs:
            return CopyTable(numpy.concatenate((self.columns, other.columns), axis=1))
        num = max(self._dims.shape[1], other._dims.shape[1])
        return CopyTable(numpy.concatenate((self._widened(num), other._widened(num)), axis=1))

    def _widened(self, num: int) -> Numbers:
        """Return the columns with `num` dimensions. The added dimensions have one element."""
        dims = numpy.ones((3, num, len(self)), numpy.int64)
        dims[:, : self._dims.shape[1]] = self._dims
        return numpy.concatenate((self.columns[:4], dims.reshape(3 * num, len(self))))

    def split(self, ends: Numbers) -> list[CopyTable]:
        """Return the copies cut into one table for each of `ends`, the indices at which the tables end, in ascending order."""
        stops = ends.tolist()
        pairs = zip([0, *stops], stops, strict=False)
        if self.are_runs:
            return [CopyTable(self.columns[:, start:stop].copy()) for start, stop in pairs]
        num_strided = numpy.append(0, (~_are_runs(*self._dims)).cumsum()).tolist()
        tables = []
        for start, stop in pairs:
            are_runs = num_strided[start] == num_strided[stop]
            width = 5 if are_runs else len(self.columns)  # copies that are runs have one size
            tables.append(CopyTable(self.columns[:width, start:stop].copy()))
        return tables

    def rows_at(self, index: Numbers) -> CopyTable:
        """Return the copies at some indices, in the order of `index`."""
        return CopyTable(self.columns[:, index])

    def rows(self) -> Iterator[Row]:
        """Return the numbers of each copy."""
        source, target, source_offset, target_offset = self.columns[:4].tolist()
        numbers = zip(source, target, self.numels.tolist(), source_offset, target_offset, strict=True)
        if self.are_runs:
            return ((*row, None) for row in numbers)
        return ((*row, None if copy.is_run else copy) for row, copy in zip(numbers, self, strict=True))

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    @overload
    def __getitem__(self, index: int) -> Copy: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Copy, ...]: ...
    def __getitem__(self, index: int | slice) -> Copy | tuple[Copy, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        return next(iter(CopyTable(self.columns[:, index : index + 1 or None])))

    def __iter__(self) -> Iterator[Copy]:
        source, target, source_offset, target_offset = self.columns[:4].tolist()
        ends = zip(source, target, source_offset, target_offset, strict=True)
        if self.are_runs:
            numels = self.columns[4].tolist()
            return (Copy(s, t, (num,), at, (1,), to, (1,)) for (s, t, at, to), num in zip(ends, numels, strict=True))
        return (
            _strided(*columns, *dims)
            for columns, dims in zip(ends, self._dims.transpose(2, 0, 1).tolist(), strict=True)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Copy.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # a table is equal to a tuple of copies, whose hash would differ


def _are_runs(sizes: Numbers, source_strides: Numbers, target_strides: Numbers) -> Mask:
    """Return whether each copy is a run, which has all its elements in the first dimension."""
    are_contiguous = (source_strides[:1] == 1) & (target_strides[:1] == 1) | (sizes[:1] == 1)
    mask: Mask = (sizes[1:] == 1).all(axis=0) & are_contiguous.all(axis=0)
    return mask


def _strided(
    source_rank: int,
    target_rank: int,
    source_offset: int,
    target_offset: int,
    sizes: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
) -> Copy:
    """Return the Copy of one row of a table, without its dimensions of one element."""
    dims = [dim for dim in zip(sizes, source_strides, target_strides, strict=True) if dim[0] > 1]
    size, source, target = zip(*(dims or [(1, 1, 1)]), strict=True)
    return Copy(source_rank, target_rank, size, source_offset, source, target_offset, target)


def has_from(copies: Sequence[Copy], rank: int) -> bool:
    """Return whether a rank is the source of any of the copies."""
    if isinstance(copies, CopyTable):
        return bool((copies.source_ranks == rank).any())
    return any(copy.source_rank == rank for copy in copies)


def run_table(copies: Sequence[Copy]) -> Numbers:
    """Return the runs of some copies, in their order: rows of source rank, target rank, source offset, target offset, numel."""
    if isinstance(copies, CopyTable) and copies.are_runs:
        return copies.columns
    rows = [(copy.source_rank, copy.target_rank, *run) for copy in copies for run in runs_of(copy)]
    table: Numbers = numpy.array(rows, numpy.int64).reshape(-1, 5).T
    return table


def num_into(copies: Sequence[Copy], rank: int) -> int:
    """Return the number of elements that the copies bring to a rank."""
    if isinstance(copies, CopyTable):
        return int(copies.numels[copies.target_ranks == rank].sum())
    return sum(copy.numel for copy in copies if copy.target_rank == rank)
