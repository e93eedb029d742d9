"""One call at a time on the same ranks: the calls that are in flight in this process, and the error of a second call."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fsdp_optim.errors import RankError

_PATIENCE = 10.0  # seconds in which another thread can end a suspended call on all its ranks


@dataclass(eq=False)
class Turn:
    """One call in flight on this rank.

    Attributes:
        conflict: the error of another call that was made while this call was in flight, raised in this call's next meeting.
        ended_by: the error that ended this call on all ranks while it was suspended.
        is_suspended: whether this call is an iterator that the caller has not resumed.
        has_met: whether all ranks have come to a meeting of this call, so that each of them is in the call.
        num_met: a number that grows when a meeting of this call has ended well.
        running: a lock that is held except while this call is suspended.
    """

    call: str
    ranks: tuple[int, ...]
    process_group: Any = None
    conflict: Exception | None = None
    ended_by: Exception | None = None
    is_suspended: bool = False
    has_met: bool = False
    num_met: int = 0
    running: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.running.acquire()

    def conflicts_with(self, other: Turn) -> bool:
        """Return whether two calls share their meetings, or messages between two ranks."""
        same_wire = self.process_group is other.process_group
        return self.ranks == other.ranks or (same_wire and len(set(self.ranks) & set(other.ranks)) > 1)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend this call while the user's code runs between two items of an iterator: no meeting is under way then."""
        self.is_suspended = True
        self.running.release()
        try:
            yield
        finally:
            self.running.acquire(timeout=_PATIENCE)
            self.is_suspended = False
        if self.ended_by is not None:
            raise self.ended_by


class Turns:
    """The calls in flight on one rank of a world.

    All calls share the rank's control and transport, whatever their models and threads. The turns cannot belong to a model or
    to a group: two models meet in one store, and two groups of the same ranks meet in that store too.
    """

    def __init__(self) -> None:
        # Reentrant: garbage collection can close an iterator, and so end a call, while this thread holds the lock.
        self._lock = threading.RLock()
        self.in_flight: tuple[Turn, ...] = ()  # oldest first

    def enter(self, turn: Turn) -> Turn | None:
        """Begin a call, or return the call in flight that prevents it."""
        other = self._enter(turn)
        if other is not None and other.is_suspended:
            gc.collect()  # closes an iterator that the user has dropped
            other = self._enter(turn)
        return other

    def _enter(self, turn: Turn) -> Turn | None:
        with self._lock:
            for other in self.in_flight:
                if turn.conflicts_with(other):
                    return other
            self.in_flight = (*self.in_flight, turn)
        return None

    def leave(self, turn: Turn) -> None:
        """End a call."""
        with self._lock:
            self.in_flight = tuple(other for other in self.in_flight if other is not turn)


def refusal(turn: Turn, other: Turn, rank: int) -> RankError:
    """Return the error of a call that was made while another call was in flight."""
    fix = (
        "exhaust the iterator first, or close it"
        if other.is_suspended
        else "make one call after the other, in one thread"
    )
    return RankError(
        f"rank {rank}: {turn.call} was called while {other.call} is in flight on the ranks {list(other.ranks)}, and the "
        f"messages of the two would mix; {fix}"
    )
