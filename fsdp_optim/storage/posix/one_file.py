"""A checkpoint that is a single file: it is made in a folder beside it, as every checkpoint, and then takes its name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fsdp_optim.errors import CheckpointError, wrong_use
from fsdp_optim.storage.posix.files import absolute, sync_folder

_ENDING = ".converting"


def folder_for(path: str | os.PathLike[str], only: str, *, overwrite: bool) -> Path:
    """Return the folder in which the file of a path is made, under the name `only`. The work of a killed call is resumed.

    Raises CheckpointError if there is a file, and it must not be replaced.
    """
    file = absolute(path)
    if os.path.lexists(file) and not overwrite:
        raise wrong_use(f"{file}: already exists: give another path, or overwrite=True to replace it")
    folder = file.with_name(f"{file.name}{_ENDING}")
    if folder.is_dir() and not (folder / only).exists():
        shutil.rmtree(folder)  # it was killed after its file had taken its place
    return folder


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a folder at a path."""
    return os.path.isdir(path)


def file_of(folder: Path) -> Path | None:
    """Return the file that is made in a folder; None for all other folders."""
    return folder.with_name(folder.name.removesuffix(_ENDING)) if folder.name.endswith(_ENDING) else None


def take_place(folder: Path, only: str, *, durable: bool) -> None:
    """Give the file in a folder its own name, and remove the folder."""
    file = file_of(folder)
    if file is None:
        raise CheckpointError(f"{folder}: is not the folder of one file")
    os.replace(folder / only, file)
    if durable:
        sync_folder(file.parent)
    shutil.rmtree(folder)
