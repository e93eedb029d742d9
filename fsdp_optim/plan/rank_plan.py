"""The plan of one rank between two placements of one parameter, and the plans that are kept from call to call.

The copies of a plan are seen from the rank (`Ways`): the peer, the direction, and the places of the elements.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

from fsdp_optim.layout import Placement
from fsdp_optim.plan.copies import Copy
from fsdp_optim.plan.planner import copies_of_parts, part_of
from fsdp_optim.plan.request import Request, ShardPair
from fsdp_optim.plan.table import CopyTable, has_from, num_into

PAIRS_TOGETHER = 1 << 11
"""The number of pairs of shards from which plans are made without waiting for more of them."""

_COPY_NBYTES = 512  # about what a copy, its way and their numbers take
_PLAN_NBYTES = 2048  # about what a plan takes besides its copies, with the two placements


@dataclass(frozen=True, eq=False)
class RankPlan(Sequence[Copy]):
    """The copies of a parameter that one rank sends and receives, in order, and what follows from them."""

    rank: int
    target: Placement
    copies: Sequence[Copy]

    @classmethod
    def of(cls, source: Placement, target: Placement, rank: int, replica: int = 0, *, sends: bool = True) -> RankPlan:
        """Return the plan of `rank` from `source` to `target`.

        Args:
            replica: as in `copies_of`.
            sends: include the copies that the rank sends to other ranks.
        """
        return cls(rank, target, copies_of_parts([part_of(Request(source, target, rank, replica, sends))])[0])

    @cached_property
    def receives(self) -> bool:
        """Whether the rank holds a shard of the target, which may be empty."""
        return self.target.shard_of(self.rank) is not None

    @cached_property
    def num_wanted(self) -> int:
        """The elements of the target's shard on the rank, without padding."""
        return self.target.numel_on(self.rank)

    @cached_property
    def sends(self) -> bool:
        """Whether the rank is the source of any of the copies."""
        return has_from(self.copies, self.rank)

    @cached_property
    def num_filled(self) -> int:
        """The number of elements that the copies bring to the rank."""
        return num_into(self.copies, self.rank)

    @cached_property
    def ways(self) -> Ways:
        """The copies as the rank sees them."""
        return Ways.of(self.copies, self.rank)

    def __len__(self) -> int:
        return len(self.copies)

    @overload
    def __getitem__(self, index: int) -> Copy: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Copy]: ...
    def __getitem__(self, index: int | slice) -> Copy | Sequence[Copy]:
        return self.copies[index]

    def __iter__(self) -> Iterator[Copy]:
        return iter(self.copies)


class Plans:
    """A cache of one rank's plans, each made once and looked up by the values from which it was made.

    A plan is a function of two placements, a rank and the number of a replica. So a kept plan is never out of date: a parameter
    that was replaced, wrapped again or moved to other ranks has another placement, which has another plan. Names, dtypes and
    memory are not part of a plan. Threads may share one object.

    `most_nbytes`: about the most memory of the kept plans; the least recently used plans are dropped first.
    """

    def __init__(self, most_nbytes: int = 32 << 20) -> None:
        self.num_made = 0
        self._most_nbytes, self._nbytes = most_nbytes, 0
        self._kept: OrderedDict[Request, RankPlan] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, source: Placement, target: Placement, rank: int, replica: int = 0, *, sends: bool = True) -> RankPlan:
        """Return the plan that `RankPlan.of` makes, from the cache where it is kept."""
        (planned,) = self.each([Request(source, target, rank, replica, sends)])
        return planned

    def each(self, requests: Iterable[Request]) -> Iterator[RankPlan]:
        """Yield the plan of each request, in the order of the requests.

        Missing plans are made together, which takes less time: a batch ends at some thousands of pairs of shards, which bounds
        its memory.
        """
        # A plan that is not kept yet is the number of its part among the missing ones.
        batch, missing, known, num_pairs = list[RankPlan | int](), list[ShardPair](), dict[Request, RankPlan | int](), 0
        for request in requests:
            # Each is hashed as seldom as possible, which is a good part of the time of a small plan.
            entry = known.get(request)
            if entry is None:
                entry = self._find(request)
                if entry is None:
                    entry = len(missing)
                    missing.append(part_of(request))
                    num_pairs += 1 + missing[-1].num_pairs
                known[request] = entry
            batch.append(entry)
            if num_pairs >= PAIRS_TOGETHER:
                yield from self._made(batch, missing)
                batch, missing, known, num_pairs = [], [], {}, 0
        yield from self._made(batch, missing)

    def _made(self, batch: Sequence[RankPlan | int], missing: Sequence[ShardPair]) -> list[RankPlan]:
        """Return the plans of a batch, which has kept plans, and the numbers of parts that are still to be planned."""
        made = [
            RankPlan(part.request.rank, part.request.target, copies)
            for part, copies in zip(missing, copies_of_parts(missing), strict=True)
        ]
        for part, plan in zip(missing, made, strict=True):
            self._keep(part.request, plan)
        return [made[entry] if isinstance(entry, int) else entry for entry in batch]

    def _find(self, request: Request) -> RankPlan | None:
        with self._lock:
            plan = self._kept.get(request)
            if plan is not None:
                self._kept.move_to_end(request)
            return plan

    def _keep(self, request: Request, plan: RankPlan) -> None:
        with self._lock:
            self.num_made += 1
            num_kept = len(self._kept)  # to ask whether it is kept would hash the request once more
            self._kept[request] = plan
            if len(self._kept) > num_kept:
                self._nbytes += _nbytes_of(request, plan)
            while self._nbytes > self._most_nbytes:
                self._nbytes -= _nbytes_of(*self._kept.popitem(last=False))

    def clear(self) -> None:
        """Drop all kept plans."""
        with self._lock:
            self._kept.clear()
            self._nbytes = 0


def _nbytes_of(request: Request, plan: RankPlan) -> int:
    num_listed = request.source.num_listed + request.target.num_listed
    return _PLAN_NBYTES + _COPY_NBYTES * (len(plan) + num_listed)


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
