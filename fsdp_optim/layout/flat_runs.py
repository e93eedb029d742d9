"""A parameter cut into runs of any length, in the order of its elements."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.boxes import Block, Run, Shape, boxes_of_run
from fsdp_optim.layout.placement import Placement, hash_once
from fsdp_optim.layout.tables import BoxTable, Columns, Numbers


@hash_once
@dataclass(frozen=True)
class FlatRuns(Placement):
    """Row-major elements [starts[i], stops[i]) on the rank `by[i]`, in separate tensors.

    # parameter  | a a a a a a a a a a |
    # rank 2     | a a a |
    # rank 0           | a a a a |         neighbouring runs may overlap: both ranks hold the common elements
    # rank 1     | a a |         | a a |   the runs of a rank follow one another in its tensor

    The runs are in order: neither `starts` nor `stops` decreases.
    """

    full_shape: Shape
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    by: tuple[int, ...]

    def __post_init__(self) -> None:
        bounds, numel = list(zip(self.starts, self.stops, strict=True)), self.numel
        if len(bounds) != len(self.by) or any(not 0 <= start <= stop <= numel for start, stop in bounds):
            raise LayoutError(f"each of the ranks {self.by} needs a run inside the {numel} elements, not {bounds}")
        if any(a > c or b > d for (a, b), (c, d) in itertools.pairwise(bounds)):
            raise LayoutError(f"runs must be in the order of their elements, not {bounds}")

    @property
    def num_listed(self) -> int:
        return len(self.by)

    @cached_property
    def _shards(self) -> dict[int, int]:
        """The shard of each rank: the ranks are numbered as they come in `by`."""
        return {rank: shard for shard, rank in enumerate(dict.fromkeys(self.by))}

    @cached_property
    def _runs(self) -> Sequence[Sequence[int]]:
        """By shard, the numbers of its runs."""
        if self.in_runs:
            return [(number,) for number in range(len(self.by))]
        runs: list[list[int]] = [[] for _ in self._shards]
        for number, rank in enumerate(self.by):
            runs[self._shards[rank]].append(number)
        return runs

    @property
    def in_runs(self) -> bool:
        return len(self._shards) == len(self.by)

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._shards))

    def holders(self, shard: int) -> tuple[int, ...]:
        return (self.by[self._runs[shard][0]],)

    def shard_of(self, rank: int) -> int | None:
        return self._shards.get(rank)

    def run(self, shard: int) -> Run | None:
        return Run(self.starts[shard], self.stops[shard], 0) if self.in_runs else None

    def run_table(self, shards: Numbers, numbers: Columns | None = None) -> BoxTable | None:
        if not self.in_runs:
            return None
        starts, stops = (numpy.array(ends, numpy.int64)[shards] for ends in (self.starts, self.stops))
        return BoxTable.of_runs(starts, stops, numpy.zeros_like(starts))

    def box_table(self, shards: Numbers, numbers: Columns | None = None) -> BoxTable | None:
        return None if self.in_runs else super().box_table(shards, numbers)

    def holders_of(self, shards: Numbers) -> Numbers:
        by: Numbers = numpy.array(list(self._shards), numpy.int64)[shards]
        return by.reshape(1, -1)

    def blocks(self, shard: int) -> tuple[Block, ...]:
        blocks, offset = [], 0
        for number in self._runs[shard]:
            for box in boxes_of_run(self.shape, self.starts[number], self.stops[number]):
                blocks.append(Block(box, offset))
                offset += box.numel
        return tuple(blocks)

    def shards_over(self, start: int, stop: int) -> Sequence[int]:
        if start >= stop:
            return range(0)
        runs = range(bisect.bisect_right(self.stops, start), bisect.bisect_left(self.starts, stop))
        return runs if self.in_runs else sorted({self._shards[self.by[number]] for number in runs})

    @property
    def overlapping(self) -> bool:
        return any(stop > start for stop, start in zip(self.stops[:-1], self.starts[1:], strict=True))

    @property
    def most_numel(self) -> int:
        sizes = (sum(self.stops[number] - self.starts[number] for number in runs) for runs in self._runs)
        return max(sizes, default=0)

    def on_lowest_ranks(self) -> FlatRuns:
        return self

    def gap(self) -> tuple[int, int] | None:
        at = 0
        for start, stop in zip(self.starts, self.stops, strict=True):
            if start > at:
                return at, start
            at = max(at, stop)
        return (at, self.numel) if at < self.numel else None
