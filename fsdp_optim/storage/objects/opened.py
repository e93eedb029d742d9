"""A checkpoint in a bucket, open for reading."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Judge, Opened
from fsdp_optim.storage.objects.base import Bucket, Found, MissingObjectError, OvertakenError
from fsdp_optim.storage.objects.keys import Files, Place, own_token

_HEAD_NBYTES = 64 << 10
"""The beginning of an object is read at once: headers, manifests and small files need one request."""


class OpenedObjects(Opened):
    """The objects of one save, in the versions that they had when they were first asked for.

    `manifest`: its object, as it was found.
    """

    request_nbytes = 1 << 20
    num_requests = 8

    def __init__(self, bucket: Bucket, place: Place, judge: Judge[Any], manifest: Found) -> None:
        self._bucket, self._place, self._judge, self._manifest = bucket, place, judge, manifest
        self._found: dict[str, Found | None] = {judge.manifest: manifest}
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
    def files(self) -> Files:
        """Where the files are: the manifest's token says it, where a folder of that name has the same manifest."""
        token = own_token(self._judge.token_in(self))
        if token is not None:
            own = Files(self._place, token)
            if self._bucket.look(own.key(self._judge.manifest)) is not None:
                return own
        return Files(self._place, None)

    def _key(self, name: str) -> str:
        return self._place.manifest(name) if name == self._judge.manifest else self.files.key(name)

    def _look(self, name: str) -> Found | None:
        if name not in self._found:
            self._found[name] = self._bucket.look(self._key(name))
        return self._found[name]

    def has(self, name: str) -> bool:
        try:
            return self._look(name) is not None
        except CheckpointError:
            return True

    def version_of(self, name: str) -> tuple[object, ...] | None:
        found = self._bucket.look(self._key(name))
        return None if found is None else (found.version,)

    def size_of(self, name: str) -> int:
        nbytes = self.nbytes_of(name)
        if nbytes < 0:
            raise CheckpointError(f"{self.named(name)}: is missing; the checkpoint is not whole")
        return nbytes

    def nbytes_of(self, name: str) -> int:
        found = self._look(name)
        return -1 if found is None else found.nbytes

    def fetch_head(self, name: str) -> None:
        """Read the beginning of a file, from which `read_into` takes what it can."""
        found = self._look(name)
        if found is not None and name not in self._heads:
            head = bytearray(min(found.nbytes, _HEAD_NBYTES))
            if head:
                self._bucket.read_into(self._key(name), [memoryview(head)], 0, version=found.version)
            self._heads[name] = bytes(head)

    def read_into(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(map(len, pieces))
        if not nbytes:
            return
        size = self.size_of(name)
        if offset + nbytes > size:
            raise CheckpointError(f"{self.named(name)}: ends at byte {size}: it was cut short")
        if offset + nbytes <= _HEAD_NBYTES:
            self.fetch_head(name)
            head = self._heads[name]
            for piece in pieces:
                piece[:] = head[offset : offset + len(piece)]
                offset += len(piece)
            return
        found = self._look(name)
        try:
            self._bucket.read_into(self._key(name), pieces, offset, version=found.version if found else None)
        except OvertakenError as error:
            raise CheckpointError(f"{self.named(name)}: was written again while it was read") from error

    def was_replaced(self) -> bool:
        found = self._bucket.look(self._place.manifest(self._judge.manifest))
        return found is None or found.version != self._manifest.version

    def close(self) -> None:
        """There is nothing to release."""


def current(bucket: Bucket, place: Place, judge: Judge[Any]) -> OpenedObjects | None:
    """The checkpoint of a place; None where there is no manifest."""
    found = bucket.look(place.manifest(judge.manifest))
    return None if found is None else OpenedObjects(bucket, place, judge, found)


def open_place(bucket: Bucket, place: Place, judge: Judge[Any]) -> OpenedObjects:
    """Open the checkpoint of a place. Raises MissingObjectError where there is none."""
    opened = current(bucket, place, judge)
    if opened is None:
        raise MissingObjectError(f"{place.where}: there is no checkpoint: no object {judge.manifest}")
    return opened
