"""What is at a path, as far as that can be told. "It cannot be told" is an answer of its own, for which nothing is removed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import replace
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import NOT_THERE, Judge, RecordT, Standing, is_sure_that_not
from fsdp_optim.storage.posix.opened import OpenFolder

_IS_CLOSED = (errno.EACCES, errno.EPERM)  # a folder that this user may not enter, such as lost+found


def standing_of(folder: Path, judge: Judge[RecordT], *, whole: bool = True) -> Standing[RecordT]:
    """Look whether a folder has a manifest, and all files that it names in their sizes.

    Args:
        whole: read and verify all of the manifest, instead of its beginning where that is enough.
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


def token_of(folder: Path, judge: Judge[RecordT]) -> str | None:
    """What only this checkpoint has; None where it cannot be read."""
    try:
        with OpenFolder(folder) as opened:
            return judge.token_in(opened)
    except OSError:
        return None


def may_be_there(path: Path) -> bool:
    """What cannot be told is there."""
    with contextlib.suppress(OSError):
        return is_there(path)
    return True


def is_there(path: Path) -> bool:
    """Whether there is anything. Raises OSError where that cannot be told."""
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return False
    return True


def is_link(path: Path) -> bool:
    """Whether it is a symbolic link."""
    return path.is_symlink()


def is_nothing(path: Path) -> bool:
    """Whether nothing is lost when a folder is put there. What cannot be looked at is something."""
    try:
        return not is_there(path) or (not path.is_symlink() and is_empty_folder(path))
    except OSError:
        return False


def is_empty_folder(path: Path) -> bool:
    """Whether it is a folder with nothing in it."""
    try:
        return path.is_dir() and not any(path.iterdir())
    except FileNotFoundError:  # it was given another name just now
        return False


def names_in(root: Path) -> set[str]:
    """What is in a folder; nothing where it is not there."""
    try:
        return set(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be listed: {error.strerror or error}") from None
