"""What saves have left beside a path: folders of saves that died, old checkpoints that are set aside, and what is to be removed.

`<path>.saving-<token>` is being written while the process that made it holds the lock on `owner.lock` in it, and is a
leftover else. `<path>.old-<token>` is what was at `path` before, until the new one is there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Judge, RecordT, Standing
from fsdp_optim.storage.posix.files import close_quietly, remove_tree, sync_folder
from fsdp_optim.storage.posix.filesystem import this_host
from fsdp_optim.storage.posix.looks import is_nothing, standing_of

LOCK = "owner.lock"
NEW, SAVING, OLD, GONE = ".new-", ".saving-", ".old-", ".gone-"
UNFINISHED = (NEW, SAVING, GONE)
_ATTEMPTS, _AGAIN = 10, 0.01  # times, seconds
_DEAD_AFTER = 3600.0  # seconds without a write, where the lock cannot tell
_MOST_HOST_NBYTES = 256
_TOKEN = re.compile("[0-9a-f]{16}")

log = logging.getLogger("fsdp_optim")


def _siblings(path: Path, mark: str) -> Iterator[Path]:
    """Folders beside `path` that a save of it has made."""
    return (folder for folder, base in aside(path.parent, mark) if base == path)


def aside(parent: Path, mark: str) -> Iterator[tuple[Path, Path]]:
    """Folders that saves have made in a folder, each with the path that it is of.

    Raises CheckpointError where the folder cannot be listed; one that may be entered only has nothing that is known.
    """
    try:
        entries = sorted(parent.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except OSError as error:
        raise CheckpointError(f"{parent}: cannot be listed: {error.strerror or error}") from None
    for entry in entries:
        base, found, token = entry.name.rpartition(mark)
        if found and base and _TOKEN.fullmatch(token) and _may_be_folder(entry):
            yield entry, parent / base


def _may_be_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError as error:
        return error.errno != errno.ENOENT


def new_gone(folder: Path) -> Path:
    """A name under which a folder is no checkpoint any more, and is removed by the next save at the latest."""
    return folder.with_name(f"{folder.name}{GONE}{secrets.token_hex(8)}")


def retire(folder: Path) -> Path:
    """Give a folder such a name, so that from here on it is no checkpoint. Raises OSError where that cannot be done."""
    gone = new_gone(folder)
    folder.rename(gone)
    return gone


def remove_gone(folders: Sequence[Path]) -> None:
    """Remove folders that are called as `new_gone` says, when that name is on the disk.

    After a power cut one would else be there under its old name again, with a manifest and without some of its files.
    """
    if not folders:
        return
    try:
        sync_folder(folders[0].parent)
    except OSError as error:
        log.warning("%s is not removed yet: its new name is not on the disk: %s", folders[0], error.strerror or error)
        return
    for folder in folders:
        remove_tree(folder)


def remove_leftovers(path: Path, judge: Judge[RecordT]) -> None:
    """Remove what saves that died have left beside `path`: folders whose lock nobody holds, and old ones that are replaced."""
    remove_gone([folder for folder, _ in aside(path.parent, GONE)])
    for mark in UNFINISHED:
        for folder, base in aside(path.parent, mark):
            if mark != GONE and not _is_held(folder):
                _remove_leftover(folder, base)
    for folder, base in aside(path.parent, OLD):
        if _is_replaced(folder, base, judge):
            _remove_leftover(folder, base)


def _remove_leftover(folder: Path, base: Path) -> None:
    """Remove a folder under another name, so that its own save, should it have begun just now, finds it gone as a whole."""
    gone = new_gone(base)
    try:
        folder.rename(gone)
    except OSError:
        return  # its save, or another one, was faster
    log.info("removed %s, which a save that died had left", folder)
    remove_tree(gone)


def _is_replaced(folder: Path, base: Path, judge: Judge[RecordT]) -> bool:
    """Whether what was at `base` is needed no more: what is there now is known to be complete, and on the disk; or half of it
    has been removed already. What cannot be told just now is no reason to remove the only copy.
    """
    standing = standing_of(folder, judge)
    if standing.is_sure and not standing.has_manifest:
        return True
    if not standing_of(base, judge).is_complete:
        return False
    try:
        sync_folder(base.parent)
    except OSError:
        return False
    return True


def _is_held(folder: Path) -> bool:
    """Whether the process that writes a folder lives.

    On some cluster file systems a lock is seen on its own host only: of a folder of another one, a free lock says nothing, and
    it counts as dead when nothing in it was written for an hour. What is no regular file was made by somebody else.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            return True
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        host = os.read(lock, _MOST_HOST_NBYTES).decode(errors="replace")
    except OSError:
        return True
    finally:
        close_quietly(lock)
    return host not in ("", this_host(folder)) and time.time() - _last_written(folder) < _DEAD_AFTER


def _last_written(folder: Path) -> float:
    """When something in a folder changed last."""
    times = [0.0]
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):  # it went away meanwhile
            times.append(path.stat().st_mtime)
    return max(times)


def restore_old(path: Path, judge: Judge[RecordT], *, overwrite: bool) -> None:
    """A save that was killed between two renames has left the old checkpoint under another name."""
    if not is_nothing(path):
        return
    old, standing = _old_of(path, judge)
    if old is None or standing is None:
        return
    if standing.is_complete:
        old.rename(path)  # over an empty folder too
    elif not overwrite:
        raise CheckpointError(
            f"{path}: {old} may be its checkpoint, which a save that died has left aside, and cannot be read just now: "
            f"{standing.reason}; save to another path, or say overwrite=True"
        )


def _old_of(path: Path, judge: Judge[RecordT]) -> tuple[Path, Standing[RecordT]] | tuple[None, None]:
    """The folder that a save of a path has put aside: the newest complete one, else one that may be complete."""
    found = [(old, standing_of(old, judge)) for old in _siblings(path, OLD)]
    complete = [(standing.brief.order, old, standing) for old, standing in found if standing.brief is not None]
    if complete:
        _, old, standing = max(complete, key=lambda one: one[0])
        return old, standing
    return next(((old, standing) for old, standing in found if not standing.is_sure), (None, None))


def existing(path: Path, judge: Judge[RecordT]) -> Path:
    """Where the checkpoint of a path is: there, or aside where a save was killed between two renames."""
    path = Path(os.path.abspath(path))
    for _ in range(_ATTEMPTS):
        if not is_nothing(path):
            return path
        old, _ = _old_of(path, judge)
        if old is not None:  # where it cannot be read, who reads it says why
            return old
        if not any(_siblings(path, SAVING)):
            break
        time.sleep(_AGAIN)  # it may be just between two names
    return path
