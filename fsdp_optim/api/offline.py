"""The calls on one checkpoint without a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_optim.checkpoint.common.formats import WRITTEN
from fsdp_optim.memory import ordinary_tensors
from fsdp_optim.offline import convert as conversion
from fsdp_optim.offline import inspecting, verifying
from fsdp_optim.offline.arguments import ConvertArguments
from fsdp_optim.options import CONVERT_NBYTES, ConvertOptions, KeyBy, Model
from fsdp_optim.results import CheckpointSummary, SaveResult, VerifyResult
from fsdp_optim.storage.posix.files import checkpoint_errors

_CONVERT = ConvertOptions()

FORMATS_WRITTEN = tuple(WRITTEN)
"""The names of the formats that `convert` writes."""


@ordinary_tensors()
def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    world_size: int | None = None,
    key_by: KeyBy | None = None,
    model: Model | None = None,
    units: Mapping[str, Sequence[str]] | None = None,
    flatten_parameters: bool | None = None,
    overwrite: bool = False,
    options: ConvertOptions = _CONVERT,
) -> SaveResult:
    """Write a checkpoint again in another format or in other files, bit for bit, without ranks and in bounded memory.

    Reads every format that `load` reads. Works without a process group; where torch.distributed is initialized, all ranks of the
    default group make the call and each copies a share of the bytes. The new checkpoint is written aside and gets its name when
    it is complete. A conversion that is killed or interrupted goes on where it stopped, if it is called again with the same
    unchanged source, the same `dst` and the same options: in a folder, data that are there already are verified and not written
    again; in a bucket that takes parts (`s3://`), parts that the store has are not put again. On another machine, the second call
    goes on only if two minutes have passed since the kill, so that the first process is surely gone. Any other save into the same
    parent folder removes such leftovers; under the same prefix of a bucket, it does so after five minutes. After an error nothing
    is left.

    Args:
        src: the checkpoint: a path, or a URL as for `save`.
        dst: the place of the new checkpoint: a path, or a URL as for `save`.
        format: "safetensors": this library's own; "dcp" and "torchtitan": as save writes these; "torch": a folder with
            `model.pt` and `optim.pt`, the dicts that an unwrapped model and its optimizer load; "torch_file": a folder with
            `checkpoint.pt`, one file `{"model": ..., "optimizer": ...}` that also has the trainer's values; if `dst` ends
            like a file (`out.pt`) and is no folder and no URL, this file alone; "fairscale": as
            "torch", with the optimizer's dict for fairscale's own `get_shard_from_optim_state_dict`, if the root alone is
            wrapped; "fairscale_shards": a file for each of `world_size` ranks, as fairseq and metaseq write it, for fairscale's
            own `load_local_state_dict` and the rank's optimizer.
        world_size: the number of ranks, for formats that have a part for each rank.
        key_by: "id" or "name", for formats whose optimizer dict may have either.
        model: in the place of `param_names` of the options: a model whose parameters have this order; it may be on the meta
            device. For several param groups, each in this order, the shapes of the state must leave one way to share the
            parameters out.
        units: for "fairscale_shards", if `src` is of another format: the FQNs that each FSDP unit flattens, in order, by the
            path of the module that is wrapped, in the order of the wrapped model's parameters(), such as
            `{"": ["stem.weight"], "block.0": ["block.0.weight", "block.0.bias"]}`.
        flatten_parameters: for "fairscale_shards": FSDP's argument of this name. False: `units` has the parameters that each FSDP
            module wraps, and each is cut by itself. None: as in `src`, if that is of this format; else True.
        overwrite: as for `save`.
        options: a `ConvertOptions`, as in `options=ConvertOptions(durable=False)`.

    Returns:
        A `SaveResult`; `nbytes_written` are the bytes that this process wrote, without those that a killed conversion had
        written.

    Raises (the same on all ranks):
        CheckpointError: the source is damaged, incomplete or unknown, or `dst` is taken or cannot be written.
        StateError: the source has ids without names, and neither `param_names` nor `model` is given; or the ranks differ.
    """
    with checkpoint_errors(dst):
        arguments = ConvertArguments.of(
            options,
            format=format,
            world_size=world_size,
            key_by=key_by,
            units=units,
            flatten_parameters=flatten_parameters,
            overwrite=overwrite,
        )
        return conversion.convert(src, dst, arguments, model)


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
    no checksums: there everything is read, so that files are found that are missing, are cut short or contradict each other, but
    changed bytes are not found. Nothing is unpickled.

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
    with checkpoint_errors(path):
        return verifying.verify(path, bucket_nbytes=bucket_nbytes, progress=progress, storage_options=storage_options)


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
    with checkpoint_errors(path):
        return inspecting.inspect(path, storage_options)
