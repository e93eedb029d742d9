"""The public functions, one file a topic. Docstrings are the contract; the work is done in `verbs` and `checkpoint`.

Each file is imported when a name of it is asked for, so that a job which saves and loads does not wait for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_optim.registry import imported_when_asked

if TYPE_CHECKING:
    from fsdp_optim.api.folders import checkpoints, latest, resume, unfinished_saves, wait_for_saves
    from fsdp_optim.api.keeping import copy, diagnose, prune
    from fsdp_optim.api.looking import diff, extract, placement, show
    from fsdp_optim.api.model_dicts import gather_full_model_state_dict, scatter_full_model_state_dict
    from fsdp_optim.api.names import views_for
    from fsdp_optim.api.offline import average, convert, inspect, merge_adapter, thin, verify
    from fsdp_optim.api.optim_dicts import (
        gather_full_optim_state_dict,
        get_shard_from_optim_state_dict,
        get_shard_without_optimizer,
        iter_full_optim_state,
        load_optim_state_dict,
        rekey_optim_state_dict,
        reshard_optim_state_dict,
        scatter_full_optim_state_dict,
        transfer_optim_state,
    )
    from fsdp_optim.api.proving import fingerprint, proof_of
    from fsdp_optim.api.save_load import async_save, load, save
    from fsdp_optim.api.slices import declare_slice
    from fsdp_optim.checkpoint.common.pending import SaveHandle
    from fsdp_optim.checkpoint.common.run_state import per_rank
    from fsdp_optim.checkpoint.proof.verdict import ResumeProof
    from fsdp_optim.checkpoint.run.manager import CheckpointManager
    from fsdp_optim.layout.views import View
    from fsdp_optim.options import CallOptions, ConvertOptions, LoadOptions, ManagerOptions, SaveOptions
    from fsdp_optim.results.calls import Incompatible, LoadResult, SaveResult, ThinResult
    from fsdp_optim.results.contents import CheckpointInfo, CheckpointSummary, GroupInfo, TensorInfo
    from fsdp_optim.results.differences import (
        DiffResult,
        HyperparameterDiff,
        ObjectDiff,
        ShapeDiff,
        ValueDiff,
        ValueStatistics,
    )
    from fsdp_optim.results.fingerprints import Difference, Fingerprint, ValueFingerprint
    from fsdp_optim.results.offline import (
        AdapterMergeResult,
        AverageResult,
        CopyResult,
        Diagnosis,
        PruneResult,
        VerifyResult,
    )
    from fsdp_optim.results.rank_maps import EmptyRanks, PlacementResult, RankRun, TensorPlacement
    from fsdp_optim.transport.launched import launched_ranks

__all__ = [
    "AdapterMergeResult",
    "AverageResult",
    "CallOptions",
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
    "GroupInfo",
    "HyperparameterDiff",
    "Incompatible",
    "LoadOptions",
    "LoadResult",
    "ManagerOptions",
    "ObjectDiff",
    "PlacementResult",
    "PruneResult",
    "RankRun",
    "ResumeProof",
    "SaveHandle",
    "SaveOptions",
    "SaveResult",
    "ShapeDiff",
    "TensorInfo",
    "TensorPlacement",
    "ThinResult",
    "ValueDiff",
    "ValueFingerprint",
    "ValueStatistics",
    "VerifyResult",
    "View",
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
    "get_shard_without_optimizer",
    "inspect",
    "iter_full_optim_state",
    "latest",
    "launched_ranks",
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

_PLACES = {
    "fsdp_optim.api.folders": "checkpoints latest resume unfinished_saves wait_for_saves",
    "fsdp_optim.api.keeping": "copy diagnose prune",
    "fsdp_optim.api.looking": "diff extract placement show",
    "fsdp_optim.api.model_dicts": "gather_full_model_state_dict scatter_full_model_state_dict",
    "fsdp_optim.api.offline": "average convert inspect merge_adapter thin verify",
    "fsdp_optim.api.optim_dicts": (
        "gather_full_optim_state_dict get_shard_from_optim_state_dict get_shard_without_optimizer iter_full_optim_state "
        "load_optim_state_dict rekey_optim_state_dict reshard_optim_state_dict scatter_full_optim_state_dict transfer_optim_state"
    ),
    "fsdp_optim.api.proving": "fingerprint proof_of",
    "fsdp_optim.api.save_load": "async_save load save",
    "fsdp_optim.api.names": "views_for",
    "fsdp_optim.api.slices": "declare_slice",
    "fsdp_optim.checkpoint.common.pending": "SaveHandle",
    "fsdp_optim.checkpoint.common.run_state": "per_rank",
    "fsdp_optim.checkpoint.proof.verdict": "ResumeProof",
    "fsdp_optim.checkpoint.run.manager": "CheckpointManager",
    "fsdp_optim.layout.views": "View",
    "fsdp_optim.options": "CallOptions ConvertOptions LoadOptions ManagerOptions SaveOptions",
    "fsdp_optim.results.calls": "Incompatible LoadResult SaveResult ThinResult",
    "fsdp_optim.results.contents": "CheckpointInfo CheckpointSummary GroupInfo TensorInfo",
    "fsdp_optim.results.differences": "DiffResult HyperparameterDiff ObjectDiff ShapeDiff ValueDiff ValueStatistics",
    "fsdp_optim.results.fingerprints": "Difference Fingerprint ValueFingerprint",
    "fsdp_optim.results.offline": ("AdapterMergeResult AverageResult CopyResult Diagnosis PruneResult VerifyResult"),
    "fsdp_optim.results.rank_maps": "EmptyRanks PlacementResult RankRun TensorPlacement",
    "fsdp_optim.transport.launched": "launched_ranks",
}
"""By module, its public names."""


_WHERE = {name: f"{module}:{name}" for module, names in _PLACES.items() for name in names.split()}


def __dir__() -> list[str]:
    return list(__all__)


if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name
    __getattr__ = imported_when_asked(__name__, _WHERE)
