"""Looks at paths. "Undecided" is a result of its own, and nothing is removed because of it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import replace
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import NOT_THERE, BriefT, Judge, Standing, is_sure_that_not
from fsdp_optim.storage.posix.beacon import is_somebodys
from fsdp_optim.storage.posix.opened import OpenFolder

_IS_CLOSED = (errno.EACCES, errno.EPERM)  # a folder that this user may not enter, such as lost+found


def standing_of(folder: Path, judge: Judge[BriefT], *, whole: bool = True) -> Standing[BriefT]:
    """Whether a folder has a manifest, and all files in the manifest with their sizes.

    Args:
        whole: read and verify the whole manifest. False: read only its beginning, where that suffices.
    """
    manifest = folder / judge.manifest
    try:
        if not stat.S_ISREG(os.lstat(manifest).st_mode):
            return Standing(reason=f"{manifest} is not a regular file")
    except OSError as error:
        has_manifest, is_sure = error.errno not in NOT_THERE + _IS_CLOSED, error.errno in NOT_THERE
        moved = is_sure and not may_be_there(folder)
        return Standing(None, has_manifest, is_sure, moved, f"{manifest}: {error.strerror or error}")
    try:
        with OpenFolder(folder) as opened:
            standing = judge.standing_in(opened, whole=whole)
            if not standing.is_complete and opened.was_replaced():
                return replace(standing, is_sure=False, has_moved=True)
            return standing
    except OSError as error:
        return Standing(is_sure=is_sure_that_not(error), has_moved=not may_be_there(folder), reason=str(error))


def token_of(folder: Path, judge: Judge[BriefT]) -> str | None:
    """The token of a checkpoint; None where the token cannot be read."""
    try:
        with OpenFolder(folder) as opened:
            return judge.token_in(opened)
    except OSError:
        return None


def may_be_there(path: Path) -> bool:
    """Whether anything has this path; True where the system cannot tell."""
    with contextlib.suppress(OSError):
        return is_there(path)
    return True


def is_there(path: Path) -> bool:
    """Whether anything has this path. Raises OSError where the system cannot tell."""
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return False
    return True


def is_link(path: Path) -> bool:
    """Whether the path is a symbolic link."""
    return path.is_symlink()


def is_nothing(path: Path) -> bool:
    """Whether a folder can take this path without a loss; False where the system cannot tell."""
    try:
        return not is_there(path) or (not path.is_symlink() and is_empty_folder(path))
    except OSError:
        return False


def is_empty_folder(path: Path) -> bool:
    """Whether the path is an empty folder."""
    try:
        return path.is_dir() and not any(is_somebodys(entry.name) for entry in path.iterdir())
    except FileNotFoundError:  # the folder was renamed just now
        return False


def names_in(root: Path) -> set[str]:
    """The names in a folder that somebody has given; none if the folder is missing."""
    try:
        return set(filter(is_somebodys, os.listdir(root)))
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be listed: {error.strerror or error}") from None
