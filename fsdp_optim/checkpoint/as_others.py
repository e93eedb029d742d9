"""Saves in this library's own format that another library opens too, because names and small files are as it expects them."""

from __future__ import annotations

import os

from torch import nn

from fsdp_optim.adapters.registry import wrapper_parts
from fsdp_optim.checkpoint import background
from fsdp_optim.checkpoint import save as saving
from fsdp_optim.checkpoint.formats import FormatChoices, format_named
from fsdp_optim.checkpoint.pending import SaveHandle
from fsdp_optim.checkpoint.results import Saved
from fsdp_optim.options import SaveOptions
from fsdp_optim.state.local import Optimizers
from fsdp_optim.storage.posix.files import checkpoint_errors


def save_as(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizers | None,
    options: SaveOptions,
    wanted: FormatChoices,
) -> Saved:
    """As `save`, with the names and small files of `wanted`. Called by all ranks of the model."""
    with checkpoint_errors(path):
        return saving.save(path, model, optim, options, format_named(options.format, wanted))


def async_save_as(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizers | None,
    options: SaveOptions,
    wanted: FormatChoices,
) -> SaveHandle:
    """As `async_save`, with the names and small files of `wanted`. Called by all ranks of the model."""
    with checkpoint_errors(path):
        return background.async_save(path, model, optim, options, format_named(options.format, wanted))


def clean_name(name: str) -> str:
    """A name without the parts that wrappers insert."""
    parts = wrapper_parts()
    return ".".join(part for part in name.split(".") if part not in parts)


def is_wrapped_child(name: str) -> bool:
    """Whether a child of this name is the module that a wrapper has around itself."""
    return name == "module" or name in wrapper_parts()
