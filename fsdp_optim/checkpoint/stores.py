"""The store of a user's path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base import Format
from fsdp_optim.formats.ours import OURS
from fsdp_optim.storage.base import Store
from fsdp_optim.storage.posix.store import Folder

Place: TypeAlias = "str | os.PathLike[str] | Store"
"""A user's path, or a store."""


def store_at(place: Place, format: Format = OURS) -> Store:
    """The store of a place. Raises CheckpointError for a path that no file system accepts, and for a URL."""
    return Folder(place, format.judge) if _is_path(place) else place  # type: ignore[arg-type, return-value]


def store_of_leader(place: Place, mine: Store, where: str, format: Format = OURS) -> Store:
    """The store of the lowest rank, which calls it `where`. A relative path counts from the working directory of that rank."""
    return store_at(where, format) if _is_path(place) else mine


def name_of(place: Place) -> str:
    """A place as the user gave it, for errors."""
    return str(place) if _is_path(place) else place.where  # type: ignore[union-attr]


def _is_path(place: Place) -> bool:
    """Whether a place is meant as a path: anything without the methods of a store. `Folder` refuses what is not a path."""
    return not hasattr(place, "begin")


def folder_of(store: Store, option: str) -> Path:
    """The path of a store that is a folder. Raises CheckpointError for any other store. `option`: what needs the folder."""
    if not isinstance(store, Folder):
        raise CheckpointError(f"{store.where}: {option} needs a folder")
    return store.path
