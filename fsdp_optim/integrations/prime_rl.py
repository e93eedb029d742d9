"""prime-rl with this library's checkpoints.

    import fsdp_optim.integrations.prime_rl

    fsdp_optim.integrations.prime_rl.enable()

From then on `CheckpointManager.save_to_path` and `load_from_path` of the trainer are this library's. The folders that prime-rl
has written by itself are loaded by its own method.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import fsdp_optim
from fsdp_optim import LoadOptions, SaveOptions, per_rank
from fsdp_optim.integrations.common.needed import needed
from fsdp_optim.integrations.common.patches import put_back, replace_method
from fsdp_optim.plugins import by_lowest, has_checkpoint

__all__ = ["disable", "enable"]

READ = "0.5"
"""The version of prime-rl whose source the plug-in follows. Others are tried."""

_SAVE, _LOAD = SaveOptions(), LoadOptions()
_MODULE = "prime_rl.trainer.ckpt"
_METHODS = ("save_to_path", "load_from_path")
_NAMES = ("scheduler", "progress", "dataloader")


def enable(*, save_options: SaveOptions = _SAVE, load_options: LoadOptions = _LOAD) -> None:
    """Save and load by this library from now on, in every CheckpointManager of prime-rl's trainer of this process.

    Call this on all ranks, with the same arguments, before training. A second call changes the arguments.

    Args:
        save_options: as `options` of `fsdp_optim.save`.
        load_options: as `options` of `fsdp_optim.load`.

    Raises:
        WrapperError, ImportError: a name that this plug-in needs is missing in the installed version of prime-rl. The error is
            both.
        StateError, CheckpointError: an option is wrong.
    """
    save_options.validate()
    load_options.validate()
    needed("prime-rl", READ, {_MODULE: ("CheckpointManager", *(f"CheckpointManager.{name}" for name in _METHODS))})
    disable()
    owner = importlib.import_module(_MODULE).CheckpointManager

    def save_to_path(_: Any, manager: Any, path: Any, *objects: Any, **named: Any) -> None:
        _save(path, save_options, *objects, **named)

    def load_from_path(original: Callable[..., Any], manager: Any, path: Any, *objects: Any, **named: Any) -> None:
        if by_lowest("look at a checkpoint", lambda: has_checkpoint(path), save_options):
            _load(path, load_options, *objects, **named)
        else:
            original(path, *objects, **named)

    replace_method(owner, "save_to_path", save_to_path)
    replace_method(owner, "load_from_path", load_from_path)


def disable() -> None:
    """Put back everything that `enable` has replaced."""
    owner = importlib.import_module(_MODULE).CheckpointManager
    for name in _METHODS:
        put_back(owner, name)


class _Progress:
    """The trainer's dataclass of counters, as an object with a state."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._progress)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self._progress, name, value)


def _save(
    path: Any, options: SaveOptions, model: Any, optimizers: Any, scheduler: Any, progress: Any, dataloader: Any = None
) -> None:
    """Save what `save_to_path` is given; a folder of the same step is replaced. Called by all ranks."""
    is_there = by_lowest("look at a checkpoint", lambda: has_checkpoint(path), options)
    state = _marked(_state(scheduler, progress, dataloader))
    fsdp_optim.save(path, model, list(optimizers), state=state, overwrite=is_there, options=options)


def _load(
    path: Any, options: LoadOptions, model: Any, optimizers: Any, scheduler: Any, progress: Any, dataloader: Any = None
) -> None:
    """Load into what `load_from_path` is given. A rank that is new gets no state of a loader. Called by all ranks."""
    state = _state(scheduler, progress, dataloader)
    has_all = len(state) == len(_NAMES)  # otherwise the checkpoint may have more than the caller asks for
    loaded = fsdp_optim.load(path, model, list(optimizers), state=_marked(state) if has_all else None, options=options)
    for name, value in {} if has_all else state.items():
        if name in loaded.state:
            value.load_state_dict(loaded.state[name])


def _state(scheduler: Any, progress: Any, dataloader: Any) -> dict[str, Any]:
    """The objects with a state, by name."""
    given = (scheduler, None if progress is None else _Progress(progress), dataloader)
    return {name: value for name, value in zip(_NAMES, given, strict=True) if value is not None}


def _marked(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same objects. The loader of each rank is its own."""
    return {name: per_rank(value) if name == "dataloader" else value for name, value in state.items()}
