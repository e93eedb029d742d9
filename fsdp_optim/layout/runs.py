"""The common parent of placements whose shards are runs of row-major elements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from fsdp_optim.layout.boxes import Shape
from fsdp_optim.layout.placement import Placement


@dataclass(frozen=True)
class OrderedRuns(Placement):
    """Row-major elements [starts[i], stops[i]) on the rank `by[i]`, in the order of the elements.

    A subclass says how many runs a rank may have. It adds no field, and so inherits equality and hash.
    """

    full_shape: Shape
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    by: tuple[int, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.full_shape, self.starts, self.stops, self.by))

    def __hash__(self) -> int:
        return self._hash

    @property
    def shape(self) -> Shape:
        return self.full_shape

    @property
    def num_listed(self) -> int:
        return len(self.by)

    @cached_property
    def _numel(self) -> int:
        return prod(self.full_shape)

    @property
    def numel(self) -> int:
        return self._numel

    @cached_property
    def _shards(self) -> dict[int, int]:
        """The shard of each rank: the ranks are numbered as they come in `by`."""
        return {rank: shard for shard, rank in enumerate(dict.fromkeys(self.by))}

    def shard_of(self, rank: int) -> int | None:
        return self._shards.get(rank)

    @property
    def overlapping(self) -> bool:
        return any(stop > start for stop, start in zip(self.stops[:-1], self.starts[1:], strict=True))
