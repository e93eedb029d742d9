"""Gather, shard, save and load the optimizer state of FSDP models, on any number of ranks and in any wrapper.

Begin with `gather_full_optim_state_dict` and `get_shard_from_optim_state_dict`; docs/concepts.md explains the design.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdp_optim.errors import (
    CheckpointError,
    FsdpOptimError,
    LayoutError,
    RankError,
    RankTimeoutError,
    StateError,
    WrapperError,
)

if TYPE_CHECKING:
    from fsdp_optim.api import (
        CheckpointInfo,
        CheckpointManager,
        GroupInfo,
        Incompatible,
        Inspected,
        LoadSummary,
        Restored,
        Saved,
        SaveHandle,
        TensorInfo,
        Verified,
        async_save,
        checkpoints,
        convert,
        declare_slice,
        for_fairscale,
        gather_full_model_state_dict,
        gather_full_optim_state_dict,
        get_shard_from_optim_state_dict,
        inspect,
        iter_full_optim_state,
        latest,
        load,
        load_optim_state_dict,
        rekey_optim_state_dict,
        resume,
        save,
        scatter_full_model_state_dict,
        scatter_full_optim_state_dict,
        transfer_optim_state,
        verify,
        wait,
    )

    # Not in __all__: `import *`, completion and help() would import fairscale, or fail where it is not installed.
    from fsdp_optim.fairscale import FullyShardedDataParallel as FullyShardedDataParallel

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointManager",
    "FsdpOptimError",
    "GroupInfo",
    "Incompatible",
    "Inspected",
    "LayoutError",
    "LoadSummary",
    "RankError",
    "RankTimeoutError",
    "Restored",
    "SaveHandle",
    "Saved",
    "StateError",
    "TensorInfo",
    "Verified",
    "WrapperError",
    "async_save",
    "checkpoints",
    "convert",
    "declare_slice",
    "for_fairscale",
    "gather_full_model_state_dict",
    "gather_full_optim_state_dict",
    "get_shard_from_optim_state_dict",
    "inspect",
    "iter_full_optim_state",
    "latest",
    "load",
    "load_optim_state_dict",
    "rekey_optim_state_dict",
    "resume",
    "save",
    "scatter_full_model_state_dict",
    "scatter_full_optim_state_dict",
    "transfer_optim_state",
    "verify",
    "wait",
]


def __dir__() -> list[str]:
    return sorted(__all__)


_OF_FAIRSCALE = "FullyShardedDataParallel"

if not TYPE_CHECKING:  # type checkers take every name as there where a module has __getattr__

    def __getattr__(name: str) -> Any:
        """Import a public name on first access, so that `import fsdp_optim` costs little; fairscale is an extra, too."""
        if name not in __all__ and name != _OF_FAIRSCALE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        room = "fairscale" if name == _OF_FAIRSCALE else "api"
        value = globals()[name] = getattr(import_module(f"{__name__}.{room}"), name)
        return value
