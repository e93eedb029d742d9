"""A folder as a store whose checkpoint gets the files of a trainer, and the folders of checkpoints that a trainer has named."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fsdp_optim.storage.base import NOT_THERE, CheckpointProbe
from fsdp_optim.storage.posix.beacon import refresh
from fsdp_optim.storage.posix.filesystem import is_of_one_machine
from fsdp_optim.storage.posix.filling import Filling
from fsdp_optim.storage.posix.folder import FolderStaging
from fsdp_optim.storage.posix.leftovers import remove_gone, retire
from fsdp_optim.storage.posix.path_status import names_in
from fsdp_optim.storage.posix.store import Folder

log = logging.getLogger("fsdp_optim")


class FilledFolder(Folder):
    """A folder as a store, whose checkpoint gets the files of a trainer at the moment in which it gets its name."""

    def __init__(self, filling: Filling, probe: CheckpointProbe[Any]) -> None:
        super().__init__(filling.path, probe)
        self._filling = filling

    def begin(self, *, overwrite: bool, durable: bool) -> FolderStaging:
        return self.begun(overwrite=overwrite, durable=durable, filling=self._filling)


def remove_files(folder: str | os.PathLike[str], matches: Callable[[str], bool]) -> None:
    """Remove the files of a folder whose names `matches` accepts."""
    for name in sorted(os.listdir(folder)):
        path = Path(folder, name)
        if matches(name) and path.is_file():
            path.unlink()


def folders_by_number(root: str | os.PathLike[str], named: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return the folders in `root` whose names `named` takes, by the number that is its first group, the lowest first.

    A folder that cannot be inspected is among them. Raises CheckpointError where `root` cannot be listed.
    """
    where = Path(root)
    if where.is_dir() and not is_of_one_machine(where):
        refresh(where)
    matches = ((named.fullmatch(name), where / name) for name in names_in(where))
    return sorted((int(match[1]), path) for match, path in matches if match is not None and _may_be_folder(path))


def remove_folders(folders: Iterable[Path], reason: str) -> None:
    """Remove folders, each with its name before its files.

    Each removal is logged with the reason; a folder that cannot be removed is warned about.
    """
    gone = []
    for folder in folders:
        try:
            gone.append(retire(folder))
        except OSError as error:
            log.warning("%s cannot be removed, though %s: %s", folder, reason, error.strerror or error)
        else:
            log.info("removed %s: %s", folder, reason)
    remove_gone(gone)


def _may_be_folder(path: Path) -> bool:
    """Return whether a path is a folder; True where the system cannot tell. A link to a folder is none."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError as error:
        return error.errno not in NOT_THERE
