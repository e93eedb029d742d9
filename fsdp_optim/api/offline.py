"""The calls on one checkpoint without a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.checkpoint.catalog.mistaken import of_one_checkpoint
from fsdp_optim.checkpoint.catalog.thinning import thin as thin_checkpoint
from fsdp_optim.checkpoint.common.stores import options_beside
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.options import CONVERT_NBYTES, ConvertOptions, Model
from fsdp_optim.registry import (
    AVERAGE,
    AVERAGE_ARGUMENTS,
    CONVERT,
    CONVERT_ARGUMENTS,
    INSPECT,
    INSPECT_PAGE,
    MERGE_ADAPTER,
    VERIFY,
    named,
)
from fsdp_optim.results.calls import SaveResult, ThinResult
from fsdp_optim.results.contents import CheckpointSummary
from fsdp_optim.results.offline import AdapterMergeResult, AverageResult, VerifyResult
from fsdp_optim.storage.posix.files import checkpoint_errors
from fsdp_optim.tensors.memory import ordinary_tensors

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
        src: the checkpoint: a path or a URL, as in `save`.
        dst: the place of the new checkpoint: a path or a URL, as in `save`.
        format: the name of a format, or a format of `fsdp_optim.plugins` with its own options. "safetensors": this library's own;
            "dcp" and "torchtitan": as save writes these; "torch": a folder with `model.pt` and `optim.pt`, the dicts that an
            unwrapped model and its optimizer load; "torch_file": a folder with `checkpoint.pt`, one file
            `{"model": ..., "optimizer": ...}` that also has the trainer's values; if `dst` ends like a file (`out.pt`) and is no
            folder and no URL, this file alone; "fairscale": as "torch", with the optimizer's dict for fairscale's own
            `get_shard_from_optim_state_dict`, if the root alone is wrapped; these three are `TorchFiles(key_by=...)` with
            options. `FairscaleShards(world_size=8, units=..., flatten_parameters=...)`: a file for each rank, as fairseq and
            metaseq write it, for fairscale's own `load_local_state_dict` and the rank's optimizer. "deepspeed_universal": a
            universal checkpoint, from which DeepSpeed's engine resumes; `DeepSpeedUniversal(masters=..., fill_missing=...)` has
            its options. Or the name of a format that an installed package adds.
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
@ordinary_tensors()
def average(
    sources: Sequence[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    moments: Literal["drop", "average"] = "drop",
    overwrite: bool = False,
    options: ConvertOptions = _CONVERT,
) -> AverageResult:
    """Average the weights of checkpoints into a new checkpoint of this library, without ranks and in bounded memory.

    Each source may have any format that `load` reads, its own dtypes, and be saved by any number of ranks. For each element,
    weight times value is added in float64, in the order of the sources, and divided by the sum of the weights; the result is
    rounded once, to the dtype that the last source has. Everything else is the last source's: integer and bool tensors, numbers
    of the optimizer such as `step`, hyperparameters, names of tied weights, and values of the trainer (`state=`).
    `AverageResult.differing` names what differs between the sources, except the trainer's values, which are not compared. The new
    checkpoint is written as `convert` does it, and all ranks of the default group make the call.

    Args:
        sources: two checkpoints or more: paths or URLs, as in `save`.
        dst: the place of the new checkpoint: a path or a URL, as in `save`.
        weights: a number above 0 for each source; they need not add up to 1. None: all weigh the same.
        moments: "drop": the new checkpoint has no optimizer. "average": all sources have one, for the same parameters, and the
            values of its state that have the shape of their parameter are averaged as the weights are.
        overwrite: as for `save`.
        options: a `ConvertOptions`, as in `options=ConvertOptions(durable=False)`.

    Raises (the same on all ranks):
        StateError: the sources have different names or shapes: the message names two of them and the parameter, and nothing was
            written; or an argument is wrong.
        CheckpointError: a source is damaged, incomplete or unknown, or `dst` is taken or cannot be written.
    """
    with ExitStack() as naming, checkpoint_errors(dst):
        for source in sources if not isinstance(sources, (str, bytes)) else ():
            naming.enter_context(of_one_checkpoint(source, options))
        arguments = named(AVERAGE_ARGUMENTS).of(options, overwrite=overwrite, weights=weights, moments=moments)
        averaged: AverageResult = named(AVERAGE)(sources, dst, arguments)
        return averaged


@public
@ordinary_tensors()
def merge_adapter(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    options: ConvertOptions = _CONVERT,
) -> AdapterMergeResult:
    """Write a new checkpoint of this library: the weights of a base with a LoRA adapter merged into them, without ranks.

    Each weight W with factors A (r, in) and B (out, r) becomes W + scale * (B @ A), in the dtype of W; the other weights are
    copied bit for bit, or are the adapter's own, rounded to the dtype of the base (`modules_to_save`, trained biases). The
    scale is lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`, with `rank_pattern` and `alpha_pattern` matched as
    PEFT does it; the product is transposed for `fan_in_fan_out`, and for an embedding (`lora_embedding_A` and `_B`). It is
    computed as by `PeftModel.from_pretrained(...).merge_and_unload()` on the CPU: in float32 (float64 for a float64 base),
    and rounded once when it is added; that of an embedding also before. The bits are the same if PEFT multiplies with as many
    threads on the same machine and the product of a matrix fits into 1/16 of `bucket_nbytes`; a larger one is computed in
    blocks of rows, where the order of an element's r terms may differ: it then differs by at most 2 * r * eps * scale * (|B|
    @ |A|), eps that of the product's dtype, before it is added.
    Neither the optimizer nor files that are no checkpoint, such as `config.json`, are in the new checkpoint. It is written as
    `convert` does it, and all ranks of the default group make the call.

    Args:
        base: a checkpoint of any format that `load` reads, with weights.
        adapter: a folder of PEFT with safetensors, or of `fsdp_optim.integrations.peft.save`.
        dst: the place of the new checkpoint: a path or a URL, as in `save`.
        overwrite: as for `save`.
        options: a `ConvertOptions`, as in `options=ConvertOptions(durable=False)`. Besides `bucket_nbytes`, nothing is held.

    Raises (the same on all ranks, before anything is written):
        StateError: a name or a shape of the adapter is not in the base; a weight to change is quantised, or has several names
            (tied weights); or parts of the adapter cannot be merged here (biases of factors).
        CheckpointError: the adapter is not LoRA, or has an option that changes the arithmetic (DoRA and others), or no
            `adapter_config.json`; `base` or `adapter` is damaged or unknown, or `dst` is taken or cannot be written.
    """
    with of_one_checkpoint(base, options), checkpoint_errors(dst):
        arguments = named(CONVERT_ARGUMENTS).of(options, overwrite=overwrite)
        merged: AdapterMergeResult = named(MERGE_ADAPTER)(base, adapter, dst, arguments)
        return merged


@public
def thin(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> ThinResult:
    """Remove the optimizer of a checkpoint of this library, in place. The weights stay, with their checksums. No communication.

    Its manifest is replaced before the files of the optimizer are removed, so that the checkpoint is complete at every moment,
    with or without the optimizer; what a killed call has left is removed by the next one. A load that is reading the checkpoint
    reads it again, or raises an error. A load of the optimizer of a thin checkpoint is an error that says that it was thinned.
    To thin a checkpoint again does nothing.

    Args:
        path: the checkpoint: a path or a URL, as in `save`.
        storage_options: as for `save`.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another format, or it has no weights, or it cannot be changed.
    """
    with of_one_checkpoint(path, storage_options), checkpoint_errors(path):
        return thin_checkpoint(path, storage_options)


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
    not changed bytes. Where a save has kept a fingerprint (`SaveOptions.fingerprint`), the tensors in the files are compared with
    it too. Nothing is unpickled.

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
def inspect(
    path: str | os.PathLike[str],
    *,
    html: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointSummary:
    """Describe a checkpoint of any format that `load` reads: tensors by name, with dtypes, shapes and bytes, and the optimizer.

    Reads no elements. No communication.

    Args:
        path, storage_options: as for `save`.
        html: a file, or a URL, for a page that shows the bytes of each layer and each kind of value as areas, and needs no
            network. It replaces a file that is there.

    Returns:
        An object with the attributes `path`, `format`, `about`, `world_size`, `step`, `model`, `aliases`, `has_optim`, `state`,
        `groups`, `optimizer_class`, `extras` and `nbytes`.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or unknown.
    """
    options = options_beside(html, path, storage_options)
    with of_one_checkpoint(path, options), checkpoint_errors(path):
        inspected: CheckpointSummary = named(INSPECT)(path, options)
        if html is not None:
            named(INSPECT_PAGE)(inspected, html, storage_options=storage_options)
        return inspected
