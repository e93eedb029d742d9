"""Checkpoints of transformers' Trainer with this library: one function for each method that saves or loads."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, LoadResult, StateError
from fsdp_optim.integrations.common.patches import status_in
from fsdp_optim.integrations.hugging_face import signs
from fsdp_optim.integrations.hugging_face.folders import (
    SHARDED_OPTIM,
    is_outdated,
    look_at,
    optimizer_inside,
    remove_older,
)
from fsdp_optim.integrations.hugging_face.proofs import number_of, prover_of
from fsdp_optim.integrations.hugging_face.settings import Settings
from fsdp_optim.plugins import (
    Rename,
    TrainerFolder,
    WhichWeights,
    absolute,
    by_lowest,
    folders_by_number,
    has_file,
    say,
    see_files,
    wait_on_all,
)

SAVING, ROTATION, LOADED = "_fsdp_optim_saving", "_fsdp_optim_rotation", "_fsdp_optim_loaded"
"""Attributes of a trainer: the checkpoint under way, the removal of older ones that waits for its end, and what is loaded of one
that is resumed from."""

_NAMED = re.compile(r"checkpoint-(\d+)")
_WEIGHTS = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
_SCHEDULER, _STATE = "scheduler.pt", "trainer_state.json"
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
"""Where the Trainer by itself looks for the optimizer: without FSDP and with it."""

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class Rotation:
    """The removal of older checkpoints, when `newest` is complete."""

    newest: Path
    limit: int
    best: str | None

    def remove_older(self) -> None:
        """Remove the checkpoints of the lowest steps. Raises CheckpointError."""
        kept = [absolute(self.best)] if self.best is not None else []
        remove_older(self.newest, _NAMED, self.limit, f"save_total_limit={self.limit}", kept)


def is_handled(trainer: Any) -> bool:
    """Whether this library saves for a trainer: not for DeepSpeed, SageMaker and XLA, nor on each node by itself."""
    module = importlib.import_module("transformers.trainer")
    other = trainer.is_deepspeed_enabled or module.is_sagemaker_mp_enabled() or module.is_torch_xla_available()
    return not other and not trainer.args.save_on_each_node


def saving_of(trainer: Any) -> TrainerFolder | None:
    """The checkpoint of a trainer that is under way."""
    save: TrainerFolder | None = vars(trainer).get(SAVING)
    return save


def save_checkpoint(original: Callable[..., Any], trainer: Any, settings: Settings, model: Any, trial: Any) -> None:
    """Save a checkpoint: the trainer writes its files aside, then this library saves, and everything gets its name at once."""
    if saving_of(trainer) is not None or not is_handled(trainer):
        original(model, trial)
        return
    module = importlib.import_module("transformers.trainer")
    step = trainer.state.global_step
    run_dir = str(trainer._get_output_dir(trial=trial)).rstrip("/")
    path = f"{run_dir}/checkpoint-{step}"
    save = TrainerFolder.begin(path, settings.saving(), is_outdated=is_outdated)
    _rotate(trainer, settings)  # TrainerFolder.begin has waited for the checkpoint before
    pushed: list[Any] = []
    with save.writing(), ExitStack() as stack:
        _remember_best(trainer, path)
        stack.enter_context(status_in(trainer, **{SAVING: save}))
        stack.enter_context(_redirected(trainer, save, path))
        stack.enter_context(status_in(trainer, _push_from_checkpoint=pushed.append))
        stack.enter_context(status_in(module, rotate_checkpoints=_nothing))
        original(model, trial)
        _write_without_weights(trainer, save)
    optim = None if trainer.args.save_only_model else optimizer_inside(trainer.optimizer)
    background = settings.background and not pushed and not _is_read_on_save(trainer)
    which = _which_weights(trainer)
    handle = save.commit(model_of(trainer), optim, step=step, weights=which, background=background)
    if optim is not None:
        prover_of(trainer, settings).saved(path, model_of(trainer), optim, step, handle=handle)
    limit = trainer.args.save_total_limit
    if limit is not None and limit > 0:
        setattr(trainer, ROTATION, Rotation(save.path, limit, trainer.state.best_model_checkpoint))
    if not settings.background:
        _rotate(trainer, settings)
    for _ in pushed:
        trainer._push_from_checkpoint(path)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A stand-in for a function of the Trainer whose work is done later."""


def _remember_best(trainer: Any, path: str) -> None:
    """Record the checkpoint as the best one, as the Trainer does where it finds the folder."""
    state, strategy = trainer.state, str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy))
    if (
        strategy in ("steps", "epoch", "best")
        and state.best_global_step
        and state.best_global_step == state.global_step
    ):
        state.best_model_checkpoint = path


@contextmanager
def _redirected(trainer: Any, save: TrainerFolder, folder: str) -> Iterator[None]:
    """The trainer's methods write into the folder for its files. An error is noted, and the trainer continues."""
    final = absolute(folder)

    def inside(path: Any) -> Any:
        where = absolute(path) if path is not None else None
        is_inside = where is not None and where.is_relative_to(final)
        return str(save.files / where.relative_to(final)) if where is not None and is_inside else path

    def redirected(owner: Any, name: str) -> Callable[..., None]:
        method = getattr(owner, name)

        def call(path: Any = None, *args: Any, **kwargs: Any) -> None:
            with save.failure:
                method(inside(path), *args, **kwargs)

        return call

    names = ("save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
    with (
        status_in(trainer, **{name: redirected(trainer, name) for name in names}),
        status_in(trainer.state, save_to_json=redirected(trainer.state, "save_to_json")),
    ):
        yield


def save_model(
    original: Callable[..., Any], trainer: Any, settings: Settings, output_dir: Any = None, _internal_call: bool = False
) -> None:
    """Save the model alone, or in a checkpoint under way the files beside its weights."""
    save = saving_of(trainer)
    if save is not None and str(output_dir) == str(save.files):
        _save_beside_weights(trainer, output_dir, settings)
    elif is_handled(trainer) and _is_sharded_without_files(trainer):
        folder = output_dir if output_dir is not None else trainer.args.output_dir
        trainer._save(folder, state_dict=_gathered(trainer, settings))
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)
    else:
        original(output_dir, _internal_call)


def _is_sharded_without_files(trainer: Any) -> bool:
    """Whether the Trainer itself would write no weights."""
    return trainer.is_fsdp_enabled and "FULL_STATE_DICT" not in str(
        trainer.accelerator.state.fsdp_plugin.state_dict_type
    )


def _save_beside_weights(trainer: Any, folder: str, settings: Settings) -> None:
    """Save the configuration, the tokenizer and the arguments; adapters in files of PEFT too, by which PEFT opens the folder."""
    full: dict[str, Any] | None = {}
    if _which_weights(trainer) == "trainable":
        full = _gathered(trainer, settings) if trainer.is_fsdp_enabled else None
    trainer._save(folder, state_dict=full)


def _gathered(trainer: Any, settings: Settings) -> dict[str, Any]:
    """The weights, or the adapters alone, on rank 0; nothing on other ranks."""
    model, weights = model_of(trainer), _which_weights(trainer)
    return fsdp_optim.gather_full_model_state_dict(model, weights=weights, options=settings.calling()) or {}


def _which_weights(trainer: Any) -> WhichWeights:
    """All weights, or the adapters of PEFT alone."""
    module = importlib.import_module("transformers.trainer")
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return "trainable" if module._is_peft_model(model) else "all"


def _write_without_weights(trainer: Any, save: TrainerFolder) -> None:
    """Remove the weights files without weights that `_save` has left."""
    if trainer.args.should_save:
        save.remove(lambda name: _WEIGHTS.fullmatch(name) is not None)


def save_optimizer_and_scheduler(
    original: Callable[..., Any], trainer: Any, settings: Settings, output_dir: str
) -> None:
    """Save the scheduler; the optimizer comes with the checkpoint under way. A Trainer without this plug-in finds a sign."""
    save = saving_of(trainer)
    if save is None or str(output_dir) != str(save.files):
        original(output_dir)
    elif trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), f"{output_dir}/{_SCHEDULER}")
        for name in _OPTIMIZERS:
            save.write(name, signs.sign("Trainer.train()"))


def load_from_checkpoint(
    original: Callable[..., Any], trainer: Any, settings: Settings, path: str, model: Any = None
) -> None:
    """Load the weights of a checkpoint."""
    which, target = _which_weights(trainer), model if model is not None else trainer.model
    rename: Rename | None = None
    kind = look_at(path, settings, with_optim=False).kind
    if kind == "other":
        original(path, model)
        return
    if kind == "sharded" and which == "trainable":
        _check_adapters(path, settings)
        rename = _names_in_model(target)
        if rename is None:
            original(path, model)
            return
    options = replace(settings.loading(rename), silent=True)
    _note(trainer, fsdp_optim.load(path, target, weights=which, options=options))


def _note(trainer: Any, loaded: LoadResult) -> None:
    """Add what was loaded to what the line about the resume will say, when the optimizer follows."""
    before = vars(trainer).get(LOADED)
    if loaded.receipt is not None:
        setattr(trainer, LOADED, before.joined(loaded.receipt) if before is not None else loaded.receipt)


def _say_resumed(trainer: Any, *names: str) -> None:
    receipt = vars(trainer).pop(LOADED, None)
    if receipt is not None:
        say(f"resumed {replace(receipt, names=names)}")


def _check_adapters(path: str, settings: Settings) -> None:
    """Refuse a folder without weights of adapters, from which Accelerate's own function loads nothing and raises no error."""
    if not by_lowest("weights of adapters", lambda: bool(fsdp_optim.inspect(path).model), settings.saving()):
        raise CheckpointError(
            f"{path}: has no weights: Accelerate saves none of PEFT's adapters with FSDP1 and SHARDED_STATE_DICT, so that no run "
            "can resume from this checkpoint: take an earlier one, or start from scratch"
        )


def _names_in_model(model: Any) -> Rename | None:
    """The function from PEFT's names, under which Accelerate saves adapters alone, to the model's.

    None for adapters whose values PEFT makes when it saves, and takes apart when it loads.
    """
    peft = importlib.import_module("fsdp_optim.integrations.peft")
    try:
        return peft.AdapterNames.of_active(model).fqn_of  # type: ignore[no-any-return]
    except StateError:
        return None


def load_optimizer_and_scheduler(
    original: Callable[..., Any], trainer: Any, settings: Settings, path: str | None
) -> None:
    """Load the optimizer and the scheduler of a checkpoint. A checkpoint without an optimizer has neither."""
    kind = look_at(path, settings, with_optim=True) if path is not None else None
    if path is None or kind is None or kind.kind == "other":
        original(path)
        return
    is_sharded = kind.kind == "sharded"
    if not is_sharded and not by_lowest("the optimizer", lambda: fsdp_optim.inspect(path).has_optim, settings.saving()):
        log.warning("%s has no optimizer (save_only_model): the optimizer and the scheduler start from scratch", path)
        _say_resumed(trainer)
        return
    place = f"{path}/{SHARDED_OPTIM}" if is_sharded else path
    optim, options = optimizer_inside(trainer.optimizer), replace(settings.loading(), silent=True)
    _note(trainer, fsdp_optim.load(place, model_of(trainer), optim, weights="none", options=options))
    has_scheduler = _SCHEDULER in kind.files
    if has_scheduler:
        trainer.lr_scheduler.load_state_dict(torch.load(f"{path}/{_SCHEDULER}", weights_only=True))
    _say_resumed(trainer, *(["scheduler"] if has_scheduler else []))
    if not is_sharded:
        prover_of(trainer, settings).resumed(path, model_of(trainer), optim, number_of(path))


def load_best_model(original: Callable[..., Any], trainer: Any, settings: Settings) -> None:
    """Load the weights of the best checkpoint."""
    path = trainer.state.best_model_checkpoint
    wait_on_all(settings.saving())
    if path is None or look_at(path, settings, with_optim=False).kind != "ours":
        original()
        return
    log.info("loading the best model from %s (%s)", path, trainer.state.best_metric)
    fsdp_optim.load(path, model_of(trainer), weights=_which_weights(trainer), options=settings.loading())


def finalize_training(original: Callable[..., Any], trainer: Any, settings: Settings, *args: Any, **kwargs: Any) -> Any:
    """Wait for the last checkpoint, and raise its error, before the trainer removes older ones."""
    if is_handled(trainer):
        wait_on_all(settings.saving())
        _rotate(trainer, settings)
    return original(*args, **kwargs)


def get_last_checkpoint(original: Callable[..., Any], settings: Settings, folder: Any) -> Any:
    """The checkpoint with the highest step, without folders in which a save has not come to its end. Called by all ranks."""
    newest = by_lowest("the last checkpoint", lambda: _last_checkpoint(original, folder), settings.saving())
    if newest is not None:
        see_files(newest, {_STATE: None}, settings.saving(), shared=False)
    return newest


def _last_checkpoint(original: Callable[..., Any], folder: Any) -> str | None:
    named = folders_by_number(folder, _NAMED)
    trainers_choice = original(folder)
    if trainers_choice is None or has_file(trainers_choice, _STATE):
        return trainers_choice  # type: ignore[no-any-return]
    newest = next((path for _, path in reversed(named) if has_file(path, _STATE)), None)
    if newest is None:
        return trainers_choice  # type: ignore[no-any-return]
    log.warning("%s has no %s, so it is not complete: %s is taken", trainers_choice, _STATE, newest)
    return str(newest)


def model_of(trainer: Any) -> nn.Module:
    """The model with its wrapper, which says which ranks share it."""
    wrapped = trainer.model_wrapped
    return trainer.model if isinstance(wrapped, nn.DataParallel) else wrapped  # type: ignore[no-any-return]


def _is_read_on_save(trainer: Any) -> bool:
    """Whether a callback gets the event of a save, in which it may read the folder."""
    base = importlib.import_module("transformers.trainer_callback").TrainerCallback
    return any(type(callback).on_save is not base.on_save for callback in trainer.callback_handler.callbacks)


def _rotate(trainer: Any, settings: Settings) -> None:
    """Remove older checkpoints, as `save_total_limit` says. The newest is complete, and stays; so does the best.

    Called by all ranks.
    """
    rotation: Rotation | None = vars(trainer).pop(ROTATION, None)
    if rotation is not None:
        by_lowest("save_total_limit", rotation.remove_older, settings.saving())
