"""CheckpointManager: one object that saves every N steps, keeps, resumes, rolls back and reacts to preemption."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Any

import torch.distributed as dist

from fsdp_optim.checkpoint.catalog.retention import Best, KeepRules
from fsdp_optim.checkpoint.run.managed_run import ManagedRun, ManagerOptions
from fsdp_optim.checkpoint.run.trainer_state import Stateful, TrainerState
from fsdp_optim.memory import ordinary_tensors
from fsdp_optim.options import (
    BUCKET_NBYTES,
    Check,
    GroupsFrom,
    Model,
    NameOf,
    OnDamage,
    OnReplicaMismatch,
    Options,
    Rename,
    ResumeOptions,
    SaveOptions,
    Strategy,
    WhichWeights,
)
from fsdp_optim.verbs.load_state import LoadableOptimizer

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class CheckpointManager:
    """Saves every N steps in the background, keeps some checkpoints, resumes, rolls back, and saves when the job is preempted.

        manager = CheckpointManager(root, model, optim, state={"scheduler": sched}, every=500, keep_last=3)
        step = manager.resume()                  # 0 where there is nothing
        for step in range(step + 1, last + 1):
            ...                                  # a training step
            manager.step(step)
            if manager.should_stop:
                break
        manager.close()

    All ranks of the model make every call except `should_stop`, with the same arguments. Every error is raised on all ranks.
    The checkpoint of step 1000 is `root/step-00001000`; `load` loads it too, with the objects' state under `"state"`.

    Args:
        root: a folder for the checkpoints of one run, or a URL, as for `save`.
        model, optim: as for `save`.
        state: objects of the trainer by name: anything with `state_dict()` and `load_state_dict()`, such as schedulers, scalers,
            EMA models, `nn.ModuleDict`. Objects that the ranks have in common: all ranks load the lowest rank's state.
            The values in a state are those that `extra` of save takes.
        per_rank_state: as `state`, but every rank saves its own, and loads its own (a data loader, say). A rank that had none at
            the save loads that of the lowest rank, and a warning says so.
        rng: save and load the random states of each rank: those of Python, numpy, torch and the current accelerator. A rank that
            had none at the save keeps its own, and a warning says so.
        every: save when a multiple of this number of steps is reached. None: only `save` and signals save.
        keep_last: the number of the newest checkpoints that stay. One that any of the three rules keeps stays, and the newest
            always stays; without a rule all stay. Only checkpoints that a manager made count and are removed: the manifest says
            so, and the name is that of the step.
        keep_every: checkpoints whose step is a multiple of this number stay.
        keep_best: the number of checkpoints with the best metrics that stay.
        best: whether the lowest ("min") or the highest ("max") metric is the best.
        signals: at the end of a step, the ranks save, wait for the save, and `should_stop` is True, if any rank has got one of
            these. The handlers, which only the main thread can have, call those that were there before, and `close` puts those
            back. (): no handlers.
        agree_every: the number of steps after which the ranks look whether one of them has got a signal, or its save has
            failed. All ranks meet for this. None: the lowest rank chooses the number, so that they meet about once a second,
            and with more than 20 ranks less often, at most every 10 s. A step that saves is such a step too.
        weights: which weights are saved, and loaded again: "all", "trainable" or "none", as for save and load.
        strategy, max_file_size, checksums, durable, allow_pickle, progress, name_of, process_group, timeout, bucket_nbytes,
            on_replica_mismatch, storage_options: as for `save`, and those that load has, also for the load.

    Raises:
        StateError, CheckpointError: an argument is wrong.
        RankError: the ranks gave different arguments.
    """

    @ordinary_tensors()
    def __init__(
        self,
        root: str | os.PathLike[str],
        model: Model,
        optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None = None,
        *,
        state: Mapping[str, Stateful] = _NOTHING,
        per_rank_state: Mapping[str, Stateful] = _NOTHING,
        rng: bool = True,
        every: int | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best: Best = "min",
        signals: Collection[int] = (signal.SIGTERM,),
        agree_every: int | None = None,
        weights: WhichWeights = "all",
        strategy: Strategy = "auto",
        max_file_size: int = 4_000_000_000,
        checksums: bool = True,
        durable: bool = True,
        allow_pickle: bool = False,
        progress: bool | None = None,
        name_of: NameOf | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: float | timedelta | None = None,
        bucket_nbytes: int = BUCKET_NBYTES,
        on_replica_mismatch: OnReplicaMismatch = "error",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        call = Options(
            name_of=name_of,
            process_group=process_group,
            timeout=timeout,
            bucket_nbytes=bucket_nbytes,
            on_replica_mismatch=on_replica_mismatch,
        )
        self._saving = SaveOptions(
            call,
            overwrite=True,  # only of checkpoints that a manager made
            strategy=strategy,
            max_file_size=max_file_size,
            checksums=checksums,
            durable=durable,
            allow_pickle=allow_pickle,
            progress=progress,
            weights=weights,
            storage_options=storage_options,
        )
        objects = TrainerState(state, per_rank_state, rng)
        rules = KeepRules(keep_last, keep_every, keep_best, best)
        options = ManagerOptions(self._saving, rules, every, agree_every, signals, objects)
        self._run = ManagedRun(root, model, optim, options)

    @property
    def should_stop(self) -> bool:
        """Whether a signal has come to any rank and the last step was saved. The same on all ranks. No communication."""
        return self._run.should_stop

    @ordinary_tensors()
    def resume(
        self,
        *,
        on_damage: OnDamage = "error",
        strict: bool = True,
        groups: GroupsFrom = "saved",
        keep: Sequence[str] = (),
        cast: bool = False,
        rename: Rename | None = None,
        verify: bool = True,
        check: Check | None = None,
        local_cache: str | os.PathLike[str] | None = None,
    ) -> int:
        """Load the newest checkpoint that a manager made in this folder; return its step, or 0 where that is empty, or missing
        in a folder that is there: the training begins anew, which one line says. A path that is a mistake is an error, as for
        `fsdp_optim.resume`, and so is a folder whose checkpoints no manager made.

        The lowest rank lists the folder, so all ranks load the same checkpoint. Model and optimizer are changed when all ranks
        have read everything, and random states are set last: call this when everything is built. If the state of an object
        is refused by its `load_state_dict`, the model and the optimizer stay as they were.

        Args:
            on_damage: as for `fsdp_optim.resume`: a damaged newest checkpoint is an error that names it, unless "previous".
            strict: as for `load`, and for the names in `state` and `per_rank_state`.
            groups, keep, cast, rename, verify, check, local_cache: as for `load`.
        """
        options = self._load_options(strict, groups, keep, cast, rename, verify, check, local_cache, on_damage)
        return self._run.load(None, options)

    @ordinary_tensors()
    def rollback(
        self,
        to: int,
        *,
        strict: bool = True,
        groups: GroupsFrom = "saved",
        keep: Sequence[str] = (),
        cast: bool = False,
        rename: Rename | None = None,
        verify: bool = True,
        check: Check | None = None,
        local_cache: str | os.PathLike[str] | None = None,
    ) -> int:
        """Load the checkpoint of an earlier step, to train on from there; return the step.

        The checkpoints of later steps stay until the next save is complete, and are removed then, because the run took these
        steps back. A run that ends before that resumes from the newest of them.

        Args:
            to: the step of the checkpoint.
            strict, groups, keep, cast, rename, verify, check, local_cache: as for `resume`.

        Raises:
            CheckpointError: the folder has no checkpoint of this step; the message names those that it has.
        """
        options = self._load_options(strict, groups, keep, cast, rename, verify, check, local_cache, "error")
        return self._run.load(to, options)

    @ordinary_tensors()
    def step(self, step: int, *, metric: float | None = None) -> None:
        """Call this after each training step. Saves in the background when `every` says so, and when a signal has come.

        A save that is still under way is waited for. A background save that has failed is raised here, on all ranks, in the
        next step in which the ranks meet (`agree_every`), and in the next save at the latest.

        Args:
            step: the number of the step that is done; it grows from call to call.
            metric: a number by which `keep_best` chooses; that of the lowest rank is recorded, if this step is saved.
        """
        self._run.step(step, metric)

    @ordinary_tensors()
    def save(self, step: int, *, metric: float | None = None) -> None:
        """Save now, in the background, whatever `every` says: at the end of the training, say.

        Does nothing if this run has saved or loaded this step.

        Args:
            step, metric: as for `step`.
        """
        self._run.save(step, metric)

    @ordinary_tensors()
    def wait(self) -> None:
        """Wait for the save in the background, if there is one. If it failed on any rank, all ranks raise its error."""
        self._run.wait()

    @ordinary_tensors()
    def close(self) -> None:
        """Wait as `wait` does, and put the previous signal handlers back, also if an error is raised. May be called again."""
        self._run.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """As `close`. After an error no other rank is waited for, because it may not come: only this rank's own save is."""
        if error is None:
            self._run.close()
        else:
            self._run.close_after_error()

    def _load_options(
        self,
        strict: bool,
        groups: GroupsFrom,
        keep: Sequence[str],
        cast: bool,
        rename: Rename | None,
        verify: bool,
        check: Check | None,
        local_cache: str | os.PathLike[str] | None,
        on_damage: OnDamage,
    ) -> ResumeOptions:
        return ResumeOptions(
            replace(self._saving.call, strict=strict, groups=groups, on_replica_mismatch="error"),
            keep=keep,
            verify=verify,
            check=check,
            allow_pickle=self._saving.allow_pickle,
            progress=self._saving.progress,
            cast=cast,
            rename=rename,
            weights=self._saving.weights,
            local_cache=local_cache,
            storage_options=self._saving.storage_options,
            on_damage=on_damage,
        )
