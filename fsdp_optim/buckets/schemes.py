"""From a URL to a store of objects: `s3://` is handled by boto3, every other scheme by fsspec and the package that it names.

`fsdp_optim.registry` says which scheme is opened here; installed packages and programs handle schemes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fsdp_optim.buckets.objects.base import Bucket
from fsdp_optim.buckets.objects.store import ObjectStore
from fsdp_optim.buckets.objects.writer import Address
from fsdp_optim.storage.base import CheckpointProbe, Store
from fsdp_optim.storage.posix.beacon import beacon_above, sees
from fsdp_optim.storage.posix.filesystem import this_host


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of an `ObjectStore`, and those of its bucket."""
    own = {name: options[name] for name in ("part_nbytes", "dead_after") if name in options}
    return own, {name: value for name, value in options.items() if name not in own}


def open_s3(url: str, probe: CheckpointProbe[Any], options: Mapping[str, Any]) -> Store:
    """Return the store of the checkpoint at a URL `s3://bucket/prefix`."""
    from fsdp_optim.buckets.s3.bucket import S3Bucket

    own, rest = _split(options)
    name, _, prefix = url.partition("://")[2].partition("/")
    size = {"part_nbytes": own["part_nbytes"]} if "part_nbytes" in own else {}  # a store may take smaller parts than S3
    return ObjectStore(S3Bucket(name, {**rest, **size}), prefix, probe, **own)


def open_fsspec(url: str, probe: CheckpointProbe[Any], options: Mapping[str, Any]) -> Store:
    """Return the store of the checkpoint at a URL of a scheme that fsspec knows."""
    from fsdp_optim.buckets.fsspec.bucket import FsspecBucket

    own, rest = _split(options)
    bucket, prefix = FsspecBucket.at(url, rest)
    if bucket.local_folder is not None:
        return MountedObjects(bucket, prefix, probe, bucket.local_folder, **own)
    return ObjectStore(bucket, prefix, probe, **own)


class MountedObjects(ObjectStore):
    """One place in a folder, as an `ObjectStore`. `folder`: where the bucket's objects are files."""

    def __init__(self, bucket: Bucket, prefix: str, probe: CheckpointProbe[Any], folder: str, **options: Any) -> None:
        super().__init__(bucket, prefix, probe, **options)
        self._folder = Path(folder)

    def machine_id(self) -> str:
        return f"{self.where} {this_host(self._folder)}"

    def sees(self, address: str) -> bool:
        """As a Store does. The address is that of a save, whose claim must be visible, or the path of a beacon."""
        is_beacon = address.startswith("/")
        return sees(Path(address) if is_beacon else self._folder / self.place.claim(Address.decoded(address).token))

    def beacon(self) -> AbstractContextManager[str]:
        return beacon_above(self._folder / self.place.prefix)
