"""Whether a folder is a complete checkpoint. "It cannot be told" is an answer of its own, for which nothing is removed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_optim.errors import causes_of
from fsdp_optim.formats.brief import MOST_NBYTES, Brief, brief_in
from fsdp_optim.formats.marker import NAME, VERSION, NewerVersion, marker_in, read_marker
from fsdp_optim.formats.opened import OpenFolder

_FIRST_NBYTES, _TIMES = (
    4096,
    16,
)  # of a marker are read for its brief, and as many times more where it does not end there
_IS_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # a link leads out of a checkpoint, which has none
_IS_CLOSED = (errno.EACCES, errno.EPERM)  # a folder that this user may not enter, such as lost+found


@dataclass(frozen=True)
class Standing:
    """What a folder is, at a look.

    Attributes:
        brief: of a complete checkpoint; None where it is not one, or cannot be told.
        has_marker: whether it has one, or could not be asked; False also where this user may not look into the folder.
        is_sure: False where it could not be read just now, or not by this version, and may be a complete checkpoint.
        has_moved: it went away, or another folder has its name, while it was looked at.
        reason: why it is not complete, or cannot be told.
    """

    brief: Brief | None = None
    has_marker: bool = True
    is_sure: bool = True
    has_moved: bool = False
    reason: str = ""

    @property
    def is_complete(self) -> bool:
        return self.brief is not None


def standing_of(folder: Path, *, whole: bool = True) -> Standing:
    """Look whether a folder has a marker, and all files that it names in their sizes.

    Args:
        whole: read and verify all of the marker, instead of the brief at its beginning where it has one.
    """
    try:
        if not stat.S_ISREG(os.lstat(folder / NAME).st_mode):
            return Standing(reason=f"{folder / NAME} is not a regular file")
    except OSError as error:
        has_marker, is_sure = error.errno not in _IS_NOT_THERE + _IS_CLOSED, error.errno in _IS_NOT_THERE
        moved = is_sure and not may_be_there(folder)
        return Standing(None, has_marker, is_sure, moved, f"{folder / NAME}: {error.strerror or error}")
    try:
        with OpenFolder(folder) as opened:
            standing = _standing_in(opened, whole=whole)
            if not standing.is_complete and opened.was_replaced():
                return replace(standing, is_sure=False, has_moved=True)
            return standing
    except OSError as error:
        return Standing(is_sure=is_sure_that_not(error), has_moved=not may_be_there(folder), reason=str(error))


def _standing_in(folder: OpenFolder, *, whole: bool) -> Standing:
    try:
        brief = (None if whole else _brief_in(folder)) or marker_in(folder).brief
        if brief.version > VERSION:
            return Standing(is_sure=False, reason=f"{folder.path / NAME} has the schema version {brief.version}")
        for name, nbytes in brief.files.items():
            if folder.nbytes_of(name) != nbytes:
                return Standing(reason=f"{folder.path / name} does not have the {nbytes} bytes that were saved")
    except (OSError, MemoryError) as error:
        return Standing(is_sure=is_sure_that_not(error), reason=str(error))
    return Standing(brief)


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
        if error.errno not in _IS_NOT_THERE:
            raise
        return False
    return True


def read_brief(folder: Path) -> Brief | None:
    """The brief of a marker; None where it has none. Raises CheckpointError where it is damaged, or is not read."""
    with OpenFolder(folder) as opened:
        return _brief_in(opened)


def _brief_in(folder: OpenFolder) -> Brief | None:
    nbytes, size = _FIRST_NBYTES, folder.size_of(NAME)
    while True:
        brief = brief_in(str(folder.path / NAME), folder.read(NAME, 0, min(nbytes, size)))
        if brief is not None or nbytes >= min(size, MOST_NBYTES):
            return brief
        nbytes *= _TIMES


def token_of(folder: Path) -> str | None:
    """What only this checkpoint has; None where it cannot be read."""
    try:
        return (read_brief(folder) or read_marker(folder).brief).token
    except (OSError, MemoryError):
        return None


def is_sure_that_not(error: BaseException) -> bool:
    """Whether what went wrong shows that something is missing or damaged; False: it may be whole, but could not be read."""
    return not any(
        isinstance(cause, (MemoryError, NewerVersion))
        or (isinstance(cause, OSError) and cause.errno is not None and cause.errno not in _IS_NOT_THERE)
        for cause in causes_of(error)
    )
