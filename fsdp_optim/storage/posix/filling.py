"""Files of a trainer, which get into the folder of a checkpoint before that folder gets its name.

`<path>.new-<token>` has the files (configuration, schedulers, random states) until the save that takes them has ended. It has a
lock as a save has, so the next save removes the folder of a process that died.

Each machine writes into a folder of its own, because only a machine's own ranks are sure to see its files at once, with their
sizes: the machine that finishes the checkpoint writes into the folder itself, the others into folders in it.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import VISIBLE_WITHIN, CheckpointProbe
from fsdp_optim.storage.posix.beacon import is_lasting
from fsdp_optim.storage.posix.claim import LOCK, claim
from fsdp_optim.storage.posix.files import (
    absolute,
    checkpoint_errors,
    close_quietly,
    remove_tree,
    sync_file,
    sync_folder,
)
from fsdp_optim.storage.posix.leftovers import NEW, give_up
from fsdp_optim.storage.posix.path_status import is_there
from fsdp_optim.storage.posix.small_files import has_size, sizes_in
from fsdp_optim.storage.posix.strangers import carry_over, strangers_in

_PART = ".of-rank-"
_LOOK_EVERY = 0.05  # seconds


@dataclass
class Filling:
    """The files of a trainer for the checkpoint of a path. A folder at the path that is no checkpoint is the trainer's too.

    Attributes:
        path: the path of the checkpoint.
        folder: the folder that has the files.
        is_outdated: whether a file that was at the path before, by its name, has no place in the new checkpoint.
        lock: the lock on `folder`, in the process that made it.
        parts: the sizes of the files that other machines have written, each into a folder of its own, by the machine's lowest
            rank.
    """

    path: Path
    folder: Path
    is_outdated: Callable[[str], bool] = field(repr=False)
    lock: int = field(default=-1, repr=False)
    parts: dict[int, dict[str, int]] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, path: str | os.PathLike[str], is_outdated: Callable[[str], bool]) -> Filling:
        """Make an empty folder, in one process. Raises CheckpointError where that is impossible."""
        where = absolute(path)
        filling = cls(where, where.with_name(f"{where.name}{NEW}{secrets.token_hex(8)}"), is_outdated)
        try:
            filling.folder.mkdir(parents=True)
            filling.lock = claim(filling.folder)
        except OSError as error:
            filling.remove()
            raise CheckpointError(f"{where}: cannot be saved: {error.strerror or error}") from error
        return filling

    def part_of(self, rank: int) -> Path:
        """Return the folder for the files of another machine, whose lowest rank is `rank`. That rank makes it."""
        return self.folder / f"{_PART}{rank}"

    def note(self, rank: int, sizes: Mapping[str, int]) -> None:
        """Note the files of another machine, as its lowest rank has seen them when they were complete (`sizes_in`)."""
        self.parts[rank] = dict(sizes)

    def carry_into(self, new: Path, probe: CheckpointProbe[Any], *, durable: bool) -> None:
        """Put the files into the folder of a save, and the files at the path that are not outdated.

        Where several machines have written a file of one name, the lowest rank's file counts. Files of other machines are
        waited for. Raises CheckpointError for a file with the name of one of the checkpoint's own, and for a file that is not
        visible here in time.
        """
        if durable:
            self._sync()
        carry_over(self.folder, new, self._own_names())
        carried = set(sizes_in(self.folder, _is_own)) if self.parts else set()
        deadline = time.monotonic() + VISIBLE_WITHIN
        for rank, sizes in sorted(self.parts.items()):
            others = {name: nbytes for name, nbytes in sizes.items() if name not in carried}
            self._wait_for(rank, others, deadline)
            self._carry_part(self.part_of(rank), new, sorted(others))
            carried |= set(others)
        if durable and self.parts:
            for folder, _, _ in os.walk(new):
                sync_folder(Path(folder))
        self.carry_from(self.path, new, probe)

    def _own_names(self) -> list[str]:
        """Return the names of the files and folders of this machine."""
        return sorted(filter(_is_own, os.listdir(self.folder)))

    def _wait_for(self, rank: int, sizes: Mapping[str, int], deadline: float) -> None:
        """Wait until all files of another machine are there with their sizes."""
        for name, nbytes in sorted(sizes.items()):
            while not has_size(self.part_of(rank) / name, nbytes):
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{self.path}: {name}, which has {nbytes} bytes on the machine of rank {rank}, is not visible with them "
                        f"on the rank that finishes the checkpoint after {VISIBLE_WITHIN:g} s"
                    )
                time.sleep(_LOOK_EVERY)

    def _carry_part(self, part: Path, new: Path, names: list[str]) -> None:
        for name in names:
            (new / name).parent.mkdir(parents=True, exist_ok=True)
        carry_over(part, new, names)

    def carry_from(self, old: Path, new: Path, probe: CheckpointProbe[Any]) -> None:
        """Put the files of an old folder into a new one, except outdated files and files that the new folder has."""
        if old.is_symlink() or not old.is_dir():
            return
        kept_names = (
            filter(is_lasting, os.listdir(old)) if self.is_trainers(old, probe) else strangers_in(old, LOCK, probe)
        )
        names = set(kept_names) - {LOCK}
        carry_over(old, new, sorted(name for name in names - set(os.listdir(new)) if not self.is_outdated(name)))

    def is_trainers(self, folder: Path, probe: CheckpointProbe[Any]) -> bool:
        """Return whether a folder is no checkpoint."""
        return folder.is_dir() and not is_there(folder / probe.manifest)

    def _sync(self) -> None:
        for name in self._own_names():  # other machines flush theirs in `complete_part`
            sync_tree(self.folder / name)

    def remove(self) -> None:
        """Remove the folder with the files. Raises nothing."""
        gone = give_up(self.folder)
        lock, self.lock = self.lock, -1
        if lock >= 0:
            close_quietly(lock)
        remove_tree(gone or self.folder)


def _is_own(name: str) -> bool:
    return name != LOCK and not name.startswith(_PART) and is_lasting(name)


def make_part(part: Path) -> None:
    """Make the folder for the files of this machine. Raises CheckpointError."""
    with checkpoint_errors(part):
        part.mkdir()


def complete_part(part: Path, *, durable: bool) -> dict[str, int]:
    """Flush the files that this machine has written into a folder of its own; return their sizes. Raises CheckpointError."""
    if durable:
        with checkpoint_errors(part):
            sync_tree(part)
    return sizes_in(part)


def sync_tree(path: Path) -> None:
    """Flush a file, or a folder with all its content, to the disk. Links have nothing to flush."""
    mode = os.lstat(path).st_mode
    if stat.S_ISREG(mode):
        sync_file(path)
    elif stat.S_ISDIR(mode):
        for name in filter(is_lasting, os.listdir(path)):
            sync_tree(path / name)
        sync_folder(path)
