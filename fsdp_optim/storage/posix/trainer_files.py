"""Files of a trainer beside a checkpoint (a model's config, a tokenizer), and what it sees of those of other machines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from fsdp_optim.storage.base import VISIBLE_WITHIN
from fsdp_optim.storage.posix.beacon import is_lasting
from fsdp_optim.storage.posix.files import checkpoint_errors
from fsdp_optim.storage.posix.filesystem import is_of_one_machine
from fsdp_optim.storage.posix.leftovers import SAVING
from fsdp_optim.storage.posix.path_status import is_there, names_in
from fsdp_optim.storage.posix.small_files import put_atomically


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder and its parents, unless they exist. Raises CheckpointError."""
    with checkpoint_errors(path):
        Path(path).mkdir(parents=True, exist_ok=True)


def copy_beside(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, without: Collection[str]
) -> list[str]:
    """Copy the plain files of a folder into another folder, and leave files alone that exist there already.

    A copy is complete or does not exist. `without`: the endings of names that are not copied. Returns the names that were copied;
    none if there is no such folder. Raises CheckpointError.
    """
    folder, copied = Path(source), []
    with checkpoint_errors(target):
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            goal = Path(target) / file.name
            is_left_out = file.name.endswith(tuple(without)) or not is_lasting(file.name)
            if not is_left_out and file.is_file() and not is_there(goal):
                with put_atomically(goal) as aside:
                    shutil.copyfile(file, aside)
                copied.append(file.name)
    return copied


def visible_within(folder: str | os.PathLike[str]) -> float:
    """Return the seconds within which a machine sees what another one has done in a folder; 0 where no other has the folder."""
    return 0.0 if is_of_one_machine(Path(folder)) else VISIBLE_WITHIN


def is_being_saved(path: str | os.PathLike[str]) -> bool:
    """Return whether a save to this path has begun and not come to its end, or was killed, as far as this machine sees.

    Raises CheckpointError where the system cannot tell.
    """
    place = Path(path)
    return any(name.startswith(f"{place.name}{SAVING}") for name in names_in(place.parent))
