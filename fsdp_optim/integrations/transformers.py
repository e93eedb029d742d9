"""transformers' own distributed models (`DistributedConfig`: FSDP2, tensor parallel) with this library's checkpoints.

    import fsdp_optim.integrations.transformers

    fsdp_optim.integrations.transformers.enable()

From then on `save_pretrained(..., distributed_checkpoint=True)` writes a folder that `from_pretrained` opens with any
`DistributedConfig` or none; `save_optimizer_distributed` and `load_optimizer_distributed` are this library's too, and so is the
load of the folders that transformers has written by itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, LoadOptions, SaveOptions
from fsdp_optim.integrations.common.needed import needed
from fsdp_optim.integrations.common.patches import put_back, replace_function
from fsdp_optim.integrations.hugging_face.pretrained_folder import save_folder
from fsdp_optim.plugins import absolute, by_lowest, has_checkpoint

__all__ = ["disable", "enable"]

TESTED = "5.23.0"
"""The version of transformers that the tests run with. Others are tried."""

_SAVE, _LOAD = SaveOptions(), LoadOptions()
_PACKAGE = "transformers.distributed"
_SAVE_MODEL, _LOAD_MODEL = "_save_model_checkpoint_distributed", "_load_model_checkpoint_distributed"
_SAVE_OPTIM, _LOAD_OPTIM = "save_optimizer_distributed", "load_optimizer_distributed"
_OWNERS = {
    f"{_PACKAGE}.checkpoint": (_SAVE_MODEL, _LOAD_MODEL, _SAVE_OPTIM, _LOAD_OPTIM),
    f"{_PACKAGE}.mixin": (_SAVE_MODEL, _LOAD_MODEL),
    _PACKAGE: (_SAVE_MODEL, _LOAD_MODEL, _SAVE_OPTIM, _LOAD_OPTIM),
}
"""Where transformers has these functions, and where it has imported them."""


def enable(*, save_options: SaveOptions = _SAVE, load_options: LoadOptions = _LOAD) -> None:
    """Save and load by this library from now on where transformers saves and loads distributed models of this process.

    Call this on all ranks, with the same arguments, before the program imports `save_optimizer_distributed` or
    `load_optimizer_distributed` by name. A second call changes the arguments.

    Args:
        save_options: as `options` of `fsdp_optim.save`.
        load_options: as `options` of `fsdp_optim.load`.

    Raises:
        WrapperError, ImportError: a name that this plug-in needs is missing in the installed version of transformers. The error
            is both.
        StateError, CheckpointError: an option is wrong.
    """
    save_options.validate()
    load_options.validate()
    needed("transformers", TESTED, _OWNERS)
    disable()
    new: dict[str, Callable[..., Any]] = {
        _SAVE_MODEL: lambda _, model, folder: _save_model(model, folder, save_options),
        _LOAD_MODEL: lambda _, model, folder, strict=True: _load_model(model, folder, strict, load_options),
        _SAVE_OPTIM: lambda _, model, optim, folder: _save_optim(model, optim, folder, save_options),
        _LOAD_OPTIM: lambda _, model, optim, folder: _load_optim(model, optim, folder, load_options),
    }
    for module, names in _OWNERS.items():
        owner = importlib.import_module(module)
        for name in names:
            replace_function(owner, name, new[name])


def disable() -> None:
    """Put back everything that `enable` has replaced."""
    for module, names in _OWNERS.items():
        owner = importlib.import_module(module)
        for name in names:
            put_back(owner, name)


def _save_model(model: nn.Module, folder: Any, options: SaveOptions) -> None:
    """Write the weights into a folder where transformers has put its configuration. Called by all ranks."""
    path = str(absolute(folder))
    if by_lowest("the checkpoint that is there", lambda: _halves(path) == "optim", options):
        raise CheckpointError(
            f"{path}: has the optimizer alone, which save_pretrained would replace: call save_optimizer_distributed after "
            "save_pretrained, or give it a folder of its own"
        )
    save_folder(path, model, None, options)


def _load_model(model: nn.Module, folder: Any, strict: bool, options: LoadOptions) -> None:
    """Load the weights of a folder, of this library or of transformers. Called by all ranks."""
    fsdp_optim.load(folder, model, strict=strict, options=options)


def _save_optim(model: nn.Module, optim: Any, folder: Any, options: SaveOptions) -> None:
    """Write the optimizer; with the weights, where the folder has these, so that it stays one checkpoint. Called by all ranks."""
    path = str(absolute(folder))
    halves = by_lowest("the checkpoint that is there", lambda: _halves(path), options)
    if halves in ("model", "both"):
        save_folder(path, model, optim, options)
    else:
        fsdp_optim.save(path, model, optim, weights="none", overwrite=halves == "optim", options=options)


def _load_optim(model: nn.Module, optim: Any, folder: Any, options: LoadOptions) -> None:
    """Load the optimizer of a folder, of this library or of transformers. Called by all ranks."""
    fsdp_optim.load(folder, model, optim, weights="none", options=options)


def _halves(path: str) -> str:
    """What the checkpoint of this library in a folder has: "model", "optim", "both" or "" where there is none."""
    if not has_checkpoint(path):
        return ""
    inside = fsdp_optim.inspect(path)
    if inside.has_optim:
        return "both" if inside.model else "optim"
    return "model"
