"""The status of paths: what is there, and whether it is a checkpoint. "Undecided" is a result, and never a reason to remove."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_optim.errors import CheckpointError, causes_of, wrong_use
from fsdp_optim.storage.base import (
    NOT_THERE,
    CheckpointProbe,
    CheckpointStatus,
    SummaryT,
    check_not_reserved,
    is_sure_that_not,
    names_checkpoint,
)
from fsdp_optim.storage.posix.beacon import is_lasting
from fsdp_optim.storage.posix.opened import OpenFolder

_IS_CLOSED = (errno.EACCES, errno.EPERM)  # a folder that this user may not enter, such as lost+found


def status_of(folder: Path, probe: CheckpointProbe[SummaryT], *, whole: bool = True) -> CheckpointStatus[SummaryT]:
    """Return whether a folder has a manifest, and all files in the manifest with their sizes.

    Args:
        whole: read and verify the complete manifest. False: read only its beginning, where that suffices.
    """
    manifest = folder / probe.manifest
    try:
        if not stat.S_ISREG(os.lstat(manifest).st_mode):
            return CheckpointStatus(reason=f"{manifest} is not a regular file")
    except OSError as error:
        if error.errno in _IS_CLOSED:
            return CheckpointStatus(None, False, False, reason=closed(folder, error), is_closed=True)
        if error.errno not in NOT_THERE:
            return CheckpointStatus(None, True, False, reason=f"{manifest}: cannot be read: {error.strerror or error}")
        moved = not may_be_there(folder)
        return CheckpointStatus(None, False, True, moved, f"{manifest}: is missing; the checkpoint is incomplete")
    try:
        with OpenFolder(folder) as opened:
            status = probe.status_in(opened, whole=whole)
            if status.is_complete:
                return status
            if opened.was_replaced():
                return replace(status, is_sure=False, has_moved=True)
            return replace(status, is_closed=not status.is_sure and not may_read(manifest))
    except OSError as error:
        is_closed = any(isinstance(cause, OSError) and cause.errno in _IS_CLOSED for cause in causes_of(error))
        moved = not may_be_there(folder)
        return CheckpointStatus(
            is_sure=is_sure_that_not(error), has_moved=moved, reason=str(error), is_closed=is_closed
        )


def version_of(folder: Path, probe: CheckpointProbe[SummaryT]) -> tuple[int, ...] | None:
    """Return numbers that change when another save writes the manifest of a folder. None: it cannot be read."""
    try:
        status = os.lstat(f"{folder}/{probe.manifest}")
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def closed(path: Path, error: OSError) -> str:
    """Return the message about a path that this user may not enter or read."""
    return (
        f"{path}: this user may not read it ({error.strerror or error}): ask the account that saved it for the right to "
        f"(chmod -R a+rX {path.name}), or run as that account"
    )


def may_read(path: Path) -> bool:
    """Return whether this user may read a path, as the rights say; True where the system cannot tell."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return error.errno not in _IS_CLOSED
    return True


def has_lost_manifest(folder: Path, probe: CheckpointProbe[SummaryT]) -> bool:
    """Return whether a folder without a manifest of any format has files that only a save of this format writes."""
    try:
        names = os.listdir(folder)
        inside = [f"extra/{name}" for name in os.listdir(folder / "extra")] if "extra" in names else []
    except OSError:
        return False
    if not any(map(probe.is_trace, [*names, *inside])):
        return False
    # The folder of one of several models has no manifest: that of their checkpoint names its files.
    places = [folder / manifest for manifest in (probe.manifest, *probe.others)]
    return not any(map(may_be_there, [*places, folder.parent / probe.manifest]))


def token_of(folder: Path, probe: CheckpointProbe[SummaryT]) -> str | None:
    """Return the token of a checkpoint; None where the token cannot be read."""
    try:
        with OpenFolder(folder) as opened:
            return probe.token_in(opened)
    except OSError:
        return None


def may_be_there(path: Path) -> bool:
    """Return whether anything has this path; True where the system cannot tell."""
    with contextlib.suppress(OSError):
        return is_there(path)
    return True


def is_there(path: Path) -> bool:
    """Return whether anything has this path. Raises OSError where the system cannot tell."""
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return False
    return True


def is_link(path: Path) -> bool:
    """Return whether the path is a symbolic link."""
    return path.is_symlink()


def is_nothing(path: Path) -> bool:
    """Return whether a folder can take this path without a loss; False where the system cannot tell."""
    try:
        return not is_there(path) or (not path.is_symlink() and is_empty_folder(path))
    except OSError:
        return False


def is_empty_folder(path: Path) -> bool:
    """Return whether the path is an empty folder."""
    try:
        return path.is_dir() and not any(map(is_lasting, os.listdir(path)))
    except (FileNotFoundError, PermissionError):  # the folder was renamed just now, or may not be listed
        return False


def names_in(root: Path) -> set[str]:
    """Return the lasting names in a folder (`is_lasting`); none if the folder is missing."""
    try:
        return set(filter(is_lasting, os.listdir(root)))
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be listed: {error.strerror or error}") from None


def is_root(path: Path) -> bool:
    """Return whether a folder exists; False where a save makes it. Raises CheckpointError for a file, and without a parent."""
    if path.is_dir():
        return True
    if may_be_there(path):
        raise CheckpointError(
            f"{path}: is not a folder, so it has no checkpoints in it: give the folder of the run's checkpoints; "
            "fsdp_optim.load reads one file"
        )
    if not path.parent.is_dir():
        raise wrong_use(
            f"{path}: is not there, and the folder that it would be in, {path.parent}, is not there either: correct the path; "
            "for a run that begins, make that folder first"
        )
    return False


def check_free(path: Path, probe: CheckpointProbe[Any], *, overwrite: bool, filled: bool = False) -> None:
    """Raise CheckpointError where `path` is taken. `filled`: a folder that is no checkpoint is the trainer's, and is allowed."""
    if path.is_symlink():
        raise CheckpointError(f"{path}: is a symbolic link: save to the folder that the link leads to")
    if not is_there(path) or is_empty_folder(path):
        return
    if not overwrite:
        raise wrong_use(f"{path}: already exists: save to another path, or give overwrite=True")
    if not (filled and path.is_dir()) and not _is_checkpoint(path, probe):
        raise wrong_use(
            f"{path}: is not a checkpoint of the format to save, so overwrite=True does not replace it: remove it, or save to "
            "another path"
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
