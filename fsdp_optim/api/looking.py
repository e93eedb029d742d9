"""The calls that look into checkpoints: diff, show, extract, placement."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.checkpoint.catalog.mistaken import of_one_checkpoint
from fsdp_optim.checkpoint.common.stores import options_beside
from fsdp_optim.layout.views import InverseView, View
from fsdp_optim.options import CONVERT_NBYTES
from fsdp_optim.registry import DIFF, DIFF_ARGUMENTS, EXTRACT, INSPECT, INSPECT_PAGE, PLACEMENT, SHOW, named
from fsdp_optim.results.calls import SaveResult
from fsdp_optim.results.differences import DiffResult, ValueStatistics
from fsdp_optim.results.rank_maps import PlacementResult
from fsdp_optim.storage.posix.files import checkpoint_errors
from fsdp_optim.tensors.memory import ordinary_tensors


@public
@ordinary_tensors()
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    match: str | None = None,
    tolerance: float | None = None,
    html: str | os.PathLike[str] | None = None,
    param_names: Sequence[str] | None = None,
    allow_pickle: bool = False,
    bucket_nbytes: int = CONVERT_NBYTES,
    progress: bool | None = None,
    views: Sequence[View | InverseView] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> DiffResult:
    """Compare two checkpoints of any formats that `load` reads and of any world sizes, value by value. No communication.

    Weights, buffers and the optimizer's state are compared by name, also under the other names of tied parameters; besides them
    the hyperparameters of each parameter's group, and the steps. Each checkpoint is read once, in windows, by several threads;
    values whose fingerprints are equal in both (`SaveOptions.fingerprint`) are not read, which `notes` says.
    Random states and other values of the trainer are not compared. Elements of different dtypes are compared as float64, or as
    int64 where both are integers. Sums are float64, and do not depend on the number of threads.

    An optimizer that calls its parameters by id gets the names in `param_names`; else the names of the other optimizer, in
    their order; else the names of the weights beside it. Names that were not given are taken only where their number and all
    shapes fit, and `notes` says so.

    Args:
        a, b: the checkpoints: paths or URLs, as in `save`.
        match: compare only values whose names fit a pattern of the shell, such as `layers.0.*` or `*:exp_avg`, and no
            hyperparameters and steps. A weight is called by its FQN, a value of the optimizer's state `FQN:exp_avg`.
        tolerance: the largest `||a - b|| / ||a||` of values that are within the tolerance.
        html: a file, or a URL, for a page with a strip of colours for each layer, and all numbers, which needs no network. It
            replaces a file that is there.
        param_names: the FQNs of the optimizer's parameters in the order of their ids.
        allow_pickle: unpickle values of the optimizer, which can run any code of their author.
        bucket_nbytes: the most bytes of elements that the process holds at a time, at least 16 MiB.
        progress: as for `verify`.
        views: Views (`fsdp_optim.View`) of fused parameters, and inverse ones, as for `ConvertOptions`: each checkpoint is
            compared as they show it, so that a fused and an unfused one have the same names. A View that changes neither is an
            error.
        storage_options: as for `save`, for both checkpoints.

    Returns:
        A `DiffResult`, with the attributes `equal`, `differing`, `beyond`, `shapes`, `only_in_a`, `only_in_b` and
        `hyperparameters`.

    Raises:
        CheckpointError: a checkpoint is incomplete, damaged or unknown.
        StateError: `param_names` has too many or too few names, or `tolerance` is negative; a View fits neither checkpoint, or
            parts cannot be joined.
    """
    with of_one_checkpoint(a, storage_options), of_one_checkpoint(b, storage_options), checkpoint_errors(a):
        arguments = named(DIFF_ARGUMENTS)(
            match=match,
            tolerance=tolerance,
            html=html,
            param_names=param_names,
            allow_pickle=allow_pickle,
            bucket_nbytes=bucket_nbytes,
            progress=progress,
            views=views,
            storage_options=storage_options,
        )
        result: DiffResult = named(DIFF)(a, b, arguments)
        return result


@public
@ordinary_tensors()
def show(
    path: str | os.PathLike[str],
    name: str,
    *,
    slice: str | None = None,
    bins: int = 20,
    allow_pickle: bool = False,
    bucket_nbytes: int = CONVERT_NBYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> ValueStatistics:
    """Describe the elements of one value of a checkpoint of any format: range, mean, norm, NaNs, a histogram. No communication.

    Reads the elements of this value alone, twice, in windows.

    Args:
        path: as for `save`.
        name: the FQN of a weight or a buffer; `FQN:exp_avg` for a value of the optimizer's state, `0:exp_avg` where the
            optimizer has ids without names.
        slice: ranges or indexes as between brackets in Python, without steps: `0:3, :5`. The figures are about the slice then,
            and the result has its `elements`.
        bins: the number of bins of the histogram, 1 to 10,000.
        allow_pickle, bucket_nbytes: as for `diff`.
        storage_options: as for `save`.

    Returns:
        A `ValueStatistics`.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or unknown.
        StateError: there is no value of this name, or the slice does not fit its shape or the memory.
    """
    with of_one_checkpoint(path, storage_options), checkpoint_errors(path):
        shown: ValueStatistics = named(SHOW)(
            path,
            name,
            text=slice,
            bins=bins,
            allow_pickle=allow_pickle,
            bucket_nbytes=bucket_nbytes,
            storage_options=storage_options,
        )
        return shown


@public
@ordinary_tensors()
def extract(
    path: str | os.PathLike[str],
    names: str | Sequence[str],
    file: str | os.PathLike[str],
    *,
    slice: str | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    bucket_nbytes: int = CONVERT_NBYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveResult:
    """Write some values of a checkpoint of any format into one file, unsharded, bit for bit, in bounded memory. No communication.

    The file gets its name when it is complete and on the disk.

    Args:
        path: as for `save`.
        names: a name as for `show`, or several.
        file: the new file, a path or a URL: `.npy` for one value that numpy has a dtype for, `.safetensors`, or `.pt` for
            `torch.load`, both by name.
        slice: as for `show`, of each value.
        overwrite: replace a file that is there.
        allow_pickle, bucket_nbytes: as for `diff`.
        storage_options: as for `save`, for the checkpoint and the file.

    Returns:
        A `SaveResult` with the file, the number of values and their bytes.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or unknown, or the file exists or cannot be written.
        StateError: there is no value of this name, or the slice does not fit its shape.
    """
    with of_one_checkpoint(path, storage_options), checkpoint_errors(path):
        extracted: SaveResult = named(EXTRACT)(
            path,
            names,
            file,
            text=slice,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            bucket_nbytes=bucket_nbytes,
            storage_options=storage_options,
        )
        return extracted


@public
def placement(
    path: str | os.PathLike[str],
    *,
    ranks: int,
    wrapper: str = "fsdp2",
    units: Sequence[str] | None = None,
    replicated: Sequence[str] = (),
    html: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> PlacementResult:
    """Say how many bytes of a checkpoint each of `ranks` ranks would hold after a load under a wrapper. No communication.

    Reads no elements. The cut is that of the planner, for the names, shapes and dtypes of the checkpoint; what a checkpoint does
    not say is assumed, and `rules` says how. The optimizer's values are cut as their parameters; numbers, such as steps, are on
    every rank, one for each flat parameter.

    Args:
        path: as for `save`.
        ranks: the number of ranks.
        wrapper: "fsdp2" (each parameter cut along its first dimension), "hsdp:4x2" (the same over 4 ranks, in 2 groups of ranks,
            which together are `ranks`), "fsdp1" with `use_orig_params=False` or "fairscale" (flat parameters), or "ddp".
        units: for flat parameters, the paths of the modules that are wrapped, or patterns of them, part by part, as `layers.*`;
            a parameter belongs to the innermost that fits, all others to the root. None: each module up to the first number of
            its name.
        replicated: patterns of the shell of names that every rank holds complete, such as buffers. Integers, bools and the
            statistics of batch norms need none.
        html: a file, or a URL, for the page of `inspect(html=...)`, which shows the map of the ranks too. It replaces a file that
            is there.
        storage_options: as for `save`.

    Returns:
        A `PlacementResult`.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or unknown.
        StateError: `wrapper` is unknown or does not fit `ranks`, or the optimizer has ids that fit no weights, so that the order
            of a flat parameter is not known.
    """
    options = options_beside(html, path, storage_options)
    with of_one_checkpoint(path, options), checkpoint_errors(path):
        summary = named(INSPECT)(path, options)
        placed: PlacementResult = named(PLACEMENT)(
            summary, ranks=ranks, wrapper=wrapper, units=units, replicated=replicated
        )
        if html is not None:
            named(INSPECT_PAGE)(summary, html, placed, storage_options)
        return placed
