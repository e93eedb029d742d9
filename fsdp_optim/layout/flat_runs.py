"""A parameter cut into runs of any length, in the order of its elements."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.boxes import Block, Run, boxes_of_run
from fsdp_optim.layout.ranks import check_distinct
from fsdp_optim.layout.runs import OrderedRuns
from fsdp_optim.layout.tables import BoxTable, Columns, Numbers


class FlatRuns(OrderedRuns):
    """Row-major elements [starts[i], stops[i]) on the rank `by[i]`: each rank has one run, in a separate tensor.

    # parameter  | a a a a a a a a a a |
    # rank 2     | a a a |
    # rank 0           | a a a a |         neighbouring runs may overlap: both ranks hold the common elements
    # rank 1                     | a a a |

    The runs are in order: neither `starts` nor `stops` decreases.
    """

    def __post_init__(self) -> None:
        check_distinct((self.by,))
        bounds = list(zip(self.starts, self.stops, strict=True))
        if len(bounds) != len(self.by) or any(not 0 <= start <= stop <= self.numel for start, stop in bounds):
            raise LayoutError(f"each of the ranks {self.by} needs a run inside the {self.numel} elements, not {bounds}")
        if any(a > c or b > d for (a, b), (c, d) in itertools.pairwise(bounds)):
            raise LayoutError(f"runs must be in the order of their elements, not {bounds}")

    @property
    def num_shards(self) -> int:
        return len(self.by)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.by))

    def holders(self, shard: int) -> tuple[int, ...]:
        return (self.by[shard],)

    @property
    def in_runs(self) -> bool:
        return True

    def run(self, shard: int) -> Run:
        return Run(self.starts[shard], self.stops[shard], 0)

    def run_table(self, shards: Numbers, numbers: Columns | None = None) -> BoxTable:
        starts, stops = (numpy.array(its, numpy.int64)[shards] for its in (self.starts, self.stops))
        return BoxTable.of_runs(starts, stops, numpy.zeros_like(starts))

    def box_table(self, shards: Numbers, numbers: Columns | None = None) -> None:
        return None

    def holders_of(self, shards: Numbers) -> Numbers:
        by: Numbers = numpy.array(self.by, numpy.int64)[shards]
        return by.reshape(1, -1)

    def blocks(self, shard: int) -> tuple[Block, ...]:
        blocks, offset = [], 0
        for box in boxes_of_run(self.shape, self.starts[shard], self.stops[shard]):
            blocks.append(Block(box, offset))
            offset += box.numel
        return tuple(blocks)

    def shards_over(self, start: int, stop: int) -> Sequence[int]:
        if start >= stop:
            return range(0)
        return range(bisect.bisect_right(self.stops, start), bisect.bisect_left(self.starts, stop))

    @property
    def most_numel(self) -> int:
        return max((stop - start for start, stop in zip(self.starts, self.stops, strict=True)), default=0)

    def on_lowest_ranks(self) -> FlatRuns:
        return self

    def gap(self) -> tuple[int, int] | None:
        at = 0
        for start, stop in zip(self.starts, self.stops, strict=True):
            if start > at:
                return at, start
            at = max(at, stop)
        return (at, self.numel) if at < self.numel else None
