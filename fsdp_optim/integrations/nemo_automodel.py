"""NeMo Automodel with this library's checkpoints.

    import fsdp_optim.integrations.nemo_automodel

    fsdp_optim.integrations.nemo_automodel.enable()

From then on the Checkpointer of every recipe saves and resumes by this library: `step_500/model` has the weights, as
`from_pretrained` opens them, and `step_500/optim` the optimizer and the schedule.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

import fsdp_optim
from fsdp_optim import LoadOptions, SaveOptions
from fsdp_optim.integrations.common.needed import needed
from fsdp_optim.integrations.common.patches import put_back, replace_method
from fsdp_optim.integrations.hugging_face.pretrained_folder import save_folder
from fsdp_optim.plugins import by_lowest, has_checkpoint, is_url, wait_on_all

__all__ = ["disable", "enable"]

TESTED = "0.7.0"
"""The version of nemo_automodel that the tests run with. Others are tried."""

_SAVE, _LOAD = SaveOptions(), LoadOptions()
_MODULE = "nemo_automodel.components.checkpoint.checkpointing"
_METHODS = ("save_model", "save_optimizer", "load_model", "load_optimizer", "async_wait")
_MODEL, _OPTIM = "model", "optim"

log = logging.getLogger("fsdp_optim")


def enable(*, save_options: SaveOptions = _SAVE, load_options: LoadOptions = _LOAD) -> None:
    """Save and load by this library from now on, in every Checkpointer of NeMo Automodel of this process.

    Call this on all ranks, with the same arguments, before training. A second call changes the arguments. `is_async` of NeMo's
    configuration writes in the background.

    Args:
        save_options: as `options` of `fsdp_optim.save`.
        load_options: as `options` of `fsdp_optim.load`.

    Raises:
        WrapperError, ImportError: a name that this plug-in needs is missing in the installed version of nemo_automodel. The error
            is both.
        StateError, CheckpointError: an option is wrong.
    """
    save_options.validate()
    load_options.validate()
    needed("nemo_automodel", TESTED, {_MODULE: ("Checkpointer", *(f"Checkpointer.{name}" for name in _METHODS))})
    disable()
    owner = importlib.import_module(_MODULE).Checkpointer
    new = _Methods(save_options, load_options)
    for name in _METHODS:
        replace_method(owner, name, getattr(new, name))


def disable() -> None:
    """Put back everything that `enable` has replaced."""
    owner = importlib.import_module(_MODULE).Checkpointer
    for name in _METHODS:
        put_back(owner, name)


class _Methods:
    """One function for each method of the Checkpointer. What is not handled goes to the method itself."""

    def __init__(self, save_options: SaveOptions, load_options: LoadOptions) -> None:
        self._save, self._load = save_options, load_options

    def save_model(
        self,
        original: Callable[..., Any],
        checkpointer: Any,
        model: Any,
        weights_path: str,
        peft_config: Any = None,
        tokenizer: Any = None,
        is_final_checkpoint: bool = False,
    ) -> None:
        if not _is_handled(checkpointer, model, weights_path):
            original(model, weights_path, peft_config, tokenizer, is_final_checkpoint)
            return
        path, is_async = Path(weights_path, _MODEL), bool(checkpointer.config.is_async)
        save_folder(path, model, None, self._saving(checkpointer), processor=tokenizer, background=is_async)

    def save_optimizer(
        self,
        original: Callable[..., Any],
        checkpointer: Any,
        optimizer: Any,
        model: Any,
        weights_path: str,
        scheduler: Any = None,
        **others: Any,
    ) -> None:
        if not _is_handled(checkpointer, model, weights_path):
            original(optimizer, model, weights_path, scheduler, **others)
            return
        path, options = Path(weights_path, _OPTIM), self._saving(checkpointer)
        is_there = by_lowest("look at the optimizer", lambda: has_checkpoint(path), options)
        save = fsdp_optim.async_save if checkpointer.config.is_async else fsdp_optim.save
        save(path, model, optimizer, weights="none", state=_schedules(scheduler), overwrite=is_there, options=options)

    def load_model(
        self,
        original: Callable[..., Any],
        checkpointer: Any,
        model: Any,
        model_path: str,
        is_init_step: bool = False,
        use_checkpoint_id: bool = True,
        key_mapping: Any = None,
        allow_checkpoint_key_subset: bool = False,
    ) -> None:
        if is_init_step or not self._is_ours(checkpointer, model_path):
            original(model, model_path, is_init_step, use_checkpoint_id, key_mapping, allow_checkpoint_key_subset)
            return
        fsdp_optim.load(model_path, model, strict=not allow_checkpoint_key_subset, options=self._loading(checkpointer))

    def load_optimizer(
        self,
        original: Callable[..., Any],
        checkpointer: Any,
        optimizer: Any,
        model: Any,
        weights_path: str,
        scheduler: Any = None,
        **others: Any,
    ) -> None:
        path = str(Path(weights_path, _OPTIM))
        if not self._is_ours(checkpointer, path):
            original(optimizer, model, weights_path, scheduler, **others)
            return
        state, options = _schedules(scheduler), self._loading(checkpointer)
        fsdp_optim.load(path, model, optimizer, weights="none", state=state or None, options=options)

    def async_wait(self, original: Callable[..., Any], checkpointer: Any) -> None:
        original()
        wait_on_all(self._saving(checkpointer))

    def _is_ours(self, checkpointer: Any, path: str) -> bool:
        if is_url(path):
            return False
        return by_lowest("look at a checkpoint", lambda: has_checkpoint(path), self._saving(checkpointer))

    def _saving(self, checkpointer: Any) -> SaveOptions:
        return replace(self._save, process_group=checkpointer.process_group or self._save.process_group)

    def _loading(self, checkpointer: Any) -> LoadOptions:
        return replace(self._load, process_group=checkpointer.process_group or self._load.process_group)


def _is_handled(checkpointer: Any, model: Any, path: str) -> bool:
    """Whether this library saves: not adapters, URLs of MSC, and models whose files NeMo writes in another form."""
    first = model if isinstance(model, nn.Module) else model[0]
    has_adapter = getattr(getattr(first, "module", first), "state_dict_adapter", None) is not None
    if has_adapter:
        log.info("%s has a state_dict_adapter, so NeMo's own function saves it", type(first).__name__)
    return not (checkpointer.config.is_peft or is_url(path) or has_adapter)


def _schedules(scheduler: Any) -> dict[str, Any]:
    """The schedule, or the schedule of each part of the model, by name."""
    given: Sequence[Any] = scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]
    present = [schedule for schedule in given if schedule is not None]
    return {
        "scheduler" if len(present) == 1 else f"scheduler_{place}": schedule for place, schedule in enumerate(present)
    }
