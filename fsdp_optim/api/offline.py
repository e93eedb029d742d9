"""The calls on one checkpoint without a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsdp_optim.checkpoint.common.offline_results import Inspected, Verified
from fsdp_optim.checkpoint.common.results import Saved
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.memory import ordinary_tensors
from fsdp_optim.options import CONVERT_NBYTES, ConvertOptions, Model, Options
from fsdp_optim.registry import CONVERT, INSPECT, VERIFY, named
from fsdp_optim.storage.posix.files import checkpoint_errors


@ordinary_tensors()
def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str | Format = "safetensors",
    memory: int = CONVERT_NBYTES,
    names: Sequence[str] | None = None,
    model: Model | None = None,
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
    it is complete. Any other save into the same parent folder removes what a killed conversion has left; under the same prefix of
    a bucket, it does so after five minutes. After an error or an interrupt nothing is left.

    Args:
        src: the checkpoint: a path, or a URL as for `save`.
        dst: the place of the new checkpoint: a path, or a URL as for `save`.
        format: the name of a format, or a format of `fsdp_optim.plugins` with its own options. "safetensors": this library's own;
            "dcp" and "torchtitan": as save writes these; "torch": a folder with `model.pt` and `optim.pt`, the dicts that an
            unwrapped model and its optimizer load; "torch_file": a folder with `checkpoint.pt`, one file
            `{"model": ..., "optimizer": ...}` that also has the trainer's values; if `dst` ends like a file (`out.pt`) and is no
            folder and no URL, this file alone; "fairscale": as "torch", with the optimizer's dict for fairscale's own
            `get_shard_from_optim_state_dict`, if the root alone is wrapped; these three are `TorchFiles(key_by=...)` with
            options. `FairscaleShards(world_size=8, units=..., flatten_parameters=...)`: a file for each rank, as fairseq and
            metaseq write it, for fairscale's own `load_local_state_dict` and the rank's optimizer. Or the name of a format that
            an installed package adds.
        memory: the most bytes of elements that each process holds at a time, at least 16 MiB. The description of the checkpoint
            (names, shapes) comes on top, and for each thread one tensor of those that torch files have compressed, or not in
            row-major order.
        names: the FQNs of the optimizer's parameters in the order of their ids, for checkpoints that have ids without names.
        model: in the place of `names`: a model whose parameters have this order; it may be on the meta device. For several param
            groups, each in this order, the shapes of the state must leave one way to share the parameters out.
        overwrite, durable, max_file_size: as for `save`.
        allow_pickle: read and write values that need pickle, which can run any code of the author of `src`.
        progress: show a bar on the lowest rank. None: for long conversions, a bar on a terminal, and lines in the log elsewhere.
        process_group, timeout: as for `gather_full_optim_state_dict`: other ranks than those of the default group.
        storage_options: as for `save`, for both places that are URLs.

    Returns:
        A `Saved`; `nbytes_written` are the bytes that this process wrote.

    Raises (the same on all ranks):
        CheckpointError: the source is damaged, incomplete or unknown, or `dst` is taken or cannot be written.
        StateError: the source has ids without names, and neither `names` nor `model` is given; or the ranks differ.
    """
    with checkpoint_errors(dst):
        options = ConvertOptions(
            Options(process_group=process_group, timeout=timeout),
            format=format,
            memory=memory,
            names=names,
            overwrite=overwrite,
            durable=durable,
            max_file_size=max_file_size,
            allow_pickle=allow_pickle,
            progress=progress,
            storage_options=storage_options,
        )
        saved: Saved = named(CONVERT)(src, dst, options, model)
        return saved


def verify(
    path: str | os.PathLike[str],
    *,
    memory: int = CONVERT_NBYTES,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Verified:
    """Read every byte of a checkpoint of any format that `load` reads, without a model, on all cores. No communication.

    Data with checksums are compared with these checksums: every byte of this library's own checkpoints, unless they were saved
    with `checksums=False`, and every record of a file of `torch.save` that has a CRC32, also in a DCP folder. Other formats have
    no checksums: there everything is read, so that files are found that are missing, are cut short or contradict each other, but
    changed bytes are not found. Nothing is unpickled.

    Args:
        path: as for `save`.
        memory: as for `convert`.
        progress: show a bar. None: for long calls, a bar on a terminal, and lines in the log elsewhere.
        storage_options: as for `save`.

    Returns:
        A `Verified`: the numbers of tensors and bytes that were read, and whether the checkpoint `has_checksums`.

    Raises:
        CheckpointError: the checkpoint is damaged. The message names all places with damage, the first twenty if there are more.
    """
    with checkpoint_errors(path):
        verified: Verified = named(VERIFY)(path, memory=memory, progress=progress, storage_options=storage_options)
        return verified


def inspect(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Inspected:
    """Describe a checkpoint of any format that `load` reads: tensors by name, with dtypes, shapes and bytes, and the optimizer.

    Reads no elements. No communication.

    Args:
        path, storage_options: as for `save`.

    Returns:
        An object with the attributes `path`, `format`, `about`, `world_size`, `step`, `model`, `aliases`, `has_optim`, `state`,
        `groups`, `optimizer_class`, `extras` and `nbytes`.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or unknown.
    """
    with checkpoint_errors(path):
        inspected: Inspected = named(INSPECT)(path, storage_options)
        return inspected
