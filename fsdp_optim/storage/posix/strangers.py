"""Strangers: files that a user has put into the folder of a checkpoint, such as a `config.json`, a tokenizer or notes.

A save that replaces the checkpoint carries strangers over to the new folder.
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
from fsdp_optim.storage.base import CheckpointProbe
from fsdp_optim.storage.posix.beacon import is_lasting
from fsdp_optim.storage.posix.files import sync_file, sync_folder
from fsdp_optim.storage.posix.opened import OpenFolder

_NOT_FOR_LACK_OF_LINKS = (errno.ENOENT, errno.EEXIST, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


def strangers_in(folder: Path, lock: str, probe: CheckpointProbe[Any]) -> list[str]:
    """Return the names of the files and folders in a checkpoint's folder that no save has written.

    `lock`: the name of a save's lock file. Where the manifest cannot be read, every name that a save could give counts as written
    by a save.
    """
    is_own = _is_own(folder, probe)
    strangers = []
    for name in sorted(filter(is_lasting, os.listdir(folder))):
        if name == lock or is_own(name):
            continue
        is_folder = stat.S_ISDIR(os.lstat(folder / name).st_mode)
        files = sorted(filter(is_lasting, os.listdir(folder / name))) if is_folder else []
        inside = [f"{name}/{file}" for file in files]
        if (name == "extra" and is_folder) or any(map(is_own, inside)):  # a folder that a save has made too
            strangers += [path for path in inside if not is_own(path)]
        else:
            strangers.append(name)
    return strangers


def _is_own(folder: Path, probe: CheckpointProbe[Any]) -> Callable[[str], bool]:
    try:
        opened = OpenFolder(folder)
    except OSError:
        return probe.is_own(None)
    with opened:
        return probe.is_own(opened)


def carry_over(old: Path, new: Path, names: list[str]) -> None:
    """Put the strangers of an old folder into a new one: as hard links, or as copies where links are impossible.

    Raises CheckpointError where the new folder has a file of the same name.
    """
    for name in names:
        if os.path.lexists(new / name):
            raise CheckpointError(
                f"{old / name}: was not written by a save, and the new checkpoint has a file of this name: move {old / name} away"
            )
        (new / name).parent.mkdir(exist_ok=True)  # a folder that this save has not made
        _carry(old / name, new / name)


def _carry(old: Path, new: Path) -> None:
    mode = os.lstat(old).st_mode
    if stat.S_ISDIR(mode):
        new.mkdir()
        for name in sorted(filter(is_lasting, os.listdir(old))):
            _carry(old / name, new / name)
        shutil.copystat(old, new)
        sync_folder(new)
        return
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NOT_FOR_LACK_OF_LINKS:
            raise
    else:
        return
    if stat.S_ISLNK(mode):
        new.symlink_to(os.readlink(old))
    elif stat.S_ISREG(mode):
        shutil.copy2(old, new)
        sync_file(new)
    else:
        raise CheckpointError(
            f"{old}: is not a file, folder or link, so the new checkpoint cannot get it: move it away"
        )
