"""The copies of one rank, computed at once: what the Boxes of many pairs of shards have in common, dimension by dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import BoxTable, Mask, Numbers, Placement, Shape, along, number_array, sorted_ranks
from fsdp_optim.plan.table import CopyTable


@dataclass(frozen=True, eq=False)
class Pairs:
    """Shards of the source and of the target that may have elements in common, and the rank that sends to the other one.

    `columns`: by pair, the shard of the source, the shard of the target, the rank that sends and the one that receives.
    """

    columns: Numbers

    @classmethod
    def of(cls, num: int, *columns: Numbers | int) -> Pairs:
        """Some pairs, from a column or one number for each of the four rows of `columns`."""
        pairs = numpy.empty((4, num), numpy.int64)
        for row, column in enumerate(columns):
            pairs[row] = column
        return cls(pairs)

    @classmethod
    def none(cls) -> Pairs:
        """No pairs."""
        return cls.of(0)

    @classmethod
    def into(
        cls, source: Placement, shards: Sequence[int], target: Placement, shard: int, rank: int, replica: int
    ) -> Pairs:
        """Shards of the source with the shard of the target that `rank` holds."""
        its = number_array(shards)
        return cls.of(len(its), its, shard, _senders(source, its, rank, target, replica), rank)

    @classmethod
    def out_of(
        cls, source: Placement, shard: int, target: Placement, shards: Sequence[int], rank: int, replica: int
    ) -> Pairs:
        """The shard of the source that `rank` holds with those shards of the target on other ranks to which `rank` sends."""
        listed = number_array(shards)
        holders = target.holders_of(listed)  # by replica and shard
        ranks = holders.T.ravel()
        senders = _senders(source, numpy.array([shard]), ranks, target, replica)
        (mine,) = ((senders == rank) & (ranks != rank)).nonzero()
        return cls.of(len(mine), shard, listed[mine // len(holders)], rank, ranks[mine])

    def joined(self, other: Pairs) -> Pairs:
        """These pairs, followed by those of `other`."""
        if not len(self) or not len(other):
            return self if len(self) else other
        return Pairs(numpy.concatenate((self.columns, other.columns), axis=1))

    def rows(self, index: Numbers | None) -> Pairs:
        """The pairs at some indices; all pairs for None."""
        return self if index is None else Pairs(self.columns[:, index])

    def __len__(self) -> int:
        return int(self.columns.shape[1])


def _senders(source: Placement, shards: Numbers, to: Numbers | int, target: Placement, replica: int) -> Numbers:
    """The sender of each of `shards` to the rank `to`, or of a single shard to each rank in `to`.

    A rank that holds a shard sends that shard to itself; other ranks take the shard from the replicas in turn.
    """
    holders = source.holders_of(shards)
    if len(holders) == 1:
        senders: Numbers = holders[0]
        return senders
    turn = (replica + shards + numpy.searchsorted(sorted_ranks(target.rank_groups), to)) % len(holders)
    is_held = numpy.isin(to, holders) if len(shards) == 1 else (holders == to).any(axis=0)
    return numpy.where(is_held, to, holders[turn, numpy.arange(len(shards))])


def copies_between(source: Placement, target: Placement, pairs: Pairs) -> CopyTable:
    """The copies of what each pair of shards has in common, in the order of the pairs.

    Runs are compared as ranges of the flattened parameter, Boxes dimension by dimension.
    """
    left, right = _tables(source, target, pairs)
    of_left, of_right, numbers = _matched(left, right, len(pairs))
    is_alone = None if numbers is None else numpy.bincount(numbers)[numbers] == 1  # the only Box of its shard
    rows, copies = _common_of(source.shape, pairs.rows(numbers), left.rows(of_left), right.rows(of_right), is_alone)
    if numbers is None:
        return copies
    return copies.rows_at(numpy.lexsort((*copies.columns[2:4], numbers[rows])))


def _tables(source: Placement, target: Placement, pairs: Pairs) -> tuple[BoxTable, BoxTable]:
    """The shards of all pairs: both as runs or both as Boxes, where that is possible."""
    runs = source.run_table(pairs.columns[0]), target.run_table(pairs.columns[1])
    if runs[0] is not None and runs[1] is not None:
        return runs[0], runs[1]
    boxes = source.box_table(pairs.columns[0]), target.box_table(pairs.columns[1])
    left, right = (run if box is None else box for run, box in zip(runs, boxes, strict=True))
    if left is None or right is None:
        raise LayoutError(f"a placement {source if left is None else target} has neither runs nor boxes")
    return left, right


def _matched(left: BoxTable, right: BoxTable, num: int) -> tuple[Numbers | None, Numbers | None, Numbers | None]:
    """The rows of both tables that belong to one pair, each with each, and their pairs; None for all rows in their order."""
    if left.owners is None or right.owners is None:
        return right.owners, left.owners, right.owners if left.owners is None else left.owners
    times = numpy.bincount(right.owners, minlength=num)
    of_left = numpy.repeat(numpy.arange(len(left)), times[left.owners])
    numbers = left.owners[of_left]
    begins = numpy.flatnonzero(numpy.diff(of_left, prepend=-1))  # of each row of `left` with at least one of `right`
    within = numpy.arange(len(of_left)) - numpy.repeat(begins, numpy.diff(begins, append=len(of_left)))
    return of_left, (numpy.cumsum(times) - times)[numbers] + within, numbers


Found = tuple[Numbers, CopyTable]
"""Some copies, and for each of them the number of the row that it comes from, in ascending order."""


def _common_of(shape: Shape, pairs: Pairs, left: BoxTable, right: BoxTable, is_alone: Mask | None) -> Found:
    """The copies of what each row of both tables has in common, whether the rows are runs or Boxes.

    A Box that is a run, and the only Box of its shard, is compared with a run as a run.
    """
    if left.num_dims == right.num_dims:
        return _common(pairs, left, right)
    is_from_runs = left.num_dims == 1
    runs, boxes = (left, right) if is_from_runs else (right, left)
    are_runs = boxes.are_runs(shape) if is_alone is None else boxes.are_runs(shape) & is_alone
    if not are_runs.any():
        return _cut(shape, pairs, runs, boxes, is_from_runs)
    one, more = numpy.flatnonzero(are_runs), numpy.flatnonzero(~are_runs)
    rows, copies = _common(pairs.rows(one), *_ordered(runs.rows(one), boxes.rows(one).as_runs(shape), is_from_runs))
    if not len(more):
        return one[rows], copies
    others, cut = _cut(shape, pairs.rows(more), runs.rows(more), boxes.rows(more), is_from_runs)
    numbers = numpy.concatenate((one[rows], more[others]))
    order = numpy.argsort(numbers, kind="stable")
    return numbers[order], copies.joined(cut).rows_at(order)


def _cut(shape: Shape, pairs: Pairs, runs: BoxTable, boxes: BoxTable, is_from_runs: bool) -> Found:
    """The copies of what each run has in common with a Box that is not a run."""
    parts = runs.as_boxes(shape)
    its = parts.owners if parts.owners is not None else numpy.arange(len(parts))
    rows, copies = _common(pairs.rows(its), *_ordered(parts, boxes.rows(its), is_from_runs))
    return its[rows], copies


def _ordered(runs: BoxTable, boxes: BoxTable, is_from_runs: bool) -> tuple[BoxTable, BoxTable]:
    return (runs, boxes) if is_from_runs else (boxes, runs)


def _common(pairs: Pairs, left: BoxTable, right: BoxTable) -> Found:
    """The copies of what each Box of one table has in common with the Box of the other one."""
    lows = numpy.maximum(left.lows, right.lows)
    sizes = numpy.minimum(left.highs, right.highs) - lows
    (rows,) = (sizes > 0).all(axis=0).nonzero()
    is_run = left.num_dims == 1
    ends = [(its.bases + (lows[0] if is_run else along(lows, its.strides)))[None] for its in (left, right)]
    strides = [] if is_run else [left.strides, right.strides]  # those of runs are 1
    columns = numpy.concatenate([pairs.columns[2:], *ends, sizes, *strides])
    return rows, CopyTable(columns if len(rows) == len(pairs) else columns[:, rows]).merged()
