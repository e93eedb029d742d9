"""Ranks that are threads of one process: they agree under one lock, and copy from each other's memory.

For tests, which then need no process for each rank (`fsdp_optim.testing.run_on_threads`), and a second implementation of what
`base.py` promises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from fsdp_optim import memory
from fsdp_optim.errors import RankError, WrapperError
from fsdp_optim.memory import Budget
from fsdp_optim.transport.base import Item, RankGroup, Send, World
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.turns import Turns
from fsdp_optim.transport.verdict import Statement, Verdict, Waiting, absence, at_another_step, deadlock, reason_of

log = logging.getLogger("fsdp_optim")

_WARN_AFTER = 30.0  # seconds

Ranks = tuple[int, ...]


@dataclass
class _Meeting:
    """One meeting: what those said who have come, and how it ended."""

    statements: dict[int, Statement] = field(default_factory=dict)
    verdict: Verdict | None = None
    is_whole: bool = False

    def come(self, rank: int, statement: Statement) -> None:
        """A rank has come. It comes with an error where it is at another step than the first one."""
        first = next(((r, s) for r, s in self.statements.items() if s.error is None), None)
        if first is not None and statement.error is None and first[1].step != statement.step:
            error = RankError(at_another_step(statement.step, first[0], first[1].step))
            statement = Statement(statement.step, statement.said, b"", error)
        self.statements[rank] = statement

    def end(self, *, is_whole: bool) -> None:
        """Nobody else is waited for."""
        came = self.statements
        reasons = sorted(
            (rank, type(s.error).__name__, str(s.error)) for rank, s in came.items() if s.error is not None
        )
        alike = is_whole and not reasons and len({s.said for s in came.values()}) == 1
        contents = {rank: s.content for rank, s in came.items() if s.error is None}
        self.is_whole = is_whole
        self.verdict = Verdict(alike, tuple(reasons), content_of=lambda rank: contents.get(rank, b""))


class _Place(NamedTuple):
    """Where a rank waits: in which meeting, and what for. `is_alone`: it has no other call in flight that could go on."""

    ranks: Ranks
    number: int
    waiting: Waiting
    is_alone: bool


@dataclass
class _Letter:
    """What a rank sends to another in one exchange: parts of its local tensors, in the order of the plan."""

    parts: Sequence[torch.Tensor]
    is_taken: bool = False


class Shared:
    """What the ranks of one in-process world have in common. `changed` guards everything, and is notified of every change."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.meetings: dict[tuple[Ranks, int], _Meeting] = {}
        self.came: defaultdict[tuple[Ranks, int], int] = defaultdict(int)  # by ranks and rank: its meetings with them
        self.waiting: dict[int, _Place] = {}
        self.letters: dict[tuple[Ranks, int, int], _Letter] = {}  # by ranks, sender and recipient
        self.claims: dict[str, str] = {}  # who has a place
        self.is_over = False

    def end(self) -> None:
        """Nobody is waited for any more: every rank that waits, or comes to wait, raises RankError."""
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for a change, holding `changed`. Raises RankError when the world is over."""
        if self.is_over:
            raise RankError("the world of this rank is over")
        self.changed.wait(max(seconds, 0.0))


class InProcessControl:
    """The `Control` of ranks that are threads."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def meet(self, group: RankGroup, statement: Statement) -> Verdict:
        """As `Control.meet`."""
        shared = self._shared
        with shared.changed:
            while True:
                shared.came[group.ranks, group.rank] += 1
                number = shared.came[group.ranks, group.rank]
                verdict = self._attend(group, number, statement)
                others = (rank for rank in group.ranks if rank not in verdict.missing)
                newest = shared.came[group.ranks, next(others, group.rank)]
                if group.rank not in verdict.missing or newest <= number:
                    return verdict
                shared.came[group.ranks, group.rank] = newest - 1  # the others are in a later meeting

    def _attend(self, group: RankGroup, number: int, statement: Statement) -> Verdict:
        shared = self._shared
        meeting = shared.meetings.setdefault((group.ranks, number), _Meeting())
        meeting.come(group.rank, statement)
        is_whole = len(meeting.statements) == len(group.ranks)
        if meeting.verdict is None and (is_whole or statement.fatal):
            meeting.end(is_whole=is_whole)
            shared.changed.notify_all()
        if meeting.is_whole:  # then everyone has left the meetings before it
            for key in [key for key in shared.meetings if key[0] == group.ranks and key[1] < number]:
                del shared.meetings[key]
        if meeting.verdict is None:
            waiting = Waiting(group.rank, group.ranks, statement.step, reason_of(statement.error))
            shared.waiting[group.rank] = _Place(group.ranks, number, waiting, group.is_alone)
            try:
                return self._wait(group, number, meeting)
            finally:
                del shared.waiting[group.rank]
        return meeting.verdict

    def _wait(self, group: RankGroup, number: int, meeting: _Meeting) -> Verdict:
        """Until the meeting has ended; end it when the patience does, or when a missing rank waits elsewhere for this one."""
        shared, begun, warn_at = self._shared, time.monotonic(), _WARN_AFTER
        step = meeting.statements[group.rank].step
        while meeting.verdict is None:
            self._look(group)
            waited = time.monotonic() - begun
            missing = self._missing(group.ranks, number)
            if meeting.verdict is None and waited >= group.timeout:
                text = absence(step, group.ranks, missing, group.timeout)
                meeting.verdict = Verdict(missing=missing, text=text)
                shared.changed.notify_all()
            elif meeting.verdict is None:
                if waited >= warn_at:
                    warn_at = float("inf")
                    absent = absence(step, group.ranks, missing, round(waited))
                    log.warning("%s; waiting until %g s have passed", absent, group.timeout)
                shared.wait(min(group.timeout, warn_at) - waited)
        return meeting.verdict

    def _missing(self, ranks: Ranks, number: int) -> Ranks:
        return tuple(rank for rank in ranks if self._shared.came[ranks, rank] < number)

    def _look(self, group: RankGroup) -> None:
        """End two meetings whose ranks wait for each other: neither could go on."""
        here = self._shared.waiting[group.rank]
        for rank in self._missing(here.ranks, here.number):
            there = self._shared.waiting.get(rank)
            if there is None or there.ranks == here.ranks or group.rank not in there.ranks:
                continue
            both = {one: self._shared.meetings[one.ranks, one.number] for one in (here, there)}
            if here.is_alone and there.is_alone and all(meeting.verdict is None for meeting in both.values()):
                text = deadlock(here.waiting, there.waiting)
                absent = {one: self._missing(one.ranks, one.number) for one in both}
                for one, other in ((here, there), (there, here)):
                    for waiting in set(absent[one]) & (set(other.ranks) - set(absent[other])):
                        self._shared.came[one.ranks, waiting] = one.number  # it hears of it where it waits
                    both[one].verdict = Verdict(missing=absent[one], text=text, is_deadlock=True)
                self._shared.changed.notify_all()
                return

    def claim(self, who: str, place: str) -> str:
        """As `Control.claim`."""
        with self._shared.changed:
            claims = self._shared.claims
            holder = claims.setdefault(place, who)
            if holder == who:
                for other in [other for other, its in claims.items() if its == who and other != place]:
                    del claims[other]
            return holder

    def release(self, who: str, place: str) -> None:
        """As `Control.release`."""
        with self._shared.changed:
            if self._shared.claims.get(place) == who:
                del self._shared.claims[place]


class InProcessTransport:
    """The `Transport` of ranks that are threads: each copies what it needs out of its peers' tensors."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As `Transport.empty`: any memory will do."""
        return memory.empty(shape, dtype, device)

    def prepare(self, group: RankGroup, items: Iterable[Item], failure: Failure, budget: Budget) -> Send:
        """As `Transport.prepare`. No memory is needed."""
        outgoing: dict[int, list[torch.Tensor]] = {}
        incoming: dict[int, list[torch.Tensor | None]] = {}
        here: list[tuple[torch.Tensor, torch.Tensor]] = []
        with failure:
            for item in items:
                for copy in item.copies:
                    source = target = None
                    if copy.source_rank == group.rank and item.source is not None:
                        source = memory.source_view(copy, item.source)
                    if copy.target_rank == group.rank and item.target is not None:
                        target = memory.target_view(copy, item.target)
                    if copy.source_rank == group.rank != copy.target_rank and source is not None:
                        outgoing.setdefault(copy.target_rank, []).append(source)
                    elif copy.target_rank == group.rank != copy.source_rank:
                        incoming.setdefault(copy.source_rank, []).append(target)
                    elif source is not None and target is not None:
                        here.append((target, source))
            if failure.error is None:
                memory.copy_all(here)
        return partial(self._move, group, outgoing, incoming)

    def _move(
        self,
        group: RankGroup,
        outgoing: dict[int, list[torch.Tensor]],
        incoming: dict[int, list[torch.Tensor | None]],
        failure: Failure,
    ) -> None:
        deadline = time.monotonic() + group.timeout
        letters = {(group.ranks, group.rank, peer): _Letter(parts) for peer, parts in outgoing.items()}
        self._post(letters)
        try:
            for peer, targets in incoming.items():
                with failure:
                    key = (group.ranks, peer, group.rank)
                    letter = self._wait_for(lambda: self._shared.letters.get(key), deadline)  # noqa: B023
                    if letter is None:
                        failure.note(self._no_answer(group, peer), fatal=True)
                    else:
                        self._take(letter, targets, failure)
            for _, _, peer in letters:
                with failure:
                    letter = letters[group.ranks, group.rank, peer]
                    if self._wait_for(lambda: letter if letter.is_taken else None, deadline) is None:  # noqa: B023
                        failure.note(self._no_answer(group, peer), fatal=True)
        finally:
            with self._shared.changed:
                for key in letters:
                    self._shared.letters.pop(key, None)

    def _post(self, letters: dict[tuple[Ranks, int, int], _Letter]) -> None:
        with self._shared.changed:
            self._shared.letters.update(letters)
            self._shared.changed.notify_all()

    def _take(self, letter: _Letter, targets: Sequence[torch.Tensor | None], failure: Failure) -> None:
        """Copy what has come, and let the sender go on."""
        try:
            if failure.error is None:
                pairs = zip(targets, letter.parts, strict=True)
                memory.copy_all([(target, part) for target, part in pairs if target is not None])
        finally:
            with self._shared.changed:
                letter.is_taken = True
                self._shared.changed.notify_all()

    def _wait_for(self, found: Callable[[], _Letter | None], deadline: float) -> _Letter | None:
        with self._shared.changed:
            while (letter := found()) is None and time.monotonic() < deadline:
                self._shared.wait(deadline - time.monotonic())
            return letter

    @staticmethod
    def _no_answer(group: RankGroup, peer: int) -> RankError:
        return RankError(f"lost the connection to rank {peer}, or it did not answer within {group.timeout:g} s")


@dataclass(frozen=True)
class InProcessGroup:
    """Some ranks of an in-process world, for `process_group=`."""

    ranks: Ranks

    @property
    def group_name(self) -> str:
        """As a process group's, the same on all ranks."""
        return f"ranks {list(self.ranks)}"


class InProcessWorld(World):
    """One rank of an in-process world; all of them have the same `shared`."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.rank, self.size = rank, shared.size
        self.shared = shared
        self.control, self.transport, self.turns = InProcessControl(shared), InProcessTransport(shared), Turns()

    def ranks_of(self, process_group: Any) -> Ranks:
        """As `World.ranks_of`."""
        if not isinstance(process_group, InProcessGroup) or self.rank not in process_group.ranks:
            raise WrapperError(
                f"process_group has to be an InProcessGroup with rank {self.rank} in it, not {process_group!r}"
            )
        return process_group.ranks

    def group_rank(self, process_group: Any) -> int:
        """As `World.group_rank`."""
        ranks = process_group.ranks if process_group is not None else range(self.size)
        return ranks.index(self.rank) if self.rank in ranks else -1
