"""A folder as a store whose checkpoint gets the files of a trainer, and the folders of checkpoints that a trainer has named."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fsdp_optim.storage.base import Judge
from fsdp_optim.storage.posix.filling import Filling
from fsdp_optim.storage.posix.folder import FolderStaging
from fsdp_optim.storage.posix.looks import may_be_there
from fsdp_optim.storage.posix.store import Folder


class FilledFolder(Folder):
    """A folder as a store, whose checkpoint gets the files of a trainer at the moment in which it gets its name."""

    def __init__(self, filling: Filling, judge: Judge[Any]) -> None:
        super().__init__(filling.path, judge)
        self._filling = filling

    def begin(self, *, overwrite: bool, durable: bool, token: str | None = None) -> FolderStaging:
        return self.begun(overwrite=overwrite, durable=durable, token=token, filling=self._filling)


def has_file(folder: str | os.PathLike[str], name: str) -> bool:
    """Whether a folder has a file of this name."""
    return Path(folder, name).is_file()


def remove_files(folder: str | os.PathLike[str], is_one: Callable[[str], bool]) -> None:
    """Remove the files of a folder whose names `is_one` takes."""
    for name in sorted(os.listdir(folder)):
        path = Path(folder, name)
        if is_one(name) and path.is_file():
            path.unlink()


def folders_by_age(root: str | os.PathLike[str], is_one: Callable[[str], bool]) -> list[Path]:
    """The folders in `root` whose names `is_one` takes, in the order in which they were changed last."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(root)):
            path = Path(root, name)
            with contextlib.suppress(OSError):
                if is_one(name) and path.is_dir() and not path.is_symlink():
                    found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def remove_folders(folders: Iterable[Path]) -> list[Path]:
    """Remove folders as far as possible; the result are those that are gone."""
    gone = []
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        if not may_be_there(folder):
            gone.append(folder)
    return gone
