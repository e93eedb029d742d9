"""The face of torch.distributed.checkpoint: its functions and signatures, with this library's files and Layouts underneath.

    from fsdp_optim import dcp   # in place of: import torch.distributed.checkpoint as dcp

trees/           `save`, `async_save` and `load`: a state dict is a tree, and a load sees every checkpoint as one
storage/         `Writer` and `Reader`: storage for torch's own calls
state_dict.py    the functions for state dicts, with torch's signatures
dicts/           what they read and set: models and optimizers, whose values stay sharded as they are

A save stores the weights in a state dict as a model's, with the optimizer (`checkpoint/common/optim_trees.py`).

Names are imported when they are asked for: `_WHERE` is the one table of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_optim.registry import imported_when_asked

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.distributed.checkpoint.stateful import Stateful

    from fsdp_optim.dcp.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
        set_state_dict,
    )
    from fsdp_optim.dcp.storage.reader import Reader
    from fsdp_optim.dcp.storage.writer import Writer
    from fsdp_optim.dcp.trees.loading import load
    from fsdp_optim.dcp.trees.saving import async_save, save

__all__ = [
    "Reader",
    "StateDictOptions",
    "Stateful",
    "Writer",
    "async_save",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

_PLACES = {
    "fsdp_optim.dcp.trees.loading": "load",
    "fsdp_optim.dcp.storage.reader": "Reader",
    "fsdp_optim.dcp.storage.writer": "Writer",
    "fsdp_optim.dcp.trees.saving": "async_save save",
    "fsdp_optim.dcp.state_dict": (
        "get_model_state_dict get_optimizer_state_dict get_state_dict "
        "set_model_state_dict set_optimizer_state_dict set_state_dict"
    ),
    "torch.distributed.checkpoint.state_dict": "StateDictOptions",
    "torch.distributed.checkpoint.stateful": "Stateful",
}
"""By module, its public names. torch's own classes are torch's, so that code which uses them stays as it is."""

_WHERE = {name: f"{module}:{name}" for module, names in _PLACES.items() for name in names.split()}


def __dir__() -> list[str]:
    return list(__all__)


if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name
    __getattr__ = imported_when_asked(__name__, _WHERE)
