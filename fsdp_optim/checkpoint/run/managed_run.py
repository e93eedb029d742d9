"""One run of a CheckpointManager: the checkpoint it resumes from, when its ranks meet, and its save in the background."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from fsdp_optim.arguments import Arguments, check_at_least, check_one_of, is_integer
from fsdp_optim.checkpoint.catalog.listing import ListedCheckpoint, newest_first
from fsdp_optim.checkpoint.catalog.listing import listed as all_listed
from fsdp_optim.checkpoint.catalog.retention import (
    KeepRules,
    KnownSaves,
    ManagedSave,
    is_own,
    metric_of,
    name_of_step,
    own_in,
)
from fsdp_optim.checkpoint.catalog.roots import begin_anew
from fsdp_optim.checkpoint.common.arguments import ResumeArguments, SaveArguments
from fsdp_optim.checkpoint.common.formats import listed_formats
from fsdp_optim.checkpoint.common.pending import SaveHandle, pending
from fsdp_optim.checkpoint.common.seen_by_all import check_shared
from fsdp_optim.checkpoint.common.stores import directory_at, store_at
from fsdp_optim.checkpoint.load.loaded_objects import LoadedObjects
from fsdp_optim.checkpoint.load.restore import restore
from fsdp_optim.checkpoint.run.preemption import Signals
from fsdp_optim.checkpoint.run.resuming import Candidate, candidates_on_all, load_newest, without_thin
from fsdp_optim.checkpoint.save.background import async_save
from fsdp_optim.errors import CheckpointError, StateError, counted_noun
from fsdp_optim.formats.base.summary import ManagerRecord
from fsdp_optim.options import ManagerOptions, Model
from fsdp_optim.registry import scheme_of
from fsdp_optim.results.calls import LoadResult
from fsdp_optim.saying import say
from fsdp_optim.storage.posix.files import absolute, checkpoint_errors
from fsdp_optim.transport.agree import agree, all_gather_bytes, all_hear, in_turn
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import world_here
from fsdp_optim.verbs.call import collective_call
from fsdp_optim.verbs.load_state import LoadableOptimizer

if TYPE_CHECKING:
    from fsdp_optim.checkpoint.proof.proving import Prove, Proving

_CALL = "CheckpointManager"

log = logging.getLogger("fsdp_optim")
_SECONDS, _SECONDS_PER_RANK, _MOST_SECONDS = 1.0, 0.05, 10.0
_MOST_STEPS = 1_000_000


@dataclass(frozen=True)
class ManagerArguments(Arguments):
    """The arguments of a CheckpointManager. `saving`: the arguments of its saves, with most of the options."""

    saving: SaveArguments
    rules: KeepRules
    every: int | None
    options: ManagerOptions
    prove: Prove = False

    def validate(self) -> None:
        super().validate()
        check_one_of("prove", self.prove, (False, True, "raise"))
        if self.every is not None:
            check_at_least("every", self.every, 1, " step")
        if self.rules.keep_optim_last is not None and self.saving.weights == "none":
            raise StateError(
                'keep_optim_last thins older checkpoints, and with weights="none" nothing would be left of them: save the '
                "weights too, or give keep_last alone"
            )

    def compared_text(self) -> str:
        """Return the arguments that must be the same on all ranks, as text."""
        signals = sorted(map(int, self.options.signals))
        return (
            f"{self.saving.compared_text()}, {self.rules.compared_text()}, every={self.every!r}, signals={signals}, "
            f"agree_every={self.options.agree_every!r}, prove={self.prove!r}"
        )


_HAS_FAILED, _HAS_SIGNAL = 1, 2
"""What any rank may tell the others at a step: its save in the background has failed; a signal has come."""


class _Saving(Struct, frozen=True):
    """A save in the background."""

    step: int
    handle: SaveHandle


class ManagedRun:
    """The run behind a CheckpointManager. Made by all ranks of the model, which also make every call.

    `proving`: the proof of its resumes; None: it proves nothing. `should_stop`: whether a signal has come to any rank, and the
    ranks have agreed on it. `restored`: the result of the last load.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        model: Model,
        optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None,
        options: ManagerArguments,
    ) -> None:
        call = options.saving.call
        with checkpoint_errors(root), collective_call(_CALL, [model], options, call, all_of_plain=True) as (_, group):
            is_url = scheme_of(root) is not None
            content = b"" if is_url else os.fsencode(absolute(root))
            result = all_gather_bytes(group, f"made with {options.compared_text()}", content)
            self._root = str(root).rstrip("/") if is_url else os.fsdecode(result.content_of(group.ranks[0]))
            inside = store_at(f"{self._root}/_", options=options.saving.storage_options)
            check_shared(group, inside, self._root)
        self._model, self._optim, self._options, self._ranks = model, optim, options, group.ranks
        self._interval = MeetingInterval(len(group.ranks), options.options.agree_every)
        self._saving: _Saving | None = None
        self._known = KnownSaves()
        self._at: int | None = None  # the step of the checkpoint that this run resumes from
        self._last_step: int | None = None
        self._next_agreement = 0
        self._has_resumed = self._has_stepped = self._has_saved = self._is_closed = self.should_stop = False
        self.restored: LoadResult | None = None
        self._signals = Signals(options.options.signals)
        saving = options.saving
        self.proving: Proving | None = None
        if options.prove:
            from fsdp_optim.checkpoint.proof.proving import Proving  # of a run that proves nothing, no module is loaded

            self.proving = Proving(model, optim, saving.state, call, saving.storage_options, options.prove)

    def __repr__(self) -> str:
        return f"CheckpointManager(root={self._root!r}, step={self._last_step}, every={self._options.every})"

    def step(self, step: int, metric: object) -> None:
        """The end of a training step."""
        self._has_stepped = True
        if self.proving is not None:
            self.proving.write_ready(self._is_saved)
        if not self._must_meet(step):
            self._last_step = step
            return
        with self._collective("step") as group:
            self._check_step(step)
            flags = _HAS_FAILED * (self._saving is not None and self._saving.handle.has_failed)
            flags |= _HAS_SIGNAL * (self._signals.received and not self.should_stop)
            # The interval of one rank, because each measures its own time, and all must come to the same next meeting.
            leads = group.rank == group.ranks[0]
            next_in = b"%d" % self._interval.steps_to_next(step) if leads else b""
            result = all_gather_bytes(group, f"step {step}", next_in, flags=flags)
            must_stop = bool(result.flags & _HAS_SIGNAL)
            self._next_agreement = step + int(result.content_of(group.ranks[0]))
            is_due, self._last_step = self._is_due(step), step
            self.should_stop = self.should_stop or must_stop
            failed = self._error_of_last(group) if result.flags & _HAS_FAILED else None
            if self.proving is not None:
                self.proving.finish(group, step)
        if is_due or must_stop:
            failed = self._save(step, metric) or failed
        if must_stop:
            if group.rank == group.ranks[0]:
                log.info("a rank has received a signal: saving step %d", step)
            self.wait()
        if failed is not None:
            raise failed

    def save(self, step: int, metric: object) -> None:
        """Save this step now, whatever `every` says."""
        with self._collective("save") as group:
            self._check_step(step)
            agree(group, f"save {step}")
            self._last_step = step
        failed = self._save(step, metric)
        if failed is not None:
            raise failed

    def wait(self) -> None:
        """Wait for the save in the background."""
        with self._collective("wait") as group:
            self._settle(group)
        if self.proving is not None:
            self.proving.write_ready(self._is_saved)

    def close(self) -> None:
        """Wait, and put the signal handlers back, also if an error is raised."""
        if self._is_closed:
            return
        try:
            self.wait()
        finally:
            self._is_closed = True
            self._signals.put_back()
            self._stop_proving()
        never_saves = self._has_stepped and not self._has_saved and self._options.every is None
        if never_saves and world_here().rank == self._ranks[0]:
            log.warning("%s: nothing was saved: give the manager every=, or call manager.save(step)", self._root)

    def close_after_error(self) -> None:
        """Close without the other ranks, because a rank that has failed does not come."""
        self._is_closed = True
        self._signals.put_back()
        self._stop_proving()
        own = self._saving.handle.error() if self._saving is not None else None
        if own is not None:
            log.error("the save in the background has failed too: %s", own)

    def load(self, to: int | None, options: ResumeArguments) -> int:
        """Load the newest checkpoint, or the checkpoint of the step `to`; return its step."""

        def listed(again: bool) -> list[Candidate]:
            with self._collective("resume" if to is None else "rollback") as group:
                options.validate()
                if to is not None:
                    check_at_least("to", to, 0)
                self._settle(group)
                pending.settle(self._known)
                about = f"{to}, {options.compared_text()}"
                return candidates_on_all(group, about, partial(self._candidates, to, again))

        candidates = listed(again=False)
        loaded = LoadedObjects.of(options)

        def load(where: str | Path) -> LoadResult:
            return restore(where, self._model, self._optim, options, objects=loaded)

        with checkpoint_errors(self._root):
            newest = load_newest(self._root, candidates, options.on_damage, load, partial(listed, True))
        step, restored = 0, newest.result
        with self._collective("random states") as group:
            if restored is not None:
                loaded.install_random()
                step = restored.step or 0
            self._known.continues_from(newest.base, newest.unread_on_any(group, "random states"))
            if restored is not None and self.proving is not None:
                self.proving.begin(group, newest.where, step, compares=True)
        if loaded.receipt:
            say(f"{'resumed' if to is None else 'rolled back to'} {loaded.receipt}")
        self._has_resumed, self.restored = True, restored
        self._at = step if restored is not None else None
        self._last_step, self._next_agreement = step, step + 1
        return step

    # -------------------------------------------------------------------------------------------- inside

    @contextmanager
    def _collective(self, what: str) -> Iterator[RankGroup]:
        """Make one collective call of the manager's ranks. An error inside is raised on all ranks."""
        call = self._options.saving.call
        group = world_here().group(f"{_CALL}.{what}", self._ranks, call.process_group, call.seconds, call.bucket_nbytes)
        with checkpoint_errors(self._root), in_turn(group), all_hear(group):
            if self._is_closed:
                raise StateError(f"{_CALL}.{what} was called after close(): make another manager")
            yield group

    def _must_meet(self, step: int) -> bool:
        """Whether the ranks meet at this step; the same on all ranks. A wrong step is reported in a meeting."""
        if self._is_closed or not is_integer(step) or self._last_step is None or step <= self._last_step:
            return True
        if self._is_due(step):
            return True
        if self.proving is not None and self.proving.is_watching:
            return True
        agrees = bool(self._options.options.signals) or self._options.options.agree_every is not None
        return agrees and step >= self._next_agreement

    def _is_due(self, step: int) -> bool:
        every = self._options.every
        before = self._last_step if self._last_step is not None else step - 1
        return every is not None and step // every > before // every

    def _check_step(self, step: int) -> None:
        check_at_least("step", step, 0)
        if self._last_step is not None and step < self._last_step:
            raise StateError(
                f"step went back from {self._last_step} to {step}: call manager.rollback(to=...) to go back to a checkpoint"
            )

    def _settle(self, group: RankGroup) -> None:
        """Wait for the background save of this manager. If it failed on any rank, all ranks raise its error."""
        saving, self._saving = self._saving, None
        failure = Failure()
        if saving is not None:
            with failure:
                error = saving.handle.error()
                if error is not None:
                    raise error
            if not saving.handle.has_failed:
                self._at = saving.step
        agree(group, "waited", failure.error)

    def _error_of_last(self, group: RankGroup) -> CheckpointError | None:
        """Wait for the background save of this manager; return its error, the same on all ranks: the next save comes first.

        The error of a rank that is gone is raised at once.
        """
        try:
            self._settle(group)
        except CheckpointError as error:
            return error
        return None

    def _stop_proving(self) -> None:
        if self.proving is not None:
            self.proving.stop()

    def _is_saved(self, where: str) -> bool:
        """Whether a checkpoint is complete, as far as this run knows: its own save in the background may be under way."""
        saving = self._saving
        if saving is None or where != f"{self._root}/{name_of_step(saving.step)}":
            return True
        return saving.handle.done() and not saving.handle.has_failed

    def _save(self, step: int, metric: object) -> CheckpointError | None:
        """Save this step in the background. Returns the error of the save before, for the caller to raise."""
        step, begun, self._has_saved = int(step), time.monotonic(), True
        with self._collective("save") as group:
            failed = self._error_of_last(group)
            if self._at == step:
                return failed
            record = ManagerRecord(-1 if self._at is None else self._at, metric_of(metric))
            agree(group, "record")
        options = replace(self._options.saving, step=step)
        managed = ManagedSave(record, self._options.rules, self._known, self._has_resumed or self._at is not None)
        place = f"{self._root}/{name_of_step(step)}"
        with checkpoint_errors(place):
            handle = async_save(place, self._model, self._optim, options, managed=managed, begun=begun)
        self._saving = _Saving(step, handle)
        if self.proving is not None:
            with self._collective("prove") as group:
                self.proving.begin(group, place, step, compares=False)
        return failed

    def _candidates(self, to: int | None, again: bool) -> list[Candidate]:
        """Return the checkpoints of a manager in the folder that a load may take, the newest first."""
        storage = self._options.saving.storage_options
        listed = all_listed([directory_at(self._root, storage, format) for format in listed_formats()])
        self._known.see(filter(is_own, listed))
        own = newest_first(own_in(listed))
        if to is None:
            if not own and not again:
                self._check_others(listed)
                begin_anew(self._root, storage)
            wanted = own if self._optim is None else without_thin(own)
            return [Candidate.of(checkpoint) for checkpoint in wanted]
        chosen = [checkpoint for checkpoint in own if checkpoint.base.rpartition("/")[2] == name_of_step(to)]
        if not chosen:
            steps = sorted(s.step for entry in own if (s := entry.summary) is not None and s.step is not None)
            has = f"those of the steps {', '.join(map(str, steps))}" if steps else "none"
            raise CheckpointError(
                f"{self._root}: has no checkpoint of step {to}; the steps that a CheckpointManager saved there: {has}"
            )
        return [Candidate.of(checkpoint) for checkpoint in chosen]

    def _check_others(self, listed: Sequence[ListedCheckpoint]) -> None:
        """Raise CheckpointError where a resume would pass by checkpoints, because no manager made them."""
        unsure = [checkpoint for checkpoint in listed if checkpoint.status.is_complete or not checkpoint.status.is_sure]
        others = newest_first(unsure)
        if others:
            raise CheckpointError(
                f"{self._root}: has {counted_noun(len(others), 'checkpoint')} that no CheckpointManager made, the newest is "
                f"{others[0].where}, and a manager resumes from its own only: fsdp_optim.resume({self._root!r}, ...) loads it; "
                "give the manager a folder of its own"
            )


class MeetingInterval:
    """The number of steps to the next meeting, which the lowest rank chooses by its clock and tells the others.

    A meeting takes some tens of microseconds for each rank, because all ranks talk to one store, and more where that store is
    on a busy host. So they meet about once a second; with more than 20 ranks, every 50 ms for each rank, at most every 10 s.
    """

    def __init__(self, num_ranks: int, fixed: int | None) -> None:
        self._goal = min(max(_SECONDS, _SECONDS_PER_RANK * num_ranks), _MOST_SECONDS)
        self._fixed = 1 if num_ranks == 1 else fixed
        self._num_steps = 1
        self._last: tuple[int, float] | None = None

    def steps_to_next(self, step: int) -> int:
        """How many steps after this one the ranks meet again. The number at most doubles, because steps differ in length."""
        if self._fixed is not None:
            return self._fixed
        now = time.monotonic()
        last, self._last = self._last, (step, now)
        if last is not None and step > last[0]:
            seconds_per_step = max((now - last[1]) / (step - last[0]), self._goal / _MOST_STEPS)
            self._num_steps = max(1, min(int(self._goal / seconds_per_step), 2 * self._num_steps))
        return self._num_steps
