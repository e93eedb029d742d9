"""The copies of a plan seen from one of the two ranks: the peer, the direction, and the places of the elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_optim.plan.copies import Copy
from fsdp_optim.plan.table import CopyTable


class Way(NamedTuple):
    """One copy, seen from one rank. `peer`: the other rank; None for a copy that stays on this rank.

    `source_at`, `target_at`: offsets of the block in the local tensors, in elements. `strided`: the copy itself, if it is
    not a run.
    """

    peer: int | None
    is_sent: bool
    numel: int
    source_at: int
    target_at: int
    strided: Copy | None

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.numel,) if self.strided is None else self.strided.sizes


@dataclass(frozen=True)
class Ways:
    """The ways of a rank in some copies, in their order.

    `tiles`: the lengths of the blocks that the rank receives, where these are several runs that follow each other; else empty.
    """

    ways: tuple[Way, ...]
    tiles: tuple[int, ...]

    @classmethod
    def of(cls, copies: Sequence[Copy], rank: int) -> Ways:
        """Return the ways of `rank` in the copies that it sends or receives."""
        rows = copies.rows() if isinstance(copies, CopyTable) else map(_row_of, copies)
        ways = tuple([_way(rank, *row) for row in rows if rank in (row[0], row[1])])
        return cls(ways, _tiles([way for way in ways if way.peer is None or not way.is_sent]))


def _row_of(copy: Copy) -> tuple[int, int, int, int, int, Copy | None]:
    strided = None if copy.is_run else copy
    return copy.source_rank, copy.target_rank, copy.numel, copy.source_offset, copy.target_offset, strided


def _way(
    rank: int, source: int, target: int, numel: int, source_at: int, target_at: int, strided: Copy | None = None
) -> Way:
    is_sent = source == rank
    peer = None if source == target else target if is_sent else source
    return Way(peer, is_sent, numel, source_at, target_at, strided)


def _tiles(received: Sequence[Way]) -> tuple[int, ...]:
    at = 0
    for way in received:
        if way.strided is not None or way.target_at != at:
            return ()
        at += way.numel
    return tuple([way.numel for way in received]) if len(received) > 1 else ()
