"""Saves in this library's own format that another library opens too, because names and small files are as it expects them."""

from __future__ import annotations

import os

from torch import nn

from fsdp_optim.adapters.known import is_wrapper_child
from fsdp_optim.checkpoint.common.pending import SaveHandle
from fsdp_optim.checkpoint.common.results import Saved
from fsdp_optim.checkpoint.save import background
from fsdp_optim.checkpoint.save import foreground as saving
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.options import SaveOptions
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.storage.posix.files import checkpoint_errors


def save_as(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizers | None,
    options: SaveOptions,
    format: Format,
) -> Saved:
    """As `save`, with the names and small files of `format`. Called by all ranks of the model."""
    with checkpoint_errors(path):
        return saving.save(path, model, optim, options, format)


def async_save_as(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizers | None,
    options: SaveOptions,
    format: Format,
) -> SaveHandle:
    """As `async_save`, with the names and small files of `format`. Called by all ranks of the model."""
    with checkpoint_errors(path):
        return background.async_save(path, model, optim, options, format)


def clean_name(model: nn.Module, name: str) -> str:
    """The name of a tensor of a model without the parts that wrappers insert."""
    module: nn.Module | None = model
    kept = []
    for part in name.split("."):
        if module is None or not is_wrapper_child(module, part):
            kept.append(part)
        module = module._modules.get(part) if module is not None else None
    return ".".join(kept)


def module_inside(wrapper: nn.Module) -> nn.Module | None:
    """The module that a wrapper has inside itself; None for a module that is no wrapper."""
    inside = [child for name, child in wrapper.named_children() if is_wrapper_child(wrapper, name)]
    return inside[0] if len(inside) == 1 else None
