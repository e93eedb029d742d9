"""The public functions. Each reads like its contract; what they do is in `verbs` and `checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, overload

import torch.distributed as dist
from torch import nn

from fsdp_optim.checkpoint import background, catalog, restore
from fsdp_optim.checkpoint import save as saving
from fsdp_optim.checkpoint.pending import SaveHandle
from fsdp_optim.checkpoint.restored import Restored
from fsdp_optim.checkpoint.results import Saved
from fsdp_optim.checkpoint.stores import shelf_at
from fsdp_optim.memory import ordinary_tensors
from fsdp_optim.options import (
    BUCKET_NBYTES,
    Check,
    Collect,
    GatherOptions,
    GroupsFrom,
    KeyBy,
    LoadOptions,
    NameOf,
    OnReplicaMismatch,
    Options,
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
from fsdp_optim.verbs.load_state import Incompatible, LoadableOptimizer


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
    """The optimizer state per original parameter, as if the wrapper were not there. Called by all ranks of the model.

    Nothing is changed: no step, gradient, parameter, group or state. Memory beyond the training's own: on a recipient
    the full state and `bucket_nbytes`, elsewhere `bucket_nbytes`.

    Args:
        model: the root that `optim` was built from: fairscale FSDP, DistributedDataParallel, a plain module, or a mix.
        optim: anything with `state_dict()` and `param_groups`.
        recipient_rank: the global rank that gets the dict; None: every rank does.
        key_by: "id" counts as the optimizer does: group after group, inside a group in the optimizer's own order, with the
            originals of a flat parameter in place. An optimizer that lists a group as the wrapped model's parameters() does is
            counted as the unwrapped model's parameters(). "name" uses clean FQNs; groups list them in the same order.
        collect: "wrapper" leaves units with fairscale's `no_broadcast_optim_state` as fairscale does: the recipient's own
            state of them is in the dict, the others' is not, and `uncollected_local_ids` lists them. "all" gathers them.
        name_of: `(fqn, rank) -> name`, for units whose ranks call different parameters by one name (every rank's own
            expert is `experts.0`): gives each a name of its own. `rank` is the lowest global rank that holds the parameter.
        process_group: the ranks that make this call, where the model does not tell (None: all ranks of its wrappers).
        timeout: seconds to wait for ranks that do not come (None: 600).
        bucket_nbytes: see above.
        on_replica_mismatch: what to do where ranks that hold the same part of a parameter have different state, because
            nobody keeps them equal (norms beside tensor parallel layers): "error", or "lowest_rank", which takes that
            of the lowest rank and says so in the log.

    Returns:
        On recipients a dict whose tensors are on the CPU, each with its own storage, in the dtype of the state; elsewhere
        None. `plain_optim.load_state_dict(full)` accepts it. Besides `state` and `param_groups` (with `param_names`) it
        has `optimizer_class` (the name of its class, without what wraps it), `param_id_map` (id -> this rank's local id, None
        without state), `num_padded` (per flat parameter, the padding of each group rank), `kinds` (what each value is to its
        parameter, which readers believe),
        `uncollected_local_ids`, and the
        other keys of the optimizer's own dict. By name it also has `unknown_order`, the reason, where ids could not count the
        parameters.

    Raises (the same on all ranks):
        WrapperError: the model or the optimizer cannot be read, or do not belong together.
        StateError: ranks do not see one model and one state; or no order of ids can be right (a module that torch FSDP took in
            part, with `ignored_states`; stages that no rank has together), and `key_by` is "id".
        RankError: a rank failed, with its reason, or made another call; or nothing in the model tells that the recipient
            shares it (pipeline stages without a wrapper), and `process_group` is not given.
        RankTimeoutError: a rank did not come; it is named.
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
    """As `gather_full_optim_state_dict`, one parameter at a time, so that no rank ever holds the whole state.

    Yields (FQN, state) on every rank: the state on recipients ({} for a parameter without state), None elsewhere. The order
    is that of gather's ids: with one group the unwrapped model's, unless the optimizer lists its parameters in another; where
    no order of ids is known, one that is the same on all ranks. Every rank of the model has to exhaust the iterator. A
    recipient holds at most `bucket_nbytes` of parameters (or one that is larger), and as much again while they move.
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
        model, optim: as for gather; the world size may be any.
        full: needed on this rank, left unchanged, shares no memory with the result. Accepted: what
            `gather_full_optim_state_dict` returns, by id or name; fairscale's own; a plain optimizer's on the unwrapped
            model.
        strict: refuse parameters that one side lacks, and state of another optimizer's class. False: take the parameters, the
            hyperparameters and the state values that both have; the rest is listed.
        groups: "saved": the optimizer has the saved groups, and gets their hyperparameters. "live": its groups and
            hyperparameters stay, and every parameter's state is found by name.
        name_of: as it was given to gather.
        process_group, timeout: as for gather, for a sharded dict (DTensor, ShardedTensor), of which every rank has its part:
            then, and only then, all ranks have to call, and data moves between them.

    Returns:
        The optimizer's own dict, an ordinary one: local ids, the saved hyperparameters, state tensors on the parameters'
        devices in the dtype they were saved in. Where `strict=False` left something out, it says what under "incompatible",
        which `load_optim_state_dict` takes out and returns.

    Raises:
        StateError: the dict is not one of this model and optimizer: names the parameter and both numbers, or the two classes
            and what only one of them has. Nothing was changed.
    """
    options = Options(name_of=name_of, process_group=process_group, timeout=timeout, strict=strict, groups=groups)
    return shard.shard(model, optim, full, options)


@ordinary_tensors()
def get_shard_without_optimizer(model: nn.Module, full: Mapping[str, Any], *, name_of: NameOf | None = None) -> Shard:
    """As `get_shard_from_optim_state_dict`, for an optimizer built like the saved one; behind fairscale's method."""
    made = shard.shard(model, None, full, Options(name_of=name_of))
    return made if isinstance(made, dict) else made[0]


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
    """As `get_shard_from_optim_state_dict`, with `full` needed on global rank `source_rank` only.

    Called by all ranks of the model. Memory beyond the result: `bucket_nbytes`.

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
def load_optim_state_dict(
    optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    shard: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    keep: Sequence[str] = (),
) -> Incompatible:
    """As `optim.load_state_dict(shard)`, but every value keeps the dtype that it was saved in. No communication.

    As with torch, the optimizer may keep the shard's tensors themselves. torch's own method casts floating state to the
    parameter's dtype, which loses fp32 moments of a bf16 parameter. Hyperparameters that change are logged (INFO).

    Args:
        optim, shard: an optimizer and what `get_shard_from_optim_state_dict` made for it, or a list of each.
        keep: hyperparameters whose current values stay (`keep=("lr",)`).

    Returns:
        `missing` and `extra` (parameters), `hyperparameters` and `values` (names that only one of two optimizers' classes has),
        as `strict=False` found them; all empty otherwise.

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
    """Load one live optimizer's state into another, in one job, whatever wraps their models.

    Called by all ranks of both models. Each byte moves once, straight to the rank that needs it: no rank holds more than
    its own shards and `bucket_nbytes`. The source is left unchanged. `strict`, `groups`: as for
    `get_shard_from_optim_state_dict`. Returns what `load_optim_state_dict` does, and raises as gather and scatter do.
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
    """The same full dict, keyed by "id" or by "name". Shares its tensors with `full`, which is left unchanged.

    Args:
        model: wrapped or not; for fairscale's own dict, wrapped as it was when saved.
        optim: an optimizer of `model` with the same parameters in the same groups. It is needed where the dict has ids
            without names and several groups, or lists its parameters in an order of its own; ids then count as it does.
            Without it, the ids of a dict without names count the model's parameters.

    Raises:
        StateError: the dict is not one of this model; or ids are asked for, or given, and neither the dict nor the model
            tells their order.
    """
    return rekey.rekey(full, model, key_by, optim)


@ordinary_tensors()
def for_fairscale(full: Mapping[str, Any]) -> FullDict:
    """A gathered dict (by id) as fairscale's own `get_shard_from_optim_state_dict` reads it.

    An explicit conversion, because fairscale needs `step` and other 0-dim tensors in a form that torch.optim does not
    read. Shares its tensors with `full`, which is left unchanged by this and by fairscale's reader.
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
    storage_options: Mapping[str, Any] | None = None,
) -> Saved:
    """Write one full checkpoint: a folder of safetensors files, which all ranks write at once, each its own bytes.

    Called by all ranks of the model. Nothing is gathered and nothing is changed; memory beyond the training's own:
    `bucket_nbytes`. What modules keep besides parameters and buffers (`get_extra_state`) is saved too; state-dict hooks are not
    run. The folder gets its name when all of it is written: a save that is killed leaves what was there before.

    Args:
        path: the folder to make, on a file system that all ranks share. A relative one counts from the working directory of
            the lowest rank; `~` is the home folder. Or a URL: `s3://bucket/run/step-1000` needs boto3; every other scheme
            (`gs://`, `az://`, `file://`) needs fsspec and the package that fsspec names.
        model, optim: as for gather; several optimizers as a list, which may not be empty; None: weights and buffers only.
        step: the trainer's step; recorded, and `restored.summary.step` has it.
        extra: values of the trainer (the lowest rank's count): JSON values, tuples, tensors, numpy arrays.
        per_rank_extra: the same, of each rank.
        overwrite: replace the checkpoint that is at `path` when the save begins. Files that somebody has put there are
            carried over.
        strategy: "in_place": all ranks write into the same files. "per_rank_files": each rank gets whole tensors first and
            writes files of its own, for file systems without sparse files. "auto" tries which it is.
        max_file_size: bytes; a larger half is split into files of at most that, with an index, as Hugging Face does.
        checksums: write a table of checksums beside each file, so that readers verify what they read.
        durable: return when the bytes are on the disk, not only on their way. A save that replaces or removes another one is
            brought to the disk first in any case.
        keep_last: remove older complete checkpoints in the same folder, until there are so many. Only those count that have
            the same content (names of parameters, with or without an optimizer) and are of the same series: names that differ
            in their digits only, or both saved with `step` and `keep_last`. Each removal is logged.
        allow_pickle: pickle what is neither JSON nor tensor in the extras, in the state and in what modules keep besides
            parameters and buffers; else it is refused by name.
        progress: a bar on the lowest rank: True, False, or None: on a terminal, for long saves, and
            lines in the log elsewhere.
        on_replica_mismatch: as for gather; also for weights and buffers, each of which has to be equal on the ranks that hold
            the same part of it, BatchNorm statistics too.
        storage_options: of a URL: `endpoint_url`, `region_name`, credentials and whatever boto3's client, or the fsspec file
            system, takes; `part_nbytes`: the size of uploaded parts; `dead_after`: seconds without a sign of life after which
            a save is dead and its leftovers are removed (300). May differ between ranks.

    Raises (the same on all ranks):
        CheckpointError: the path is taken, or cannot be written, or other ranks of the job save to it; names the file.
        As `gather_full_optim_state_dict`.
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
    storage_options: Mapping[str, Any] | None = None,
) -> SaveHandle:
    """As `save`, but returns when the state is copied to host memory: training may go on and change it.

    Called by all ranks. One thread per rank writes, without any collective call. The next save or async_save of this process
    waits for it and raises what went wrong in it; so does `handle.wait()`, and the end of the process waits too. Memory: what
    this rank writes (its shard, or its share of what several ranks hold), once, until it is written.
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
    verify: bool = True,
    check: Check | None = None,
    allow_pickle: bool = False,
    progress: bool | None = None,
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> Restored:
    """Load a checkpoint into a live model and optimizer, at any world size, in any wrapper or none.

    Called by all ranks of the model. Each rank reads the bytes that it needs, and verifies them; what several ranks need is
    read once and sent. Nothing is changed before all ranks have all of it. Memory beyond the training's own: this rank's
    shard, once, and `bucket_nbytes`.

    Args:
        path: as for save. Where another save replaces it meanwhile, all that is loaded is of one checkpoint.
        model, optim: as for save; `optim` None: weights and buffers only; both None: the extras only, on this process alone
            (`process_group` then says which rank's `per_rank_extra`: that of this process's place in it).
        strict: refuse parameters that one side lacks, and state of another optimizer's class. False: they stay as they are, and
            are listed in the result.
        groups: as for `get_shard_from_optim_state_dict`.
        keep: hyperparameters whose current values stay (`keep=("lr",)`).
        cast: weights and buffers may be of another floating dtype in the model than in the checkpoint. State keeps its dtype,
            unless the live optimizer has another for it, or is one of torch.optim, which needs the weights' dtype, and the
            state had it.
        verify: compare checksums.
        check: "bitwise": at the end read all once more and compare it with what the model and the optimizer hold.
        allow_pickle: load pickled values, which can run any code: only from someone you trust. Without it a model loads all the
            same; a pickled value of the extras raises CheckpointError when it is asked for, and the others are there. One that a
            module of the model keeps (`get_extra_state`) raises CheckpointError, or counts as missing with `strict=False`.
        progress, name_of, process_group, timeout, bucket_nbytes, storage_options: as for save and gather.

    Returns:
        The saved `extra` as a dict (under "extra" where it was none), with `per_rank` (this rank's `per_rank_extra`, or rank 0's,
        with a warning, where this rank had none), `all_ranks` (that of every rank that saved), `missing`, `unexpected`,
        `unmatched_hyperparameters`, `unmatched_values`, `summary`.

    Raises (the same on all ranks, before anything is changed):
        CheckpointError: the checkpoint is not whole, or not what was saved; names the file and the tensor.
        StateError: the model or the optimizer differs; lists the differences. Or its own `load_state_dict` refuses it.
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
            storage_options=storage_options,
        )
        return restore.restore(path, model, optim, options)


def latest(root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Path | str | None:
    """The newest complete checkpoint in a folder of checkpoints, or under a URL; None where there is none. No communication.

    The newest one is the one that was saved last, whatever the clocks said: each save records a sequence number that is higher
    than all in the folder. Where two are equal (folders were merged), the higher `step` is newer, then the later time.
    Checkpoints of a version that did not record it are older than all others.

    Args:
        root: a path, or a URL as for save.
        storage_options: as for save.

    Returns:
        A Path in a folder, a URL (str) under a URL; None where there is no complete checkpoint.

    Raises:
        CheckpointError: the folder cannot be listed, or has checkpoints, but none that can be read just now.
    """
    with checkpoint_errors(root):
        found = catalog.latest(shelf_at(root, storage_options))
        return found if found is None or scheme_of(root) is not None else Path(found)
