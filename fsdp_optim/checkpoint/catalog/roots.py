"""A folder, or a prefix, in which no checkpoint was found: a run that begins there, or a mistake in the path."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from fsdp_optim.checkpoint.catalog.listing import last_number
from fsdp_optim.checkpoint.common.formats import format_of, listed_formats
from fsdp_optim.checkpoint.common.stores import StorageOptions, directory_at, is_url, store_at
from fsdp_optim.errors import CheckpointError, shortened, wrong_use
from fsdp_optim.storage.base import Opened, is_reserved, names_checkpoint
from fsdp_optim.storage.posix.files import absolute
from fsdp_optim.storage.posix.path_status import is_root, names_in

_MOST_LOOKS = 8  # at folders that are named like checkpoints

log = logging.getLogger("fsdp_optim")


def begin_anew(root: str | os.PathLike[str], options: StorageOptions = None) -> None:
    """Say on one line that a run begins, because its folder has no checkpoint. Raises as `check_root` does."""
    check_root(root, options)
    log.warning("%s has no checkpoint: training starts from scratch", root)


def check_root(root: str | os.PathLike[str], options: StorageOptions = None) -> None:
    """Raise CheckpointError where a path without checkpoints in it is a mistake.

    It is a mistake if the path is a checkpoint itself, has checkpoints of other programs, or if its parent folder is missing.
    """
    if not is_url(str(root)) and not is_root(absolute(root)):
        return
    own_format = _format_of_manifest(root, options)
    passed_by = list(_passed_by(root, options)) if not own_format else []
    if passed_by:
        raise wrong_use(
            f"{root}: has no checkpoint of this library, but those of other programs: {shortened(passed_by)}: fsdp_optim.load of "
            "one of these paths loads it; for a new run, give another folder"
        )
    format = own_format or _foreign_format(root, options)
    if format:
        raise wrong_use(
            f"{root}: is a checkpoint ({format}), not a folder of checkpoints: fsdp_optim.load({str(root)!r}, ...) loads it; to "
            "resume from the newest, give the folder that it is in"
        )


def format_at(place: str | os.PathLike[str], options: StorageOptions = None) -> str:
    """Return the name of the format of the checkpoint that a path is; empty if it is none."""
    return _format_of_manifest(place, options) or _foreign_format(place, options)


def _format_of_manifest(root: str | os.PathLike[str], options: StorageOptions) -> str:
    """Return the name of the format of the checkpoint that a path is, by its manifest; empty if it has none."""
    for format in listed_formats():
        with contextlib.suppress(CheckpointError), store_at(_as_place(root), format, options).open() as opened:
            if opened.has(format.probe.manifest):
                return format.name
    return ""


def _foreign_format(root: str | os.PathLike[str], options: StorageOptions) -> str:
    """Return the name of the format of another library's checkpoint that a path is; empty if it is none.

    A folder with files of torch.save in it may be anything.
    """
    with contextlib.suppress(CheckpointError), store_at(_as_place(root), options=options).open_any() as files:
        known = format_of(files) if not _is_empty(files) else None
        if known is not None and known.claims_folders:
            return known.name
    return ""


def _is_empty(files: Opened) -> bool:
    """Return whether a place has no files, so that no format needs to be imported and asked."""
    with contextlib.suppress(CheckpointError):
        return not files.selected and not files.names()
    return False


def _passed_by(root: str | os.PathLike[str], options: StorageOptions) -> Iterator[str]:
    """Yield the checkpoints of other programs that a resume does not look at."""
    seen = set()
    for format in listed_formats():
        for entry in directory_at(root, options, format).listed():
            seen.add(entry.where)
            if entry.summary is not None and entry.summary.is_stand_in:
                yield entry.where
    if is_url(str(root)):
        return
    path = absolute(root)
    names = (name for name in names_in(path) if names_checkpoint(name) and not is_reserved(name))  # without dead saves
    folders = [path / name for name in names if str(path / name) not in seen]
    for folder in sorted(folders, key=lambda folder: last_number(folder.name) or 0, reverse=True)[:_MOST_LOOKS]:
        with contextlib.suppress(CheckpointError), store_at(folder).open_any() as files:
            if format_of(files) is not None:
                yield str(folder)


def _as_place(root: str | os.PathLike[str]) -> str | Path:
    return str(root).rstrip("/") if is_url(str(root)) else absolute(root)
