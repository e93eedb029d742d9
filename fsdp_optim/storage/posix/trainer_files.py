"""Small files of a trainer beside a checkpoint: a model's config, a tokenizer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from fsdp_optim.storage.posix.beacon import is_lasting
from fsdp_optim.storage.posix.files import checkpoint_errors
from fsdp_optim.storage.posix.path_status import is_there
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
