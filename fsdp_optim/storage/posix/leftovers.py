"""Folders that saves leave next to a path: of saves that died, earlier checkpoints, and folders that wait for their removal.

`<path>.saving-<token>` is being written as long as its claim (`claim.py`) is held; then it is a leftover. `<path>.old-<token>`
is the earlier checkpoint, until the new one is in place. `<path>.gone-<token>` waits for its removal.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import CheckpointProbe, CheckpointStatus, SummaryT
from fsdp_optim.storage.posix.claim import is_held
from fsdp_optim.storage.posix.files import remove_tree, sync_folder
from fsdp_optim.storage.posix.path_status import is_nothing, may_be_there, status_of

NEW, SAVING, OLD, GONE = ".new-", ".saving-", ".old-", ".gone-"
UNFINISHED = (NEW, SAVING, GONE)
_ATTEMPTS, _AGAIN = 10, 0.01  # times, seconds
_TOKEN = re.compile("[0-9a-f]{16}")

log = logging.getLogger("fsdp_optim")


def _siblings(path: Path, mark: str) -> Iterator[Path]:
    """Return the folders next to `path` that saves to `path` have made."""
    return (folder for folder, base in aside(path.parent, mark) if base == path)


def aside(parent: Path, mark: str, names: Collection[str] | None = None) -> Iterator[tuple[Path, Path]]:
    """Yield the folders in `parent` whose names have this mark, each with the path of its checkpoint.

    `names`: the names in `parent`, if the caller has listed it. Yields nothing where this user may not list `parent`. Raises
    CheckpointError where listing fails for another reason.
    """
    if names is None:
        try:
            names = os.listdir(parent)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        except OSError as error:
            raise CheckpointError(f"{parent}: cannot be listed: {error.strerror or error}") from None
    for name in sorted(name for name in names if mark in name):
        base, separator, token = name.rpartition(mark)
        if separator and base and _TOKEN.fullmatch(token) and _may_be_folder(parent / name):
            yield parent / name, parent / base


def _may_be_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError as error:
        return error.errno != errno.ENOENT


def new_gone(folder: Path) -> Path:
    """Return a new name that marks a folder for removal: the folder is no longer a checkpoint, and the next save removes it."""
    return folder.with_name(f"{folder.name}{GONE}{secrets.token_hex(8)}")


def retire(folder: Path) -> Path:
    """Rename a folder as `new_gone` says, and return the new path. Raises OSError where the rename fails."""
    gone = new_gone(folder)
    folder.rename(gone)
    return gone


def give_up(folder: Path) -> Path | None:
    """Retire a folder that a save of this process has written, so that its claim can be released; return its new path, if any.

    Late writes of other ranks into it then disturb no checkpoint. Raises nothing.
    """
    try:
        return retire(folder)
    except OSError:  # it is gone, or the next save removes it
        return None


def remove_gone(folders: Sequence[Path]) -> None:
    """Remove folders with names of `new_gone`, after these names are on the disk.

    Otherwise a folder could have its old name again after a power cut, with a manifest but without some of its files.
    """
    if not folders:
        return
    try:
        sync_folder(folders[0].parent)
    except OSError as error:
        log.warning(
            "%s is not removed yet, because its new name could not be made durable: %s",
            folders[0],
            error.strerror or error,
        )
        return
    for folder in folders:
        remove_tree(folder)


def remove_leftovers(path: Path, probe: CheckpointProbe[SummaryT]) -> None:
    """Remove the folders that dead saves have left next to `path`: folders that no process claims, and replaced checkpoints."""
    remove_gone([folder for folder, _ in aside(path.parent, GONE)])
    for mark in UNFINISHED:
        for folder, base in aside(path.parent, mark):
            if mark != GONE and not is_held(folder):
                _remove_leftover(folder, base)
    for folder, base in aside(path.parent, OLD):
        if _is_replaced(folder, base, probe):
            _remove_leftover(folder, base)


def _remove_leftover(folder: Path, base: Path) -> None:
    """Rename a folder and then remove it, so that a save that has just begun in the folder finds all of it gone at once."""
    gone = new_gone(base)
    try:
        folder.rename(gone)
    except OSError:
        return  # another save was faster
    log.info("removed %s, the leftover of a save that died", folder)
    remove_tree(gone)


def _is_replaced(folder: Path, base: Path, probe: CheckpointProbe[SummaryT]) -> bool:
    """Return whether an earlier checkpoint of `base` can be removed.

    It can when the present checkpoint is complete and on the disk, or when the earlier one has lost its manifest already. False
    where the system cannot tell, because `folder` may be the only copy.
    """
    status = status_of(folder, probe)
    if status.is_sure and not status.has_manifest:
        return not any(may_be_there(folder / other) for other in probe.others)
    if not status_of(base, probe).is_complete:
        return False
    try:
        sync_folder(base.parent)
    except OSError:
        return False
    return True


def restore_old(path: Path, probe: CheckpointProbe[SummaryT], *, overwrite: bool) -> None:
    """Give an earlier checkpoint its name back, where a save was killed between its two renames."""
    if not is_nothing(path):
        return
    old, status = _old_of(path, probe)
    if old is None or status is None:
        return
    if status.is_complete:
        old.rename(path)  # over an empty folder too
    elif not overwrite:
        raise CheckpointError(
            f"{path}: {old} may be the checkpoint of this path, left by a save that died, and cannot be read just now: "
            f"{status.reason}; save to another path, or give overwrite=True"
        )


def _old_of(
    path: Path, probe: CheckpointProbe[SummaryT]
) -> tuple[Path, CheckpointStatus[SummaryT]] | tuple[None, None]:
    """Return the earlier checkpoint that a save to `path` has renamed: the newest complete, else any that may be complete."""
    looked_at = [(old, status_of(old, probe)) for old in _siblings(path, OLD)]
    complete = [(status.summary.order, old, status) for old, status in looked_at if status.summary is not None]
    if complete:
        _, old, status = max(complete, key=lambda candidate: candidate[0])
        return old, status
    return next(((old, status) for old, status in looked_at if not status.is_sure), (None, None))


def existing(path: Path, probe: CheckpointProbe[SummaryT]) -> Path:
    """Return the folder of a path's checkpoint: the path, or another name where a save was killed between its two renames."""
    path = Path(os.path.abspath(path))
    for _ in range(_ATTEMPTS):
        if not is_nothing(path):
            return path
        old, _ = _old_of(path, probe)
        if old is not None:  # if that folder cannot be read, the reader raises the reason
            return old
        if not any(_siblings(path, SAVING)):
            break
        time.sleep(_AGAIN)  # a save may be between its two renames
    return path
