"""One meeting as it is in the rendezvous store: its keys, its verdict, and which ranks have come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.job.job_store import JobStore
from fsdp_optim.transport.stored_contents import Contents
from fsdp_optim.transport.stored_verdict import StoredVerdict
from fsdp_optim.transport.tree import Tree
from fsdp_optim.wire import decode, encode

FANOUT = 64
"""Ranks that tell one other rank."""

_TOGETHER = 512  # values that are read at once


@dataclass
class Attendance:
    """What a rank remembers from meeting to meeting with the same ranks.

    Attributes:
        number: the number of its last meeting.
        complete: the number of the last meeting to which all came, as far as this rank knows.
        sees_all_below: whether the ranks below this one have all told something, once.
        contents: the contents that do not travel with the statements.
    """

    prefix: str
    number: int = 0
    complete: int = 0
    sees_all_below: bool = False
    contents: Contents = field(default_factory=Contents)


@dataclass(frozen=True)
class StoredMeeting:
    """The keys of one meeting in the store. `number` counts this rank's meetings with these ranks.

    The verdict is the first that a rank writes: the root when all have come, or a rank that ends the meeting early.
    """

    group: RankGroup
    store: JobStore
    prefix: str
    number: int
    attendance: Attendance = field(default_factory=lambda: Attendance(""), compare=False)
    fanout: int = FANOUT

    @cached_property
    def tree(self) -> Tree:
        """The tree of the ranks of this meeting."""
        return Tree(len(self.group.ranks), self.fanout)

    @cached_property
    def position(self) -> int:
        """The position of this rank."""
        return self.group.position

    @cached_property
    def is_leaf(self) -> bool:
        """Whether no ranks are below this one, which tells another one."""
        return self.position > 0 and not self.tree.below(self.position)

    def key(self, name: str) -> str:
        """Return the full key of `name` in this meeting."""
        return f"{self.prefix}/{self.number}/{name}"

    def decide(self, verdict: StoredVerdict) -> StoredVerdict:
        """Put a verdict into the store if there is none, which ends the meeting; return the verdict of the meeting."""
        value = self.store.compare_set(self.key("verdict"), "", encode(verdict))
        verdict = decode(StoredVerdict, value)
        if not verdict.is_complete:  # those that others tell wait for these others, and must learn that they need not
            keys = [bell_key(self.prefix, position) for position in self.tree.inner]
            self.store.multi_set([ended_key(self.prefix), *keys], [str(self.number), *([""] * len(keys))])
        return verdict

    def sees_verdict(self, seconds: float) -> bool:
        """Wait for the verdict for at most `seconds`; returns whether the verdict is there."""
        return self.store.wait(self.key("verdict"), min(seconds, self.group.timeout))

    def has_verdict(self) -> bool:
        """Return whether the verdict is there."""
        return self.store.check([self.key("verdict")])

    def verdict(self) -> StoredVerdict:
        """Read the verdict, which is there."""
        return decode(StoredVerdict, self._read("verdict"))

    def _read(self, name: str) -> bytes:
        """Return a value of this meeting that exists."""
        value = self.store.read(self.key(name))
        return self.store.get(self.key(name)) if value is None else value  # which raises the error

    def told_key(self, position: int) -> str:
        """Return the key with what a position has told, after the number of the meeting. It is used in every meeting."""
        return f"{self.prefix}/told/{position}"

    def claims_end(self) -> bool:
        """Return whether this rank is the first that ends the meeting at the timeout."""
        return self.store.add(self.key("ends"), 1) == 1

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that have not come."""
        numbers = self._numbers([at_key(self.prefix, rank) for rank in self.group.ranks])
        return tuple(rank for rank, number in zip(self.group.ranks, numbers, strict=True) if number < self.number)

    def silent(self) -> tuple[int, ...]:
        """Return the ranks that the meeting waits for, once all ranks have come: one of them must write next."""
        inner = self.tree.inner[1:]
        numbers = self._numbers([self.told_key(position) for position in inner])
        silent = [position for position, number in zip(inner, numbers, strict=True) if number < self.number]
        return tuple(self.group.ranks[position] for position in silent or [0] if position != self.position)

    def _numbers(self, keys: Sequence[str]) -> list[int]:
        """Return the numbers with which values begin; 0 where a key is missing."""
        if not keys:
            return []
        if len(keys) <= _TOGETHER and self.store.check(keys):
            return [int(value.partition(b" ")[0]) for value in self.store.multi_get(keys)]
        if len(keys) == 1:
            return [0]
        half = len(keys) // 2
        return [*self._numbers(keys[:half]), *self._numbers(keys[half:])]

    def catch_up(self, verdict: StoredVerdict) -> bool:
        """Return whether this rank, which the verdict calls missing, must join a later meeting, which then is its next one.

        It was passed by, or the other ranks are in a later meeting. Without this, a rank that skipped a call would be a meeting
        behind for the rest of the job.
        """
        last = self.store.add(came_key(self.prefix, self.group.rank), 0)
        if last < self.number:
            others = (rank for rank in self.group.ranks if rank not in verdict.missing)
            newest = int(self.store.read(at_key(self.prefix, next(others, self.group.rank))) or 0)
            if newest <= self.number:
                return False
            last = newest - 1
        self.attendance.number = last
        return True

    def pass_by(self, rank: int, number: int) -> None:
        """Count a rank as come to its meetings up to `number`, so that its next meeting has the number after that."""
        key = came_key(self.prefix, rank)
        while (came := self.store.add(key, 0)) < number:
            # compare_set, because the rank may come meanwhile, or another rank may pass it by at the same time.
            if self.store.compare_set(key, str(came), str(number)) == str(number).encode():
                return


def at_key(prefix: str, rank: int) -> str:
    """Return the key with the number of a rank's last meeting."""
    return f"{prefix}/at/{rank}"


def came_key(prefix: str, rank: int) -> str:
    """Return the key with the number of the last meeting by which others have passed a rank."""
    return f"{prefix}/came/{rank}"


def bell_key(prefix: str, position: int) -> str:
    """Return the key that is there when a position must look who has come."""
    return f"{prefix}/bell/{position}"


def ended_key(prefix: str) -> str:
    """Return the key with the number of the last meeting that was ended early."""
    return f"{prefix}/ended"
