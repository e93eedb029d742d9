"""All ranks agree, or all ranks raise the same error. No rank hangs: one that does not come is named.

The ranks meet in the rendezvous store that every process group has, so that any set of ranks can meet, and nothing is
pending in the group when a rank does not come. A meeting is a handful of store operations per rank, whatever the number
of ranks. What ranks have to tell beyond that travels in `reports`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from fsdp_optim import errors
from fsdp_optim.errors import FsdpOptimError, RankError, RankTimeoutError
from fsdp_optim.transport.callers import Callers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_ABANDONED = "abandoned "  # a verdict: followed by the ranks that were waited for in vain


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
    if len(callers.ranks) == 1:
        if error is not None:
            raise error
        return True
    meeting = _Meeting.enter(callers)
    verdict = meeting.conclude(said, error, fatal)
    if verdict.startswith(_ABANDONED):
        missing = verdict.removeprefix(_ABANDONED)
        raise RankTimeoutError(f"rank {callers.rank} came too late: the other ranks had given up on {missing}")
    if verdict == "failed":
        raise _the_error(meeting.read_errors(), len(callers.ranks)) from error
    return verdict == "same"


@dataclass(frozen=True)
class _Meeting:
    """The keys of one meeting in the store: `number` counts this rank's meetings with these ranks."""

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

    def conclude(self, said: bytes, error: Exception | None, fatal: bool) -> str:
        digest = hashlib.blake2b(said, digest_size=16).hexdigest()
        num_alike, num_errors = 0, 0
        if error is not None:
            self.store.set(self.key(f"error/{self.callers.rank}"), _encode(error))
            num_errors = self.store.add(self.key("errors"), 1)
        else:
            num_alike = self.store.add(self.key(f"alike/{digest}"), 1)
        num_here = self.store.add(self.key("here"), 1)
        if fatal:
            self.store.set(self.key("verdict"), "failed")
        elif num_here == len(self.callers.ranks):
            self._last_one_decides(digest, num_alike, num_errors)
        try:
            self.store.wait([self.key("verdict")], timedelta(seconds=self.callers.timeout))
        except RuntimeError as timeout:
            self._give_up(timeout)
        return bytes(self.store.get(self.key("verdict"))).decode()

    def _last_one_decides(self, digest: str, num_alike: int, num_errors: int) -> None:
        if self.store.check([self.key("verdict")]):
            return  # too late: the others gave up, or a broken connection was reported
        if num_errors == 0:
            num_errors = self.store.add(self.key("errors"), 0)
        alike = num_alike == len(self.callers.ranks)
        self.store.delete_key(self.key(f"alike/{digest}"))
        self._forget_the_previous()
        self.store.set(self.key("verdict"), "failed" if num_errors else "same" if alike else "differ")

    def _forget_the_previous(self) -> None:
        """Every rank has left the previous meeting when all are in this one: its keys can go."""
        for name in ("verdict", "here", "errors"):
            self.store.delete_key(self.key(name, self.number - 1))

    def _give_up(self, timeout: Exception) -> None:
        came = {r: self.store.add(f"{self.prefix}/came/{r}", 0) for r in self.callers.ranks}
        missing = [rank for rank, number in came.items() if number < self.number]
        if not missing:  # it came in this very moment, or the store itself failed
            raise RankTimeoutError(
                f"rank {self.callers.rank} heard no verdict within {self.callers.timeout:g} s although all came: {timeout}"
            ) from timeout
        names = ", ".join(f"rank {rank}" for rank in missing)
        self.store.set(self.key("verdict"), _ABANDONED + names)
        raise RankTimeoutError(
            f"{names} did not arrive within {self.callers.timeout:g} s; {len(came) - len(missing)} of the ranks "
            f"{list(self.callers.ranks)} did. Every one of these ranks has to make this call: look there for an error or "
            "a branch that skips it, or give a longer timeout="
        ) from timeout

    def read_errors(self) -> dict[int, tuple[str, str]]:
        found = {}
        for rank in self.callers.ranks:
            key = self.key(f"error/{rank}")
            if self.store.check([key]):
                found[rank] = _decode(bytes(self.store.get(key)))
        return found


def _encode(error: Exception) -> str:
    return f"{type(error).__name__}\n{error}"


def _decode(text: bytes) -> tuple[str, str]:
    name, _, message = text.decode().partition("\n")
    return name, message


def _the_error(found: dict[int, tuple[str, str]], num_ranks: int) -> FsdpOptimError:
    """One error that is the same on all ranks, from what each failed rank said."""
    names = {name for name, _ in found.values()}
    known = getattr(errors, next(iter(names)), None) if len(names) == 1 else None
    kind: type[FsdpOptimError] = RankError
    ours = isinstance(known, type) and issubclass(known, FsdpOptimError)
    if isinstance(known, type) and ours:
        kind = known
    if ours and len(found) == num_ranks and len(set(found.values())) == 1:
        return kind(next(iter(found.values()))[1])
    by_reason: dict[tuple[str, str], list[int]] = {}
    for rank, reason in found.items():
        by_reason.setdefault(reason, []).append(rank)
    lines = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {message if ours else f'{name}: {message}'}"
        for (name, message), ranks in by_reason.items()
    ]
    return kind("\n".join(lines))
