"""The plan of one rank between two placements of one parameter, and the plans that are kept from call to call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from fsdp_optim.layout import Placement
from fsdp_optim.plan.copies import Copy
from fsdp_optim.plan.planner import copies_into, copies_of
from fsdp_optim.plan.table import has_from, num_into
from fsdp_optim.plan.ways import Ways

_COPY_NBYTES = 512  # about what a copy, its way and their numbers take
_PLAN_NBYTES = 2048  # about what a plan takes besides its copies, with the two placements


@dataclass(frozen=True, eq=False)
class RankPlan(Sequence[Copy]):
    """The copies of a parameter that one rank sends and receives, in order, and what follows from them.

    `receives`: whether the rank holds a shard of the target, which may be empty. `num_wanted`: the elements of that shard,
    without padding.
    """

    rank: int
    copies: Sequence[Copy]
    receives: bool
    num_wanted: int

    @classmethod
    def of(cls, source: Placement, target: Placement, rank: int, replica: int = 0, *, sends: bool = True) -> RankPlan:
        """The plan of `rank` from `source` to `target`.

        Args:
            replica: as in `copies_of`.
            sends: include the copies that the rank sends to other ranks.
        """
        copies = (
            copies_of(source, target, rank=rank, replica=replica)
            if sends
            else copies_into(source, target, rank, replica)
        )
        return cls(rank, copies, target.shard_of(rank) is not None, target.numel_on(rank))

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
    """Plans of one rank, each made once and found again by the values from which it was made.

    A plan is a function of two placements, a rank and the number of a replica. So a kept plan is never out of date: a parameter
    that was replaced, wrapped again or moved to other ranks has another placement, which has another plan. Names, dtypes and
    memory are not part of a plan. Threads may share one object.

    `most_nbytes`: about the most memory of the kept plans; those that were not used for longest go first.
    """

    def __init__(self, most_nbytes: int = 32 << 20) -> None:
        self.num_made = 0
        self._most_nbytes, self._nbytes = most_nbytes, 0
        self._kept: OrderedDict[tuple[object, ...], RankPlan] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, source: Placement, target: Placement, rank: int, replica: int = 0, *, sends: bool = True) -> RankPlan:
        """As `RankPlan.of`."""
        key = (source, target, rank, replica, sends)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        made = RankPlan.of(source, target, rank, replica, sends=sends)
        with self._lock:
            self.num_made += 1
            if key not in self._kept:
                self._kept[key] = made
                self._nbytes += _nbytes_of(key, made)
            while self._nbytes > self._most_nbytes:
                self._nbytes -= _nbytes_of(*self._kept.popitem(last=False))
        return made

    def clear(self) -> None:
        """Drop all kept plans."""
        with self._lock:
            self._kept.clear()
            self._nbytes = 0


def _nbytes_of(key: tuple[object, ...], plan: RankPlan) -> int:
    listed = sum(part.num_listed for part in key if isinstance(part, Placement))
    return _PLAN_NBYTES + _COPY_NBYTES * (len(plan) + listed)
