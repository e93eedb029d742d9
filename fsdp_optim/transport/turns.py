"""One call at a time on the same ranks: the calls that are in flight on this process, and why one of them has to end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fsdp_optim.errors import RankError

_PATIENCE = 10.0  # seconds for another thread to tell the ranks of a suspended call that it is over


@dataclass(eq=False)
class Turn:
    """One call in flight on this rank.

    Attributes:
        spoilt: another call was made while this one was in flight; the ranks hear of it in its next meeting.
        over: the error that ended the call on all ranks while it was suspended.
    """

    call: str
    ranks: tuple[int, ...]
    process_group: Any = None
    spoilt: Exception | None = None
    over: Exception | None = None
    is_suspended: bool = False
    running: threading.Lock = field(default_factory=threading.Lock)  # held but while it is suspended

    def __post_init__(self) -> None:
        self.running.acquire()

    def meets(self, other: Turn) -> bool:
        """Whether two calls share a meeting place, or messages between two ranks."""
        same_wire = self.process_group is other.process_group
        return self.ranks == other.ranks or (same_wire and len(set(self.ranks) & set(other.ranks)) > 1)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The caller has the word: until it comes back, this call has no meeting under way."""
        self.is_suspended = True
        self.running.release()
        try:
            yield
        finally:
            self.running.acquire(timeout=_PATIENCE)
            self.is_suspended = False
        if self.over is not None:
            raise self.over


class Turns:
    """The calls in flight on one rank of a world.

    Whatever model or thread a call is for, it shares the rank's control and transport with the others. It cannot belong to a
    model or a group alone: two models meet in one store, and two groups of the same ranks meet there too.
    """

    def __init__(self) -> None:
        # Collecting garbage can close an iterator, and so end a call, while this thread is in here.
        self._lock = threading.RLock()
        self.in_flight: tuple[Turn, ...] = ()  # oldest first

    def enter(self, turn: Turn) -> Turn | None:
        """Begin a call, or give the one that is in its way."""
        other = self._enter(turn)
        if other is not None and other.is_suspended:
            gc.collect()  # an iterator that nobody has any more is in nobody's way
            other = self._enter(turn)
        return other

    def _enter(self, turn: Turn) -> Turn | None:
        with self._lock:
            for other in self.in_flight:
                if turn.meets(other):
                    return other
            self.in_flight = (*self.in_flight, turn)
        return None

    def leave(self, turn: Turn) -> None:
        """The call is over."""
        with self._lock:
            self.in_flight = tuple(other for other in self.in_flight if other is not turn)


def refusal(turn: Turn, other: Turn, rank: int) -> RankError:
    """What a call raises that was made while another was in flight."""
    way_out = (
        "exhaust the iterator first, or close it"
        if other.is_suspended
        else "make one call after the other, in one thread"
    )
    return RankError(
        f"rank {rank}: {turn.call} was called while {other.call} is in flight on the ranks {list(other.ranks)}, and the "
        f"messages of the two would mix; {way_out}"
    )
