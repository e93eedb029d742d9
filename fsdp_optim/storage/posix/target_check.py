"""The check whether a save may give its path to a new folder: what has the path now, and what the path is called."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import CheckpointProbe, check_not_reserved, names_checkpoint
from fsdp_optim.storage.posix.beacon import is_lasting
from fsdp_optim.storage.posix.path_status import closed, has_lost_manifest, is_empty_folder, is_there


def check_free(path: Path, probe: CheckpointProbe[Any], *, overwrite: bool, filled: bool = False) -> None:
    """Raise CheckpointError where `path` is taken. `filled`: a folder that is no checkpoint is the trainer's, and is allowed."""
    if path.is_symlink():
        raise CheckpointError(f"{path}: is a symbolic link: save to the folder that the link leads to")
    if not is_there(path) or is_empty_folder(path):
        return
    if not overwrite:
        raise CheckpointError(f"{path}: exists already: save to another path, or give overwrite=True")
    if not (filled and path.is_dir()) and not _is_checkpoint(path, probe):
        raise CheckpointError(
            f"{path}: is not a checkpoint, so overwrite=True does not replace it: remove it, or save to another path"
        )


def _is_checkpoint(path: Path, probe: CheckpointProbe[Any]) -> bool:
    """Return whether a folder is a checkpoint, damaged or not: where this user may not enter it, its name decides."""
    try:
        return is_there(path / probe.manifest) or has_lost_manifest(path, probe)
    except PermissionError as error:
        if names_checkpoint(path.name):
            return True
        raise CheckpointError(f"{closed(path, error)}; it may be no checkpoint, so it is not replaced") from error


def check_name(path: Path) -> None:
    """Raise CheckpointError for a path that no listing would show, that another save would remove, or that processes work in."""
    check_not_reserved(str(path), path.parts)
    if not is_lasting(path.name):
        raise CheckpointError(
            f"{path}: {path.name} is a name of files that listings leave out: save to a path without this name"
        )
    if _is_in_use(path):
        raise CheckpointError(
            f"{path}: this process works in this folder, and a save gives its path to a new folder: give the name of a folder in "
            f"it, such as {path / 'step-1000'}"
        )


def _is_in_use(path: Path) -> bool:
    """Return whether the working folder of this process is this folder, or in it."""
    with contextlib.suppress(OSError):  # a working folder that was removed
        here = Path.cwd()
        return path.is_dir() and path.resolve() in (here, *here.parents)
    return False
