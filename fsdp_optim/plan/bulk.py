"""The copies of one rank, computed at once: what the Boxes of many pairs of shards have in common, dimension by dimension.

The pairs belong to one parameter, or to several whose placements are of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import BoxTable, Columns, Mask, Numbers, Placement, along, at, number_array, sorted_ranks
from fsdp_optim.plan.request import ShardPair
from fsdp_optim.plan.table import CopyTable


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of a source shard and a target shard that may have elements in common, with the sending and the receiving rank.

    `columns`: by pair, the number of the parameter, the source shard, the target shard, the rank that sends and the rank that
    receives. `shape`: the shape of the parameter; for several parameters, sizes by dimension and pair.
    """

    columns: Numbers
    shape: Columns

    @classmethod
    def of(cls, parts: Sequence[ShardPair]) -> Pairs:
        """Return the pairs of some parts of one kind: part after part, and in each part first what its rank receives."""
        columns, sent = _received(parts), _sent(parts)
        if sent.shape[1]:
            columns = numpy.concatenate((columns, sent), axis=1)
            columns = columns[:, columns[0].argsort(kind="stable")] if len(parts) > 1 else columns
        shape = _by_part([part.request.source.shape for part in parts])
        return cls(columns, at(shape, columns[0]))

    def rows(self, index: Numbers | None) -> Pairs:
        """Return the pairs at some indices; all pairs for None."""
        return self if index is None else Pairs(self.columns[:, index], at(self.shape, index))

    def __len__(self) -> int:
        return int(self.columns.shape[1])


def _by_part(numbers: Sequence[Sequence[int]]) -> Columns:
    """Return the numbers of a single part; for several parts, an array by number and part."""
    return numbers[0] if len(numbers) == 1 else numpy.array(numbers, numpy.int64).T


def _received(parts: Sequence[ShardPair]) -> Numbers:
    """Return the columns of the pairs in which the rank receives."""
    (source, target, rank, _, _), shard = parts[0].request, parts[0].target_shard
    of, shards = _listed([part.into for part in parts])
    if shard is None or not len(shards):
        return _columns(of, 0, 0, 0, 0)
    return _columns(of, shards, shard, _senders(source, shards, rank, target, _replicas(parts)[of]), rank)


def _sent(parts: Sequence[ShardPair]) -> Numbers:
    """Return the columns of the pairs in which the rank sends to other ranks."""
    (source, target, rank, _, _), shard = parts[0].request, parts[0].source_shard
    of, shards = _listed([part.out for part in parts])
    if shard is None or not len(shards):
        return _columns(of, 0, 0, 0, 0)
    holders = target.holders_of(shards)  # by replica and shard
    of, shards, ranks = of.repeat(len(holders)), shards.repeat(len(holders)), holders.T.ravel()
    senders = _senders(source, numpy.array([shard]), ranks, target, _replicas(parts)[of])
    (is_sent,) = ((senders == rank) & (ranks != rank)).nonzero()
    return _columns(of[is_sent], shard, shards[is_sent], rank, ranks[is_sent])


def _listed(shards: Sequence[Sequence[int]]) -> tuple[Numbers, Numbers]:
    """Return the part of each shard, and the shards, one part after the other."""
    arrays = [number_array(indices) for indices in shards]
    return numpy.arange(len(arrays)).repeat([len(indices) for indices in arrays]), numpy.concatenate(arrays)


def _columns(of: Numbers, *columns: Numbers | int) -> Numbers:
    """Stack columns as long as `of`, which is the first column; a number stands for a column of equal numbers."""
    rows = numpy.empty((1 + len(columns), len(of)), numpy.int64)
    rows[0] = of
    for row, column in enumerate(columns, start=1):
        rows[row] = column
    return rows


def _replicas(parts: Sequence[ShardPair]) -> Numbers:
    return number_array([part.request.replica for part in parts])


def _senders(source: Placement, shards: Numbers, to: Numbers | int, target: Placement, replicas: Numbers) -> Numbers:
    """Return the sender of each of `shards` to the rank `to`, or of a single shard to each rank in `to`.

    A rank that holds a shard sends that shard to itself; other ranks take the shard from the replicas in turn.
    """
    holders = source.holders_of(shards)
    if len(holders) == 1:
        senders: Numbers = holders[0]
        return senders
    turn = (replicas + shards + numpy.searchsorted(sorted_ranks(target.rank_groups), to)) % len(holders)
    is_held = numpy.isin(to, holders) if len(shards) == 1 else (holders == to).any(axis=0)
    return numpy.where(is_held, to, holders[turn, numpy.arange(len(shards))])


def copies_of_kind(parts: Sequence[ShardPair]) -> list[CopyTable]:
    """Return the copies of each part, where all parts are of one kind, in the order of its pairs of shards."""
    pairs = Pairs.of(parts)
    rows, copies = _copies_between(parts, pairs)
    if len(parts) == 1:
        return [copies]
    ends = pairs.columns[0, rows].searchsorted(numpy.arange(len(parts)), "right")
    return copies.split(ends)


def _copies_between(parts: Sequence[ShardPair], pairs: Pairs) -> Found:
    """Return the copies of the elements that each pair of shards has in common, in the order of the pairs.

    Runs are compared as ranges of the flattened parameter, Boxes dimension by dimension.
    """
    left, right = _tables(parts, pairs)
    of_left, of_right, numbers = _matched(left, right, len(pairs))
    is_alone = None if numbers is None else numpy.bincount(numbers)[numbers] == 1  # the only Box of its shard
    rows, copies = _common_of(pairs.rows(numbers), left.rows(of_left), right.rows(of_right), is_alone)
    if numbers is None:
        return rows, copies
    order = numpy.lexsort((*copies.columns[2:4], numbers[rows]))
    return numbers[rows[order]], copies.rows_at(order)


def _tables(parts: Sequence[ShardPair], pairs: Pairs) -> tuple[BoxTable, BoxTable]:
    """Return the shards of all pairs: both as runs or both as Boxes, where that is possible."""
    source, target = parts[0].request[:2]
    of, from_, to = pairs.columns[:3]
    source_numbers, target_numbers = None, None
    if len(parts) > 1:
        source_numbers = at(_by_part([part.request.source.numbers for part in parts]), of)
        target_numbers = at(_by_part([part.request.target.numbers for part in parts]), of)
    runs = source.run_table(from_, source_numbers), target.run_table(to, target_numbers)
    if runs[0] is not None and runs[1] is not None:
        return runs[0], runs[1]
    boxes = source.box_table(from_, source_numbers), target.box_table(to, target_numbers)
    left, right = (run if box is None else box for run, box in zip(runs, boxes, strict=True))
    if left is None or right is None:
        raise LayoutError(f"a placement {source if left is None else target} has neither runs nor boxes")
    return left, right


def _matched(left: BoxTable, right: BoxTable, num: int) -> tuple[Numbers | None, Numbers | None, Numbers | None]:
    """Match the rows of both tables that belong to one pair, each with each: (rows, rows, pairs); None for all in their order."""
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


def _common_of(pairs: Pairs, left: BoxTable, right: BoxTable, is_alone: Mask | None) -> Found:
    """Return the copies of the elements that the rows of both tables have in common, whether the rows are runs or Boxes.

    A Box that is a run, and the only Box of its shard, is compared with a run as a run.
    """
    if left.num_dims == right.num_dims:
        return _common(pairs, left, right)
    is_from_runs = left.num_dims == 1
    runs, boxes = (left, right) if is_from_runs else (right, left)
    are_runs = boxes.are_runs(pairs.shape)
    if is_alone is not None:
        are_runs &= is_alone
    if not are_runs.any():
        return _cut(pairs, runs, boxes, is_from_runs)
    run_rows, box_rows = numpy.flatnonzero(are_runs), numpy.flatnonzero(~are_runs)
    run_pairs = pairs.rows(run_rows)
    rows, copies = _common(
        run_pairs, *_ordered(runs.rows(run_rows), boxes.rows(run_rows).as_runs(run_pairs.shape), is_from_runs)
    )
    if not len(box_rows):
        return run_rows[rows], copies
    cut_rows, cut = _cut(pairs.rows(box_rows), runs.rows(box_rows), boxes.rows(box_rows), is_from_runs)
    numbers = numpy.concatenate((run_rows[rows], box_rows[cut_rows]))
    order = numpy.argsort(numbers, kind="stable")
    return numbers[order], copies.joined(cut).rows_at(order)


def _cut(pairs: Pairs, runs: BoxTable, boxes: BoxTable, is_from_runs: bool) -> Found:
    """Return the copies of the elements that each run has in common with a Box that is not a run."""
    parts = runs.as_boxes(pairs.shape)
    owners = parts.owners if parts.owners is not None else numpy.arange(len(parts))
    rows, copies = _common(pairs.rows(owners), *_ordered(parts, boxes.rows(owners), is_from_runs))
    return owners[rows], copies


def _ordered(runs: BoxTable, boxes: BoxTable, is_from_runs: bool) -> tuple[BoxTable, BoxTable]:
    return (runs, boxes) if is_from_runs else (boxes, runs)


def _common(pairs: Pairs, left: BoxTable, right: BoxTable) -> Found:
    """Return the copies of the elements that each Box of one table has in common with the Box of the other table."""
    lows = numpy.maximum(left.lows, right.lows)
    sizes = numpy.minimum(left.highs, right.highs) - lows
    (rows,) = (sizes > 0).all(axis=0).nonzero()
    is_run = left.num_dims == 1 and bool((left.strides == 1).all() and (right.strides == 1).all())
    ends = [(table.bases + (lows[0] if is_run else along(lows, table.strides)))[None] for table in (left, right)]
    strides = [] if is_run else [left.strides, right.strides]  # the strides of runs are 1
    columns = numpy.concatenate([pairs.columns[3:], *ends, sizes, *strides])
    return rows, CopyTable(columns if len(rows) == len(pairs) else columns[:, rows]).merged()
