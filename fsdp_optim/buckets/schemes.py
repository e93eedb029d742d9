"""From a URL to a store: which package handles which scheme.

`s3://` is handled here by boto3, every other scheme by fsspec and the package that fsspec names for it. Installed packages
handle schemes of their own by an entry point in the group `fsdp_optim.stores`: its name is the scheme, and its object is called
with (url, judge, options) and returns a `Store`. A program does the same with `use_stores`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from importlib.metadata import entry_points
from typing import Any, TypeAlias

from fsdp_optim.buckets.mounted import MountedObjects
from fsdp_optim.buckets.objects.store import ObjectStore
from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import CheckpointProbe, Store

GROUP = "fsdp_optim.stores"
"""The entry points by which installed packages handle schemes."""

OpenStore: TypeAlias = Callable[[str, CheckpointProbe[Any], Mapping[str, Any]], Store]
"""(URL, judge, storage options) -> the store of the checkpoint at that URL."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)

_added: ContextVar[Mapping[str, OpenStore]] = ContextVar("added", default={})  # noqa: B039  # it is never changed


def scheme_of(place: object) -> str | None:
    """The scheme of a URL; None for a name that is no URL."""
    found = _URL.match(place) if isinstance(place, str) else None
    return found[1].lower() if found is not None else None


@contextlib.contextmanager
def use_stores(stores: Mapping[str, OpenStore]) -> Iterator[None]:
    """Inside, URLs of these schemes are opened by these functions, before all others.

    All ranks must use the same ones. Threads that are started inside do not inherit them.
    """
    token = _added.set({**_added.get(), **{scheme.lower(): opener for scheme, opener in stores.items()}})
    try:
        yield
    finally:
        _added.reset(token)


def store_of_url(url: str, probe: CheckpointProbe[Any], options: Mapping[str, Any]) -> Store:
    """The store of the checkpoint at a URL. Raises CheckpointError for a scheme or an option that nothing handles."""
    scheme = scheme_of(url) or ""
    opener = _added.get().get(scheme) or _installed(scheme) or (_s3 if scheme == "s3" else _fsspec)
    return opener(url, probe, options)


def _installed(scheme: str) -> OpenStore | None:
    for point in entry_points(group=GROUP):
        if point.name.lower() == scheme:
            try:
                found: OpenStore = point.load()
            except Exception as error:
                raise CheckpointError(
                    f"{scheme}://: the store {point.value} of the entry point {point.name!r} cannot be loaded: "
                    f"{type(error).__name__}: {error}"
                ) from error
            return found
    return None


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of an `ObjectStore`, and those of its bucket."""
    own = {name: options[name] for name in ("part_nbytes", "dead_after") if name in options}
    return own, {name: value for name, value in options.items() if name not in own}


def _s3(url: str, probe: CheckpointProbe[Any], options: Mapping[str, Any]) -> Store:
    from fsdp_optim.buckets.s3.bucket import S3Bucket

    own, rest = _split(options)
    name, _, prefix = url.partition("://")[2].partition("/")
    size = {"part_nbytes": own["part_nbytes"]} if "part_nbytes" in own else {}  # a store may take smaller parts than S3
    return ObjectStore(S3Bucket(name, {**rest, **size}), prefix, probe, **own)


def _fsspec(url: str, probe: CheckpointProbe[Any], options: Mapping[str, Any]) -> Store:
    from fsdp_optim.buckets.fsspec.bucket import FsspecBucket

    own, rest = _split(options)
    bucket, prefix = FsspecBucket.at(url, rest)
    if bucket.local_folder is not None:
        return MountedObjects(bucket, prefix, probe, bucket.local_folder, **own)
    return ObjectStore(bucket, prefix, probe, **own)
