"""Requests for plans: the copies of one rank, between two placements of one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fsdp_optim.layout import Placement


class Request(NamedTuple):
    """A request for the copies that `rank` receives and, with `sends`, sends. `replica`: as in `copies_of`."""

    source: Placement
    target: Placement
    rank: int
    replica: int = 0
    sends: bool = True


class ShardPair(NamedTuple):
    """A request with the shards that may have elements in common.

    Attributes:
        target_shard: the shard of the target that the rank holds; None for none.
        into: the shards of the source that may have elements of `target_shard`.
        source_shard: the shard of the source that the rank holds, and sends; None for none.
        out: the shards of the target that may have elements of `source_shard`.
    """

    request: Request
    target_shard: int | None = None
    into: Sequence[int] = ()
    source_shard: int | None = None
    out: Sequence[int] = ()

    @property
    def num_pairs(self) -> int:
        """The number of pairs of shards, each on one rank, that must be compared."""
        return len(self.into) + (len(self.out) * self.request.target.num_replicas if self.out else 0)

    @property
    def in_runs(self) -> bool:
        """Whether all shards, of the source and of the target, are runs."""
        return self.request.source.in_runs and self.request.target.in_runs

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for parts that can be planned at once: the rank, and all of the placements but some numbers."""
        source, target, rank, _, sends = self.request
        return source.kind, target.kind, len(source.shape), rank, sends
