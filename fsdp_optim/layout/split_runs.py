"""A parameter cut into runs of any length; a rank may have several runs."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import cached_property

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.boxes import Block, boxes_of_run
from fsdp_optim.layout.runs import OrderedRuns


class SplitRuns(OrderedRuns):
    """Row-major elements [starts[i], stops[i]) on the rank `by[i]`: the runs of a rank follow one another in its tensor.

    # parameter  | a a a a a a a a a a |
    # rank 1     | a a |         a a a |
    # rank 0           | a a a a |         neighbouring runs may overlap: both ranks hold the common elements

    The runs are in order, and have no gap between them. `FlatRuns` is the same where each rank has one run.
    """

    def __post_init__(self) -> None:
        begins, ends = (*self.starts, self.numel), (0, *self.stops)
        if not len(self.starts) == len(self.stops) == len(self.by) or any(
            a > b for a, b in zip(begins, ends, strict=True)
        ):
            raise LayoutError(
                f"runs must cover {self.numel} elements, not {list(zip(self.starts, self.stops, strict=True))}"
            )
        if list(self.starts) != sorted(self.starts) or list(self.stops) != sorted(self.stops):
            raise LayoutError(f"runs must be in the order of their elements, not {self.starts} to {self.stops}")

    @cached_property
    def _runs(self) -> tuple[tuple[int, ...], ...]:
        """By shard, the numbers of its runs."""
        found: list[list[int]] = [[] for _ in self._shards]
        for number, rank in enumerate(self.by):
            found[self._shards[rank]].append(number)
        return tuple(map(tuple, found))

    @property
    def has_tables(self) -> bool:
        return False

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def holders(self, shard: int) -> tuple[int, ...]:
        return (self.by[self._runs[shard][0]],)

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
        first, last = bisect.bisect_right(self.stops, start), bisect.bisect_left(self.starts, stop)
        return sorted({self._shards[rank] for rank in self.by[first:last]})

    @property
    def most_numel(self) -> int:
        sizes = (sum(self.stops[number] - self.starts[number] for number in its) for its in self._runs)
        return max(sizes, default=0)

    def on_lowest_ranks(self) -> SplitRuns:
        return self
