"""Accelerate and transformers' Trainer with this library's checkpoints.

    import fsdp_optim.integrations.accelerate

    fsdp_optim.integrations.accelerate.enable()

From then on `accelerator.save_state` and `load_state`, and the checkpoints of a Trainer, are this library's: for FSDP2, FSDP1,
DDP and single processes, at any number of ranks, from every wrapper to every other. `from_pretrained` opens a checkpoint folder,
which has `model.safetensors` beside `config.json`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from fsdp_optim import LoadOptions, SaveOptions
from fsdp_optim.integrations.common.needed import needed, version_of
from fsdp_optim.integrations.common.patches import is_replaced, put_back, replace_function, replace_method
from fsdp_optim.integrations.hugging_face import accelerator_state, trainer_folder
from fsdp_optim.integrations.hugging_face.accelerate_start import weights_from
from fsdp_optim.integrations.hugging_face.settings import Settings
from fsdp_optim.plugins import Prove

__all__ = ["FsdpOptimTrainerMixin", "Settings", "disable", "enable", "weights_from"]

_SAVE, _LOAD = SaveOptions(), LoadOptions()

TESTED = {"accelerate": "1.15.0", "transformers": "5.23.0"}
"""The versions that the tests run with. Others are tried."""

_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "save_state": accelerator_state.save_state,
    "load_state": accelerator_state.load_state,
    "end_training": accelerator_state.end_training,
}
_OF_ACCELERATOR = (
    *("save_accelerator_state", "load_accelerator_state"),
    *("save_fsdp_model", "save_fsdp_optimizer", "load_fsdp_model", "load_fsdp_optimizer"),
)
_TRAINER: dict[str, Callable[..., Any]] = {
    "_save_checkpoint": trainer_folder.save_checkpoint,
    "save_model": trainer_folder.save_model,
    "_save_optimizer_and_scheduler": trainer_folder.save_optimizer_and_scheduler,
    "_load_from_checkpoint": trainer_folder.load_from_checkpoint,
    "_load_optimizer_and_scheduler": trainer_folder.load_optimizer_and_scheduler,
    "_load_best_model": trainer_folder.load_best_model,
    "_finalize_training": trainer_folder.finalize_training,
}
_USED_OF_TRAINER = ("_save", "_save_scaler", "_save_rng_state", "_push_from_checkpoint", "_get_output_dir")
_OF_TRAINER = (
    "rotate_checkpoints",
    "get_last_checkpoint",
    "is_sagemaker_mp_enabled",
    "is_torch_xla_available",
    "_is_peft_model",
)

log = logging.getLogger("fsdp_optim")


def enable(
    *,
    background: bool = False,
    prove: Prove = False,
    save_options: SaveOptions = _SAVE,
    load_options: LoadOptions = _LOAD,
) -> None:
    """Save and load by this library from now on, in every Accelerator and every Trainer of this process.

    Call this on all ranks, with the same arguments, before training. A second call changes the arguments.

    Args:
        background: write while training continues. An error is raised by the next save, at the end of `Trainer.train`, or by
            `accelerator.end_training()`, with which a program with an Accelerator must end. A save that something wants to
            read at once (a callback with `on_save`, `push_to_hub`) is waited for. False: a checkpoint is complete when the call
            returns.
        prove: as for `fsdp_optim.CheckpointManager`: the optimizer's next step after each checkpoint is recorded beside it, and
            a run that resumes compares its own.
        save_options: as `options` of `fsdp_optim.save`, such as `SaveOptions(durable=False)`, without `process_group` and
            `rename`.
        load_options: as `options` of `fsdp_optim.load`, such as `LoadOptions(cast=True)`, without the same two.

    Raises:
        WrapperError, ImportError: a name that this plug-in needs is missing in the installed version of accelerate or
            transformers. The error is both.
        StateError, CheckpointError: an argument is wrong.
    """
    settings = Settings(background, prove, save_options, load_options)
    settings.validate()
    methods = [f"Accelerator.{name}" for name in (*_ACCELERATOR, "__init__")]
    owner = _checked("accelerate", {"accelerate.accelerator": ("Accelerator", *_OF_ACCELERATOR, *methods)})[
        "Accelerator"
    ]
    _check_trainer()
    disable()
    for name, new in _ACCELERATOR.items():
        replace_method(owner, name, _with_settings(new, settings))
    replace_method(owner, "__init__", functools.partial(_made, settings))
    _enable_trainer(settings)


def disable() -> None:
    """Put back everything that `enable` has replaced."""
    module = sys.modules.get("accelerate.accelerator")
    for name in (*_ACCELERATOR, "__init__") if module is not None else ():
        put_back(module.Accelerator, name)  # type: ignore[union-attr]
    trainer = sys.modules.get("transformers.trainer")
    if trainer is not None:
        for name in _TRAINER:
            put_back(trainer.Trainer, name)
        put_back(trainer, "get_last_checkpoint")


def _by_this_library(name: str) -> Callable[..., Any]:
    """A method of the mixin: the replacement that `enable` would make of the Trainer's own method."""
    new = _TRAINER[name]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = getattr(super(FsdpOptimTrainerMixin, self), name)
        return new(original, self, self.fsdp_optim_settings, *args, **kwargs)

    method.__name__, method.__doc__ = name, new.__doc__
    return method


class FsdpOptimTrainerMixin:
    """A Trainer whose checkpoints are this library's, without `enable`.

        class MyTrainer(FsdpOptimTrainerMixin, transformers.Trainer):
            fsdp_optim_settings = Settings(background=True)

    `fsdp_optim_settings`: the arguments of `enable`.
    """

    fsdp_optim_settings: ClassVar[Settings] = Settings()

    _save_checkpoint = _by_this_library("_save_checkpoint")
    save_model = _by_this_library("save_model")
    _save_optimizer_and_scheduler = _by_this_library("_save_optimizer_and_scheduler")
    _load_from_checkpoint = _by_this_library("_load_from_checkpoint")
    _load_optimizer_and_scheduler = _by_this_library("_load_optimizer_and_scheduler")
    _load_best_model = _by_this_library("_load_best_model")
    _finalize_training = _by_this_library("_finalize_training")


def _with_settings(new: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    def call(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        return new(original, self, settings, *args, **kwargs)

    return call


def _last_checkpoint(settings: Settings) -> Callable[..., Any]:
    return lambda original, folder: trainer_folder.get_last_checkpoint(original, settings, folder)


def _made(settings: Settings, original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> None:
    """A new Accelerator. Every Trainer makes one, so a Trainer that was imported after `enable` is found here."""
    _enable_trainer(settings)
    original(*args, **kwargs)


def _enable_trainer(settings: Settings) -> None:
    module = sys.modules.get("transformers.trainer")
    if module is None or not hasattr(module, "Trainer") or is_replaced(module.Trainer, "_save_checkpoint"):
        return
    _check_trainer()
    for name, new in _TRAINER.items():
        replace_method(module.Trainer, name, _with_settings(new, settings))
    replace_function(module, "get_last_checkpoint", _last_checkpoint(settings))


def _check_trainer() -> None:
    module = sys.modules.get("transformers.trainer")
    if module is not None and hasattr(module, "Trainer"):
        methods = [f"Trainer.{name}" for name in (*_TRAINER, *_USED_OF_TRAINER)]
        _checked("transformers", {"transformers.trainer": (*_OF_TRAINER, *methods)})


def _checked(package: str, names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The objects of these names in the installed version, which is tried."""
    version = needed(package, TESTED[package], names)
    if version_of(package) != TESTED[package]:
        log.info("%s %s is tried; %s was tested", package, version_of(package), TESTED[package])
    return version
