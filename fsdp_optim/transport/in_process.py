"""Ranks that are threads of one process: they agree under one lock, and copy from each other's memory.

Tests use them to need no process for each rank (`fsdp_optim.testing.run_on_threads`); they are also a second implementation of
the protocols in `base.py`.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, not re-exported

from fsdp_optim.errors import RankError, WrapperError, class_name
from fsdp_optim.plan import Plans
from fsdp_optim.tensors import allocation, memory
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.transport.base import Item, RankGroup, Send, World
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.job.job_store import JobStore
from fsdp_optim.transport.job.pulse import Pulse
from fsdp_optim.transport.turns import Turns
from fsdp_optim.transport.verdict import (
    Reason,
    Statement,
    Verdict,
    Waiting,
    absence,
    at_another_step,
    deadlock,
    reason_of,
)

log = logging.getLogger("fsdp_optim")

_WARN_AFTER = 30.0  # seconds

RankTuple = tuple[int, ...]


@dataclass
class _Meeting:
    """One meeting: the statements of the ranks that have come, and the verdict."""

    statements: dict[int, Statement] = field(default_factory=dict)
    verdict: Verdict | None = None
    is_complete: bool = False

    def come(self, rank: int, statement: Statement) -> None:
        """Add the statement of a rank; a rank at another step than the first rank counts as a rank with an error."""
        first = next(((r, s) for r, s in self.statements.items() if s.error is None), None)
        if first is not None and statement.error is None and first[1].step != statement.step:
            error = RankError(at_another_step(statement.step, first[0], first[1].step))
            statement = Statement(statement.step, statement.compared, b"", error, flags=statement.flags)
        self.statements[rank] = statement

    def end(self, *, is_complete: bool) -> None:
        """Make the verdict from the statements so far. `is_complete`: all ranks have come."""
        came = self.statements
        reasons = sorted(
            Reason(rank, class_name(s.error), str(s.error)) for rank, s in came.items() if s.error is not None
        )
        all_equal = is_complete and not reasons and len({s.compared for s in came.values()}) == 1
        contents = {rank: s.content for rank, s in came.items() if s.error is None}
        flags = functools.reduce(operator.or_, (s.flags for s in came.values()), 0)
        self.is_complete = is_complete
        self.verdict = Verdict(all_equal, tuple(reasons), content_of=lambda rank: contents.get(rank, b""), flags=flags)


class _WaitingRank(NamedTuple):
    """The meeting in which a rank waits, and for whom. `is_alone`: the rank has no other call in flight that could continue."""

    ranks: RankTuple
    number: int
    waiting: Waiting
    is_alone: bool


@dataclass
class _Letter:
    """The blocks of local tensors that a rank sends to another rank in one exchange, in the order of the plan."""

    blocks: Sequence[torch.Tensor]
    is_taken: bool = False


class Shared:
    """The common state of the ranks of one in-process world. `changed` guards all of it, and is notified of every change."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.meetings: dict[tuple[RankTuple, int], _Meeting] = {}
        # The number of meetings that a rank has come to, by (ranks of the meetings, rank).
        self.came: defaultdict[tuple[RankTuple, int], int] = defaultdict(int)
        self.waiting: dict[int, _WaitingRank] = {}
        self.letters: dict[tuple[RankTuple, int, int], _Letter] = {}  # (ranks, sender, receiver) -> letter
        self.claims: dict[str, str] = {}  # place -> owner
        self.store = HashStore()
        self.is_over = False

    def end(self) -> None:
        """End the world: every rank that waits, or comes to wait, raises RankError."""
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for a change, holding `changed`. Raises RankError when the world is over."""
        if self.is_over:
            raise RankError("the in-process world of this rank has ended")
        self.changed.wait(max(seconds, 0.0))


class InProcessControl:
    """The `Control` of ranks that are threads."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def meet(self, group: RankGroup, statement: Statement) -> Verdict:
        """Meet as `Control.meet` says."""
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
        is_complete = len(meeting.statements) == len(group.ranks)
        if meeting.verdict is None and (is_complete or statement.fatal):
            meeting.end(is_complete=is_complete)
            shared.changed.notify_all()
        if meeting.is_complete:  # every rank has left the earlier meetings
            for key in [key for key in shared.meetings if key[0] == group.ranks and key[1] < number]:
                del shared.meetings[key]
        if meeting.verdict is None:
            waiting = Waiting(group.rank, group.ranks, statement.step, reason_of(statement.error))
            shared.waiting[group.rank] = _WaitingRank(group.ranks, number, waiting, group.is_alone)
            try:
                return self._wait(group, number, meeting)
            finally:
                del shared.waiting[group.rank]
        return meeting.verdict

    def _wait(self, group: RankGroup, number: int, meeting: _Meeting) -> Verdict:
        """Wait until the meeting has a verdict. End it at the timeout, or when a missing rank waits elsewhere for this rank."""
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

    def _missing(self, ranks: RankTuple, number: int) -> RankTuple:
        return tuple(rank for rank in ranks if self._shared.came[ranks, rank] < number)

    def _look(self, group: RankGroup) -> None:
        """End two meetings whose ranks wait for each other, because neither meeting could end."""
        here = self._shared.waiting[group.rank]
        for rank in self._missing(here.ranks, here.number):
            there = self._shared.waiting.get(rank)
            if there is None or there.ranks == here.ranks or group.rank not in there.ranks:
                continue
            both = {place: self._shared.meetings[place.ranks, place.number] for place in (here, there)}
            if here.is_alone and there.is_alone and all(meeting.verdict is None for meeting in both.values()):
                text = deadlock(here.waiting, there.waiting)
                absent = {place: self._missing(place.ranks, place.number) for place in both}
                for place, other in ((here, there), (there, here)):
                    for waiting in set(absent[place]) & (set(other.ranks) - set(absent[other])):
                        # The rank gets the verdict of the meeting in which it waits.
                        self._shared.came[place.ranks, waiting] = place.number
                    both[place].verdict = Verdict(missing=absent[place], text=text, is_early=True)
                self._shared.changed.notify_all()
                return

    def claim(self, who: str, place: str) -> str:
        """Claim as `Control.claim` says."""
        with self._shared.changed:
            claims = self._shared.claims
            holder = claims.setdefault(place, who)
            if holder == who:
                for other in [other for other, owner in claims.items() if owner == who and other != place]:
                    del claims[other]
            return holder

    def release(self, who: str, place: str) -> None:
        """Release as `Control.release` says."""
        with self._shared.changed:
            if self._shared.claims.get(place) == who:
                del self._shared.claims[place]


class InProcessTransport:
    """The `Transport` of ranks that are threads: each rank copies blocks out of its peers' tensors."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory as `Transport.empty` says: any memory is suitable."""
        return allocation.empty(shape, dtype, device)

    def prepare(self, group: RankGroup, items: Iterable[Item], failure: Failure, budget: Budget) -> Send:
        """Prepare as `Transport.prepare` says, without any buffers."""
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
        letters = {(group.ranks, group.rank, peer): _Letter(blocks) for peer, blocks in outgoing.items()}
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

    def _post(self, letters: dict[tuple[RankTuple, int, int], _Letter]) -> None:
        with self._shared.changed:
            self._shared.letters.update(letters)
            self._shared.changed.notify_all()

    def _take(self, letter: _Letter, targets: Sequence[torch.Tensor | None], failure: Failure) -> None:
        """Copy the blocks of a letter, and let the sender continue."""
        try:
            if failure.error is None:
                pairs = zip(targets, letter.blocks, strict=True)
                memory.copy_all([(target, block) for target, block in pairs if target is not None])
        finally:
            with self._shared.changed:
                letter.is_taken = True
                self._shared.changed.notify_all()

    def _wait_for(self, look_up: Callable[[], _Letter | None], deadline: float) -> _Letter | None:
        with self._shared.changed:
            while (letter := look_up()) is None and time.monotonic() < deadline:
                self._shared.wait(deadline - time.monotonic())
            return letter

    @staticmethod
    def _no_answer(group: RankGroup, peer: int) -> RankError:
        return RankError(f"lost the connection to rank {peer}, or there was no answer within {group.timeout:g} s")


@dataclass(frozen=True)
class InProcessGroup:
    """Some ranks of an in-process world, for `process_group=`."""

    ranks: RankTuple

    @property
    def group_name(self) -> str:
        """The name of the group, equal on all ranks."""
        return f"ranks {list(self.ranks)}"


class InProcessWorld(World):
    """One rank of an in-process world; all ranks have the same `shared`."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.rank, self.size = rank, shared.size
        self.shared = shared
        self.control, self.transport = InProcessControl(shared), InProcessTransport(shared)
        self.turns, self.plans = Turns(), Plans()
        self.board = JobStore(lambda: shared.store)
        self.pulse = Pulse(self.board, rank, shared.size)

    def ranks_of(self, process_group: Any) -> RankTuple:
        """Return the ranks as `World.ranks_of` says."""
        if not isinstance(process_group, InProcessGroup) or self.rank not in process_group.ranks:
            raise WrapperError(
                f"process_group must be an InProcessGroup with rank {self.rank} in it, not {process_group!r}"
            )
        return process_group.ranks

    def group_rank(self, process_group: Any) -> int:
        """Return the group rank as `World.group_rank` says."""
        ranks = process_group.ranks if process_group is not None else range(self.size)
        return ranks.index(self.rank) if self.rank in ranks else -1
