"""CheckpointManager: one object that saves every N steps, keeps, resumes, rolls back and reacts to preemption."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.checkpoint.catalog.retention import KeepRules
from fsdp_optim.checkpoint.common.arguments import ResumeArguments, SaveArguments
from fsdp_optim.checkpoint.common.run_state import RunState
from fsdp_optim.checkpoint.run.managed_run import ManagedRun, ManagerArguments
from fsdp_optim.options import LoadOptions, ManagerOptions, Model, OnDamage, SaveOptions, WhichWeights, fields_of
from fsdp_optim.results.calls import LoadResult
from fsdp_optim.tensors.memory import ordinary_tensors
from fsdp_optim.verbs.load_state import LoadableOptimizers
from fsdp_optim.verbs.named_models import named_models

if TYPE_CHECKING:
    from fsdp_optim.checkpoint.proof.proving import Prove
    from fsdp_optim.checkpoint.proof.verdict import ResumeProof

_MANAGER, _LOAD = ManagerOptions(), LoadOptions()


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
    The checkpoint of step 1000 is `root/step-00001000`; `load` loads it too.

    Args:
        root: a folder for the checkpoints of one run, or a URL, as in `save`.
        model, optim: as for `save`, also several models and their optimizers by their names.
        state: objects of the trainer and trees of values by name, as for `save`. Each save takes the state of that moment.
            Objects are loaded by `resume` and `rollback`; values are in `restored.state`.
        every: save when a multiple of this number of steps is reached. None: only `save` and signals save.
        keep_last: the number of the newest checkpoints that stay. A checkpoint stays if any of the three rules keeps it, and the
            newest always stays; without a rule all stay. Only checkpoints that a manager made count and are removed: the manifest
            says so, and the name is the one of the step.
        keep_every: checkpoints whose step is a multiple of this number stay.
        keep_best: the number of checkpoints with the best metrics that stay; `ManagerOptions(best=)` says which are the best.
        keep_optim_last: the number of the newest checkpoints that keep their optimizer; the others that stay are thinned, as by
            `fsdp_optim.thin`, also the best ones. A run resumes from the newest with an optimizer. None: all keep it.
        weights: which weights are saved, and loaded again: "all", "trainable" or "none", as for save and load.
        prove: True: the step after each checkpoint is recorded in `proof.json` beside it, and a run that resumes compares its
            own next step with the record: `proof` has the verdict, and one line says it. "raise": a step that differs is a
            StateError of `step`, on all ranks. docs/reliability.md says what is compared, and by which bounds.
        options: a `ManagerOptions`, as in `options=ManagerOptions(durable=False, signals=())`.

    Attributes:
        restored: the `LoadResult` of the last `resume` or `rollback`; None before, and where there was nothing.

    Raises:
        StateError, CheckpointError: an argument is wrong.
        RankError: the ranks gave different arguments.
    """

    @public
    @ordinary_tensors()
    def __init__(
        self,
        root: str | os.PathLike[str],
        model: Model | Mapping[str, Model],
        optim: LoadableOptimizers | Mapping[str, LoadableOptimizers] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        every: int | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        keep_optim_last: int | None = None,
        weights: WhichWeights = "all",
        prove: Prove = False,
        options: ManagerOptions = _MANAGER,
    ) -> None:
        is_right = isinstance(options, ManagerOptions)
        self._options = options if is_right else _MANAGER
        named = named_models(model, optim)
        self._saving = SaveArguments(
            **fields_of(SaveOptions, self._options),
            models=named.names,
            state=RunState(state, rng=self._options.rng),
            overwrite=True,  # only of checkpoints that a manager made
            weights=weights,
            wrong_options=named.wrong if is_right else fields_of(ManagerOptions, options)["wrong_options"],
        )
        rules = KeepRules(keep_last, keep_every, keep_best, self._options.best, keep_optim_last)
        arguments = ManagerArguments(self._saving, rules, every, self._options, prove)
        self._run = ManagedRun(root, named.model, named.optim, arguments)

    @property
    def restored(self) -> LoadResult | None:
        """The result of the last `resume` or `rollback`; None before, and where there was nothing to load."""
        return self._run.restored

    @property
    def proof(self) -> ResumeProof | None:
        """The verdict about the last resume or rollback, after the step that followed it; None before, and with prove=False."""
        return self._run.proving.proof if self._run.proving is not None else None

    @property
    def should_stop(self) -> bool:
        """Whether a signal has come to any rank and the last step was saved. The same on all ranks. No communication."""
        return self._run.should_stop

    @public
    @ordinary_tensors()
    def resume(
        self,
        *,
        on_damage: OnDamage = "error",
        strict: bool = True,
        options: LoadOptions = _LOAD,
    ) -> int:
        """Load the newest checkpoint that a manager made in this folder; return its step, or 0 where there is none.

        The result is 0 where the folder is empty, or missing in a folder that is there: training starts from scratch, which
        one line says. A path that is a mistake is an error, as for `fsdp_optim.resume`, and so is a folder whose checkpoints
        no manager made.

        The lowest rank lists the folder, so all ranks load the same checkpoint. Model and optimizer are changed when all ranks
        have read everything, and random states are set last: call this when everything is built. If the state of an object
        is refused by its `load_state_dict`, the model and the optimizer stay as they were.

        Args:
            on_damage: as for `fsdp_optim.resume`: a damaged newest checkpoint is an error that names it, unless "previous".
            strict: as for `load`, also for the names in `state`.
            options: a `LoadOptions`. What it leaves at its default is the manager's, where the manager has such an option
                (`process_group`, `timeout`, `bucket_nbytes`, `name_of`, `views`, `allow_pickle`, `progress`, `storage_options`).
        """
        return self._run.load(None, self._arguments(options, strict, on_damage))

    @public
    @ordinary_tensors()
    def rollback(
        self,
        to: int,
        *,
        strict: bool = True,
        options: LoadOptions = _LOAD,
    ) -> int:
        """Load the checkpoint of an earlier step, to continue training from there; return the step.

        The checkpoints of later steps stay until the next save is complete, and are removed then, because the run took these
        steps back. A run that ends before that resumes from the newest of them. A parameter that got its first state after that
        step (a layer that was unfrozen, an expert that was not used before) has none again.

        Args:
            to: the step of the checkpoint.
            strict, options: as for `resume`.

        Raises:
            CheckpointError: the folder has no checkpoint of this step; the message names the steps that it has.
        """
        return self._run.load(to, replace(self._arguments(options, strict, "error"), drops_new_state=True))

    @public
    @ordinary_tensors()
    def step(self, step: int, *, metric: float | None = None) -> None:
        """Call this after each training step. Saves in the background when `every` says so, and when a signal has come.

        A save that is still under way is waited for. A background save that has failed is raised here, on all ranks, in the
        next step in which the ranks meet (`agree_every`), and in the next save at the latest.

        Args:
            step: the number of the step that is done; it grows from call to call.
            metric: a number by which `keep_best` chooses; the lowest rank's is recorded, if this step is saved.
        """
        self._run.step(step, metric)

    def observe(self, **values: Any) -> None:
        """Show what a step has seen, so that a verdict can name it: the batch, the loss, the norm of the gradients, and more.

            manager.observe(batch=batch, loss=loss, grad_norm=norm)

        Call it before `step`, as often as there are forward passes. Does nothing in a step that is not proven. Called by any
        rank, without communication; what only some ranks show is not compared.

        Args:
            batch: a tree of tensors, arrays and plain values. Without it, what the model is called with is the batch.
            values: numbers, or tensors of one element, are compared as numbers: at another world size their mean over the ranks.
                Other trees are compared bit for bit, at the same world size.
        """
        if self._run.proving is not None:
            self._run.proving.observe(values)

    @public
    @ordinary_tensors()
    def save(self, step: int, *, metric: float | None = None) -> None:
        """Save now, in the background, whatever `every` says: at the end of the training, say.

        Does nothing if this run has saved or loaded this step.

        Args:
            step, metric: as for `step`.
        """
        self._run.save(step, metric)

    @public
    @ordinary_tensors()
    def wait(self) -> None:
        """Wait for the background save, if there is any. If it failed on any rank, all ranks raise its error."""
        self._run.wait()

    @public
    @ordinary_tensors()
    def close(self) -> None:
        """Wait as `wait` does, and put the previous signal handlers back, also if an error is raised. May be called again."""
        self._run.close()

    def __repr__(self) -> str:
        return repr(self._run)

    def __enter__(self) -> CheckpointManager:
        return self

    @public
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close as `close`. After an error wait only for this rank's own save, not for other ranks, which may not come."""
        if error is None:
            self._run.close()
        else:
            self._run.close_after_error()

    def _arguments(self, options: LoadOptions, strict: bool, on_damage: OnDamage) -> ResumeArguments:
        """Return the arguments of a load: the options given there, and for the rest the manager's."""
        given = fields_of(LoadOptions, options)
        shared = {option.name for option in fields(SaveOptions)} - {"rename"}
        defaults = {option.name: option.default for option in fields(LoadOptions) if option.name in shared}
        own = {
            name: getattr(self._options, name)
            for name, default in defaults.items()
            if name not in given or given[name] is default or given[name] == default
        }
        return ResumeArguments(
            **{**given, **own},
            state=self._saving.state,
            strict=strict,
            weights=self._saving.weights,
            models=self._saving.models,
            on_damage=on_damage,
        )
