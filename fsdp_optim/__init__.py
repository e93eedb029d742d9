"""Gather, shard, save and load the optimizer state of FSDP models, on any number of ranks and in any wrapper.

Begin with `gather_full_optim_state_dict` and `get_shard_from_optim_state_dict`; docs/concepts.md explains the design.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdp_optim.errors import (
    CheckpointError,
    FsdpOptimError,
    RankError,
    RankTimeoutError,
    StateError,
    WrapperError,
)

if TYPE_CHECKING:
    from fsdp_optim.api import (
        AverageResult,
        CallOptions,
        CheckpointInfo,
        CheckpointManager,
        CheckpointSummary,
        ConvertOptions,
        CopyResult,
        Diagnosis,
        GroupInfo,
        Incompatible,
        LoadOptions,
        LoadResult,
        ManagerOptions,
        PruneResult,
        SaveHandle,
        SaveOptions,
        SaveResult,
        TensorInfo,
        ThinResult,
        VerifyResult,
        async_save,
        average,
        checkpoints,
        convert,
        copy,
        declare_slice,
        diagnose,
        gather_full_model_state_dict,
        gather_full_optim_state_dict,
        get_shard_from_optim_state_dict,
        inspect,
        iter_full_optim_state,
        latest,
        load,
        load_optim_state_dict,
        per_rank,
        prune,
        rekey_optim_state_dict,
        reshard_optim_state_dict,
        resume,
        save,
        scatter_full_model_state_dict,
        scatter_full_optim_state_dict,
        thin,
        transfer_optim_state,
        verify,
        wait_for_saves,
    )

__version__ = "0.1.0"

__all__ = [
    "AverageResult",
    "CallOptions",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointSummary",
    "ConvertOptions",
    "CopyResult",
    "Diagnosis",
    "FsdpOptimError",
    "GroupInfo",
    "Incompatible",
    "LoadOptions",
    "LoadResult",
    "ManagerOptions",
    "PruneResult",
    "RankError",
    "RankTimeoutError",
    "SaveHandle",
    "SaveOptions",
    "SaveResult",
    "StateError",
    "TensorInfo",
    "ThinResult",
    "VerifyResult",
    "WrapperError",
    "async_save",
    "average",
    "checkpoints",
    "convert",
    "copy",
    "declare_slice",
    "diagnose",
    "gather_full_model_state_dict",
    "gather_full_optim_state_dict",
    "get_shard_from_optim_state_dict",
    "inspect",
    "iter_full_optim_state",
    "latest",
    "load",
    "load_optim_state_dict",
    "per_rank",
    "prune",
    "rekey_optim_state_dict",
    "reshard_optim_state_dict",
    "resume",
    "save",
    "scatter_full_model_state_dict",
    "scatter_full_optim_state_dict",
    "thin",
    "transfer_optim_state",
    "verify",
    "wait_for_saves",
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # type checkers take every name as there where a module has __getattr__

    def __getattr__(name: str) -> Any:
        """Import a public name on first access, so that `import fsdp_optim` costs little."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.api"), name)  # not kept here, so that there is one place to patch
