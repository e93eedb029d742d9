"""Which store a user's path means."""

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
"""A user's path, or a store that somebody has made."""


def store_at(place: Place, format: Format = OURS) -> Store:
    """The store of a place. Raises CheckpointError for a path that no file system takes, and for a URL."""
    return Folder(place, format.judge) if _is_path(place) else place  # type: ignore[arg-type, return-value]


def store_told(place: Place, mine: Store, where: str, format: Format = OURS) -> Store:
    """The store that the lowest rank calls `where`: a relative path counts from the working directory of that rank."""
    return store_at(where, format) if _is_path(place) else mine


def name_of(place: Place) -> str:
    """A place as its user gave it, for errors."""
    return str(place) if _is_path(place) else place.where  # type: ignore[union-attr]


def _is_path(place: Place) -> bool:
    """Whatever has none of a store's methods is meant as a path, and refused by name where it is none."""
    return not hasattr(place, "begin")


def folder_of(store: Store, what: str) -> Path:
    """The path of a store that is a folder. Raises CheckpointError for another one, which `what` does not work with."""
    if not isinstance(store, Folder):
        raise CheckpointError(f"{store.where}: {what} needs a folder")
    return store.path
