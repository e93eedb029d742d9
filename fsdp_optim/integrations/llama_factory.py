"""LLaMA-Factory v1 with this library's checkpoints.

    import fsdp_optim.integrations.llama_factory

    fsdp_optim.integrations.llama_factory.enable()

From then on the distributed plug-in "fsdp2" of LLaMA-Factory saves and resumes by this library. `checkpoint-500/model` is one
checkpoint with the optimizer, which `from_pretrained` opens; the schedule, the loader and the random states stay in
LLaMA-Factory's own files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_optim
from fsdp_optim import LoadOptions, SaveOptions
from fsdp_optim.integrations.common.needed import needed
from fsdp_optim.integrations.hugging_face.pretrained_folder import save_folder
from fsdp_optim.plugins import absolute, by_lowest, has_checkpoint

__all__ = ["disable", "enable"]

TESTED = "0.9.5"
"""The version of llamafactory that the tests run with. Others are tried."""

_SAVE, _LOAD = SaveOptions(), LoadOptions()
_HUB = "llamafactory.v1.plugins.trainer_plugins.distributed.hub"
_METHODS = ("save_checkpoint", "load_checkpoint")
_MARK = "_fsdp_optim_replaces"


def enable(*, save_options: SaveOptions = _SAVE, load_options: LoadOptions = _LOAD) -> None:
    """Save and load by this library from now on, in every FSDP2 run of LLaMA-Factory v1 of this process.

    Call this on all ranks, with the same arguments, before training. A second call changes the arguments. A checkpoint is
    complete when LLaMA-Factory writes its marker.

    Args:
        save_options: as `options` of `fsdp_optim.save`.
        load_options: as `options` of `fsdp_optim.load`.

    Raises:
        WrapperError, ImportError: a name that this plug-in needs is missing in the installed version of llamafactory. The error
            is both.
        StateError, CheckpointError: an option is wrong.
    """
    save_options.validate()
    load_options.validate()
    plugin = _plugin()
    disable()
    original: dict[str, Callable[..., Any]] = {name: plugin[name] for name in _METHODS}

    def save_checkpoint(model: Any, optimizer: Any, ckpt_dir: str, **kwargs: Any) -> None:
        save_folder(_path(ckpt_dir), model, optimizer, save_options, processor=kwargs.get("processor"))

    def load_checkpoint(model: Any, optimizer: Any, ckpt_dir: str, **kwargs: Any) -> None:
        path = _path(ckpt_dir)
        if by_lowest("look at a checkpoint", lambda: has_checkpoint(path), save_options):
            fsdp_optim.load(path, model, optimizer, options=load_options)
        else:
            original["load_checkpoint"](model, optimizer, ckpt_dir, **kwargs)

    for function in (save_checkpoint, load_checkpoint):
        setattr(function, _MARK, original[function.__name__])
        plugin.register(function.__name__)(function)


def disable() -> None:
    """Put back everything that `enable` has replaced."""
    plugin = _plugin()
    for name in _METHODS:
        original = getattr(plugin[name], _MARK, None)
        if original is not None:
            plugin.register(name)(original)


def _plugin() -> Any:
    names = needed("llamafactory", TESTED, {_HUB: ("DistributedPlugin", "DistributedPlugin.register")})
    return names["DistributedPlugin"]("fsdp2")


def _path(ckpt_dir: str) -> str:
    return str(absolute(ckpt_dir) / "model")
