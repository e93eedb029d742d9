"""The public functions. Each docstring is the contract of its function; the code is in `verbs` and `checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, overload

import torch.distributed as dist
from torch import nn

from fsdp_optim.checkpoint import background, catalog, inspecting, listing, model_dict, restore, resuming, verifying
from fsdp_optim.checkpoint import convert as conversion
from fsdp_optim.checkpoint import save as saving
from fsdp_optim.checkpoint.alone import launched_ranks as launched_ranks
from fsdp_optim.checkpoint.formats import SAVED, WRITTEN
from fsdp_optim.checkpoint.inspecting import Inspected as Inspected
from fsdp_optim.checkpoint.inspecting import TensorInfo as TensorInfo
from fsdp_optim.checkpoint.manager import CheckpointManager as CheckpointManager
from fsdp_optim.checkpoint.pending import SaveHandle as SaveHandle
from fsdp_optim.checkpoint.pending import pending
from fsdp_optim.checkpoint.restored import Restored as Restored
from fsdp_optim.checkpoint.results import CheckpointInfo as CheckpointInfo
from fsdp_optim.checkpoint.results import LoadSummary as LoadSummary
from fsdp_optim.checkpoint.results import Saved as Saved
from fsdp_optim.checkpoint.stores import shelf_at
from fsdp_optim.checkpoint.verifying import Verified
from fsdp_optim.memory import ordinary_tensors
from fsdp_optim.options import (
    BUCKET_NBYTES,
    CONVERT_NBYTES,
    Check,
    Collect,
    ConvertOptions,
    GatherOptions,
    GroupsFrom,
    KeyBy,
    LoadOptions,
    NameOf,
    OnDamage,
    OnReplicaMismatch,
    Options,
    Rename,
    ResumeOptions,
    SavedFormat,
    SaveOptions,
    ScatterOptions,
    Strategy,
)
from fsdp_optim.state.full import FullDict
from fsdp_optim.state.local import OptimizerLike, Optimizers
from fsdp_optim.state.shard import Shard
from fsdp_optim.storage.posix.files import checkpoint_errors
from fsdp_optim.storage.schemes import scheme_of
from fsdp_optim.verbs import gather, iterate, rekey, scatter, shard, transfer
from fsdp_optim.verbs import load_state as loading
from fsdp_optim.verbs.load_state import Incompatible as Incompatible
from fsdp_optim.verbs.load_state import LoadableOptimizer

FORMATS_WRITTEN = tuple(WRITTEN)
"""The names of the formats that `convert` writes."""


@ordinary_tensors()
def gather_full_optim_state_dict(
    model: nn.Module,
    optim: Optimizers,
    recipient_rank: int | None = 0,
    key_by: KeyBy = "id",
    *,
    collect: Collect = "wrapper",
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    on_replica_mismatch: OnReplicaMismatch = "error",
) -> FullDict | None:
    """The full optimizer state per original parameter, as if the model had no wrapper. Called by all ranks of the model.

    Changes no step, gradient, parameter, group or state. An optimizer with `synchronize_for_checkpoint()` (Dion), whose replicas
    differ between steps, is asked to make them equal first, as by save, iterate and transfer. Memory beyond the training's own:
    on a recipient the full state and `bucket_nbytes`, on other ranks `bucket_nbytes`.

    Args:
        model: the root that `optim` was built from: fairscale FSDP, torch FSDP, DistributedDataParallel, a plain module, or a
            mix.
        optim: an optimizer, or a list of optimizers: any object with `state_dict()` and `param_groups`.
        recipient_rank: the global rank that gets the dict; None: every rank gets the dict.
        key_by: "id" counts parameters as the optimizer does: group after group, and inside a group in the optimizer's own order,
            with the originals of a flat parameter in its place. A group in the order of the wrapped model's parameters() is
            counted in the order of the unwrapped model's parameters(). "name" uses clean FQNs, in the same order.
        collect: "wrapper" treats units with fairscale's `no_broadcast_optim_state` as fairscale does: the dict has the
            recipient's own state of these units, and `uncollected_local_ids` lists them. "all" gathers these units too.
        name_of: a function `(fqn, rank) -> name`, for models in which ranks call different parameters by the same name (the own
            expert of every rank is `experts.0`). The function gives each parameter its own name; `rank` is the lowest global
            rank that holds the parameter.
        process_group: the ranks that make this call, if the model does not show them (None: all ranks of its wrappers).
        timeout: seconds to wait for a missing rank, or a timedelta (None: 600 seconds).
        bucket_nbytes: the memory for elements that move between ranks, in bytes.
        on_replica_mismatch: the reaction to different state on ranks that hold the same part of a parameter, such as norms next
            to tensor parallel layers, which no wrapper keeps equal: "error", or "lowest_rank", which uses the state of the
            lowest rank and logs a warning.

    Returns:
        On recipients the full dict, on other ranks None. Its tensors are on the CPU, each with its own storage, in the shape of
        the original parameter (or 0-dim, for `step`) and in the dtype of the state. A plain optimizer on the unwrapped model
        loads the dict by `load_state_dict(full)`. Besides `state` and `param_groups` (with `param_names`), the dict has
        `optimizer_class` (the name of the innermost optimizer's class), `param_id_map` (id -> this rank's local id, or None
        without state), `num_padded` (for each flat parameter, the padding of each group rank, in elements), `kinds` (how each
        value relates to its parameter), `uncollected_local_ids`, and the other keys of the optimizer's own dict. With
        `key_by="name"`, a dict whose parameters ids cannot count has `unknown_order`, the reason.

    Raises (the same on all ranks):
        WrapperError: the model or the optimizer cannot be read, or they do not belong together.
        StateError: the ranks have different models or states; or `key_by` is "id", and no order of ids can be right (with a
            module that torch FSDP wrapped in part, by `ignored_states`, or with stages that no rank has together).
        RankError: a rank failed (the message has its reason) or made another call; or nothing in the model shows that the
            recipient shares it (pipeline stages without a wrapper), and `process_group` is not given.
        RankTimeoutError: a rank, which the message names, did not come in time.
    """
    options = Options(
        collect,
        name_of,
        process_group,
        timeout,
        bucket_nbytes=bucket_nbytes,
        on_replica_mismatch=on_replica_mismatch,
    )
    return gather.gather(model, optim, GatherOptions(options, recipient_rank, key_by))


def iter_full_optim_state(
    model: nn.Module,
    optim: Optimizers,
    recipient_rank: int | None = 0,
    *,
    collect: Collect = "wrapper",
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    on_replica_mismatch: OnReplicaMismatch = "error",
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """As `gather_full_optim_state_dict`, but one parameter at a time, so that no rank ever holds the whole state.

    Yields (FQN, state) on every rank. The state is a dict of CPU tensors and other values on recipients ({} for a parameter
    without state), and None on other ranks. The order is that of the ids of gather: with one group that of the unwrapped model,
    unless the optimizer lists its parameters in another order. If no order of ids is known, the order is the same on all ranks.
    Every rank of the model has to exhaust the iterator. A recipient holds at most `bucket_nbytes` of state (or one larger
    parameter), and as much again while the elements move.
    """
    options = Options(
        collect,
        name_of,
        process_group,
        timeout,
        bucket_nbytes=bucket_nbytes,
        on_replica_mismatch=on_replica_mismatch,
    )
    return iterate.iterate(model, optim, GatherOptions(options, recipient_rank, "name"))


@overload
def get_shard_from_optim_state_dict(
    model: nn.Module,
    optim: OptimizerLike,
    full: Mapping[str, Any],
    *,
    strict: bool = True,
    groups: GroupsFrom = "saved",
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
) -> Shard: ...


@overload
def get_shard_from_optim_state_dict(
    model: nn.Module,
    optim: Sequence[OptimizerLike],
    full: Mapping[str, Any],
    *,
    strict: bool = True,
    groups: GroupsFrom = "saved",
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
) -> list[Shard]: ...


@ordinary_tensors()
def get_shard_from_optim_state_dict(
    model: nn.Module,
    optim: Optimizers,
    full: Mapping[str, Any],
    *,
    strict: bool = True,
    groups: GroupsFrom = "saved",
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
) -> Shard | list[Shard]:
    """This rank's part of a full dict, ready for `load_optim_state_dict(optim, shard)`. No communication.

    Args:
        model, optim: as for gather, at any world size.
        full: the full dict, needed on this rank. It stays unchanged and shares no memory with the result. Accepted are the
            result of `gather_full_optim_state_dict`, by id or by name; a full dict of fairscale or torch; and the state_dict()
            of a plain optimizer on the unwrapped model.
        strict: True: refuse parameters that only one side has, and state of another optimizer class. False: use the parameters,
            hyperparameters and state values that both sides have; the result lists the rest.
        groups: "saved": the optimizer has the saved groups, and gets their hyperparameters. "live": the groups and
            hyperparameters of the optimizer stay, and the state of every parameter is found by name.
        name_of: the function that was given to gather.
        process_group, timeout: as for gather; only for a sharded dict (DTensor, ShardedTensor), of which every rank has its part.
            For such a dict, and only for such a dict, all ranks have to make the call, and elements move between them.

    Returns:
        The optimizer's own dict: local ids, the saved hyperparameters, and state tensors in the local shapes, on the devices of
        the parameters, in the saved dtypes. With several optimizers, a list of dicts. If `strict=False` has left out anything,
        the entry "incompatible" lists it; `load_optim_state_dict` removes and returns that entry.

    Raises:
        StateError: the dict does not belong to this model and optimizer. The message names the parameter and both numbers, or the
            two optimizer classes and the names that only one of them has. Nothing was changed.
    """
    options = Options(name_of=name_of, process_group=process_group, timeout=timeout, strict=strict, groups=groups)
    return shard.shard(model, optim, full, options)


@ordinary_tensors()
def get_shard_without_optimizer(model: nn.Module, full: Mapping[str, Any], *, name_of: NameOf | None = None) -> Shard:
    """As `get_shard_from_optim_state_dict`, for an optimizer built like the saved one; the drop-in method without `optim`."""
    own = shard.shard(model, None, full, Options(name_of=name_of))
    return own if isinstance(own, dict) else own[0]


@ordinary_tensors()
def scatter_full_optim_state_dict(
    model: nn.Module,
    optim: Optimizers,
    full: Mapping[str, Any] | None,
    source_rank: int = 0,
    *,
    strict: bool = True,
    groups: GroupsFrom = "saved",
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
) -> Shard | list[Shard]:
    """As `get_shard_from_optim_state_dict`, but only global rank `source_rank` needs `full`; other ranks may give None.

    Called by all ranks of the model. Memory beyond the result: `bucket_nbytes`, in bytes.

    Raises (the same on all ranks): as `get_shard_from_optim_state_dict` and `gather_full_optim_state_dict`.
    """
    options = Options(
        name_of=name_of,
        process_group=process_group,
        timeout=timeout,
        strict=strict,
        bucket_nbytes=bucket_nbytes,
        groups=groups,
    )
    return scatter.scatter(model, optim, full, ScatterOptions(options, source_rank))


@ordinary_tensors()
def gather_full_model_state_dict(
    model: nn.Module,
    recipient_rank: int | None = 0,
    *,
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    on_replica_mismatch: OnReplicaMismatch = "error",
) -> dict[str, Any] | None:
    """The weights and buffers of the whole model, as the `state_dict()` of the unwrapped model. Called by all ranks of the model.

    Changes nothing, and needs no forward pass before. Memory beyond the training's own: on a recipient the model and
    `bucket_nbytes`, on other ranks `bucket_nbytes`. All arguments are those of `gather_full_optim_state_dict`.

    Returns:
        On recipients a dict of CPU tensors by FQN, in their original shapes and dtypes; on other ranks None. Tied weights are
        one tensor under all their names. The extra state of modules (`get_extra_state`) is under its names; buffers that are
        not persistent are left out.

    Raises (the same on all ranks): WrapperError, StateError, RankError and RankTimeoutError, as `gather_full_optim_state_dict`.
    """
    options = Options(
        name_of=name_of,
        process_group=process_group,
        timeout=timeout,
        bucket_nbytes=bucket_nbytes,
        on_replica_mismatch=on_replica_mismatch,
    )
    return model_dict.gather_model(model, GatherOptions(options, recipient_rank, "name"))


@ordinary_tensors()
def scatter_full_model_state_dict(
    model: nn.Module,
    full: Mapping[str, Any] | None,
    source_rank: int = 0,
    *,
    strict: bool = True,
    cast: bool = False,
    rename: Rename | None = None,
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
) -> Incompatible:
    """Load a full model dict of global rank `source_rank` into the model of all ranks; other ranks may give None.

    Called by all ranks of the model. Every rank gets only its part. Nothing is changed before all ranks have received theirs.
    Memory beyond the training's own: one copy of this rank's shard, and `bucket_nbytes`, in bytes.

    Args:
        full: the `state_dict()` of an unwrapped model, or what `gather_full_model_state_dict` returned: whole tensors on any
            device. It is not changed.
        strict, cast, rename: as for `load`.
        source_rank: the global rank that has `full`.
        name_of, process_group, timeout, bucket_nbytes: as for `gather_full_optim_state_dict`.

    Returns:
        The differences that `strict=False` has passed over: `missing` and `unexpected`.

    Raises (the same on all ranks, before anything is changed):
        StateError: names, shapes, dtypes or two tensors of one tied parameter differ, and the message lists the differences; or
            `full` has no whole tensors.
        WrapperError, RankError, RankTimeoutError: as `gather_full_optim_state_dict`.
    """
    call = Options(
        name_of=name_of,
        process_group=process_group,
        timeout=timeout,
        strict=strict,
        bucket_nbytes=bucket_nbytes,
    )
    return model_dict.scatter_model(model, full, source_rank, LoadOptions(call, cast=cast, rename=rename))


@ordinary_tensors()
def load_optim_state_dict(
    optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    shard: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    keep: Sequence[str] = (),
) -> Incompatible:
    """As `optim.load_state_dict(shard)`, but every value keeps its saved dtype. No communication.

    As with torch, the optimizer may keep the tensors of the shard without copies. torch's own method casts floating state to the
    dtype of the parameter, which loses the precision of fp32 moments of a bf16 parameter. Changes of hyperparameters are logged
    (INFO).

    Args:
        optim, shard: an optimizer and the result of `get_shard_from_optim_state_dict` for it, or a list of each.
        keep: the hyperparameters whose current values stay, such as `keep=("lr",)`.

    Returns:
        The differences that `strict=False` has passed over, all empty without any: `missing` and `unexpected` (FQNs of
        parameters), `unmatched_hyperparameters` and `unmatched_values` (names that only one of two optimizer classes has).

    Raises:
        StateError: the shard is a full dict, or does not fit this optimizer. Nothing was changed.
    """
    return loading.load_shard(optim, shard, keep)


@ordinary_tensors()
def transfer_optim_state(
    src_model: nn.Module,
    src_optim: Optimizers,
    dst_model: nn.Module,
    dst_optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    *,
    strict: bool = True,
    groups: GroupsFrom = "saved",
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    on_replica_mismatch: OnReplicaMismatch = "error",
) -> Incompatible:
    """Load the state of one live optimizer into another in the same job, whatever wraps their models.

    Called by all ranks of both models. Each byte moves once, directly to the rank that needs it, so a rank holds no more than
    its own shards and `bucket_nbytes`. The source stays unchanged. `strict`, `groups`: as for
    `get_shard_from_optim_state_dict`. Returns the same as `load_optim_state_dict`, and raises the same errors as gather and
    scatter.
    """
    options = Options(
        name_of=name_of,
        process_group=process_group,
        timeout=timeout,
        strict=strict,
        bucket_nbytes=bucket_nbytes,
        groups=groups,
        on_replica_mismatch=on_replica_mismatch,
    )
    return transfer.transfer(src_model, src_optim, dst_model, dst_optim, options)


@ordinary_tensors()
def rekey_optim_state_dict(
    full: Mapping[str, Any], model: nn.Module, key_by: KeyBy, *, optim: Optimizers | None = None
) -> FullDict:
    """The same full dict, keyed by "id" or by "name". It shares its tensors with `full`, which stays unchanged. No communication.

    Args:
        model: the model, wrapped or not; for a dict of fairscale itself, wrapped as at the save.
        optim: an optimizer of `model` with the same parameters in the same groups. It is needed if the dict has ids without names
            and several groups, or an order of parameters of its own; ids then count as this optimizer does. Without `optim`,
            the ids of a dict without names count the parameters of the model.

    Raises:
        StateError: the dict does not belong to this model; or ids are read or requested, and neither the dict nor the model shows
            their order.
    """
    return rekey.rekey(full, model, key_by, optim)


@ordinary_tensors()
def for_fairscale(full: Mapping[str, Any]) -> FullDict:
    """A gathered dict (by id) in the form that fairscale's own `get_shard_from_optim_state_dict` reads.

    The conversion is explicit, because fairscale needs `step` and other 0-dim tensors in a form that torch.optim does not
    read. The result shares its tensors with `full`, which neither this function nor fairscale's reader changes.
    """
    return rekey.for_fairscale(full)


@ordinary_tensors()
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizers | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    per_rank_extra: Any = None,
    overwrite: bool = False,
    strategy: Strategy = "auto",
    max_file_size: int = 4_000_000_000,
    checksums: bool = True,
    durable: bool = True,
    keep_last: int | None = None,
    allow_pickle: bool = False,
    progress: bool | None = None,
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    on_replica_mismatch: OnReplicaMismatch = "error",
    upload_to: str | None = None,
    format: SavedFormat = "safetensors",
    storage_options: Mapping[str, Any] | None = None,
) -> Saved:
    """Write a full checkpoint: a folder of safetensors files, into which all ranks write at the same time, each its own bytes.

    Called by all ranks of the model. Gathers nothing and changes nothing. Memory beyond the training's own: `bucket_nbytes`.
    Values of modules besides parameters and buffers (`get_extra_state`) are saved too; state-dict hooks are not run. The folder
    gets its name only when it is complete, so a save that is killed leaves the earlier checkpoint.

    Args:
        path: the folder to make, on a file system that all ranks share. A relative one counts from the working directory of
            the lowest rank; `~` is the home folder. Or a URL: `s3://bucket/run/step-1000` needs boto3; every other scheme
            (`gs://`, `az://`, `file://`) needs fsspec and the package that fsspec names.
        model, optim: as for gather; several optimizers as a list, which may not be empty; None: weights and buffers only.
        step: the step of the trainer. It is recorded, and `restored.summary.step` returns it.
        extra: values of the trainer: JSON values, tuples, tensors, numpy arrays. The values of the lowest rank are saved.
        per_rank_extra: as `extra`, but every rank saves its own values.
        overwrite: replace the checkpoint that is at `path` when the save begins. Files that a user has put there are carried
            over.
        strategy: "in_place": all ranks write into the same files. "per_rank_files": each rank first gets whole tensors and then
            writes its own files, for file systems without sparse files. "auto" finds out which one the file system needs.
        max_file_size: the most bytes of one file. A larger half is split into several files with an index, as Hugging Face does.
        checksums: write a table of checksums next to each file, so that readers can verify the bytes that they read.
        durable: return only when the bytes are on the disk. A save that replaces or removes another checkpoint is flushed to the
            disk before that in any case.
        keep_last: remove older complete checkpoints in the same folder until this number is left. Only checkpoints of one series
            with the same content count: names that differ only in their digits, or both saved with `step` and `keep_last`; the
            same names of parameters, and both with or both without an optimizer. Each removal is logged.
        allow_pickle: pickle values that are neither JSON nor tensors, in the extras, in the state, and in values of modules.
            False: such a value is an error that names it.
        progress: show a bar on the lowest rank. None: for long saves, a bar on a terminal, and lines in the log elsewhere.
        on_replica_mismatch: as for gather, and also for weights and buffers, BatchNorm statistics included, which have to be
            equal on all ranks that hold the same part.
        upload_to: a URL to which all ranks upload the finished folder in the background. `result.upload.wait()` waits for the
            end and raises the error of a failure; so do the next save of this process and the exit of the process. `overwrite`,
            `keep_last` and `storage_options` count for the URL too.
        format: the form of the files. "safetensors": this library's own. "dcp": a folder of torch.distributed.checkpoint, which
            a job without this library resumes by `dcp.load({"model": ..., "optimizer": ...})` and `set_state_dict`;
            "torchtitan": the same with the weights at the top level. These two have no checksums, take no `upload_to`, and
            their extras are flattened as torch flattens dicts: keys become str.
        storage_options: the options of a URL: `endpoint_url`, `region_name`, credentials, and all options of boto3's client or of
            the fsspec file system; `part_nbytes`: the size of uploaded parts in bytes; `dead_after`: the seconds without sign of
            life after which a save is dead and its leftovers are removed (300). The options may differ between ranks.

    Raises (the same on all ranks):
        CheckpointError: the path is taken, or cannot be written, or other ranks of the job save to it. The message names the
            file.
        The errors of `gather_full_optim_state_dict`.
    """
    with checkpoint_errors(path):
        options = SaveOptions(
            Options(
                name_of=name_of,
                process_group=process_group,
                timeout=timeout,
                bucket_nbytes=bucket_nbytes,
                on_replica_mismatch=on_replica_mismatch,
            ),
            step=step,
            extra=extra,
            per_rank_extra=per_rank_extra,
            overwrite=overwrite,
            strategy=strategy,
            max_file_size=max_file_size,
            checksums=checksums,
            durable=durable,
            keep_last=keep_last,
            allow_pickle=allow_pickle,
            progress=progress,
            upload_to=upload_to,
            format=format,
            storage_options=storage_options,
        )
        return saving.save(path, model, optim, options)


@ordinary_tensors()
def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizers | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    per_rank_extra: Any = None,
    overwrite: bool = False,
    strategy: Strategy = "auto",
    max_file_size: int = 4_000_000_000,
    checksums: bool = True,
    durable: bool = True,
    keep_last: int | None = None,
    allow_pickle: bool = False,
    progress: bool | None = None,
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    on_replica_mismatch: OnReplicaMismatch = "error",
    upload_to: str | None = None,
    format: SavedFormat = "safetensors",
    storage_options: Mapping[str, Any] | None = None,
) -> SaveHandle:
    """As `save`, but returns when the state is copied to host memory, so that training may go on and change the state.

    Called by all ranks of the model. One thread of each rank writes the copy, without collective calls. `handle.wait()` and the
    next save or async_save of this process wait for this save, with `upload_to` also for the upload, and raise its error; the
    exit of the process waits too. Memory: one copy of the part that this rank writes (its shard, or its share of replicated
    values), until that part is written.
    """
    with checkpoint_errors(path):
        options = SaveOptions(
            Options(
                name_of=name_of,
                process_group=process_group,
                timeout=timeout,
                bucket_nbytes=bucket_nbytes,
                on_replica_mismatch=on_replica_mismatch,
            ),
            step=step,
            extra=extra,
            per_rank_extra=per_rank_extra,
            overwrite=overwrite,
            strategy=strategy,
            max_file_size=max_file_size,
            checksums=checksums,
            durable=durable,
            keep_last=keep_last,
            allow_pickle=allow_pickle,
            progress=progress,
            upload_to=upload_to,
            format=format,
            storage_options=storage_options,
        )
        return background.async_save(path, model, optim, options)


@ordinary_tensors()
def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None = None,
    *,
    strict: bool = True,
    groups: GroupsFrom = "saved",
    keep: Sequence[str] = (),
    cast: bool = False,
    rename: Rename | None = None,
    verify: bool = True,
    check: Check | None = None,
    allow_pickle: bool = False,
    progress: bool | None = None,
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    local_cache: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Restored:
    """Load a checkpoint into a live model and optimizer, at any world size, in any wrapper or none.

    Called by all ranks of the model. Each rank reads and verifies the bytes that it needs; elements that several ranks need are
    read once and sent. Nothing is changed before all ranks have read all elements. Memory beyond the training's own: one copy
    of this rank's shard, and `bucket_nbytes`.

    Args:
        path: as for save. If another save replaces the checkpoint meanwhile, all loaded values are from one of the two.
        model, optim: as for save; `optim` None: weights and buffers only; both None: the extras only, on this process alone
            (the index of this process in `process_group` then selects the `per_rank_extra`).
        strict: True: refuse parameters that only one side has, and state of another optimizer class. False: these stay as they
            are, and the result lists them.
        groups: as for `get_shard_from_optim_state_dict`.
        keep: the hyperparameters whose current values stay, such as `keep=("lr",)`.
        cast: allow weights and buffers with another floating dtype in the model than in the checkpoint. State keeps its saved
            dtype, unless the live optimizer has another dtype for it, or is one of torch.optim and the state had the saved
            dtype of the weights: then the state follows the weights.
        rename: names in the checkpoint that the model has under others: a function from a stored name to the model's name, or
            a dict of beginnings of names, such as `{"model.": ""}`; the longest beginning that fits is replaced.
        verify: compare the checksums of all bytes that are read. Other libraries' checkpoints have none.
        check: "bitwise": at the end, read the checkpoint again and compare it with the live model and optimizer.
        allow_pickle: load pickled values, which can run any code, so only give True if you trust the author. Without it, the
            model loads, and only the access to a pickled value of the extras raises CheckpointError. A pickled value of a
            module (`get_extra_state`) raises CheckpointError, or counts as missing with `strict=False`.
        local_cache: a folder of this machine that keeps what was read from a URL, in blocks of 1 MiB, for the next time. Blocks
            are verified when they are used. The ranks on one machine may share the folder.
        progress, name_of, process_group, timeout, bucket_nbytes, storage_options: as for save and gather.

    Returns:
        The saved `extra` as a dict (another value is under the key "extra"), with the attributes `per_rank` (this rank's
        `per_rank_extra`; if this rank had none, that of rank 0, with a warning), `all_ranks` (the `per_rank_extra` of every rank
        that saved), `missing`, `unexpected`, `unmatched_hyperparameters`, `unmatched_values` and `summary`.

    Raises (the same on all ranks, before anything is changed):
        CheckpointError: the checkpoint is incomplete or damaged. The message names the file and the tensor.
        StateError: the model or the optimizer differs, and the message lists the differences; or the optimizer's own
            `load_state_dict` refuses the state.
    """
    call = Options(
        name_of=name_of,
        process_group=process_group,
        timeout=timeout,
        strict=strict,
        bucket_nbytes=bucket_nbytes,
        groups=groups,
    )
    with checkpoint_errors(path):
        options = LoadOptions(
            call,
            keep=keep,
            verify=verify,
            check=check,
            allow_pickle=allow_pickle,
            progress=progress,
            cast=cast,
            rename=rename,
            local_cache=local_cache,
            storage_options=storage_options,
        )
        return restore.restore(path, model, optim, options)


def latest(root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Path | str | None:
    """The newest complete checkpoint in a folder of checkpoints, or under a URL; None where there is none. No communication.

    The newest checkpoint is the one that was saved last, whatever the clocks showed, because each save records a sequence
    number above all others in the folder. If two numbers are equal, as in merged folders, the higher `step` is newer, then the
    later time. Checkpoints of versions that recorded no number are older than all others.

    Args:
        root: a path, or a URL as for save.
        storage_options: as for save.

    Returns:
        A Path in a folder, a URL (str) under a URL; None where there is no complete checkpoint.

    Raises:
        CheckpointError: the folder cannot be listed, or none of its checkpoints can be read just now.
    """
    with checkpoint_errors(root):
        found = catalog.latest(*(shelf_at(root, storage_options, format) for format in SAVED))
        return found if found is None or scheme_of(root) is not None else Path(found)


@ordinary_tensors()
def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    world_size: int | None = None,
    key_by: KeyBy | None = None,
    memory: int = CONVERT_NBYTES,
    names: Sequence[str] | None = None,
    model: nn.Module | None = None,
    overwrite: bool = False,
    durable: bool = True,
    max_file_size: int = 4_000_000_000,
    allow_pickle: bool = False,
    progress: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Saved:
    """Write a checkpoint again in another format or in other files, bit for bit, without ranks and in bounded memory.

    Reads every format that `load` reads. Works without a process group; where torch.distributed is initialized, all ranks of the
    default group make the call and each copies a share of the bytes. The new checkpoint is written aside and gets its name when
    it is complete. A conversion into a folder that is killed or interrupted goes on where it stopped, if it is called again with
    the same source, which has not changed, the same `dst` and the same options: what is there already is verified and not written
    again. Any other save into the same parent folder removes such leftovers. After an error nothing is left.

    Args:
        src: the checkpoint: a path, or a URL as for save.
        dst: the place of the new checkpoint: a path, or a URL as for save.
        format: "safetensors": this library's own; "dcp" and "torchtitan": as save writes these; "torch": a folder with
            `model.pt` and `optim.pt`, the dicts that an unwrapped model and its optimizer load; "fairscale": the same with
            the optimizer's dict for fairscale's own `get_shard_from_optim_state_dict`, if the root alone is wrapped.
        world_size: the number of ranks, for formats that have a part for each rank.
        key_by: "id" or "name", for formats whose optimizer dict may have either.
        memory: the most bytes of elements that each process holds at a time, at least 16 MiB. The description of the checkpoint
            (names, shapes) comes on top.
        names: the FQNs of the optimizer's parameters in the order of their ids, for checkpoints that have ids without names.
        model: in the place of `names`: a model whose parameters have this order; it may be on the meta device.
        overwrite, durable, max_file_size: as for save.
        allow_pickle: read and write values that need pickle, which can run any code of the author of `src`.
        progress: show a bar on the lowest rank. None: for long conversions, a bar on a terminal, and lines in the log elsewhere.
        process_group, timeout: as for gather: other ranks than those of the default group.
        storage_options: as for save, for both places that are URLs.

    Returns:
        A `Saved`; `nbytes_written` are the bytes that this process wrote, without those that a killed conversion had written.

    Raises (the same on all ranks):
        CheckpointError: the source is damaged, incomplete or unknown, or `dst` is taken or cannot be written.
        StateError: the source has ids without names, and neither `names` nor `model` tells them; or the ranks differ.
    """
    with checkpoint_errors(dst):
        options = ConvertOptions(
            Options(process_group=process_group, timeout=timeout),
            format=format,
            world_size=world_size,
            key_by=key_by,
            memory=memory,
            names=names,
            overwrite=overwrite,
            durable=durable,
            max_file_size=max_file_size,
            allow_pickle=allow_pickle,
            progress=progress,
            storage_options=storage_options,
        )
        return conversion.convert(src, dst, options, model)


@ordinary_tensors()
def resume(
    root: str | os.PathLike[str],
    model: nn.Module,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None = None,
    *,
    on_damage: OnDamage = "error",
    strict: bool = True,
    groups: GroupsFrom = "saved",
    keep: Sequence[str] = (),
    cast: bool = False,
    rename: Rename | None = None,
    verify: bool = True,
    check: Check | None = None,
    allow_pickle: bool = False,
    progress: bool | None = None,
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    local_cache: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Restored | None:
    """Load the newest checkpoint in a folder of checkpoints, or under a URL. Called by all ranks of the model.

    The lowest rank lists the folder, so all ranks load the same checkpoint. The order is that of `checkpoints`.

    Args:
        root: a path, or a URL as for save.
        on_damage: what to do if the newest checkpoint is damaged, or cannot be read just now. "error": raise CheckpointError
            that names it, and the one before it. "previous": log a warning, and load the newest one that can be loaded.
        model, optim, strict, groups, keep, cast, rename, verify, check, allow_pickle, progress, name_of, process_group,
            timeout, bucket_nbytes, local_cache, storage_options: as for load.

    Returns:
        As load; None where the folder has no checkpoint, and nothing was changed.

    Raises (the same on all ranks): as load.
    """
    call = Options(
        name_of=name_of,
        process_group=process_group,
        timeout=timeout,
        strict=strict,
        bucket_nbytes=bucket_nbytes,
        groups=groups,
    )
    with checkpoint_errors(root):
        options = ResumeOptions(
            call,
            keep=keep,
            verify=verify,
            check=check,
            allow_pickle=allow_pickle,
            progress=progress,
            cast=cast,
            rename=rename,
            local_cache=local_cache,
            storage_options=storage_options,
            on_damage=on_damage,
        )
        return resuming.resume(root, model, optim, options)


def checkpoints(
    root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[CheckpointInfo]:
    """The checkpoints in a folder, or under a URL, the newest first, damaged ones included. No communication.

    The newest checkpoint is the one that was saved last, as for `latest`. A checkpoint whose manifest is damaged has no
    sequence number, so its place follows from the number in its name; without a number it comes first.

    Args:
        root: a path, or a URL as for save.
        storage_options: as for save.

    Returns:
        For each checkpoint its `path`, `step`, `world_size`, `nbytes`, whether it is `complete` (else the `reason`), and its
        `metric`. Folders without a manifest are no checkpoints, and saves under way are none yet.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    with checkpoint_errors(root):
        return listing.checkpoints(*(shelf_at(root, storage_options, format) for format in SAVED))


def wait(timeout: float | None = None) -> None:
    """Wait for the save or upload of this process that is in the background, if there is one. No communication.

    Args:
        timeout: seconds, at most; None: without limit.

    Raises:
        CheckpointError: the save failed, and its error was not raised before.
        RankTimeoutError: the save did not end in time; it goes on.
    """
    pending.wait(timeout)


def verify(
    path: str | os.PathLike[str],
    *,
    memory: int = CONVERT_NBYTES,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Verified:
    """Read every byte of a checkpoint of any format that `load` reads, without a model, on all cores. No communication.

    What has checksums is compared with them, which is every byte of this library's own checkpoints, unless they were saved with
    `checksums=False`. Formats of other libraries have none: there everything is read, so that files that are missing, cut short
    or contradict each other are found, but no changed bytes. Nothing is unpickled.

    Args:
        path: as for save.
        memory: as for convert.
        progress: show a bar. None: for long calls, a bar on a terminal, and lines in the log elsewhere.
        storage_options: as for save.

    Returns:
        A `Verified`: what was read, and whether it `has_checksums`.

    Raises:
        CheckpointError: the checkpoint is damaged. The message names all places with damage, the first twenty if there are more.
    """
    with checkpoint_errors(path):
        return verifying.verify(path, memory=memory, progress=progress, storage_options=storage_options)


def inspect(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Inspected:
    """What a checkpoint of any format that `load` reads has: tensors by name, with dtypes, shapes and bytes, and the optimizer.

    Reads the description and no elements. No communication. `path` and `storage_options` are as for save.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or unknown.
    """
    with checkpoint_errors(path):
        return inspecting.inspect(path, storage_options)
