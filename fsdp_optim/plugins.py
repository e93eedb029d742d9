"""The door for other packages, and for this one's integrations: what a wrapper, a store, a format or a trainer's plug-in needs.

A **wrapper** is read by an `Adapter`, which turns a model into `Handle`s, each with a `Placement`. A **store** is a `Store`, with
an `Opened` to read, a `Staging` and a `StoreWriter` to write; or less, a `Bucket`, of which an `ObjectStore` makes a store. A
**format** is a `Format`, with a `Reader`, a `Writer` and a `CheckpointProbe`, whose summaries are `ManifestSummary`.
The order of calls is in the docstring of each. `fsdp_optim.testing` has a conformance suite for each.

A package registers plug-ins by entry points, in the groups `fsdp_optim.adapters` (the name is the module whose wrapper is read),
`fsdp_optim.stores` (the name is the scheme of URLs) and `fsdp_optim.formats` (the name is what `format=` takes); a program
registers them for a while by `use_adapters`, `use_stores` and `use_formats`.

Formats of this package that have options of their own, for `format=` of `save`, `async_save` and `convert`: `TorchFiles`,
`FairscaleShards`, `DeepSpeedUniversal`, `DcpFolder`.

A **trainer's plug-in** gives its calls to the public functions, and takes the rest from here. What several ranks must find alike:
`by_lowest`, `see_files`, `wait_on_all`. A folder that the trainer fills too: `TrainerFolder`; what another library looks for
beside the weights: `OwnFormat(weights_name=..., beside=...)`. The trainer's own folders and files: `has_checkpoint`,
`remove_checkpoint`, `folders_by_number`, `remove_folders`, and what it sees of other machines: `is_being_saved`, `folders_in`,
`visible_within`. The state of a rank: `random_states`, `set_random_states`. Inside wrappers: `clean_name`, `module_inside`. What
to say where a package is missing: `pip_install`. The proof of resumes, without a call after each step: `ResumeProver`.

Everything is imported when it is asked for, so that importing this module costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_optim.registry import imported_when_asked

if TYPE_CHECKING:
    from fsdp_optim.adapters.base import Adapter, Place
    from fsdp_optim.adapters.known import use_adapters
    from fsdp_optim.adapters.tree import ModuleTree
    from fsdp_optim.adapters.unwrapping import clean_name, module_inside
    from fsdp_optim.buckets.objects.base import (
        ABSENT,
        Bucket,
        BucketCan,
        MissingObjectError,
        ObjectInfo,
        OvertakenError,
    )
    from fsdp_optim.buckets.objects.store import ObjectStore
    from fsdp_optim.checkpoint.common.random_states import random_states, set_random_states
    from fsdp_optim.checkpoint.common.seen_by_all import waited_for
    from fsdp_optim.checkpoint.common.stores import is_url
    from fsdp_optim.checkpoint.proof.prover import ResumeProver
    from fsdp_optim.checkpoint.proof.proving import Prove
    from fsdp_optim.checkpoint.trainers.folder import TrainerFolder
    from fsdp_optim.checkpoint.trainers.looks import by_lowest, has_checkpoint, see_files
    from fsdp_optim.checkpoint.trainers.meeting import wait_on_all
    from fsdp_optim.checkpoint.trainers.removal import remove_checkpoint
    from fsdp_optim.errors import pip_install
    from fsdp_optim.foreign.dcp.format import DcpFolder
    from fsdp_optim.foreign.deepspeed.writer import DeepSpeedUniversal
    from fsdp_optim.foreign.per_rank.fairscale_writer import FairscaleShards
    from fsdp_optim.foreign.torch.writer import TorchFiles
    from fsdp_optim.formats.base.bools import check_bytes as check_bools
    from fsdp_optim.formats.base.checksums import Sums, hash_of, hex_of, join_tables
    from fsdp_optim.formats.base.description import GroupDescription, OptimDescription, ParamDescription
    from fsdp_optim.formats.base.description import decoded as decoded_optim
    from fsdp_optim.formats.base.description import to_plain as plain_optim
    from fsdp_optim.formats.base.distrust import as_checkpoint_error
    from fsdp_optim.formats.base.extents import DataSection, Extent, read_extents, write_extents
    from fsdp_optim.formats.base.index import CheckpointIndex, Facts, SavedOptim, StoredExtra, StoredOptim
    from fsdp_optim.formats.base.json_text import parse_json
    from fsdp_optim.formats.base.protocols import (
        COMMON,
        MODULES,
        CheckpointContents,
        Chunks,
        Format,
        Half,
        PlannedFile,
        PlannedTensor,
        Prepared,
        Reader,
        SavedWeights,
        Stamp,
        StoredTensor,
        Writer,
        WrittenFiles,
        rank_extra_name,
        replaced_error,
    )
    from fsdp_optim.formats.base.saved_optim import contents_of, extras_in, saved_optim
    from fsdp_optim.formats.base.summary import ManagerRecord, ManifestSummary
    from fsdp_optim.formats.own.extras import Extra as ValuesFile
    from fsdp_optim.formats.own.extras import encode_extra as encode_values
    from fsdp_optim.formats.own.extras import info_of as info_of_values
    from fsdp_optim.formats.own.extras import read_extra as read_values
    from fsdp_optim.formats.own.format import OwnFormat
    from fsdp_optim.formats.own.manifest import FileInfo
    from fsdp_optim.layout import Boxes, FlatChunks, MeshBoxes, Placement, Ranks, Shape, Whole
    from fsdp_optim.options import Model, OnDamage, OnReplicaMismatch, Rename, Strategy, WhichWeights
    from fsdp_optim.registry import use_formats, use_stores
    from fsdp_optim.saying import say
    from fsdp_optim.state.live.local import Optimizers
    from fsdp_optim.storage.base import (
        Capabilities,
        CheckpointDirectory,
        CheckpointEntry,
        CheckpointProbe,
        CheckpointStatus,
        Opened,
        Staging,
        Store,
        StoreWriter,
        check_inside,
        check_name,
        check_not_reserved,
        is_reserved,
        is_sure_that_not,
        names_checkpoint,
    )
    from fsdp_optim.storage.posix.beacon import sees
    from fsdp_optim.storage.posix.files import absolute
    from fsdp_optim.storage.posix.filled import folders_by_number, remove_folders
    from fsdp_optim.storage.posix.small_files import folders_in, has_file, replace_text, sizes_in
    from fsdp_optim.storage.posix.store import Folder
    from fsdp_optim.storage.posix.trainer_files import copy_beside, is_being_saved, make_folder, visible_within
    from fsdp_optim.tensors.memory import dtype_name, dtype_named
    from fsdp_optim.view import Handle, Original

__all__ = [
    "ABSENT",
    "COMMON",
    "MODULES",
    "Adapter",
    "Boxes",
    "Bucket",
    "BucketCan",
    "Capabilities",
    "CheckpointContents",
    "CheckpointDirectory",
    "CheckpointEntry",
    "CheckpointIndex",
    "CheckpointProbe",
    "CheckpointStatus",
    "Chunks",
    "DataSection",
    "DcpFolder",
    "DeepSpeedUniversal",
    "Extent",
    "Facts",
    "FairscaleShards",
    "FileInfo",
    "FlatChunks",
    "Folder",
    "Format",
    "GroupDescription",
    "Half",
    "Handle",
    "ManagerRecord",
    "ManifestSummary",
    "MeshBoxes",
    "MissingObjectError",
    "Model",
    "ModuleTree",
    "ObjectInfo",
    "ObjectStore",
    "OnDamage",
    "OnReplicaMismatch",
    "Opened",
    "OptimDescription",
    "Optimizers",
    "Original",
    "OvertakenError",
    "OwnFormat",
    "ParamDescription",
    "Place",
    "Placement",
    "PlannedFile",
    "PlannedTensor",
    "Prepared",
    "Prove",
    "Ranks",
    "Reader",
    "Rename",
    "ResumeProver",
    "SavedOptim",
    "SavedWeights",
    "Shape",
    "Staging",
    "Stamp",
    "Store",
    "StoreWriter",
    "StoredExtra",
    "StoredOptim",
    "StoredTensor",
    "Strategy",
    "Sums",
    "TorchFiles",
    "TrainerFolder",
    "ValuesFile",
    "WhichWeights",
    "Whole",
    "Writer",
    "WrittenFiles",
    "absolute",
    "as_checkpoint_error",
    "by_lowest",
    "check_bools",
    "check_inside",
    "check_name",
    "check_not_reserved",
    "clean_name",
    "contents_of",
    "copy_beside",
    "decoded_optim",
    "dtype_name",
    "dtype_named",
    "encode_values",
    "extras_in",
    "folders_by_number",
    "folders_in",
    "has_checkpoint",
    "has_file",
    "hash_of",
    "hex_of",
    "info_of_values",
    "is_being_saved",
    "is_reserved",
    "is_sure_that_not",
    "is_url",
    "join_tables",
    "make_folder",
    "module_inside",
    "names_checkpoint",
    "parse_json",
    "pip_install",
    "plain_optim",
    "random_states",
    "rank_extra_name",
    "read_extents",
    "read_values",
    "remove_checkpoint",
    "remove_folders",
    "replace_text",
    "replaced_error",
    "saved_optim",
    "say",
    "see_files",
    "sees",
    "set_random_states",
    "sizes_in",
    "use_adapters",
    "use_formats",
    "use_stores",
    "visible_within",
    "wait_on_all",
    "waited_for",
    "write_extents",
]

_PLACES = {
    "fsdp_optim.adapters.base": "Adapter Place",
    "fsdp_optim.adapters.known": "use_adapters",
    "fsdp_optim.adapters.tree": "ModuleTree",
    "fsdp_optim.adapters.unwrapping": "clean_name module_inside",
    "fsdp_optim.buckets.objects.base": "ABSENT Bucket BucketCan ObjectInfo MissingObjectError OvertakenError",
    "fsdp_optim.buckets.objects.store": "ObjectStore",
    "fsdp_optim.checkpoint.common.random_states": "random_states set_random_states",
    "fsdp_optim.checkpoint.common.seen_by_all": "waited_for",
    "fsdp_optim.checkpoint.common.stores": "is_url",
    "fsdp_optim.checkpoint.trainers.folder": "TrainerFolder",
    "fsdp_optim.checkpoint.proof.prover": "ResumeProver",
    "fsdp_optim.checkpoint.proof.proving": "Prove",
    "fsdp_optim.checkpoint.trainers.looks": "by_lowest has_checkpoint see_files",
    "fsdp_optim.checkpoint.trainers.meeting": "wait_on_all",
    "fsdp_optim.checkpoint.trainers.removal": "remove_checkpoint",
    "fsdp_optim.foreign.dcp.format": "DcpFolder",
    "fsdp_optim.foreign.deepspeed.writer": "DeepSpeedUniversal",
    "fsdp_optim.foreign.per_rank.fairscale_writer": "FairscaleShards",
    "fsdp_optim.foreign.torch.writer": "TorchFiles",
    "fsdp_optim.formats.base.bools": "check_bytes=check_bools",
    "fsdp_optim.formats.base.checksums": "Sums hash_of hex_of join_tables",
    "fsdp_optim.formats.base.description": (
        "GroupDescription OptimDescription ParamDescription decoded=decoded_optim to_plain=plain_optim"
    ),
    "fsdp_optim.formats.base.distrust": "as_checkpoint_error",
    "fsdp_optim.formats.base.extents": "DataSection Extent read_extents write_extents",
    "fsdp_optim.formats.base.index": "CheckpointIndex Facts SavedOptim StoredExtra StoredOptim",
    "fsdp_optim.formats.base.json_text": "parse_json",
    "fsdp_optim.formats.base.protocols": (
        "COMMON MODULES CheckpointContents Chunks Format Half "
        "PlannedFile PlannedTensor Prepared Reader SavedWeights Stamp StoredTensor Writer WrittenFiles "
        "rank_extra_name replaced_error"
    ),
    "fsdp_optim.errors": "pip_install",
    "fsdp_optim.formats.base.saved_optim": "contents_of extras_in saved_optim",
    "fsdp_optim.formats.base.summary": "ManagerRecord ManifestSummary",
    "fsdp_optim.formats.own.extras": "Extra=ValuesFile encode_extra=encode_values info_of=info_of_values read_extra=read_values",
    "fsdp_optim.formats.own.format": "OwnFormat",
    "fsdp_optim.formats.own.manifest": "FileInfo",
    "fsdp_optim.layout": "Boxes FlatChunks MeshBoxes Placement Ranks Shape Whole",
    "fsdp_optim.tensors.memory": "dtype_name dtype_named",
    "fsdp_optim.options": "Model OnDamage OnReplicaMismatch Rename Strategy WhichWeights",
    "fsdp_optim.registry": "use_formats use_stores",
    "fsdp_optim.saying": "say",
    "fsdp_optim.state.live.local": "Optimizers",
    "fsdp_optim.storage.base": (
        "Capabilities CheckpointDirectory CheckpointEntry CheckpointProbe CheckpointStatus "
        "Opened Staging Store StoreWriter check_inside check_name check_not_reserved is_reserved "
        "is_sure_that_not names_checkpoint"
    ),
    "fsdp_optim.storage.posix.beacon": "sees",
    "fsdp_optim.storage.posix.files": "absolute",
    "fsdp_optim.storage.posix.filled": "folders_by_number remove_folders",
    "fsdp_optim.storage.posix.small_files": "folders_in has_file replace_text sizes_in",
    "fsdp_optim.storage.posix.store": "Folder",
    "fsdp_optim.storage.posix.trainer_files": "copy_beside is_being_saved make_folder visible_within",
    "fsdp_optim.view": "Handle Original",
}
"""By module, its public names; `name=public name` where the name says too little outside the module."""


def _where() -> dict[str, str]:
    """Return `module:attribute` by public name."""
    listed = [(module, *name.partition("=")[::2]) for module, names in _PLACES.items() for name in names.split()]
    return {public or name: f"{module}:{name}" for module, name, public in listed}


_WHERE = _where()

__all__ = sorted(_WHERE)  # the names are in the table above


def __dir__() -> list[str]:
    return list(__all__)


if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name
    __getattr__ = imported_when_asked(__name__, _WHERE)
