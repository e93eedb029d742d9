"""The calls that write one checkpoint from a live model and load it into one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_optim.checkpoint.common.pending import SaveHandle
from fsdp_optim.checkpoint.common.results import Saved
from fsdp_optim.checkpoint.load import restore
from fsdp_optim.checkpoint.load.restored import Restored
from fsdp_optim.checkpoint.save import background
from fsdp_optim.checkpoint.save import foreground as saving
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.memory import ordinary_tensors
from fsdp_optim.options import (
    BUCKET_NBYTES,
    Check,
    GroupsFrom,
    LoadOptions,
    Model,
    NameOf,
    OnReplicaMismatch,
    Options,
    Rename,
    SaveOptions,
    Strategy,
    WhichWeights,
)
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.storage.posix.files import checkpoint_errors
from fsdp_optim.verbs.load_state import LoadableOptimizer


@ordinary_tensors()
def save(
    path: str | os.PathLike[str],
    model: Model,
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
    allow_pickle: bool = False,
    progress: bool | None = None,
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    on_replica_mismatch: OnReplicaMismatch = "error",
    format: str | Format = "safetensors",
    weights: WhichWeights = "all",
    rename: Rename | None = None,
    weights_dtype: torch.dtype | None = None,
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
        model: as for `gather_full_optim_state_dict`.
        optim: as for `gather_full_optim_state_dict`; a list of several may not be empty. None: weights and buffers only.
        step: the step of the trainer. It is recorded, and `restored.summary.step` returns it.
        extra: values of the trainer: JSON values, tuples, tensors, numpy arrays. The values of the lowest rank are saved.
        per_rank_extra: as `extra`, but every rank saves its own values.
        overwrite: replace the checkpoint that is at `path` when the save begins. Files that a user has put there are carried
            over.
        strategy: "in_place": all ranks write into the same files. "per_rank_files": each rank first gets whole tensors and then
            writes its own files, for file systems without sparse files. "auto" finds out which one the file system needs.
        max_file_size: the most bytes of a file with tensors, with its header. A larger half is split into several files with an
            index, as Hugging Face does. A tensor that is larger than that is in a file of its own.
        checksums: write a table of checksums next to each file, so that readers can verify the bytes that they read.
        durable: return only when the bytes are on the disk. A save that replaces another checkpoint is flushed to the disk
            before that in any case.
        allow_pickle: pickle values that are neither JSON nor tensors, in the extras, in the state, and in values of modules.
            False: such a value is an error that names it.
        progress: show a bar on the lowest rank. None: for long saves, a bar on a terminal, and lines in the log elsewhere.
        name_of, process_group, timeout, bucket_nbytes: as for `gather_full_optim_state_dict`.
        on_replica_mismatch: as for `gather_full_optim_state_dict`, and also for weights and buffers, BatchNorm statistics
            included, which must be equal on all ranks that hold the same part.
        format: the form of the files. "safetensors": this library's own. "dcp": a folder of torch.distributed.checkpoint, which
            a job without this library resumes by `dcp.load({"model": ..., "optimizer": ...})` and `set_state_dict`;
            "torchtitan": the same with the weights at the top level. These two have no checksums, and their
            extras are flattened as torch flattens dicts: keys become str for other readers, and come back in `load`.
        weights: "all": all parameters and buffers, and the values of modules. "trainable": the parameters that require
            gradients (adapters, say), and all buffers and values of modules, because training changes these too. "none": the
            optimizer alone, beside model files that the trainer has elsewhere. The checkpoint records the choice; `load` has an
            argument of the same name.
        rename: the names in the checkpoint, of weights and optimizer state alike: a function from a name of the model to the
            name in the checkpoint, or a dict of beginnings of names, such as `{"": "model."}`; the longest beginning that fits
            is replaced. Two parameters of one name are an error. `load` has an argument of the same name for the way back.
        weights_dtype: for export: torch.bfloat16, float16, float32 or float64, to which floating parameters and buffers are cast
            as they are written, in bounded memory; the live ones, those in 8 bits and less, and the optimizer's state stay as
            they are. A number that would become infinite is an error. The checkpoint records the dtype; a load of other dtypes
            needs `cast=True`.
        storage_options: the options of a URL: `endpoint_url`, `region_name`, credentials, and all options of boto3's client or of
            the fsspec file system; `part_nbytes`: the size of uploaded parts in bytes; `dead_after`: the seconds without sign of
            life after which a save is dead and its leftovers are removed (300). The options may differ between ranks.

    Raises (the same on all ranks):
        CheckpointError: the path is taken, or cannot be written, or other ranks of the job save to it. The message names the
            file.
        WrapperError, StateError, RankError, RankTimeoutError: as `gather_full_optim_state_dict`.
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
            allow_pickle=allow_pickle,
            progress=progress,
            format=format,
            weights=weights,
            rename=rename,
            weights_dtype=weights_dtype,
            storage_options=storage_options,
        )
        return saving.save(path, model, optim, options)


@ordinary_tensors()
def async_save(
    path: str | os.PathLike[str],
    model: Model,
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
    allow_pickle: bool = False,
    progress: bool | None = None,
    name_of: NameOf | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    on_replica_mismatch: OnReplicaMismatch = "error",
    format: str | Format = "safetensors",
    weights: WhichWeights = "all",
    rename: Rename | None = None,
    weights_dtype: torch.dtype | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveHandle:
    """As `save`, but returns when the state is copied to host memory, so that training may go on and change the state.

    Called by all ranks of the model. One thread of each rank writes the copy, without collective calls. `handle.wait()` and the
    next save or async_save of this process wait for this save, and raise its error; the exit of the process waits too. Memory:
    one copy of the part that this rank writes (its shard, or its share of replicated values), until that part is written.

    Args:
        path, model, optim, weights, weights_dtype, rename, step, extra, per_rank_extra, overwrite, strategy, max_file_size,
            checksums, durable, allow_pickle, progress, name_of, process_group, timeout, bucket_nbytes,
            on_replica_mismatch, format, storage_options: as for `save`.

    Returns:
        A `SaveHandle` for this save.
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
            allow_pickle=allow_pickle,
            progress=progress,
            format=format,
            weights=weights,
            rename=rename,
            weights_dtype=weights_dtype,
            storage_options=storage_options,
        )
        return background.async_save(path, model, optim, options)


@ordinary_tensors()
def load(
    path: str | os.PathLike[str],
    model: Model | None = None,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None = None,
    *,
    weights: WhichWeights = "all",
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
        path: as for `save`. If another save replaces the checkpoint meanwhile, all loaded values are from one of the two.
        model: as for `save`. None, with `optim` None: the extras only, on this process alone (the index of this process in
            `process_group` then selects the `per_rank_extra`). Buffers with persistent=False are in no checkpoint: after
            `to_empty()` compute them anew; a warning names those that evidently nothing has filled.
        optim: as for `save`. None: weights and buffers only.
        weights: the weights that this load must fill, of any checkpoint that has them. "all": all of the model. "trainable":
            the parameters that require gradients now, and buffers and values of modules; frozen parameters stay as they are.
            "none": no weights, the optimizer alone. A checkpoint of `save(weights="none")` is an error with any other value.
        strict: True: refuse parameters that only one side has, and state of another optimizer class; of a checkpoint of
            `save(weights="trainable")` also parameters that are frozen now. False: these stay as they are, and the result
            lists them.
        groups: as for `get_shard_from_optim_state_dict`.
        keep: the hyperparameters whose current values stay, such as `keep=("lr",)`.
        cast: allow weights and buffers with another floating dtype in the model than in the checkpoint. State keeps its saved
            dtype, unless the live optimizer has another dtype for it, or is one of torch.optim and the state had the saved
            dtype of the weights: then the state follows the weights.
        rename: the model's names, if the checkpoint has other names: a function from a stored name to the model's name, or a
            dict of beginnings of names, such as `{"model.": ""}`; the longest beginning that fits is replaced.
        verify: compare the checksums of all bytes that are read. Other libraries' checkpoints have no checksums.
        check: "bitwise": at the end, read the checkpoint again and compare it with the live model and optimizer.
        allow_pickle: load pickled values, which can run any code, so only give True if you trust the author. With False, the
            model loads, and only the access to a pickled value of the extras raises CheckpointError. A pickled value of a
            module (`get_extra_state`) raises CheckpointError, or counts as missing with `strict=False`.
        local_cache: a folder of this machine that keeps the bytes read from a URL, in blocks of 1 MiB, for later loads. Blocks
            are verified when they are used. The ranks on one machine may share the folder.
        progress, name_of, process_group, timeout, bucket_nbytes, storage_options: as for `save`.

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
            weights=weights,
            local_cache=local_cache,
            storage_options=storage_options,
        )
        return restore.restore(path, model, optim, options)
