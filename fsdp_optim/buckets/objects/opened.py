"""A checkpoint in a bucket, open for reading."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from fsdp_optim.buckets.objects.base import Bucket, MissingObjectError, ObjectInfo
from fsdp_optim.buckets.objects.keys import KeyedFiles, ObjectPlace, own_token
from fsdp_optim.buckets.objects.versioned import VersionedObjects
from fsdp_optim.storage.base import CheckpointProbe

_HEAD_NBYTES = 64 << 10
"""The beginning of an object is read at once: headers, manifests and small files need one request."""


class OpenedObjects(VersionedObjects):
    """The objects of one save, in the versions that they had when they were first asked for.

    `manifest`: its object, as it was found.
    """

    def __init__(self, bucket: Bucket, place: ObjectPlace, probe: CheckpointProbe[Any], manifest: ObjectInfo) -> None:
        super().__init__(bucket)
        self._place, self._probe, self._manifest = place, probe, manifest
        self._infos[probe.manifest] = manifest
        self._heads: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def where(self) -> str:
        return self._place.where

    @property
    def manifest_version(self) -> str:
        """The version of the manifest that was opened."""
        return self._manifest.version

    @cached_property
    def files(self) -> KeyedFiles:
        """Where the files are: the manifest's token says it, where a folder of that name has the same manifest."""
        token = own_token(self._probe.token_in(self))
        if token is not None:
            own = KeyedFiles(self._place, token)
            if self._bucket.look(own.key(self._probe.manifest)) is not None:
                return own
        return KeyedFiles(self._place, None)

    def _key(self, name: str) -> str:
        return self._place.manifest(name) if name == self._probe.manifest else self.files.key(name)

    def fetch_head(self, name: str) -> None:
        """Read the beginning of a file, from which `read_into` takes as much as possible."""
        info = self._look(name)
        if info is not None and name not in self._heads:
            head = bytearray(min(info.nbytes, _HEAD_NBYTES))
            if head:
                self._bucket.read_into(self._key(name), [memoryview(head)], 0, version=info.version)
            self._heads[name] = bytes(head)

    def _fill(self, name: str, pieces: Sequence[memoryview], offset: int, stop: int) -> None:
        if stop > _HEAD_NBYTES:
            super()._fill(name, pieces, offset, stop)
            return
        self.fetch_head(name)
        head = self._heads[name]
        for piece in pieces:
            piece[:] = head[offset : offset + len(piece)]
            offset += len(piece)

    def was_replaced(self) -> bool:
        manifest = self._bucket.look(self._place.manifest(self._probe.manifest))
        return manifest is None or manifest.version != self._manifest.version


def current(bucket: Bucket, place: ObjectPlace, probe: CheckpointProbe[Any]) -> OpenedObjects | None:
    """Return the checkpoint of a place; None where there is no manifest."""
    manifest = bucket.look(place.manifest(probe.manifest))
    return None if manifest is None else OpenedObjects(bucket, place, probe, manifest)


def open_place(bucket: Bucket, place: ObjectPlace, probe: CheckpointProbe[Any]) -> OpenedObjects:
    """Open the checkpoint of a place. Raises MissingObjectError where there is none."""
    opened = current(bucket, place, probe)
    if opened is None:
        raise MissingObjectError(f"{place.where}: there is no checkpoint: no object {probe.manifest}")
    return opened
