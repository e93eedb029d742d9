"""All ranks agree, or all ranks raise the same error. No rank hangs: one that does not come is named.

The ranks meet in the rendezvous store that every process group has, so that any set of ranks can meet, and nothing is
pending in the group when a rank does not come. A meeting is a handful of store operations per rank, whatever the number
of ranks. What ranks have to tell each other is in the store before they meet, so that reading it waits for nobody.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from fsdp_optim import errors
from fsdp_optim.errors import FsdpOptimError, RankError, RankTimeoutError
from fsdp_optim.transport.callers import Callers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


Reason = tuple[int, str, str]
"""(rank, class of its error, message)"""

_MAX_REASONS = 64  # of as many failed ranks the reasons are told
_PART_NBYTES = 4 << 20  # of what ranks tell each other, in one value of the store


def agree(callers: Callers, said: bytes, error: Exception | None = None, *, fatal: bool = False) -> bool:
    """Meet the other ranks; tell them `said` or `error`. Returns whether all ranks said the same, the same on all ranks.

    Called by all ranks of `callers`, the same number of times on each.

    Args:
        fatal: this rank's `error` broke the connection to another rank, which may never come: tell the others now.

    Raises:
        The error of the ranks that gave one, on all ranks alike: with its own class where that is one of this
        library's and all failed ranks agree on it, else RankError. The message names the ranks and their reasons.
        RankTimeoutError: a rank did not come within the timeout; the message names it.
    """
    return tell(callers, b"", said, error, fatal=fatal).alike


@dataclass(frozen=True)
class Told:
    """What ranks told in a meeting. To be read before this rank comes to the next one."""

    alike: bool
    _content_of: Callable[[int], bytes]

    def by(self, rank: int) -> bytes:
        """What `rank` told: it is there already, so nobody waits for anybody."""
        return self._content_of(rank)


def tell(
    callers: Callers, content: bytes, said: bytes = b"", error: Exception | None = None, *, fatal: bool = False
) -> Told:
    """As `agree`, and every rank can read the `content` of every other afterwards. It need not be alike."""
    if len(callers.ranks) == 1:
        if error is not None:
            raise error
        return Told(True, lambda rank: content)
    while True:
        meeting = _Meeting.enter(callers)
        verdict = meeting.conclude(said, error, fatal, content)
        if callers.rank not in verdict.missing:
            break
        if not meeting.catch_up(verdict):
            raise _told(RankTimeoutError(f"rank {callers.rank} came too late: {verdict.text}"))
    if verdict.missing:
        raise _told(RankTimeoutError(verdict.text))
    if verdict.reasons:
        raise _told(_the_error(verdict.reasons, len(callers.ranks))) from error
    num_parts = dict(verdict.told)
    return Told(verdict.alike, lambda rank: meeting.content(rank, num_parts.get(rank, 0)))


@contextmanager
def all_hear(callers: Callers) -> Iterator[None]:
    """An exception on this rank, between two meetings, is told in the next one; the others come to it anyway."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, FsdpOptimError) or not error.told:
            agree(callers, b"", error)
        raise


def _told(error: FsdpOptimError) -> FsdpOptimError:
    error.told = True
    return error


@dataclass(frozen=True)
class _Verdict:
    """How a meeting ended: all said the same or not, or ranks failed, or ranks were waited for in vain."""

    alike: bool = False
    reasons: tuple[Reason, ...] = ()
    missing: tuple[int, ...] = ()
    text: str = ""
    told: tuple[tuple[int, int], ...] = ()  # (rank, number of parts of what it told)

    def encoded(self) -> str:
        return json.dumps([self.alike, self.reasons, self.missing, self.text, self.told])

    @classmethod
    def decoded(cls, encoded: bytes) -> _Verdict:
        alike, reasons, missing, text, told = json.loads(encoded)
        named = tuple((rank, name, message) for rank, name, message in reasons)
        return cls(alike, named, tuple(missing), text, tuple((rank, num) for rank, num in told))


@dataclass(frozen=True)
class _Meeting:
    """The keys of one meeting in the store: `number` counts this rank's meetings with these ranks.

    One rank decides for all, so that all read the same verdict: the last to come, or the first whose patience ends.
    """

    callers: Callers
    store: Store
    prefix: str
    number: int

    @classmethod
    def enter(cls, callers: Callers) -> _Meeting:
        store = callers.store()
        who = hashlib.blake2b(repr(callers.ranks).encode(), digest_size=8).hexdigest()
        prefix = f"fsdp_optim/{who}"
        return cls(callers, store, prefix, store.add(f"{prefix}/came/{callers.rank}", 1))

    def key(self, name: str, number: int | None = None) -> str:
        return f"{self.prefix}/{self.number if number is None else number}/{name}"

    def content(self, rank: int, num_parts: int) -> bytes:
        return b"".join(bytes(self.store.get(self.key(f"told/{rank}/{part}"))) for part in range(num_parts))

    def _put(self, content: bytes) -> None:
        num_parts = -(-len(content) // _PART_NBYTES)
        for part in range(num_parts):
            piece = content[part * _PART_NBYTES : (part + 1) * _PART_NBYTES]
            self.store.set(self.key(f"told/{self.callers.rank}/{part}"), piece)  # type: ignore[arg-type]  # takes bytes
        index = self.store.add(self.key("tellers"), 1)
        self.store.set(self.key(f"teller/{index}"), json.dumps([self.callers.rank, num_parts]))

    def conclude(self, said: bytes, error: Exception | None, fatal: bool, content: bytes) -> _Verdict:
        digest = hashlib.blake2b(said, digest_size=16).hexdigest()
        if error is not None:
            reason = (self.callers.rank, type(error).__name__, str(error))
            self.store.set(self.key(f"error/{self.store.add(self.key('errors'), 1)}"), json.dumps(reason))
        else:
            if content:
                self._put(content)
            self.store.add(self.key(f"alike/{digest}"), 1)
        is_last = self.store.add(self.key("here"), 1) == len(self.callers.ranks)
        if (is_last or fatal) and self._decides():
            num_alike = self.store.add(self.key(f"alike/{digest}"), 0)  # now, when all have said what they say
            self.store.delete_key(self.key(f"alike/{digest}"))
            if is_last:
                self._forget_the_previous()
            alike = num_alike == len(self.callers.ranks)
            self._write(_Verdict(alike, self._reasons(), told=tuple(self._tellers())))
        try:
            self.store.wait([self.key("verdict")], timedelta(seconds=self.callers.timeout))
        except RuntimeError:
            self._give_up()
        return _Verdict.decoded(self.store.get(self.key("verdict")))

    def _decides(self) -> bool:
        return bool(self.store.add(self.key("decided"), 1) == 1)

    def _write(self, verdict: _Verdict) -> None:
        self.store.set(self.key("verdict"), verdict.encoded())

    def _reasons(self) -> tuple[Reason, ...]:
        number = min(self.store.add(self.key("errors"), 0), _MAX_REASONS)
        told = [json.loads(self.store.get(self.key(f"error/{index + 1}"))) for index in range(number)]
        return tuple(sorted((rank, name, message) for rank, name, message in told))

    def _tellers(self) -> Iterator[tuple[int, int]]:
        for index in range(self.store.add(self.key("tellers"), 0)):
            rank, num_parts = json.loads(self.store.get(self.key(f"teller/{index + 1}")))
            self.store.delete_key(self.key(f"teller/{index + 1}"))
            yield rank, num_parts

    def _forget_the_previous(self) -> None:
        """Every rank has left the previous meeting when all are in this one: its keys can go."""
        previous = self.key("verdict", self.number - 1)
        if self.store.check([previous]):
            for rank, num_parts in _Verdict.decoded(self.store.get(previous)).told:
                for part in range(num_parts):
                    self.store.delete_key(self.key(f"told/{rank}/{part}", self.number - 1))
        for name in ("verdict", "here", "errors", "decided", "tellers"):
            self.store.delete_key(self.key(name, self.number - 1))

    def _give_up(self) -> None:
        if not self._decides():  # another rank is about to write what it has decided
            self.store.wait([self.key("verdict")], timedelta(seconds=self.callers.timeout))
            return
        came = {rank: self.store.add(f"{self.prefix}/came/{rank}", 0) for rank in self.callers.ranks}
        missing = tuple(rank for rank, number in came.items() if number < self.number)
        names = ", ".join(f"rank {rank}" for rank in missing) or "a rank"
        text = (
            f"{names} did not arrive within {self.callers.timeout:g} s; {len(came) - len(missing)} of the ranks "
            f"{list(self.callers.ranks)} did. Every one of these ranks has to make this call: look there for an error or "
            "a branch that skips it, or give a longer timeout="
        )
        self._write(_Verdict(missing=missing or (-1,), text=text))

    def catch_up(self, verdict: _Verdict) -> bool:
        """Go to the meeting that the others are in now, where they are in a later one than this; else stay.

        A rank that skipped a call would else be one meeting behind for the rest of the job.
        """
        others = (rank for rank in self.callers.ranks if rank not in verdict.missing)
        newest = self.store.add(f"{self.prefix}/came/{next(others, self.callers.rank)}", 0)
        if newest <= self.number:
            return False
        self.store.add(f"{self.prefix}/came/{self.callers.rank}", newest - self.number - 1)
        return True


def _the_error(reasons: tuple[Reason, ...], num_ranks: int) -> FsdpOptimError:
    """One error that is the same on all ranks, from what each failed rank said."""
    names = {name for _, name, _ in reasons}
    known = getattr(errors, next(iter(names)), None) if len(names) == 1 else None
    ours = isinstance(known, type) and issubclass(known, FsdpOptimError)
    kind: type[FsdpOptimError] = known if ours and known is not None else RankError
    by_reason: dict[str, list[int]] = {}
    for rank, name, message in reasons:
        by_reason.setdefault(message if ours else f"{name}: {message}", []).append(rank)
    if ours and len(by_reason) == 1 and len(reasons) == num_ranks:
        return kind(next(iter(by_reason)))
    return kind(
        "\n".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {reason}"
            for reason, ranks in by_reason.items()
        )
    )
