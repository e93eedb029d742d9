"""One meeting of ranks in the rendezvous store: the ranks that came, their statements, and one verdict for all of them.

Any set of ranks can meet, and a missing rank leaves nothing pending in the process group. The ranks are a tree (`tree.py`): each
waits for the statements of the ranks below it, and tells the rank above it what all of them state, as one `TreeSummary`. The root
makes the verdict, for which all wait. A rank that others tell waits for a bell, which each of them rings.

Whatever the number of ranks, a leaf waits twice for an answer of the store: there is a verdict, and it reads the verdict. All
else is sent without waiting. A rank with others below it waits four more times, and again four times when it was woken before
all of them had come. Keys are used again in the next meeting of the same ranks, or deleted in it by the rank that wrote them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import INTERRUPTS, Failure
from fsdp_optim.transport.job.job_store import JobStore
from fsdp_optim.transport.long_wait import LongWait
from fsdp_optim.transport.stored_contents import reader
from fsdp_optim.transport.stored_meeting import FANOUT as _FANOUT
from fsdp_optim.transport.stored_meeting import Attendance, StoredMeeting, at_key, bell_key, ended_key
from fsdp_optim.transport.stored_verdict import StoredVerdict, TreeSummary
from fsdp_optim.transport.tree import Tree
from fsdp_optim.transport.verdict import Statement
from fsdp_optim.wire import decode, encode

_QUIET = 5.0  # seconds; a rank that waits longer looks for the missing ranks


@dataclass(frozen=True)
class Meeting(StoredMeeting):
    """The part of this rank in one meeting: it enters, concludes, and reads what others have brought."""

    @classmethod
    def enter(cls, group: RankGroup, store: JobStore) -> Meeting:
        """Begin the next meeting of this rank with the others."""
        group.world.pulse.introduce()
        attendance = store.attended.get(group.ranks)
        if attendance is None:
            who = hashlib.blake2b(repr(group.ranks).encode(), digest_size=8).hexdigest()
            attendance = Attendance(f"fsdp_optim/{who}")
            # An earlier process group may have used this store.
            number = int(store.read(at_key(attendance.prefix, group.rank)) or 0)
            attendance.number = attendance.complete = number
            if Tree(len(group.ranks), _FANOUT).below(group.position):
                store.compare_set(ended_key(attendance.prefix), "", "0")
            store.attended[group.ranks] = attendance
        return cls(group, store, attendance.prefix, attendance.number + 1, attendance, _FANOUT)

    def reader(self, verdict: StoredVerdict) -> Callable[[int], bytes]:
        """Return a function that gives the content of a rank: in the verdict, or in the store, where it is before the verdict."""
        return reader(verdict, lambda rank, part: self._read(f"content/{rank}/{part}"))

    def conclude(self, statement: Statement) -> tuple[StoredVerdict, BaseException | None]:
        """Publish this rank's statement, wait for the other ranks, and read the verdict.

        An interrupt of this rank is its error, as long as the others can learn of it in this meeting. Later the rank does its
        part of the meeting first, and returns the interrupt with the verdict.
        """
        held, verdict, ends = Failure(), None, statement.fatal
        while verdict is None:
            try:
                self.attendance.number = self.number
                verdict = self._made(statement) if ends else self._attended(statement)
            except INTERRUPTS as error:
                held.note(error)
                ends = True
                if statement.error is None:
                    statement = statement._replace(error=error)
        self.group.turn.num_met += not (verdict.missing or verdict.reasons)
        with held:
            self._leave(verdict)
        return verdict, held.error

    def _attended(self, statement: Statement) -> StoredVerdict:
        """Take part in the meeting to its end."""
        part = MeetingPart(self, statement)
        begun = time.monotonic()
        while (left := begun + min(_QUIET, self.group.timeout) - time.monotonic()) > 0:
            verdict = part.wait(left)
            if verdict is not None:
                return verdict
        return LongWait(self, part.look, statement, begun).until_verdict()

    def _made(self, statement: Statement) -> StoredVerdict:
        """End the meeting at once, by the error of this rank, whose others may never come; return the verdict of the meeting."""
        summary = self._publish(statement)
        return self.decide(StoredVerdict(reasons=summary.reasons))

    def _publish(self, statement: Statement) -> TreeSummary:
        """Come to the meeting. A leaf tells its statement at once."""
        summary = TreeSummary.of(self.group.rank, statement)
        if self.is_leaf:
            self.tell(summary)
        else:
            self.store.set(at_key(self.prefix, self.group.rank), str(self.number))
        return summary

    def tell(self, summary: TreeSummary) -> None:
        """Tell the rank above what this one and those below it state."""
        summary = self._without_long(summary)
        keys, values = [self.told_key(self.position)], [f"{self.number} {encode(summary)}"]
        if self.is_leaf:
            keys.insert(0, at_key(self.prefix, self.group.rank))
            values.insert(0, str(self.number))
        bell = bell_key(self.prefix, self.tree.above(self.position))  # the last, when all else is there
        self.store.multi_set([*keys, bell], [*values, ""])

    def verdict_of(self, summary: TreeSummary) -> StoredVerdict:
        """Make the verdict, on the root, when all have come; return the verdict of the meeting."""
        return self.decide(StoredVerdict.of(self._without_long(summary)))

    def _without_long(self, summary: TreeSummary) -> TreeSummary:
        """Return a summary whose contents are short enough to be told. Others are put into the store."""
        return self.attendance.contents.without_long(summary, self.group.rank, self._put)

    def _put(self, part: int, piece: bytes) -> None:
        """Put a part of the contents that this rank writes into the store."""
        key = self.key(f"content/{self.group.rank}/{part}")
        self.attendance.contents.written.append((self.number, key))
        self.store.set(key, piece)

    def heard(self) -> list[TreeSummary] | StoredVerdict | None:
        """Return what the ranks below this one tell; None where some have not come. Where the meeting has ended, its verdict."""
        keys = [ended_key(self.prefix), *(self.told_key(position) for position in self.tree.below(self.position))]
        if not self.attendance.sees_all_below:
            if not self.store.check(keys):
                return self.verdict() if self.has_verdict() else None
            self.attendance.sees_all_below = True
        ended, *values = self.store.multi_get(keys)
        numbers_and_texts = [value.split(b" ", 1) for value in values]
        if all(int(number) == self.number for number, _ in numbers_and_texts):
            return [decode(TreeSummary, text) for _, text in numbers_and_texts]
        return self.verdict() if int(ended) >= self.number else None

    def answer(self) -> None:
        """Note that this rank has heard the bell, before it looks who has come."""
        self.store.delete_key(bell_key(self.prefix, self.position))

    def waits_for_bell(self, seconds: float) -> bool:
        """Wait until a rank below this one has come, or the meeting was ended; returns whether the bell rings."""
        return self.store.wait(bell_key(self.prefix, self.position), min(seconds, self.group.timeout))

    def _leave(self, verdict: StoredVerdict) -> None:
        """Delete the keys of earlier meetings, which every rank has left when all ranks have come to this one."""
        if not verdict.is_complete:
            if self.tree.below(self.position):  # a rank may have rung for the next meeting already
                self.store.set(bell_key(self.prefix, self.position), "")
            return
        attendance = self.attendance
        attendance.contents.forget(self.number, self.store)
        if self.position == 0:
            for number in range(max(attendance.complete, 1), self.number):
                earlier = replace(self, number=number)
                if number > attendance.complete:  # it was ended early
                    self.store.delete_key(earlier.key("ends"))
                self.store.delete_key(earlier.key("verdict"))
        attendance.complete = self.number


class MeetingPart:
    """The part of one rank in a meeting: it comes, hears the ranks below, tells the rank above, and waits for the verdict."""

    def __init__(self, meeting: Meeting, statement: Statement) -> None:
        self._meeting = meeting
        self._own = meeting._publish(statement)
        self._has_told = meeting.is_leaf

    def wait(self, seconds: float) -> StoredVerdict | None:
        """Wait until the next thing happens, for at most `seconds`; return the verdict, if that is it."""
        if self._has_told:
            return self._meeting.verdict() if self._meeting.sees_verdict(seconds) else None
        if len(self._meeting.group.ranks) > 1 and not self._meeting.waits_for_bell(seconds):
            return None
        return self._hear()

    def look(self) -> StoredVerdict | None:
        """Do what can be done without waiting; return the verdict, if it is there."""
        verdict = None if self._has_told else self._hear()
        if verdict is None and self._meeting.has_verdict():
            verdict = self._meeting.verdict()
        return verdict

    def _hear(self) -> StoredVerdict | None:
        self._meeting.answer()
        heard = self._meeting.heard()
        if heard is None or isinstance(heard, StoredVerdict):
            return heard
        summary = TreeSummary.merged([self._own, *heard])
        if self._meeting.position == 0:
            return self._meeting.verdict_of(summary)
        self._meeting.tell(summary)
        self._has_told = True
        return None
