"""The calls that keep checkpoints in order, without a model: copies, retention, and what a path is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.checkpoint.catalog.mistaken import of_one_checkpoint
from fsdp_optim.checkpoint.catalog.retention import KeepRules
from fsdp_optim.options import CONVERT_NBYTES, Best
from fsdp_optim.registry import COPY, DIAGNOSE, PRUNE, named
from fsdp_optim.results.offline import CopyResult, Diagnosis, PruneResult
from fsdp_optim.storage.posix.files import checkpoint_errors, text_of
from fsdp_optim.tensors.memory import ordinary_tensors


@public
def prune(
    root: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    best: Best = "min",
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> PruneResult:
    """Remove the checkpoints in a folder, or under a URL, that no rule keeps. No communication.

    The rules are those of a `CheckpointManager`, and count all complete checkpoints of this library, whoever saved them.
    The newest always stays. Checkpoints of other parameters, or with other contents, are counted apart. Damaged checkpoints
    neither count nor go.

    Args:
        root: a path or a URL, as in `save`.
        keep_last, keep_every, keep_best, best: as for `CheckpointManager`. At least one rule is needed.
        dry_run: remove nothing, and return what would be removed.
        storage_options: as for `save`.

    Returns:
        A `PruneResult`: what was removed, and what stays.

    Raises:
        CheckpointError: no rule is given, the folder cannot be listed, or the path is a mistake, as for `resume`. A checkpoint
            that cannot be removed is in `not_removed` of the result.
        StateError: a rule is no number of 1 or more.
    """
    with checkpoint_errors(root):
        rules = KeepRules(keep_last, keep_every, keep_best, best)
        pruned: PruneResult = named(PRUNE)(text_of(root), rules, dry_run=dry_run, storage_options=storage_options)
        return pruned


@public
@ordinary_tensors()
def copy(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    durable: bool = True,
    bucket_nbytes: int = CONVERT_NBYTES,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CopyResult:
    """Copy a checkpoint of this library byte for byte, to a folder or a URL, and verify it meanwhile. No communication.

    Every byte that has a checksum is compared with it before it is written. The copy is written aside, and gets its name when it
    is complete; of a damaged checkpoint nothing is left there. It has the number and the time of the original, so it is as old as
    the original in every folder.

    Args:
        src: the checkpoint: a path or a URL, as in `save`.
        dst: the place of the copy: a path or a URL, as in `save`.
        overwrite, durable, storage_options: as for `save`.
        bucket_nbytes: the most bytes that the process holds at a time, at least 16 MiB.
        progress: as for `verify`.

    Returns:
        A `CopyResult`.

    Raises:
        CheckpointError: the source is damaged, or is no checkpoint of this library, which `convert` reads; or `dst` is taken or
            cannot be written.
    """
    with of_one_checkpoint(src, storage_options), checkpoint_errors(dst):
        copied: CopyResult = named(COPY)(
            src,
            dst,
            overwrite=overwrite,
            durable=durable,
            bucket_nbytes=bucket_nbytes,
            progress=progress,
            storage_options=storage_options,
        )
        return copied


@public
def diagnose(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Diagnosis:
    """Say what a path is: a checkpoint, a folder of checkpoints, an unfinished save, or none; and what is missing there.

    Reads no elements, and raises nothing for damage. No communication.

    Args:
        path, storage_options: as for `save`.

    Returns:
        A `Diagnosis`, with the line of Python that loads the path.

    Raises:
        CheckpointError: the path or the URL is none.
    """
    with checkpoint_errors(path):
        diagnosis: Diagnosis = named(DIAGNOSE)(text_of(path), storage_options)
        return diagnosis
