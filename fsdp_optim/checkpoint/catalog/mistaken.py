"""A path given for a checkpoint that is none: a folder of checkpoints, or a name that is not there, with others beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from fsdp_optim.checkpoint.catalog.listing import ListedCheckpoint, listed, newest_first
from fsdp_optim.checkpoint.catalog.roots import format_at
from fsdp_optim.checkpoint.common.formats import listed_formats
from fsdp_optim.checkpoint.common.stores import StorageOptions, directory_at, is_url
from fsdp_optim.errors import CheckpointError, shortened, wrong_use
from fsdp_optim.storage.posix.files import absolute
from fsdp_optim.storage.posix.path_status import names_in


@contextlib.contextmanager
def of_one_checkpoint(path: str | os.PathLike[str], options: object) -> Iterator[None]:
    """Name the checkpoints in or beside a path, in the error of a call that found none at the path.

    `options`: those of the call, with `storage_options`, or these themselves. Nothing is looked at before an error.
    """
    try:
        yield
    except CheckpointError as error:
        better = None
        storage = getattr(options, "storage_options", options)
        with contextlib.suppress(CheckpointError, OSError, TypeError, ValueError):
            better = _named_instead(path, storage if isinstance(storage, Mapping) else None, error)
        if better is None:
            raise
        refusal = wrong_use(better)
        refusal.on_all_ranks = error.on_all_ranks
        raise refusal from None


def _named_instead(path: str | os.PathLike[str], options: StorageOptions, error: CheckpointError) -> str | None:
    """Return what a path is instead of a checkpoint, and the checkpoint that is probably meant; None if nothing shows it."""
    if format_at(path, options):
        return None
    inside = _checkpoints_in(path, options)
    if inside:
        return f"{path}: is a folder of checkpoints, not a checkpoint: it has {_names(inside)}. {_meant(inside)}"
    if is_url(str(path)):
        return None
    place = absolute(path)
    if place.name in names_in(place.parent):
        return None
    beside = _checkpoints_in(place.parent, options)
    return f"{error}; beside it are {_names(beside)}. {_meant(beside)}" if beside else None


def _checkpoints_in(root: str | os.PathLike[str], options: StorageOptions) -> list[ListedCheckpoint]:
    """Return the checkpoints of a folder or under a URL, the newest first."""
    return newest_first(listed([directory_at(root, options, format) for format in listed_formats()]))


def _names(entries: Sequence[ListedCheckpoint]) -> str:
    return shortened(entry.base.rpartition("/")[2] for entry in entries)


def _meant(entries: Sequence[ListedCheckpoint]) -> str:
    """Ask whether the newest one is meant, of those that are complete."""
    newest = next((entry for entry in entries if entry.status.is_complete), entries[0])
    return f"Did you mean {newest.where}?"
