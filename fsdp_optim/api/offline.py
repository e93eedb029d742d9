"""The calls on one checkpoint without a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fsdp_optim.boundary import public
from fsdp_optim.checkpoint.catalog.mistaken import of_one_checkpoint
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.memory import ordinary_tensors
from fsdp_optim.options import CONVERT_NBYTES, ConvertOptions, Model
from fsdp_optim.registry import CONVERT, CONVERT_ARGUMENTS, INSPECT, VERIFY, named
from fsdp_optim.results import CheckpointSummary, SaveResult, VerifyResult
from fsdp_optim.storage.posix.files import checkpoint_errors

_CONVERT = ConvertOptions()


@public
@ordinary_tensors()
def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str | Format = "safetensors",
    model: Model | None = None,
    overwrite: bool = False,
    options: ConvertOptions = _CONVERT,
) -> SaveResult:
    """Write a checkpoint again in another format or in other files, bit for bit, without ranks and in bounded memory.

    Reads every format that `load` reads. Works without a process group; where torch.distributed is initialized, all ranks of the
    default group make the call and each copies a share of the bytes. The new checkpoint is written aside and gets its name when
    it is complete. The next save into the same parent folder removes what a killed conversion has left; under the same prefix of
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
        model: in the place of `param_names` of the options: a model whose parameters have this order; it may be on the meta
            device. For several param groups, each in this order, the shapes of the state must leave one way to share the
            parameters out.
        overwrite: as for `save`.
        options: a `ConvertOptions`, as in `options=ConvertOptions(durable=False)`.

    Returns:
        A `SaveResult`; `nbytes_written` are the bytes that this process wrote.

    Raises (the same on all ranks):
        CheckpointError: the source is damaged, incomplete or unknown, or `dst` is taken or cannot be written.
        StateError: the source has ids without names, and neither `param_names` nor `model` is given; or the ranks differ.
    """
    with of_one_checkpoint(src, options), checkpoint_errors(dst):
        arguments = named(CONVERT_ARGUMENTS).of(
            options,
            format=format,
            overwrite=overwrite,
        )
        saved: SaveResult = named(CONVERT)(src, dst, arguments, model)
        return saved


@public
def verify(
    path: str | os.PathLike[str],
    *,
    bucket_nbytes: int = CONVERT_NBYTES,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyResult:
    """Read every byte of a checkpoint of any format that `load` reads, without a model, on all cores. No communication.

    Data with checksums are compared with these checksums: every byte of this library's own checkpoints, unless they were saved
    with `checksums=False`, and every record of a file of `torch.save` that has a CRC32, also in a DCP folder. Other formats have
    no checksums: there everything is read, which finds files that are missing, cut short or in contradiction to each other, but
    not changed bytes. Nothing is unpickled.

    Args:
        path: as for `save`.
        bucket_nbytes: the most bytes of elements that the process holds at a time, at least 16 MiB.
        progress: show a bar. None: for long calls, a bar on a terminal, and lines in the log elsewhere.
        storage_options: as for `save`.

    Returns:
        A `VerifyResult`: the numbers of tensors and bytes that were read, and whether the checkpoint `has_checksums`.

    Raises:
        CheckpointError: the checkpoint is damaged. The message names all places with damage, the first twenty if there are more.
    """
    with of_one_checkpoint(path, storage_options), checkpoint_errors(path):
        verified: VerifyResult = named(VERIFY)(
            path, bucket_nbytes=bucket_nbytes, progress=progress, storage_options=storage_options
        )
        return verified


@public
def inspect(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> CheckpointSummary:
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
    with of_one_checkpoint(path, storage_options), checkpoint_errors(path):
        inspected: CheckpointSummary = named(INSPECT)(path, storage_options)
        return inspected
