"""Small files of a trainer beside a checkpoint: a model's config, a tokenizer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path


def copy_beside(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, without: Collection[str]
) -> list[str]:
    """Copy the plain files of a folder into another one, and leave files alone that are there already.

    `without`: the endings of names that are not copied. Returns the names that were copied; none if there is no such folder.
    """
    folder, copied = Path(source), []
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        goal = Path(target) / file.name
        if file.is_file() and not file.name.endswith(tuple(without)) and not goal.exists():
            shutil.copyfile(file, goal)
            copied.append(file.name)
    return copied
