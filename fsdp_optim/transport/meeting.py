"""One meeting of ranks in the rendezvous store: the ranks that came, their statements, and one verdict for all of them.

Any set of ranks can meet, and a missing rank leaves nothing pending in the process group. A meeting takes a handful of store
operations per rank, whatever the number of ranks. The keys of a meeting are deleted in the next meeting of the same ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fsdp_optim.errors import RankError, class_name
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.job_store import JobStore
from fsdp_optim.transport.pulse import Watch, lost_ranks
from fsdp_optim.transport.verdict import Reason, Statement, Waiting, absence, at_another_step, deadlock, loss, reason_of

log = logging.getLogger("fsdp_optim")

_MAX_REASONS = 64  # failed ranks whose reasons the error names
_PART_NBYTES = 4 << 20  # bytes of a content in one value of the store
_WATCHERS = 16  # waiting ranks that look for missing ranks; each of them asks the store about every rank

_QUIET = 5.0  # seconds; a rank that waits longer looks for the missing ranks
_ASK_EVERY = 0.5  # seconds
_LOOK_AGAIN = 1.5  # a rank looks again when it has waited this many times as long
_WARN_AFTER = 30.0  # seconds

# One number, and so one store operation, counts the ranks that came, those whose bytes differ, and those with content or error.
_DIFFERS, _HAS_MORE = 1 << 20, 1 << 40


@dataclass(frozen=True)
class StoredVerdict:
    """A verdict in the form that is put into the store.

    Attributes:
        alike, reasons, missing, text, is_early: as in `Verdict`.
        whole: all ranks had come when the verdict was made.
        contents: (rank, number of parts of the rank's content in the store).
        num_errors: the number of errors in the store.
    """

    alike: bool = False
    whole: bool = False
    reasons: tuple[Reason, ...] = ()
    missing: tuple[int, ...] = ()
    text: str = ""
    is_early: bool = False
    contents: tuple[tuple[int, int], ...] = ()
    num_errors: int = 0

    def encoded(self) -> str:
        """The verdict as JSON."""
        fields = (self.reasons, self.missing, self.text, self.is_early, self.contents, self.num_errors)
        return json.dumps([self.alike, self.whole, *fields])

    @classmethod
    def decoded(cls, encoded: bytes) -> StoredVerdict:
        """The inverse of `encoded`."""
        alike, whole, reasons, missing, text, is_early, contents, num_errors = json.loads(encoded)
        named = tuple((rank, name, message) for rank, name, message in reasons)
        sizes = tuple((rank, num_parts) for rank, num_parts in contents)
        return cls(alike, whole, named, tuple(missing), text, is_early, sizes, num_errors)


@dataclass(frozen=True)
class Meeting:
    """The keys of one meeting in the store. `number` counts this rank's meetings with these ranks.

    One rank writes the verdict for all ranks: the last rank to come, or the first rank whose timeout ends.
    """

    group: RankGroup
    store: JobStore
    prefix: str
    number: int

    @classmethod
    def enter(cls, group: RankGroup, store: JobStore) -> Meeting:
        """The next meeting of this rank with the others."""
        group.world.pulse.introduce()
        who = hashlib.blake2b(repr(group.ranks).encode(), digest_size=8).hexdigest()
        prefix = f"fsdp_optim/{who}"
        return cls(group, store, prefix, store.add(_came(prefix, group.rank), 1))

    def key(self, name: str) -> str:
        """The full key of `name` in this meeting."""
        return f"{self.prefix}/{self.number}/{name}"

    def content(self, rank: int, num_parts: int) -> bytes:
        """The content of a rank, which is in the store before the verdict is."""
        return b"".join(self.store.get(self.key(f"content/{rank}/{part}")) for part in range(num_parts))

    def conclude(self, statement: Statement) -> StoredVerdict:
        """Publish this rank's statement, wait for the other ranks, and read the verdict."""
        number = self.store.add(self.key("here"), 1 + self._publish(statement))
        is_last = number % _DIFFERS == len(self.group.ranks)
        if (is_last or statement.fatal) and self.decides():
            has_more = number >= _HAS_MORE
            verdict = StoredVerdict(
                alike=is_last and number % _HAS_MORE < _DIFFERS,
                whole=is_last,
                reasons=self._reasons() if has_more else (),
                contents=tuple(self._contents()) if has_more else (),
                num_errors=self.store.add(self.key("errors"), 0) if has_more else 0,
            )
            self.write(verdict)
            if is_last:
                self._forget_the_previous()
            return verdict
        if not self._sees_verdict(_QUIET):
            _Wait(self, statement, watches=number % _DIFFERS <= _WATCHERS).until_verdict()
        return StoredVerdict.decoded(self.store.get(self.key("verdict")))

    def _publish(self, statement: Statement) -> int:
        """Put this rank's statement into the store. Returns the summand (`_DIFFERS`, `_HAS_MORE`) for the count of ranks."""
        error, differs = statement.error, 0
        if error is None:
            digest = hashlib.blake2b(statement.compared, digest_size=16).hexdigest()
            mine = json.dumps([self.group.rank, statement.step, digest])
            rank, step, first_digest = json.loads(self.store.compare_set(self.key("first"), "", mine))
            if step != statement.step:
                error = RankError(at_another_step(statement.step, rank, step))
            differs = _DIFFERS if first_digest != digest else 0
        if error is not None:
            index = self.store.add(self.key("errors"), 1)
            if index <= _MAX_REASONS:
                reason = (self.group.rank, class_name(error), str(error))
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
            self.store.set(self.key(f"content/{self.group.rank}/{part}"), piece)
        index = self.store.add(self.key("contents"), 1)
        self.store.set(self.key(f"contents/{index}"), json.dumps([self.group.rank, num_parts]))

    def decides(self) -> bool:
        """Whether this rank makes the verdict: the first rank that calls this does."""
        return bool(self.store.add(self.key("decided"), 1) == 1)

    def write(self, verdict: StoredVerdict) -> None:
        """Put the verdict into the store, which ends the meeting for all waiting ranks."""
        self.store.set(self.key("verdict"), verdict.encoded())

    def _sees_verdict(self, seconds: float) -> bool:
        """Wait for the verdict for at most `seconds`; returns whether the verdict is there."""
        return self.store.wait(self.key("verdict"), min(seconds, self.group.timeout))

    def _reasons(self) -> tuple[Reason, ...]:
        number = min(self.store.add(self.key("errors"), 0), _MAX_REASONS)
        reasons = [json.loads(self.store.get(self.key(f"error/{index + 1}"))) for index in range(number)]
        return tuple(sorted((rank, name, message) for rank, name, message in reasons))

    def _contents(self) -> Iterator[tuple[int, int]]:
        for index in range(self.store.add(self.key("contents"), 0)):
            rank, num_parts = json.loads(self.store.get(self.key(f"contents/{index + 1}")))
            yield rank, num_parts

    def missing(self) -> tuple[int, ...]:
        """The ranks that have not come."""
        came = {rank: self.store.add(_came(self.prefix, rank), 0) for rank in self.group.ranks}
        return tuple(rank for rank, number in came.items() if number < self.number)

    def catch_up(self, verdict: StoredVerdict) -> bool:
        """Whether the other ranks are in a later meeting than this one; if so, this rank's next meeting is that meeting.

        Otherwise a rank that skipped a call would be one meeting behind for the rest of the job.
        """
        others = (rank for rank in self.group.ranks if rank not in verdict.missing)
        newest = self.store.add(_came(self.prefix, next(others, self.group.rank)), 0)
        if newest <= self.number:
            return False
        self.pass_by(self.group.rank, newest - 1)
        return True

    def pass_by(self, rank: int, number: int) -> None:
        """Count a rank as come to its meetings up to `number`, so that it skips them."""
        key = _came(self.prefix, rank)
        while (came := self.store.add(key, 0)) < number:
            # compare_set, because the rank may come meanwhile, or another rank may do the same for it.
            if self.store.compare_set(key, str(came), str(number)) == str(number).encode():
                return

    def _forget_the_previous(self) -> None:
        """Delete the keys of the previous meeting, which every rank has left when all ranks have come to this one.

        A meeting with missing ranks has not deleted the keys of the meeting before it, so these are deleted here too.
        """
        previous = replace(self, number=self.number - 1)
        while self.store.check([previous.key("verdict")]):
            verdict = StoredVerdict.decoded(self.store.get(previous.key("verdict")))
            previous._forget(verdict)
            if verdict.whole:
                return
            previous = replace(previous, number=previous.number - 1)

    def _forget(self, verdict: StoredVerdict) -> None:
        """Delete all keys of this meeting."""
        contents, num_errors = verdict.contents, verdict.num_errors
        if not verdict.whole:  # ranks that came after the verdict may have added contents and errors
            contents, num_errors = tuple(self._contents()), self.store.add(self.key("errors"), 0)
        names = ["verdict", "here", "decided", "first"]
        if contents or num_errors or not verdict.whole:
            names += ["errors", "contents", *(f"error/{index + 1}" for index in range(min(num_errors, _MAX_REASONS)))]
            names += [f"contents/{index + 1}" for index in range(len(contents))]
            names += [f"content/{rank}/{part}" for rank, num_parts in contents for part in range(num_parts)]
        for name in names:
            self.store.delete_key(self.key(name))


def _came(prefix: str, rank: int) -> str:
    return f"{prefix}/came/{rank}"


@dataclass(frozen=True)
class _Wait:
    """A rank that waits longer than usual: it publishes where it waits, looks for the missing ranks, and gives up in the end.

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
        """Where this rank waits, as JSON for the other ranks."""
        group = self.meeting.group
        place = (self.meeting.prefix, self.meeting.number, group.ranks)
        return json.dumps([*place, self.statement.step, reason_of(self.statement.error), group.is_alone])

    def _look_for_life(self, missing: tuple[int, ...]) -> None:
        """End this meeting if a missing rank is lost. `missing`: as of the last time that all were counted."""
        lost: dict[int, str] = {}
        for rank in missing:
            if rank not in self.watched:
                self.watched[rank] = Watch(self.store, [rank], beats=self.meeting.group.turn.has_met)
            lost.update(self.watched[rank].look())
        lost = {rank: how for rank, how in lost.items() if rank in self.meeting.missing()} if lost else {}
        if lost and self.meeting.decides():
            text = loss(self.statement.step, lost_ranks(lost))
            self.meeting.write(StoredVerdict(missing=self.meeting.missing(), text=text, is_early=True))

    def _look(self, missing: tuple[int, ...]) -> None:
        """Look for a rank that waits for this rank in another meeting: neither of them can go on, so both raise."""
        me = self.meeting.group.rank
        for rank in missing if self.meeting.group.is_alone else ():
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
