"""Small files of a trainer: written whole or not at all, and looked for."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(file: str | os.PathLike[str], text: str) -> None:
    """Write a small file; readers see the text before or the text after, and no part of one."""
    aside = f"{os.fspath(file)}.tmp"
    Path(aside).write_text(text)
    os.replace(aside, file)


def has_file(folder: str | os.PathLike[str], name: str) -> bool:
    """Whether a folder has a file of this name."""
    return (Path(folder) / name).is_file()


def folders_in(folder: str | os.PathLike[str]) -> list[str]:
    """The names of the folders in a folder."""
    return sorted(entry.name for entry in Path(folder).iterdir() if entry.is_dir())
