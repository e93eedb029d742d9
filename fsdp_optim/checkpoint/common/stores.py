"""The store of a user's path or URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.registry import CACHED_STORE, named, opener_of, scheme_of
from fsdp_optim.storage.base import CheckpointDirectory, CheckpointProbe, Store
from fsdp_optim.storage.posix.files import absolute
from fsdp_optim.storage.posix.store import Folder
from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.base import RankGroup

Place: TypeAlias = "str | os.PathLike[str] | Store"
"""A user's path or URL, or a store that the caller has made."""

StorageOptions: TypeAlias = "Mapping[str, Any] | None"


class HasProbe(Protocol):
    """The part of a format that its store needs."""

    @property
    def probe(self) -> CheckpointProbe[Any] | None: ...


def store_at(place: Place, format: HasProbe = OURS, options: StorageOptions = None) -> Store:
    """Return the store of a place.

    Raises CheckpointError for a path that no file system takes, and for a URL that nothing handles.
    """
    if options is not None and not isinstance(options, Mapping):
        raise CheckpointError(f"storage_options must be a dict of options for the store, not {type(options).__name__}")
    probe = format.probe if format.probe is not None else OURS.probe  # a format without a probe is read, not written
    scheme = scheme_of(place)
    if isinstance(place, str) and scheme is not None:
        store: Store = opener_of(scheme)(place.rstrip("/"), probe, dict(options or {}))
        return store
    if options:
        raise CheckpointError(f"{name_of(place)}: storage_options are for URLs (s3://...): a path has none")
    return Folder(place, probe) if _is_path(place) else place  # type: ignore[arg-type, return-value]


def options_of(place: Place, options: StorageOptions) -> StorageOptions:
    """The options of a place: a path has none, because the other place of the call may be a URL."""
    return options if isinstance(place, str) and scheme_of(place) is not None else None


def options_beside(other: Place | None, place: Place, options: StorageOptions) -> StorageOptions:
    """The options of a place whose call has another place too, which may be the URL that they are for."""
    return options_of(place, options) if other is not None and is_url(other) else options


def is_url(place: Place) -> bool:
    """Return whether a place is a URL of a store, and no path."""
    return isinstance(place, str) and scheme_of(place) is not None


def store_of_leader(
    place: Place, own_store: Store, where: str, format: HasProbe = OURS, options: StorageOptions = None
) -> Store:
    """Return the store that the lowest rank calls `where`: a relative path counts from the working directory of that rank."""
    if not _is_path(place) or where == own_store.where:
        return own_store
    return store_at(where, format, options if scheme_of(where) is not None else None)


def with_cache(store: Store, folder: str | os.PathLike[str] | None) -> Store:
    """Return the same store, read through a cache in a folder of this machine; a folder's checkpoints need none."""
    if folder is None or store.on_file_system:
        return store
    cached: Store = named(CACHED_STORE)(store, folder, OURS.probe.manifest)
    return cached


def directory_at(
    root: str | os.PathLike[str], options: StorageOptions = None, format: HasProbe = OURS
) -> CheckpointDirectory[Any]:
    """Return the directory of checkpoints that a folder, or a prefix of a bucket, is."""
    inside = f"{root}/_" if isinstance(root, str) and scheme_of(root) is not None else absolute(root) / "_"
    return store_at(inside, format, options).directory()


def name_of(place: Place) -> str:
    """Return a place as its user gave it, for errors."""
    return str(place) if _is_path(place) else place.where  # type: ignore[union-attr]


def path_of(store: Store) -> Path | str:
    """Return the place of a store as results have it: a path for a folder, a URL for everything else."""
    return Path(store.where) if store.on_file_system else store.where


def _is_path(place: Place) -> bool:
    """Return whether a place is a path: anything without `begin()` is; an invalid path raises an error that names it later."""
    return not hasattr(place, "begin")


def common_store(group: RankGroup, place: Place, options: StorageOptions = None) -> Store:
    """The store of a place, the same on all ranks: a relative path counts from the working directory of the lowest rank.

    Called by all ranks.
    """
    own_store = store_at(place, options=options)
    content = os.fsencode(own_store.where)
    result = all_gather_bytes(group, "path", content if group.rank == group.ranks[0] else b"", compared=content)
    if result.all_equal:
        return own_store
    return store_of_leader(place, own_store, os.fsdecode(result.content_of(group.ranks[0])), options=options)
