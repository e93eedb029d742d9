"""The calls on a folder of checkpoints, and the wait for a save of this process in the background."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.checkpoint.catalog import listing, roots
from fsdp_optim.checkpoint.common.arguments import ResumeArguments
from fsdp_optim.checkpoint.common.formats import listed_formats
from fsdp_optim.checkpoint.common.pending import pending
from fsdp_optim.checkpoint.common.stores import directory_at
from fsdp_optim.checkpoint.run import resuming
from fsdp_optim.options import (
    LoadOptions,
    Model,
    OnDamage,
    WhichWeights,
)
from fsdp_optim.registry import scheme_of
from fsdp_optim.results.calls import LoadResult
from fsdp_optim.results.contents import CheckpointInfo
from fsdp_optim.storage.posix.files import checkpoint_errors
from fsdp_optim.tensors.memory import ordinary_tensors
from fsdp_optim.verbs.load_state import LoadableOptimizers
from fsdp_optim.verbs.named_models import named_models

_LOAD = LoadOptions()


@public
@ordinary_tensors()
def resume(
    root: str | os.PathLike[str],
    model: Model | Mapping[str, Model],
    optim: LoadableOptimizers | Mapping[str, LoadableOptimizers] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    on_damage: OnDamage = "error",
    strict: bool = True,
    weights: WhichWeights = "all",
    options: LoadOptions = _LOAD,
) -> LoadResult | None:
    """Load the newest checkpoint in a folder of checkpoints, or under a URL. Called by all ranks of the model.

    The lowest rank lists the folder, so all ranks load the same checkpoint. The order is the same as for `checkpoints`.

    Args:
        root: a path or a URL, as in `save`.
        on_damage: the reaction to a newest checkpoint that is damaged, or cannot be read now or by this user. "error": raise a
            CheckpointError that names this checkpoint and the one before. "previous": log a warning, and load the newest
            checkpoint that can be loaded.
        model, optim, state, strict, weights, options: as for `load`.

    Returns:
        As `load`; None where the folder is empty, or missing in a folder that is there: training starts from scratch, which a
        line on the lowest rank says, and nothing was changed.

    Raises (the same on all ranks): as `load`; and CheckpointError where the path is itself a checkpoint, where even its parent
        folder is missing, and where all checkpoints in it belong to other programs.
    """
    with checkpoint_errors(root):
        named = named_models(model, optim)
        arguments = ResumeArguments.of(options, state, named, strict=strict, weights=weights, on_damage=on_damage)
        return resuming.resume(root, named.model, named.optim, arguments)


@public
def latest(root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Path | str | None:
    """Return the newest complete checkpoint in a folder of checkpoints, or under a URL; None where there is none.

    No communication.

    The newest checkpoint is the one that was saved last, whatever the clocks showed, because each save records a sequence
    number above all others in the folder. If two numbers are equal, as in merged folders, the higher `step` is newer, then the
    later time. Checkpoints of versions that recorded no number are older than all others.

    Args:
        root: a path or a URL, as in `save`.
        storage_options: as for `save`.

    Returns:
        A Path in a folder, a URL (str) under a URL; None where there is no complete checkpoint.

    Raises:
        CheckpointError: the folder cannot be listed, or none of its checkpoints can be read just now; or the path is a mistake,
            as for `resume`.
    """
    with checkpoint_errors(root):
        newest = listing.latest(*(directory_at(root, storage_options, format) for format in listed_formats()))
        if newest is None:
            roots.check_root(root, storage_options)
        return newest if newest is None or scheme_of(root) is not None else Path(newest)


@public
def checkpoints(
    root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[CheckpointInfo]:
    """Return the checkpoints in a folder, or under a URL, the newest first, damaged ones included. No communication.

    The newest checkpoint is the one that was saved last, as for `latest`. A checkpoint whose manifest is damaged has no
    sequence number, so its place follows from the number in its name; without a number it comes first.

    Args:
        root: a path or a URL, as in `save`.
        storage_options: as for `save`.

    Returns:
        For each checkpoint its `path`, `step`, `world_size`, `nbytes`, whether it is `complete` (else the `reason`), and its
        `metric`. Folders without a manifest are listed where a save has written their files. Saves in progress are not listed.

    Raises:
        CheckpointError: the folder cannot be listed, or the path is a mistake, as for `resume`.
    """
    with checkpoint_errors(root):
        listed = listing.checkpoints(*(directory_at(root, storage_options, format) for format in listed_formats()))
        if not listed:
            roots.check_root(root, storage_options)
        return listed


@public
def unfinished_saves(root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the names of the unfinished saves in a folder of checkpoints, or under a URL. No communication.

    Each is a save, or a conversion, that is under way, or has died; the next save beside it removes what a dead one has left.

    Args:
        root: a path, or a URL as for `save`.
        storage_options: as for `save`.

    Returns:
        Names below `root`, sorted: of folders (`step-60.saving-<token>`), or the common beginnings of objects' names
        (`step-60/.saving-<token>`). None for a store that cannot list them.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    with checkpoint_errors(root):
        any_format = next(iter(listed_formats()))  # a save that is under way has no format yet
        return directory_at(root, storage_options, any_format).unfinished()


@public
def wait_for_saves(timeout: float | None = None) -> None:
    """Wait for the background save or upload of this process, if there is any. No communication.

    Args:
        timeout: seconds, at most; None: without limit.

    Raises:
        CheckpointError: the save failed, and its error was not raised before.
        RankTimeoutError: the save did not end in time; it continues.
    """
    pending.wait(timeout)
