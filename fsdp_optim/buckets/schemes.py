"""From a URL to a store of objects: `s3://` is handled by boto3, every other scheme by fsspec and the package that it names.

`fsdp_optim.registry` says which scheme is opened here; installed packages and programs handle schemes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_optim.buckets.mounted import MountedObjects
from fsdp_optim.buckets.objects.store import ObjectStore
from fsdp_optim.storage.base import CheckpointProbe, Store


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
