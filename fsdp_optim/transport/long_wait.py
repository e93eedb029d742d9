"""A wait for other ranks that is longer than usual: who is missing, who is lost, and who waits for whom in another meeting."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fsdp_optim.transport.job.job_store import JobStore
from fsdp_optim.transport.job.pulse import Watch, lost_ranks
from fsdp_optim.transport.stored_meeting import StoredMeeting
from fsdp_optim.transport.stored_verdict import StoredVerdict, WaitingPlace, ranks_in, runs_of
from fsdp_optim.transport.verdict import Statement, Waiting, absence, deadlock, loss, reason_of
from fsdp_optim.wire import decode, encode

log = logging.getLogger("fsdp_optim")

_WATCHERS = 16  # waiting ranks that look for missing ranks; each of them asks the store about every rank
_ASK_EVERY, _ASK_AT_LEAST = 0.5, 2.0  # seconds; less often with many ranks,
_ASKS_PER_SECOND = 2000  # of all of them together
_LOOK_AGAIN = 1.5  # a rank looks again when it has waited this many times as long
_WARN_AFTER = 30.0  # seconds
_SOON = 5.0  # seconds in which a rank that ends a meeting writes the verdict


@dataclass(frozen=True)
class LongWait:
    """A wait that is longer than usual: the rank publishes where it waits, looks for the missing ranks, and gives up in the end.

    Ranks that wait for each other in two meetings, because their process groups or their calls are for different ranks, find
    each other in this way, and raise long before the timeout.

    Attributes:
        look: does what this rank must do in the meeting and can do without waiting; returns the verdict, if it is there.
        begun: the `time.monotonic` at which the rank has come.
        watched: the ranks whose signs of life this rank looks at.
    """

    meeting: StoredMeeting
    look: Callable[[], StoredVerdict | None]
    statement: Statement
    begun: float
    watched: dict[int, Watch] = field(default_factory=dict)

    def until_verdict(self) -> StoredVerdict:
        """Return the verdict when it is there; at the timeout, make it."""
        timeout, warned, look_at = self.meeting.group.timeout, False, 0.0
        missing: tuple[int, ...] = ()
        self.store.set(self._place(self.meeting.group.rank), self._where())
        try:
            while (verdict := self.look()) is None:
                waited = time.monotonic() - self.begun
                if waited >= timeout:
                    return self._given_up()
                if self.watches and waited >= look_at:
                    look_at = waited * _LOOK_AGAIN
                    missing = self.meeting.missing()[:_WATCHERS]
                    self._look(missing)
                if self.watches:
                    self._look_for_life(missing)
                if self.watches and waited >= _WARN_AFTER and not warned:
                    warned = True
                    absent = self._absence(self.meeting.missing(), round(waited))
                    log.warning("%s; waiting until %g s have passed", absent, timeout)
                time.sleep(max(min(self._pause, timeout - waited), 0.0))
        finally:
            self.store.delete_key(self._place(self.meeting.group.rank))
        return verdict

    @property
    def store(self) -> JobStore:
        return self.meeting.store

    @property
    def watches(self) -> bool:
        """Whether this is one of the ranks that look for missing ranks: a few from all hosts."""
        return self.meeting.position % -(-self.meeting.tree.size // _WATCHERS) == 0

    @property
    def _pause(self) -> float:
        return min(max(_ASK_EVERY, self.meeting.tree.size / _ASKS_PER_SECOND), _ASK_AT_LEAST)

    @staticmethod
    def _place(rank: int) -> str:
        return f"fsdp_optim/waits/{rank}"

    def _where(self) -> str:
        """Return where this rank waits, as JSON for the other ranks."""
        group = self.meeting.group
        place = (self.meeting.prefix, self.meeting.number, runs_of(group.ranks))
        return encode(WaitingPlace(*place, self.statement.step, reason_of(self.statement.error), group.is_alone))

    def _look_for_life(self, missing: tuple[int, ...]) -> None:
        """End this meeting if a missing rank is lost or, where all have come, a rank that should have told something.

        `missing`: as of the last count of all ranks.
        """
        lost: dict[int, str] = {}
        for rank in missing or self.meeting.silent():
            if rank not in self.watched:
                self.watched[rank] = Watch(self.store, [rank], beats=self.meeting.group.turn.has_met)
            lost.update(self.watched[rank].look())
        if not lost:
            return
        absent = self.meeting.missing()
        gone = {rank: how for rank, how in lost.items() if not absent or rank in absent}
        if gone:
            text = loss(self.statement.step, lost_ranks(gone))
            self.meeting.decide(StoredVerdict(missing=absent or tuple(gone), text=text, is_early=True))

    def _look(self, missing: tuple[int, ...]) -> None:
        """Look for a rank that waits for this rank in another meeting: neither can continue, so both raise."""
        me = self.meeting.group.rank
        for rank in missing if self.meeting.group.is_alone else ():
            place = self.store.read(self._place(rank))
            if place is None:
                continue
            there = decode(WaitingPlace, place)
            ranks = tuple(ranks_in(there.runs))
            if there.prefix == self.meeting.prefix or me not in ranks or not there.is_alone:
                continue
            group = replace(self.meeting.group, ranks=ranks)
            other = replace(self.meeting, group=group, prefix=there.prefix, number=there.number)
            waiting = Waiting(me, self.meeting.group.ranks, self.statement.step, reason_of(self.statement.error))
            self._end_both(other, deadlock(waiting, Waiting(rank, ranks, there.step, there.reason)))
            return

    def _end_both(self, other: StoredMeeting, text: str) -> None:
        """End this meeting and another meeting, whose ranks wait for each other."""
        absent = {meeting: meeting.missing() for meeting in (other, self.meeting)}
        if not all(absent.values()) or any(meeting.has_verdict() for meeting in absent):
            return
        for meeting, elsewhere in ((other, self.meeting), (self.meeting, other)):
            for rank in set(absent[meeting]) & (set(elsewhere.group.ranks) - set(absent[elsewhere])):
                meeting.pass_by(rank, meeting.number)  # the rank gets the verdict of the meeting in which it waits
        for meeting, missing in absent.items():
            meeting.decide(StoredVerdict(missing=missing, text=text, is_early=True))

    def _given_up(self) -> StoredVerdict:
        """End the meeting at the timeout; return its verdict."""
        if not self.meeting.claims_end() and self.meeting.sees_verdict(_SOON):  # another rank writes the verdict
            return self.meeting.verdict()
        absent = self.meeting.missing()
        text = self._absence(absent, self.meeting.group.timeout)
        return self.meeting.decide(StoredVerdict(missing=absent or (-1,), text=text))

    def _absence(self, missing: tuple[int, ...], seconds: float) -> str:
        return absence(self.statement.step, self.meeting.group.ranks, missing, seconds)
