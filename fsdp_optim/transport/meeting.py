"""One meeting of ranks in the rendezvous store: who came, what they said, and one verdict for all of them.

Any set of ranks can meet, and nothing is pending in the process group when a rank does not come. A meeting is a handful of
store operations per rank, whatever the number of ranks. The last of them to leave a meeting takes its keys away.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from fsdp_optim.errors import RankError
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.rendezvous import rendezvous_store
from fsdp_optim.transport.verdict import Reason, Statement, Waiting, absence, at_another_step, deadlock, reason_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger("fsdp_optim")

_MAX_REASONS = 64  # of as many failed ranks the reasons are told
_PART_NBYTES = 4 << 20  # of what ranks tell each other, in one value of the store
_WATCHERS = 16  # of the ranks that wait, so many look for those that do not come: each asks about every rank

_QUIET = 5.0  # seconds; who waits longer looks where the others are
_ASK_EVERY = 0.5  # seconds
_LOOK_AGAIN = 1.5  # times as long
_WARN_AFTER = 30.0  # seconds

# One number counts those that are here, those of them that say something else, and those that tell or fail: one operation.
_DIFFERS, _HAS_MORE = 1 << 20, 1 << 40


@dataclass(frozen=True)
class Record:
    """A verdict as it is in the store.

    Attributes:
        alike, reasons, missing, text, is_deadlock: as in `Verdict`.
        whole: all ranks had come when it was given.
        told: (rank, number of parts of what it told).
        num_errors: errors that are in the store.
    """

    alike: bool = False
    whole: bool = False
    reasons: tuple[Reason, ...] = ()
    missing: tuple[int, ...] = ()
    text: str = ""
    is_deadlock: bool = False
    told: tuple[tuple[int, int], ...] = ()
    num_errors: int = 0

    def encoded(self) -> str:
        """For the store."""
        parts = (self.reasons, self.missing, self.text, self.is_deadlock, self.told, self.num_errors)
        return json.dumps([self.alike, self.whole, *parts])

    @classmethod
    def decoded(cls, encoded: bytes) -> Record:
        """The inverse of `encoded`."""
        alike, whole, reasons, missing, text, is_deadlock, told, num_errors = json.loads(encoded)
        named = tuple((rank, name, message) for rank, name, message in reasons)
        parts = tuple((rank, num) for rank, num in told)
        return cls(alike, whole, named, tuple(missing), text, is_deadlock, parts, num_errors)


@dataclass(frozen=True)
class Meeting:
    """The keys of one meeting in the store: `number` counts this rank's meetings with these ranks.

    One rank decides for all, so that all read the same verdict: the last to come, or the first whose patience ends.
    """

    group: RankGroup
    store: Store
    prefix: str
    number: int

    @classmethod
    def enter(cls, group: RankGroup) -> Meeting:
        """The next meeting of this rank with the others."""
        store = rendezvous_store()
        who = hashlib.blake2b(repr(group.ranks).encode(), digest_size=8).hexdigest()
        prefix = f"fsdp_optim/{who}"
        return cls(group, store, prefix, store.add(_came(prefix, group.rank), 1))

    def key(self, name: str) -> str:
        """Every key of the meeting begins with its number."""
        return f"{self.prefix}/{self.number}/{name}"

    def content(self, rank: int, num_parts: int) -> bytes:
        """What a rank told: it is in the store before the verdict is."""
        return b"".join(bytes(self.store.get(self.key(f"told/{rank}/{part}"))) for part in range(num_parts))

    def conclude(self, statement: Statement) -> Record:
        """Say it, wait for the others, and read how it ended."""
        number = self.store.add(self.key("here"), 1 + self._say(statement))
        is_last = number % _DIFFERS == len(self.group.ranks)
        if (is_last or statement.fatal) and self.decides():
            has_more = number >= _HAS_MORE
            verdict = Record(
                alike=is_last and number % _HAS_MORE < _DIFFERS,
                whole=is_last,
                reasons=self._reasons() if has_more else (),
                told=tuple(self._tellers()) if has_more else (),
                num_errors=self.store.add(self.key("errors"), 0) if has_more else 0,
            )
            self.write(verdict)
            if is_last:
                self._forget_the_previous()
            return verdict
        if not self._sees_verdict(_QUIET):
            _Wait(self, statement, watches=number % _DIFFERS <= _WATCHERS).until_verdict()
        return Record.decoded(self.store.get(self.key("verdict")))

    def _say(self, statement: Statement) -> int:
        """Put everything that this rank says into the store; what it adds to the number of those that are here."""
        error, differs = statement.error, 0
        if error is None:
            digest = hashlib.blake2b(statement.said, digest_size=16).hexdigest()
            mine = json.dumps([self.group.rank, statement.step, digest])
            rank, step, theirs = json.loads(self.store.compare_set(self.key("first"), "", mine))
            if step != statement.step:
                error = RankError(at_another_step(statement.step, rank, step))
            differs = _DIFFERS if theirs != digest else 0
        if error is not None:
            index = self.store.add(self.key("errors"), 1)
            if index <= _MAX_REASONS:
                reason = (self.group.rank, type(error).__name__, str(error))
                self.store.set(self.key(f"error/{index}"), json.dumps(reason))
            return _HAS_MORE
        if statement.content:
            self._put(statement.content)
            return differs + _HAS_MORE
        return differs

    def _put(self, content: bytes) -> None:
        num_parts = -(-len(content) // _PART_NBYTES)
        for part in range(num_parts):
            piece = content[part * _PART_NBYTES : (part + 1) * _PART_NBYTES]
            self.store.set(self.key(f"told/{self.group.rank}/{part}"), piece)  # type: ignore[arg-type]  # takes bytes
        index = self.store.add(self.key("tellers"), 1)
        self.store.set(self.key(f"teller/{index}"), json.dumps([self.group.rank, num_parts]))

    def decides(self) -> bool:
        """Whether this rank decides how the meeting ended: the first that asks."""
        return bool(self.store.add(self.key("decided"), 1) == 1)

    def write(self, verdict: Record) -> None:
        """Let all who are here go."""
        self.store.set(self.key("verdict"), verdict.encoded())

    def _sees_verdict(self, seconds: float) -> bool:
        """Wait for the verdict, at most so long."""
        try:
            self.store.wait([self.key("verdict")], timedelta(seconds=min(seconds, self.group.timeout)))
        except RuntimeError:
            return bool(self.store.check([self.key("verdict")]))  # raises where the store is gone
        return True

    def _reasons(self) -> tuple[Reason, ...]:
        number = min(self.store.add(self.key("errors"), 0), _MAX_REASONS)
        told = [json.loads(self.store.get(self.key(f"error/{index + 1}"))) for index in range(number)]
        return tuple(sorted((rank, name, message) for rank, name, message in told))

    def _tellers(self) -> Iterator[tuple[int, int]]:
        for index in range(self.store.add(self.key("tellers"), 0)):
            rank, num_parts = json.loads(self.store.get(self.key(f"teller/{index + 1}")))
            yield rank, num_parts

    def missing(self) -> tuple[int, ...]:
        """The ranks that have not come."""
        came = {rank: self.store.add(_came(self.prefix, rank), 0) for rank in self.group.ranks}
        return tuple(rank for rank, number in came.items() if number < self.number)

    def catch_up(self, verdict: Record) -> bool:
        """Go to the meeting that the others are in now, where they are in a later one than this; else stay.

        A rank that skipped a call would else be one meeting behind for the rest of the job.
        """
        others = (rank for rank in self.group.ranks if rank not in verdict.missing)
        newest = self.store.add(_came(self.prefix, next(others, self.group.rank)), 0)
        if newest <= self.number:
            return False
        self.pass_by(self.group.rank, newest - 1)
        return True

    def pass_by(self, rank: int, number: int) -> None:
        """A rank is not going to come to its meetings up to `number` any more."""
        key = _came(self.prefix, rank)
        while (
            came := self.store.add(key, 0)
        ) < number:  # in one operation: it may come meanwhile, or be passed by twice
            if self.store.compare_set(key, str(came), str(number)) == str(number).encode():
                return

    def _forget_the_previous(self) -> None:
        """Every rank has left the previous meeting when all are in this one: its keys can go.

        One to which not all came has not taken away the keys of the one before it, so they go now.
        """
        previous = replace(self, number=self.number - 1)
        while self.store.check([previous.key("verdict")]):
            verdict = Record.decoded(self.store.get(previous.key("verdict")))
            previous._forget(verdict)
            if verdict.whole:
                return
            previous = replace(previous, number=previous.number - 1)

    def _forget(self, verdict: Record) -> None:
        """Take away all keys of this meeting."""
        told, num_errors = verdict.told, verdict.num_errors
        if not verdict.whole:  # ranks that came later may have said more
            told, num_errors = tuple(self._tellers()), self.store.add(self.key("errors"), 0)
        names = ["verdict", "here", "decided", "first"]
        if told or num_errors or not verdict.whole:
            names += ["errors", "tellers", *(f"error/{index + 1}" for index in range(min(num_errors, _MAX_REASONS)))]
            names += [f"teller/{index + 1}" for index in range(len(told))]
            names += [f"told/{rank}/{part}" for rank, num_parts in told for part in range(num_parts)]
        for name in names:
            self.store.delete_key(self.key(name))


def _came(prefix: str, rank: int) -> str:
    return f"{prefix}/came/{rank}"


@dataclass(frozen=True)
class _Wait:
    """A rank that waits for others longer than usual: it says where it is, looks where they are, and gives up at last.

    Ranks that wait for each other in two meetings, because they were given different process groups or make calls about
    different ranks, find each other so, and raise long before the timeout.
    """

    meeting: Meeting
    statement: Statement
    watches: bool

    def until_verdict(self) -> None:
        """Return when there is a verdict; give one when the patience ends."""
        timeout, begun = self.meeting.group.timeout, time.monotonic() - min(_QUIET, self.meeting.group.timeout)
        warned, look_at = False, 0.0
        self.store.set(self._place(self.meeting.group.rank), self._where())
        try:
            while not self.store.check([self.meeting.key("verdict")]):
                waited = time.monotonic() - begun
                if waited >= timeout:
                    self._give_up()
                    return
                if self.watches and waited >= look_at:
                    look_at = waited * _LOOK_AGAIN
                    self._look()
                if self.watches and waited >= _WARN_AFTER and not warned:
                    warned = True
                    absent = self._absence(self.meeting.missing(), round(waited))
                    log.warning("%s; waiting until %g s have passed", absent, timeout)
                time.sleep(max(min(_ASK_EVERY, timeout - waited), 0.0))
        finally:
            self.store.delete_key(self._place(self.meeting.group.rank))

    @property
    def store(self) -> Store:
        return self.meeting.store

    @staticmethod
    def _place(rank: int) -> str:
        return f"fsdp_optim/waits/{rank}"

    def _where(self) -> str:
        """Where this rank waits, for the others to read."""
        group = self.meeting.group
        place = (self.meeting.prefix, self.meeting.number, group.ranks)
        return json.dumps([*place, self.statement.step, reason_of(self.statement.error), group.is_alone])

    def _look(self) -> None:
        """Look for a rank that waits for this one somewhere else; then neither can go on, and both raise."""
        me = self.meeting.group.rank
        for rank in self.meeting.missing()[:_WATCHERS] if self.meeting.group.is_alone else ():
            if not self.store.check([self._place(rank)]):
                continue
            prefix, number, ranks, step, reason, is_alone = json.loads(self.store.get(self._place(rank)))
            if prefix == self.meeting.prefix or me not in ranks or not is_alone:
                continue
            other = replace(
                self.meeting, group=replace(self.meeting.group, ranks=tuple(ranks)), prefix=prefix, number=number
            )
            mine = Waiting(me, self.meeting.group.ranks, self.statement.step, reason_of(self.statement.error))
            self._part(other, deadlock(mine, Waiting(rank, tuple(ranks), step, reason)))
            return

    def _part(self, other: Meeting, text: str) -> None:
        """End this meeting and another one whose ranks wait for each other."""
        if not other.decides():
            return
        absent = {one: one.missing() for one in (other, self.meeting)}
        decided = {other: self.meeting, **({self.meeting: other} if self.meeting.decides() else {})}
        for one, elsewhere in decided.items():
            for rank in set(absent[one]) & (set(elsewhere.group.ranks) - set(absent[elsewhere])):
                one.pass_by(rank, one.number)  # it hears of it where it waits
        for one in decided:
            one.write(Record(missing=absent[one] or (-1,), text=text, is_deadlock=True))

    def _give_up(self) -> None:
        if self.meeting.decides():
            absent = self.meeting.missing()
            text = self._absence(absent, self.meeting.group.timeout)
            self.meeting.write(Record(missing=absent or (-1,), text=text))
        else:  # another rank is about to write what it has decided
            self.store.wait([self.meeting.key("verdict")], timedelta(seconds=max(self.meeting.group.timeout, _QUIET)))

    def _absence(self, missing: tuple[int, ...], seconds: float) -> str:
        return absence(self.statement.step, self.meeting.group.ranks, missing, seconds)
