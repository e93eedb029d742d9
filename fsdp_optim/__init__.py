"""Save, load, gather and reshard the weights and the optimizer state of FSDP models, on any number of ranks, under any wrapper.

Begin with `CheckpointManager`, or with `save` and `load`; docs/concepts.md says how they work.
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
        AdapterMergeResult,
        AverageResult,
        CallOptions,
        CheckpointInfo,
        CheckpointManager,
        CheckpointSummary,
        ConvertOptions,
        CopyResult,
        Diagnosis,
        Difference,
        DiffResult,
        EmptyRanks,
        Fingerprint,
        GroupInfo,
        HyperparameterDiff,
        Incompatible,
        LoadOptions,
        LoadResult,
        ManagerOptions,
        ObjectDiff,
        PlacementResult,
        PruneResult,
        RankRun,
        ResumeProof,
        SaveHandle,
        SaveOptions,
        SaveResult,
        ShapeDiff,
        TensorInfo,
        TensorPlacement,
        ThinResult,
        ValueDiff,
        ValueFingerprint,
        ValueStatistics,
        VerifyResult,
        View,
        async_save,
        average,
        checkpoints,
        convert,
        copy,
        declare_slice,
        diagnose,
        diff,
        extract,
        fingerprint,
        gather_full_model_state_dict,
        gather_full_optim_state_dict,
        get_shard_from_optim_state_dict,
        inspect,
        iter_full_optim_state,
        latest,
        load,
        load_optim_state_dict,
        merge_adapter,
        per_rank,
        placement,
        proof_of,
        prune,
        rekey_optim_state_dict,
        reshard_optim_state_dict,
        resume,
        save,
        scatter_full_model_state_dict,
        scatter_full_optim_state_dict,
        show,
        thin,
        transfer_optim_state,
        unfinished_saves,
        verify,
        views_for,
        wait_for_saves,
    )

__version__ = "0.1.0"

__all__ = [
    "AdapterMergeResult",
    "AverageResult",
    "CallOptions",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointSummary",
    "ConvertOptions",
    "CopyResult",
    "Diagnosis",
    "DiffResult",
    "Difference",
    "EmptyRanks",
    "Fingerprint",
    "FsdpOptimError",
    "GroupInfo",
    "HyperparameterDiff",
    "Incompatible",
    "LoadOptions",
    "LoadResult",
    "ManagerOptions",
    "ObjectDiff",
    "PlacementResult",
    "PruneResult",
    "RankError",
    "RankRun",
    "RankTimeoutError",
    "ResumeProof",
    "SaveHandle",
    "SaveOptions",
    "SaveResult",
    "ShapeDiff",
    "StateError",
    "TensorInfo",
    "TensorPlacement",
    "ThinResult",
    "ValueDiff",
    "ValueFingerprint",
    "ValueStatistics",
    "VerifyResult",
    "View",
    "WrapperError",
    "async_save",
    "average",
    "checkpoints",
    "convert",
    "copy",
    "declare_slice",
    "diagnose",
    "diff",
    "extract",
    "fingerprint",
    "gather_full_model_state_dict",
    "gather_full_optim_state_dict",
    "get_shard_from_optim_state_dict",
    "inspect",
    "iter_full_optim_state",
    "latest",
    "load",
    "load_optim_state_dict",
    "merge_adapter",
    "per_rank",
    "placement",
    "proof_of",
    "prune",
    "rekey_optim_state_dict",
    "reshard_optim_state_dict",
    "resume",
    "save",
    "scatter_full_model_state_dict",
    "scatter_full_optim_state_dict",
    "show",
    "thin",
    "transfer_optim_state",
    "unfinished_saves",
    "verify",
    "views_for",
    "wait_for_saves",
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # type checkers take every name as there where a module has __getattr__

    def __getattr__(name: str) -> Any:
        """Import a public name on first access, so that `import fsdp_optim` costs little."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fsdp_optim.boundary.collector import fewer_collections

        # What is imported stays, and a walk of torch's objects in between would take as long as the imports.
        with fewer_collections():
            return getattr(import_module(f"{__name__}.api"), name)  # not kept here, so that there is one place to patch
