"""Files of a trainer, which get into the folder of a checkpoint before that folder gets its name.

`<path>.new-<token>` has the files (configuration, schedulers, random states) until the save that takes them has ended. Its lock
is as that of a save, so the next save removes what a process that died has left.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Judge
from fsdp_optim.storage.posix.claim import LOCK, claim_text, hold
from fsdp_optim.storage.posix.files import absolute, close_quietly, remove_tree, sync_file, sync_folder
from fsdp_optim.storage.posix.leftovers import NEW, give_up
from fsdp_optim.storage.posix.looks import is_there
from fsdp_optim.storage.posix.strangers import carry_over, strangers_in


@dataclass
class Filling:
    """The files of a trainer for the checkpoint of a path. A folder at the path that is no checkpoint is the trainer's too.

    Attributes:
        path: the path of the checkpoint.
        folder: the folder that has the files.
        is_outdated: whether a file that was at the path before, by its name, has no place in the new checkpoint.
        lock: the lock on `folder`, in the process that made it.
    """

    path: Path
    folder: Path
    is_outdated: Callable[[str], bool] = field(repr=False)
    lock: int = field(default=-1, repr=False)

    @classmethod
    def make(cls, path: str | os.PathLike[str], is_outdated: Callable[[str], bool]) -> Filling:
        """Make an empty folder, in one process. Raises CheckpointError where that is impossible."""
        where = absolute(path)
        made = cls(where, where.with_name(f"{where.name}{NEW}{secrets.token_hex(8)}"), is_outdated)
        try:
            made.folder.mkdir(parents=True)
            (made.folder / LOCK).write_text(claim_text(made.folder))
            made.lock = os.open(made.folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
            hold(made.lock)
        except OSError as error:
            made.remove()
            raise CheckpointError(f"{where}: cannot be saved: {error.strerror or error}") from error
        return made

    def carry_into(self, new: Path, judge: Judge[Any], *, durable: bool) -> None:
        """Put the files into the folder of a save, and those at the path that are not outdated.

        Raises CheckpointError for a file with the name of one of the checkpoint's own.
        """
        if durable:
            self._sync()
        carry_over(self.folder, new, sorted(name for name in os.listdir(self.folder) if name != LOCK))
        self.carry_from(self.path, new, judge)

    def carry_from(self, old: Path, new: Path, judge: Judge[Any]) -> None:
        """Put the files of an old folder into a new one, but for those that the new one has, and outdated ones."""
        if old.is_symlink() or not old.is_dir():
            return
        names = set(os.listdir(old)) - {LOCK} if self.is_trainers(old, judge) else set(strangers_in(old, LOCK, judge))
        carry_over(old, new, sorted(name for name in names - set(os.listdir(new)) if not self.is_outdated(name)))

    def is_trainers(self, folder: Path, judge: Judge[Any]) -> bool:
        """Whether a folder is no checkpoint."""
        return folder.is_dir() and not is_there(folder / judge.manifest)

    def _sync(self) -> None:
        for folder, _, files in os.walk(self.folder):
            for path in (Path(folder, name) for name in files):
                if not path.is_symlink():
                    sync_file(path)
            sync_folder(Path(folder))

    def remove(self) -> None:
        """Remove the folder with the files. Raises nothing."""
        gone = give_up(self.folder)
        lock, self.lock = self.lock, -1
        if lock >= 0:
            close_quietly(lock)
        remove_tree(gone or self.folder)
