"""One meeting of ranks in the rendezvous store: the ranks that came, their statements, and one verdict for all of them.

Any set of ranks can meet, and a missing rank leaves nothing pending in the process group. Whatever the number of ranks, a rank
waits three times for an answer of the store: it is counted, it learns that there is a verdict, it reads the verdict. The last
rank to come waits twice: it is counted, it reads the statements of the others. All else is sent without waiting. The keys of a
meeting are deleted in the next meeting of the same ranks, by the lowest rank, which mostly is on the host of the store.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fsdp_optim.errors import class_name
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import INTERRUPTS, Failure
from fsdp_optim.transport.job.job_store import JobStore
from fsdp_optim.transport.job.pulse import Watch, lost_ranks
from fsdp_optim.transport.stored_verdict import ContentNote, Notes, StepNote, StoredVerdict, WaitingPlace
from fsdp_optim.transport.verdict import Reason, Statement, Waiting, absence, deadlock, loss, reason_of
from fsdp_optim.wire import decode, encode

log = logging.getLogger("fsdp_optim")

_MAX_REASONS = 64  # failed ranks whose reasons the error names
_PART_NBYTES = 4 << 20  # bytes of a content in one value of the store
_SHORT_NBYTES = 64 << 10  # bytes of all contents of a meeting that come with the verdict
_WATCHERS = 16  # waiting ranks that look for missing ranks; each of them asks the store about every rank

_QUIET = 5.0  # seconds; a rank that waits longer looks for the missing ranks
_ASK_EVERY = 0.5  # seconds
_LOOK_AGAIN = 1.5  # a rank looks again when it has waited this many times as long
_WARN_AFTER = 30.0  # seconds

# One number, and so one store operation, counts three things: ranks that came, ranks with an error, ranks that decide early.
_FAILED, _DECIDED = 1 << 20, 1 << 40


@dataclass(frozen=True)
class Meeting:
    """The keys of one meeting in the store. `number` counts this rank's meetings with these ranks.

    One rank writes the verdict for all ranks: the last rank to come, or the first rank whose timeout ends.
    """

    group: RankGroup
    store: JobStore
    prefix: str
    number: int
    previous: StoredVerdict | None = None
    """The verdict of the meeting before, where this rank knows it."""

    @classmethod
    def enter(cls, group: RankGroup, store: JobStore) -> Meeting:
        """Begin the next meeting of this rank with the others."""
        group.world.pulse.introduce()
        who = hashlib.blake2b(repr(group.ranks).encode(), digest_size=8).hexdigest()
        prefix = f"fsdp_optim/{who}"
        if prefix not in store.last_meetings:  # an earlier process group may have used this store
            store.last_meetings[prefix] = int(store.read(_at(prefix, group.rank)) or 0), None
        number, previous = store.last_meetings[prefix]
        store.set(_at(prefix, group.rank), str(number + 1))
        return cls(group, store, prefix, number + 1, previous)

    def key(self, name: str) -> str:
        """Return the full key of `name` in this meeting."""
        return f"{self.prefix}/{self.number}/{name}"

    def reader(self, verdict: StoredVerdict) -> Callable[[int], bytes]:
        """Return a function that gives the content of a rank: in the verdict, or in the store, where it is before the verdict."""
        notes = {note.rank: note for note in verdict.contents}

        def content(rank: int) -> bytes:
            note = notes.get(rank, ContentNote(rank, 0, ""))
            parts = (self._read(f"content/{rank}/{part}") for part in range(note.num_parts))
            return b"".join(parts) if note.num_parts else base64.b64decode(note.short)

        return content

    def conclude(self, statement: Statement) -> tuple[StoredVerdict, BaseException | None]:
        """Publish this rank's statement, wait for the other ranks, and read the verdict.

        An interrupt of this rank is its error, as long as the others can learn of it in this meeting. Later the rank does its
        part of the meeting first, and returns the interrupt with the verdict.
        """
        held, self.store.last_meetings[self.prefix] = Failure(), (self.number, None)
        try:
            number = self._come(statement)
            makes = number % _FAILED == len(self.group.ranks) and number < _DECIDED
        except INTERRUPTS as error:  # whether this rank was counted is unknown, so it is counted again
            held.note(error)
            number = self._come(statement._replace(error=error))
            makes = number % _FAILED >= len(self.group.ranks)
        is_last, verdict = makes, None
        while verdict is None:
            try:
                makes = makes or ((statement.fatal or held.error is not None) and self.decides())
                if makes:
                    verdict = self._made(is_last, has_errors=held.error is not None or number % _DECIDED >= _FAILED)
                    # After an interrupt this rank may have written already: a verdict that others have read must stay.
                    self.write_if_missing(verdict) if held.error is not None else self.write(verdict)
                elif not self._sees_verdict(_QUIET):
                    _LongWait(self, statement, watches=number % _FAILED <= _WATCHERS).until_verdict()
                if not makes or held.error is not None:
                    verdict = decode(StoredVerdict, self._read("verdict"))
            except INTERRUPTS as error:
                if held.error is None and statement.error is None:
                    self._state_late(error)
                held.note(error)
                verdict = None
        self.group.turn.num_met += not (verdict.missing or verdict.reasons)
        with held:
            if verdict.is_complete and self.group.position == 0:
                self._forget_the_previous()
        self.store.last_meetings[self.prefix] = self.number, verdict
        return verdict, held.error

    def _come(self, statement: Statement) -> int:
        """Publish this rank's statement, and count it as come."""
        self._publish(statement)
        return self.store.add(self.key("here"), 1 if statement.error is None else 1 + _FAILED)

    def _state_late(self, error: BaseException) -> None:
        """State the error of this rank, which has come without one."""
        self._put_reason(error)
        self.store.add(self.key("here"), _FAILED)

    def _publish(self, statement: Statement) -> None:
        """Put this rank's statement into the store."""
        error, step, digest = statement.error, "", ""
        if error is None:
            step, digest = statement.step, hashlib.blake2b(statement.compared, digest_size=16).hexdigest()
            if statement.content:
                self._put(statement.content)
        else:
            self._put_reason(error)
        self._note(StepNote(self.group.rank, step, digest))

    def _put_reason(self, error: BaseException) -> None:
        index = self.store.add(self.key("errors"), 1)
        if index <= _MAX_REASONS:
            self.store.set(self.key(f"error/{index}"), encode(Reason(self.group.rank, class_name(error), str(error))))

    def _note(self, note: StepNote | ContentNote) -> None:
        self.store.append(self.key("notes"), encode(note) + "\n")

    def _notes(self) -> Notes:
        return Notes.decoded(self.store.read(self.key("notes")) or b"")

    def _put(self, content: bytes) -> None:
        if len(content) <= _SHORT_NBYTES // len(self.group.ranks):
            self._note(ContentNote(self.group.rank, 0, base64.b64encode(content).decode()))
            return
        num_parts = -(-len(content) // _PART_NBYTES)
        for part in range(num_parts):
            piece = content[part * _PART_NBYTES : (part + 1) * _PART_NBYTES]
            self.store.set(self.key(f"content/{self.group.rank}/{part}"), piece)
        self._note(ContentNote(self.group.rank, num_parts, ""))

    def _made(self, is_last: bool, has_errors: bool) -> StoredVerdict:
        """Make the verdict, on the rank that decides when all have come, or when it has broken a connection."""
        notes = self._notes()
        num_errors = self.store.add(self.key("errors"), 0) if has_errors else 0
        reasons = (self._errors(num_errors) + notes.at_other_steps())[:_MAX_REASONS]
        return StoredVerdict(
            all_equal=is_last and not reasons and notes.are_all_equal,
            is_complete=is_last,
            reasons=tuple(sorted(reasons)),
            contents=tuple(notes.contents),
            num_errors=num_errors,
        )

    def _errors(self, num_errors: int) -> list[Reason]:
        return [decode(Reason, self._read(f"error/{index + 1}")) for index in range(min(num_errors, _MAX_REASONS))]

    def decides(self) -> bool:
        """Return whether this rank makes the verdict early: it is the first rank that calls this, and not all have come."""
        number = self.store.add(self.key("here"), _DECIDED)
        return number < 2 * _DECIDED and number % _FAILED < len(self.group.ranks)

    def write(self, verdict: StoredVerdict) -> None:
        """Put the verdict into the store, which ends the meeting for all waiting ranks."""
        self.store.set(self.key("verdict"), encode(verdict))

    def write_if_missing(self, verdict: StoredVerdict) -> None:
        """Put a verdict into the store where there is none."""
        self.store.compare_set(self.key("verdict"), "", encode(verdict))

    def _read(self, name: str) -> bytes:
        """Return a value of this meeting that exists."""
        value = self.store.read(self.key(name))
        return self.store.get(self.key(name)) if value is None else value  # which raises the error

    def _sees_verdict(self, seconds: float) -> bool:
        """Wait for the verdict for at most `seconds`; returns whether the verdict is there."""
        return self.store.wait(self.key("verdict"), min(seconds, self.group.timeout))

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that have not come."""
        came = {note.rank for note in self._notes().steps}
        return tuple(rank for rank in self.group.ranks if rank not in came)

    def last_to_come(self) -> tuple[int, ...]:
        """Return the other ranks that have come, the last one first."""
        return tuple(note.rank for note in reversed(self._notes().steps) if note.rank != self.group.rank)

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
        self.store.last_meetings[self.prefix] = last, None
        return True

    def pass_by(self, rank: int, number: int) -> None:
        """Count a rank as come to its meetings up to `number`, so that its next meeting has the number after that."""
        key = _came(self.prefix, rank)
        while (came := self.store.add(key, 0)) < number:
            # compare_set, because the rank may come meanwhile, or another rank may pass it by at the same time.
            if self.store.compare_set(key, str(came), str(number)) == str(number).encode():
                return

    def _forget_the_previous(self) -> None:
        """Delete the keys of the previous meeting, which every rank has left when all ranks have come to this one.

        A meeting with missing ranks has not deleted the keys of the meeting before it, so these are deleted here too.
        """
        earlier, verdict = replace(self, number=self.number - 1), self.previous
        while True:
            if verdict is None:
                value = self.store.read(earlier.key("verdict"))
                if value is None:
                    return
                verdict = decode(StoredVerdict, value)
            earlier._forget(verdict)
            if verdict.is_complete:
                return
            earlier, verdict = replace(earlier, number=earlier.number - 1), None

    def _forget(self, verdict: StoredVerdict) -> None:
        """Delete all keys of this meeting."""
        contents, num_errors = verdict.contents, verdict.num_errors
        if not verdict.is_complete:  # ranks that came after the verdict may have added contents and errors
            contents, num_errors = tuple(self._notes().contents), self.store.add(self.key("errors"), 0)
        names = ["verdict", "here", "notes"]
        if num_errors or not verdict.is_complete:
            names += ["errors", *(f"error/{index + 1}" for index in range(min(num_errors, _MAX_REASONS)))]
        names += [f"content/{note.rank}/{part}" for note in contents for part in range(note.num_parts)]
        for name in names:
            self.store.delete_key(self.key(name))


def _at(prefix: str, rank: int) -> str:
    """Return the key with the number of a rank's last meeting."""
    return f"{prefix}/at/{rank}"


def _came(prefix: str, rank: int) -> str:
    """Return the key with the number of the last meeting by which others have passed a rank."""
    return f"{prefix}/came/{rank}"


@dataclass(frozen=True)
class _LongWait:
    """A wait that is longer than usual: the rank publishes where it waits, looks for the missing ranks, and gives up in the end.

    Ranks that wait for each other in two meetings, because their process groups or their calls are for different ranks, find
    each other in this way, and raise long before the timeout.
    """

    meeting: Meeting
    statement: Statement
    watches: bool
    watched: dict[int, Watch] = field(default_factory=dict)

    def until_verdict(self) -> None:
        """Return when there is a verdict; at the timeout, make the verdict."""
        timeout, begun = self.meeting.group.timeout, time.monotonic() - min(_QUIET, self.meeting.group.timeout)
        warned, look_at = False, 0.0
        missing: tuple[int, ...] = ()
        self.store.set(self._place(self.meeting.group.rank), self._where())
        try:
            while not self.store.check([self.meeting.key("verdict")]):
                waited = time.monotonic() - begun
                if waited >= timeout:
                    self._give_up()
                    return
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
                time.sleep(max(min(_ASK_EVERY, timeout - waited), 0.0))
        finally:
            self.store.delete_key(self._place(self.meeting.group.rank))

    @property
    def store(self) -> JobStore:
        return self.meeting.store

    @staticmethod
    def _place(rank: int) -> str:
        return f"fsdp_optim/waits/{rank}"

    def _where(self) -> str:
        """Return where this rank waits, as JSON for the other ranks."""
        group = self.meeting.group
        place = (self.meeting.prefix, self.meeting.number, group.ranks)
        return encode(WaitingPlace(*place, self.statement.step, reason_of(self.statement.error), group.is_alone))

    def _look_for_life(self, missing: tuple[int, ...]) -> None:
        """End this meeting if a missing rank is lost, or the rank that came last and should have written the verdict.

        `missing`: as of the last count of all ranks.
        """
        lost: dict[int, str] = {}
        for rank in missing or self.meeting.last_to_come()[:_WATCHERS]:
            if rank not in self.watched:
                self.watched[rank] = Watch(self.store, [rank], beats=self.meeting.group.turn.has_met)
            lost.update(self.watched[rank].look())
        if not lost:
            return
        absent = self.meeting.missing()
        if not absent:
            self._take_over(lost)
        elif lost.keys() & set(absent) and self.meeting.decides():
            text = loss(self.statement.step, lost_ranks({rank: lost[rank] for rank in lost if rank in absent}))
            self.meeting.write(StoredVerdict(missing=self.meeting.missing(), text=text, is_early=True))

    def _take_over(self, lost: dict[int, str]) -> None:
        """Write the verdict of a meeting to which all have come, where the last rank is lost and has written none."""
        text = loss(self.statement.step, lost_ranks(lost))
        self.meeting.write_if_missing(StoredVerdict(missing=tuple(lost), text=text, is_early=True))

    def _look(self, missing: tuple[int, ...]) -> None:
        """Look for a rank that waits for this rank in another meeting: neither can continue, so both raise."""
        me = self.meeting.group.rank
        for rank in missing if self.meeting.group.is_alone else ():
            place = self.store.read(self._place(rank))
            if place is None:
                continue
            there = decode(WaitingPlace, place)
            if there.prefix == self.meeting.prefix or me not in there.ranks or not there.is_alone:
                continue
            group = replace(self.meeting.group, ranks=there.ranks)
            other = replace(self.meeting, group=group, prefix=there.prefix, number=there.number)
            waiting = Waiting(me, self.meeting.group.ranks, self.statement.step, reason_of(self.statement.error))
            self._part(other, deadlock(waiting, Waiting(rank, there.ranks, there.step, there.reason)))
            return

    def _part(self, other: Meeting, text: str) -> None:
        """End this meeting and another meeting, whose ranks wait for each other."""
        if not other.decides():
            return
        absent = {meeting: meeting.missing() for meeting in (other, self.meeting)}
        decided = {other: self.meeting, **({self.meeting: other} if self.meeting.decides() else {})}
        for meeting, elsewhere in decided.items():
            for rank in set(absent[meeting]) & (set(elsewhere.group.ranks) - set(absent[elsewhere])):
                meeting.pass_by(rank, meeting.number)  # the rank gets the verdict of the meeting in which it waits
        for meeting in decided:
            meeting.write(StoredVerdict(missing=absent[meeting] or (-1,), text=text, is_early=True))

    def _give_up(self) -> None:
        if self.meeting.decides():
            absent = self.meeting.missing()
            text = self._absence(absent, self.meeting.group.timeout)
            self.meeting.write(StoredVerdict(missing=absent or (-1,), text=text))
        else:  # another rank is about to write the verdict
            self.store.wait(self.meeting.key("verdict"), max(self.meeting.group.timeout, _QUIET))

    def _absence(self, missing: tuple[int, ...], seconds: float) -> str:
        return absence(self.statement.step, self.meeting.group.ranks, missing, seconds)
