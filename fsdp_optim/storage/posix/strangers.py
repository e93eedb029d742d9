"""What somebody has put into the folder of a checkpoint, beside what the save wrote: a `config.json`, a tokenizer, notes.

It is carried over to the checkpoint that takes the folder's place.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Judge
from fsdp_optim.storage.posix.files import sync_file, sync_folder
from fsdp_optim.storage.posix.opened import OpenFolder

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EACCES)


def strangers_in(folder: Path, lock: str, judge: Judge[Any]) -> list[str]:
    """The names of files and folders that no save has written into a checkpoint's folder. `lock`: a file that one has.

    Where its manifest cannot be read, what has a name that a save gives is the save's.
    """
    is_own = _is_own(folder, judge)
    found = []
    for name in sorted(os.listdir(folder)):
        if name == "extra" and stat.S_ISDIR(os.lstat(folder / name).st_mode):
            inside = (f"extra/{one}" for one in sorted(os.listdir(folder / name)))
            found += [one for one in inside if not is_own(one)]
        elif name != lock and not is_own(name):
            found.append(name)
    return found


def _is_own(folder: Path, judge: Judge[Any]) -> Callable[[str], bool]:
    try:
        opened = OpenFolder(folder)
    except OSError:
        return judge.is_own(None)
    with opened:
        return judge.is_own(opened)


def carry_over(old: Path, new: Path, names: list[str]) -> None:
    """Give strangers of an old folder to a new one too: the same files by another name, or copies where that cannot be.

    Raises CheckpointError where the new one has a file of that name.
    """
    for name in names:
        if os.path.lexists(new / name):
            raise CheckpointError(
                f"{old / name}: is not of the checkpoint that is there, and the new one has a file of this name: move it away"
            )
        _carry(old / name, new / name)


def _carry(old: Path, new: Path) -> None:
    mode = os.lstat(old).st_mode
    if stat.S_ISDIR(mode):
        new.mkdir()
        for name in sorted(os.listdir(old)):
            _carry(old / name, new / name)
        shutil.copystat(old, new)
        sync_folder(new)
        return
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    else:
        return
    if stat.S_ISLNK(mode):
        new.symlink_to(os.readlink(old))
    elif stat.S_ISREG(mode):
        shutil.copy2(old, new)
        sync_file(new)
    else:
        raise CheckpointError(f"{old}: cannot be carried over to the checkpoint that takes its place: move it away")
