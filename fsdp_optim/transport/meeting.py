"""One meeting of ranks in the rendezvous store: the ranks that came, their statements, and one verdict for all of them.

Any set of ranks can meet, and a missing rank leaves nothing pending in the process group. The ranks are a tree (`tree.py`): each
waits for the statements of the ranks below it, and tells the rank above it what all of them state, as one `Summary`. The root
makes the verdict, for which all wait. A rank that others tell waits for a bell, which each of them rings.

Whatever the number of ranks, a leaf waits twice for an answer of the store: there is a verdict, and it reads the verdict. All
else is sent without waiting. A rank with others below it waits four more times, and again four times when it was woken before
all of them had come. Keys are used again in the next meeting of the same ranks, or deleted in it by the rank that wrote them.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import INTERRUPTS, Failure
from fsdp_optim.transport.job.job_store import JobStore
from fsdp_optim.transport.job.pulse import Watch, lost_ranks
from fsdp_optim.transport.stored_verdict import (
    Blob,
    LongContents,
    StoredVerdict,
    Summary,
    WaitingPlace,
    packed,
    ranks_in,
    runs_of,
    unpacked,
)
from fsdp_optim.transport.tree import Tree
from fsdp_optim.transport.verdict import Statement, Waiting, absence, deadlock, loss, reason_of
from fsdp_optim.wire import decode, encode

log = logging.getLogger("fsdp_optim")

_FANOUT = 64  # ranks that tell one other rank
_PART_NBYTES = 4 << 20  # bytes of a content in one value of the store
_SHORT_NBYTES = 16 << 10  # bytes of contents that travel with the statements, and come with the verdict
_TOGETHER = 512  # values that are read at once
_WATCHERS = 16  # waiting ranks that look for missing ranks; each of them asks the store about every rank

_QUIET = 5.0  # seconds; a rank that waits longer looks for the missing ranks
_ASK_EVERY, _ASK_AT_LEAST = 0.5, 2.0  # seconds; less often with many ranks,
_ASKS_PER_SECOND = 2000  # of all of them together
_LOOK_AGAIN = 1.5  # a rank looks again when it has waited this many times as long
_WARN_AFTER = 30.0  # seconds


@dataclass
class Attendance:
    """What a rank remembers from meeting to meeting with the same ranks.

    Attributes:
        number: the number of its last meeting.
        complete: the number of the last meeting to which all came, as far as this rank knows.
        sees_all_below: whether the ranks below this one have all told something, once.
        written: the keys of contents that this rank has put into the store, and the numbers of their meetings.
    """

    prefix: str
    number: int = 0
    complete: int = 0
    sees_all_below: bool = False
    written: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Meeting:
    """The keys of one meeting in the store. `number` counts this rank's meetings with these ranks.

    The verdict is the first that a rank writes: the root when all have come, or a rank that ends the meeting early.
    """

    group: RankGroup
    store: JobStore
    prefix: str
    number: int
    attendance: Attendance = field(default_factory=lambda: Attendance(""), compare=False)

    @classmethod
    def enter(cls, group: RankGroup, store: JobStore) -> Meeting:
        """Begin the next meeting of this rank with the others."""
        group.world.pulse.introduce()
        attendance = store.attended.get(group.ranks)
        if attendance is None:
            who = hashlib.blake2b(repr(group.ranks).encode(), digest_size=8).hexdigest()
            attendance = Attendance(f"fsdp_optim/{who}")
            number = int(
                store.read(_at(attendance.prefix, group.rank)) or 0
            )  # an earlier process group may have used it
            attendance.number = attendance.complete = number
            if Tree(len(group.ranks), _FANOUT).below(group.position):
                store.compare_set(_ended(attendance.prefix), "", "0")
            store.attended[group.ranks] = attendance
        return cls(group, store, attendance.prefix, attendance.number + 1, attendance)

    @cached_property
    def tree(self) -> Tree:
        """The tree of the ranks of this meeting."""
        return Tree(len(self.group.ranks), _FANOUT)

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

    def reader(self, verdict: StoredVerdict) -> Callable[[int], bytes]:
        """Return a function that gives the content of a rank: in the verdict, or in the store, where it is before the verdict."""
        contents: dict[int, bytes] = {}
        for content in verdict.contents:
            contents.update(dict.fromkeys(ranks_in(content.runs), base64.b64decode(content.base64)))
        num_parts = {rank: own.num_parts for own in verdict.long_contents for rank in ranks_in(own.runs)}
        blobs = {rank: blob for blob in verdict.blobs for rank in ranks_in(blob.runs)}

        def content_of(rank: int) -> bytes:
            if rank in contents:
                return contents[rank]
            if rank in num_parts:
                return self._parts(rank, num_parts[rank])
            if rank not in blobs:
                return b""
            contents.update(unpacked(self._parts(blobs[rank].writer, blobs[rank].num_parts)))
            return contents[rank]

        return content_of

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
        part = _Part(self, statement)
        begun = time.monotonic()
        while (left := begun + min(_QUIET, self.group.timeout) - time.monotonic()) > 0:
            verdict = part.wait(left)
            if verdict is not None:
                return verdict
        return _LongWait(self, part, statement).until_verdict()

    def _made(self, statement: Statement) -> StoredVerdict:
        """End the meeting at once, by the error of this rank, whose others may never come; return the verdict of the meeting."""
        summary = self._publish(statement)
        return self.decide(StoredVerdict(reasons=summary.reasons))

    def _publish(self, statement: Statement) -> Summary:
        """Come to the meeting. A leaf, and a rank with an error that ends the meeting, tells its statement at once."""
        summary = Summary.of(self.group.rank, statement)
        if self.is_leaf:
            self.tell(summary)
        else:
            self.store.set(_at(self.prefix, self.group.rank), str(self.number))
        return summary

    def tell(self, summary: Summary) -> None:
        """Tell the rank above what this one and those below it state."""
        summary = self._without_long(summary)
        keys, values = [self._told(self.position)], [f"{self.number} {encode(summary)}"]
        if self.is_leaf:
            keys.insert(0, _at(self.prefix, self.group.rank))
            values.insert(0, str(self.number))
        bell = _bell(self.prefix, self.tree.above(self.position))  # the last, when all else is there
        self.store.multi_set([*keys, bell], [*values, ""])

    def verdict_of(self, summary: Summary) -> StoredVerdict:
        """Make the verdict, on the root, when all have come; return the verdict of the meeting."""
        return self.decide(StoredVerdict.of(self._without_long(summary)))

    def decide(self, verdict: StoredVerdict) -> StoredVerdict:
        """Put a verdict into the store if there is none, which ends the meeting; return the verdict of the meeting."""
        value = self.store.compare_set(self.key("verdict"), "", encode(verdict))
        verdict = decode(StoredVerdict, value)
        if not verdict.is_complete:  # those that others tell wait for these others, and must learn that they need not
            keys = [_bell(self.prefix, position) for position in self.tree.inner]
            self.store.multi_set([_ended(self.prefix), *keys], [str(self.number), *([""] * len(keys))])
        return verdict

    def _without_long(self, summary: Summary) -> Summary:
        """Return a summary whose contents are short enough to be told. Others are put into the store."""
        if summary.content_nbytes <= _SHORT_NBYTES:
            return summary
        rank = self.group.rank
        if summary.contents[0].runs == ((rank, rank),) and len(summary.contents) == 1:
            own = self._put(base64.b64decode(summary.contents[0].base64))
            long_contents = (*summary.long_contents, LongContents(own, ((rank, rank),)))
            return msgspec.structs.replace(summary, contents=(), long_contents=long_contents)
        runs = runs_of(rank for content in summary.contents for rank in ranks_in(content.runs))
        blob = Blob(rank, self._put(packed(summary.contents)), runs)
        return msgspec.structs.replace(summary, contents=(), blobs=(*summary.blobs, blob))

    def _put(self, content: bytes) -> int:
        """Put bytes of this rank into the store; return the number of parts."""
        parts = range(0, len(content), _PART_NBYTES)
        for part, first in enumerate(parts):
            key = self.key(f"content/{self.group.rank}/{part}")
            self.attendance.written.append((self.number, key))
            self.store.set(key, content[first : first + _PART_NBYTES])
        return len(parts)

    def _parts(self, rank: int, num_parts: int) -> bytes:
        return b"".join(self._read(f"content/{rank}/{part}") for part in range(num_parts))

    def heard(self) -> list[Summary] | StoredVerdict | None:
        """Return what the ranks below this one tell; None where some have not come. Where the meeting has ended, its verdict."""
        keys = [_ended(self.prefix), *(self._told(position) for position in self.tree.below(self.position))]
        if not self.attendance.sees_all_below:
            if not self.store.check(keys):
                return self.verdict() if self.has_verdict() else None
            self.attendance.sees_all_below = True
        ended, *told = self.store.multi_get(keys)
        numbers_and_texts = [value.split(b" ", 1) for value in told]
        if all(int(number) == self.number for number, _ in numbers_and_texts):
            return [decode(Summary, text) for _, text in numbers_and_texts]
        return self.verdict() if int(ended) >= self.number else None

    def answer(self) -> None:
        """Note that this rank has heard the bell, before it looks who has come."""
        self.store.delete_key(_bell(self.prefix, self.position))

    def waits_for_bell(self, seconds: float) -> bool:
        """Wait until a rank below this one has come, or the meeting was ended; returns whether the bell rings."""
        return self.store.wait(_bell(self.prefix, self.position), min(seconds, self.group.timeout))

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

    def _told(self, position: int) -> str:
        """Return the key with what a position has told, after the number of the meeting. It is used in every meeting."""
        return f"{self.prefix}/told/{position}"

    def claims_end(self) -> bool:
        """Return whether this rank is the first that ends the meeting at the timeout."""
        return self.store.add(self.key("ends"), 1) == 1

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that have not come."""
        numbers = self._numbers([_at(self.prefix, rank) for rank in self.group.ranks])
        return tuple(rank for rank, number in zip(self.group.ranks, numbers, strict=True) if number < self.number)

    def silent(self) -> tuple[int, ...]:
        """Return the ranks of which one must tell something next, when all have come."""
        inner = self.tree.inner[1:]
        numbers = self._numbers([self._told(position) for position in inner])
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
        last = self.store.add(_came(self.prefix, self.group.rank), 0)
        if last < self.number:
            others = (rank for rank in self.group.ranks if rank not in verdict.missing)
            newest = int(self.store.read(_at(self.prefix, next(others, self.group.rank))) or 0)
            if newest <= self.number:
                return False
            last = newest - 1
        self.attendance.number = last
        return True

    def pass_by(self, rank: int, number: int) -> None:
        """Count a rank as come to its meetings up to `number`, so that its next meeting has the number after that."""
        key = _came(self.prefix, rank)
        while (came := self.store.add(key, 0)) < number:
            # compare_set, because the rank may come meanwhile, or another rank may pass it by at the same time.
            if self.store.compare_set(key, str(came), str(number)) == str(number).encode():
                return

    def _leave(self, verdict: StoredVerdict) -> None:
        """Delete the keys of earlier meetings, which every rank has left when all ranks have come to this one."""
        if not verdict.is_complete:
            if self.tree.below(self.position):  # a rank may have rung for the next meeting already
                self.store.set(_bell(self.prefix, self.position), "")
            return
        attendance = self.attendance
        while attendance.written and attendance.written[0][0] < self.number:
            self.store.delete_key(attendance.written[0][1])
            attendance.written.pop(0)
        if self.position == 0:
            for number in range(max(attendance.complete, 1), self.number):
                earlier = replace(self, number=number)
                if number > attendance.complete:  # it was ended early
                    self.store.delete_key(earlier.key("ends"))
                self.store.delete_key(earlier.key("verdict"))
        attendance.complete = self.number


def _at(prefix: str, rank: int) -> str:
    """Return the key with the number of a rank's last meeting."""
    return f"{prefix}/at/{rank}"


def _came(prefix: str, rank: int) -> str:
    """Return the key with the number of the last meeting by which others have passed a rank."""
    return f"{prefix}/came/{rank}"


def _bell(prefix: str, position: int) -> str:
    """Return the key that is there when a position must look who has come."""
    return f"{prefix}/bell/{position}"


def _ended(prefix: str) -> str:
    """Return the key with the number of the last meeting that was ended early."""
    return f"{prefix}/ended"


class _Part:
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
        summary = Summary.merged([self._own, *heard])
        if self._meeting.position == 0:
            return self._meeting.verdict_of(summary)
        self._meeting.tell(summary)
        self._has_told = True
        return None


@dataclass(frozen=True)
class _LongWait:
    """A wait that is longer than usual: the rank publishes where it waits, looks for the missing ranks, and gives up in the end.

    Ranks that wait for each other in two meetings, because their process groups or their calls are for different ranks, find
    each other in this way, and raise long before the timeout.
    """

    meeting: Meeting
    part: _Part
    statement: Statement
    watched: dict[int, Watch] = field(default_factory=dict)

    def until_verdict(self) -> StoredVerdict:
        """Return the verdict when it is there; at the timeout, make it."""
        timeout, begun = self.meeting.group.timeout, time.monotonic() - min(_QUIET, self.meeting.group.timeout)
        warned, look_at = False, 0.0
        missing: tuple[int, ...] = ()
        self.store.set(self._place(self.meeting.group.rank), self._where())
        try:
            while (verdict := self.part.look()) is None:
                waited = time.monotonic() - begun
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
            self._part(other, deadlock(waiting, Waiting(rank, ranks, there.step, there.reason)))
            return

    def _part(self, other: Meeting, text: str) -> None:
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
        if not self.meeting.claims_end() and self.meeting.sees_verdict(
            _QUIET
        ):  # another rank is about to write the verdict
            return self.meeting.verdict()
        absent = self.meeting.missing()
        text = self._absence(absent, self.meeting.group.timeout)
        return self.meeting.decide(StoredVerdict(missing=absent or (-1,), text=text))

    def _absence(self, missing: tuple[int, ...], seconds: float) -> str:
        return absence(self.statement.step, self.meeting.group.ranks, missing, seconds)
