"""Lightning: its strategies for FSDP2, FSDP1 and DDP, with checkpoints of this library.

    from fsdp_optim.integrations.lightning import FSDPStrategy  # or ModelParallelStrategy, DDPStrategy

    trainer = Trainer(strategy=FSDPStrategy(), callbacks=[ModelCheckpoint(save_top_k=2, save_last=True)])
    trainer.fit(model, ckpt_path="last")

Each class takes the arguments of Lightning's own class of the same name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import group

import fsdp_optim
from fsdp_optim import CheckpointError, FsdpOptimError, LoadOptions, SaveOptions, StateError
from fsdp_optim.integrations.common.needed import refusal
from fsdp_optim.plugins import (
    Prove,
    ResumeProver,
    WhichWeights,
    by_lowest,
    is_url,
    random_states,
    remove_checkpoint,
    set_random_states,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from fsdp_optim import LoadResult

__all__ = ["Checkpoints", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy"]

TESTED = "2.6.0"
"""The version of Lightning that the tests use."""

try:
    from lightning import __version__ as version_here
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
    from lightning.pytorch.strategies import FSDPStrategy as _FSDPStrategy
    from lightning.pytorch.strategies import ModelParallelStrategy as _ModelParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise refusal("lightning", TESTED, f"a name ({error})") from error

_SAVE, _LOAD = SaveOptions(), LoadOptions()
_STATE, _OPTIMIZERS = "state_dict", "optimizer_states"
_OF_RANK, _RANDOM, _MID_EPOCH = "of_this_rank", "random", "mid_epoch"
"""The name of what each rank has for itself among the values of a checkpoint, and its keys."""

OptionsT = TypeVar("OptionsT", SaveOptions, LoadOptions)

log = logging.getLogger("fsdp_optim")


class Checkpoints:
    """A mixin for strategies of Lightning's Trainer: checkpoints are folders of this library.

        class MyStrategy(Checkpoints, FSDPStrategy): ...

    On several machines give `ckpt_path` a path: for "last" and "hpc" each rank of Lightning looks into the folder by itself, and
    a network file system may show them different checkpoints.

    Args:
        args, kwargs: those of Lightning's own strategy.
        async_save: write in the background while training continues. The next save and the end of the training wait for it, and
            raise its error on all ranks.
        weights: the weights that are saved and loaded, as for `fsdp_optim.save` and `load`.
        save_options: a `fsdp_optim.SaveOptions`, such as `SaveOptions(max_file_size=10**9)`. The ranks are the strategy's.
        load_options: a `fsdp_optim.LoadOptions`, such as `LoadOptions(cast=True)`. The ranks are the strategy's.
        prove: as for `fsdp_optim.CheckpointManager`: the optimizers' next step after each checkpoint is recorded beside it, and
            a run that resumes compares its own.
    """

    _OVERRIDDEN = (
        *("lightning_module_state_dict", "optimizer_state", "load_model_state_dict", "load_optimizer_state_dict"),
        *("save_checkpoint", "load_checkpoint", "remove_checkpoint", "restore_checkpoint_after_setup"),
        *("lightning_restore_optimizer", "on_train_start", "on_train_batch_start", "on_exception", "teardown"),
    )

    if TYPE_CHECKING:  # attributes of the strategies
        model: nn.Module | None
        optimizers: list[Optimizer]
        lightning_module: Any
        is_global_zero: bool

        def broadcast(self, obj: Any, src: int = 0) -> Any: ...

    def __init__(
        self,
        *args: Any,
        async_save: bool = True,
        weights: WhichWeights = "all",
        save_options: SaveOptions = _SAVE,
        load_options: LoadOptions = _LOAD,
        prove: Prove = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._saves_in_background = async_save
        self._weights: WhichWeights = weights
        self._save_options = _checked("save_options", save_options, SaveOptions)
        self._load_options = _checked("load_options", load_options, LoadOptions)
        self._handle: fsdp_optim.SaveHandle | None = None
        self._prove: Prove = prove
        self._prover: ResumeProver | None = None
        self._replaced: dict[
            str, None
        ] = {}  # checkpoints that ModelCheckpoint has removed: they stay until the save under way is complete
        self._was_interrupted = False
        self._random: Mapping[str, Any] | None = None  # the random states that `on_train_start` sets

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a version of Lightning that does not call the methods that are overridden here."""
        super().__init_subclass__(**kwargs)
        bases = [base for base in cls.__mro__ if not issubclass(base, Checkpoints)]
        missing = [name for name in cls._OVERRIDDEN if not any(name in vars(base) for base in bases)]
        if missing and bases != [object]:
            raise refusal("lightning", TESTED, ", ".join(f"{bases[0].__name__}.{name}" for name in missing))

    # ------------------------------------------------------------------------------------------- state that the Trainer collects

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: weights and state are loaded into the wrapped model and its optimizers."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` has loaded the optimizers."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: `save_checkpoint` reads the live model."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` reads the live optimizers."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has loaded the weights."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has loaded the state."""

    # ------------------------------------------------------------------------------------------- saving

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save the live model and optimizers, with all other values of `checkpoint` as the trainer's. Called by all ranks."""
        path = self.broadcast(str(filepath))
        self._settle()
        extra = dict(checkpoint)
        optimizers = self.optimizers if extra.pop(_OPTIMIZERS, None) is not None else None
        if extra.pop(_STATE, None):
            raise StateError(
                f"{path}: on_save_checkpoint has put weights into checkpoint['{_STATE}'], which is empty because this strategy "
                "saves the live model: choose the weights in another way, such as fsdp_optim.convert of the finished checkpoint"
            )
        options = replace(self._save_options, process_group=group.WORLD)
        if storage_options is not None:
            options = replace(options, storage_options=storage_options)
        own = {_OF_RANK: fsdp_optim.per_rank(self._of_this_rank())} if optimizers is not None else {}
        self._replaced.pop(path, None)
        by_lowest("put a file aside", lambda: _put_file_aside(path))
        handle = fsdp_optim.async_save(
            path,
            self._model_here,
            _one_or_list(optimizers) if optimizers is not None else None,
            state={**extra, **own},
            step=extra.get("global_step"),
            overwrite=True,
            weights=self._weights,
            options=options,
        )
        self._handle = handle
        if optimizers:
            self.prover.saved(path, self._model_here, optimizers, extra.get("global_step") or 0, handle=handle)
        if not self._saves_in_background or Path(path).name.startswith("hpc_ckpt_"):  # after these the job is requeued
            self._settle()

    def _of_this_rank(self) -> dict[str, Any]:
        """The random states, and whether an epoch is under way, so that its loader's iterator has made its draws."""
        epoch = self.lightning_module.trainer.fit_loop.epoch_loop
        return {_RANDOM: random_states(), _MID_EPOCH: not epoch.batch_progress.is_last_batch}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, once the save that is under way is complete: until then it may be the only one."""
        self._replaced[str(filepath)] = None
        if self._handle is None:
            self._remove_replaced()

    def on_train_start(self) -> None:
        """Set the random states of an epoch that was under way, now that its loader has a new iterator."""
        super().on_train_start()  # type: ignore[misc]
        states, self._random = self._random, None
        if states is not None:
            set_random_states(states)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Remove the checkpoint that the save in the background has replaced, if that save is complete."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        handle = self._handle
        if self._replaced and handle is not None and handle.done() and not handle.has_failed:
            self._remove_replaced()

    def on_exception(self, exception: BaseException) -> None:
        """Note that other ranks may not come any more."""
        self._was_interrupted = True
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        """Wait for the save in the background. Raises its error, unless another error ends the training."""
        try:
            if self._was_interrupted:
                self._settle_after_error()
            else:
                self._settle()
        finally:
            if self._prover is not None:
                self._prover.close()
            self._was_interrupted = False
            super().teardown()  # type: ignore[misc]

    def _settle(self) -> None:
        """Wait for the save in the background, and remove the replaced checkpoint. All ranks raise the save's error."""
        handle, self._handle = self._handle, None
        if handle is not None:
            replaced, self._replaced = self._replaced, {}
            handle.wait()
            self._replaced = replaced
        self._remove_replaced()

    def _settle_after_error(self) -> None:
        try:
            self._settle()
        except FsdpOptimError as error:
            log.error("the save in the background has failed too: %s", error)

    def _remove_replaced(self) -> None:
        replaced, self._replaced = self._replaced, {}
        for path in replaced if self.is_global_zero else ():
            _remove(path, self._save_options.storage_options)

    # ------------------------------------------------------------------------------------------- loading

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of this library or of Lightning's own strategies into the live model and optimizers.

        Returns its other values. `weights_only`: False allows pickled ones.
        """
        path = self.broadcast(str(checkpoint_path))
        self._settle()
        options = replace(self._load_options, process_group=group.WORLD)
        if weights_only is False:
            options = replace(options, allow_pickle=True)
        module = self.lightning_module
        is_fitting = module.trainer.state.fn == TrainerFn.FITTING
        result = fsdp_optim.load(
            path,
            self._model_here,
            _one_or_list(self.optimizers) if is_fitting and self.optimizers else None,
            strict=module.strict_loading,
            weights=self._weights,
            options=options,
        )
        checkpoint = result.state
        checkpoint.setdefault("pytorch-lightning_version", version_here)  # which a checkpoint of another program lacks
        if is_fitting:
            self._restore_random(result, path)
            if self.optimizers:
                self.prover.resumed(path, self._model_here, self.optimizers, checkpoint.get("global_step") or 0)
        return checkpoint

    @property
    def prover(self) -> ResumeProver:
        """The prover of resumes; its `proof` is the verdict about the last one."""
        if self._prover is None:
            self._prover = ResumeProver(self._prove, options=fsdp_optim.CallOptions(process_group=group.WORLD))
        return self._prover

    def _restore_random(self, result: LoadResult, path: str) -> None:
        """Set the random states of this rank: now, and once more where the new iterator of the loader is one too many."""
        # Older versions of this plug-in have saved the two under names of their own.
        own = result.state.get(_OF_RANK, result.state if _MID_EPOCH in result.state else {})
        if _RANDOM in own:
            set_random_states(own[_RANDOM])
            if own.get(_MID_EPOCH):
                self._random = own[_RANDOM]
        elif self.is_global_zero:  # a rank that is new keeps its own, which the load has said
            log.warning("%s has no random states, so they stay as they are: Lightning itself saves none", path)

    @property
    def _model_here(self) -> nn.Module:
        if self.model is None:
            raise StateError("the strategy has no model yet: save and load checkpoints after the trainer has set it up")
        return self.model


class ModelParallelStrategy(Checkpoints, _ModelParallelStrategy):
    """Lightning's strategy for FSDP2 and tensor parallel, with checkpoints of this library. Arguments: `Checkpoints`."""


class FSDPStrategy(Checkpoints, _FSDPStrategy):
    """Lightning's strategy for torch FSDP1, with checkpoints of this library. Arguments: `Checkpoints`."""


class DDPStrategy(Checkpoints, _DDPStrategy):
    """Lightning's strategy for DistributedDataParallel, with checkpoints of this library. Arguments: `Checkpoints`."""


def _checked(name: str, options: Any, kind: type[OptionsT]) -> OptionsT:
    """The options of a call of this library. Raises StateError for a wrong one."""
    if not isinstance(options, kind):
        raise StateError(f"{name} must be a {kind.__name__}, not a {type(options).__name__}")
    if options.process_group is not None:
        raise StateError(f"{name} has process_group=, which is the strategy's own")
    options.validate()
    return options


def _one_or_list(optimizers: list[Optimizer]) -> Any:
    return optimizers[0] if len(optimizers) == 1 else list(optimizers)


def _put_file_aside(path: str) -> None:
    """Rename a file of Lightning's own strategies whose name a new checkpoint gets, as `last.ckpt`."""
    if is_url(path):
        return
    files = get_filesystem(path)
    if files.isfile(path) and not files.islink(path):
        aside = f"{path}.file"
        log.warning("%s is a file, and a checkpoint gets this name: the file is now %s", path, aside)
        files.mv(path, aside)
    elif files.islink(path):
        files.rm_file(path)


def _remove(path: str, storage_options: Mapping[str, Any] | None) -> None:
    """Remove a checkpoint of this library, a link to one, or a file. Warns if one cannot be removed."""
    try:
        files = None if is_url(path) else get_filesystem(path)
        if files is not None and (files.islink(path) or files.isfile(path)):
            files.rm_file(path)
            return
        options = storage_options if is_url(path) else None
        remove_checkpoint(path, "ModelCheckpoint does not keep it", storage_options=options)
    except (OSError, CheckpointError) as error:
        log.warning("%s cannot be removed: %s", path, error)
