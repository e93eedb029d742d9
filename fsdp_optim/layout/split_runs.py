"""A parameter cut into runs of any length, of which a rank may have several."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.boxes import Block, Shape, boxes_of_run
from fsdp_optim.layout.placement import Placement


@dataclass(frozen=True)
class SplitRuns(Placement):
    """Row-major elements [starts[i], stops[i]) on the rank `by[i]`: the runs of a rank follow one another in its tensor.

    # parameter  | a a a a a a a a a a |
    # rank 1     | a a |         a a a |
    # rank 0           | a a a a |         neighbouring runs may overlap: both ranks hold the common elements

    The runs are in order, and have no gap between them. `FlatRuns` is the same where each rank has one run.
    """

    full_shape: Shape
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    by: tuple[int, ...]

    def __post_init__(self) -> None:
        begins, ends = (*self.starts, self.numel), (0, *self.stops)
        if not len(self.starts) == len(self.stops) == len(self.by) or any(
            a > b for a, b in zip(begins, ends, strict=True)
        ):
            raise LayoutError(
                f"runs have to cover {self.numel} elements, not {list(zip(self.starts, self.stops, strict=True))}"
            )
        if list(self.starts) != sorted(self.starts) or list(self.stops) != sorted(self.stops):
            raise LayoutError(f"runs have to be in the order of their elements, not {self.starts} to {self.stops}")

    @cached_property
    def _hash(self) -> int:
        return hash((self.full_shape, self.starts, self.stops, self.by))

    def __hash__(self) -> int:
        return self._hash

    @property
    def shape(self) -> Shape:
        return self.full_shape

    @cached_property
    def _numel(self) -> int:
        return prod(self.full_shape)

    @property
    def numel(self) -> int:
        return self._numel

    @cached_property
    def _shards(self) -> dict[int, int]:
        return {rank: shard for shard, rank in enumerate(dict.fromkeys(self.by))}

    @cached_property
    def _runs(self) -> tuple[tuple[int, ...], ...]:
        """By shard, the numbers of its runs."""
        found: list[list[int]] = [[] for _ in self._shards]
        for number, rank in enumerate(self.by):
            found[self._shards[rank]].append(number)
        return tuple(map(tuple, found))

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def holders(self, shard: int) -> tuple[int, ...]:
        return (self.by[self._runs[shard][0]],)

    def shard_of(self, rank: int) -> int | None:
        return self._shards.get(rank)

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
    def overlapping(self) -> bool:
        return any(stop > start for stop, start in zip(self.stops[:-1], self.starts[1:], strict=True))

    @property
    def most_numel(self) -> int:
        sizes = (sum(self.stops[number] - self.starts[number] for number in its) for its in self._runs)
        return max(sizes, default=0)

    def on_lowest_ranks(self) -> SplitRuns:
        return self
