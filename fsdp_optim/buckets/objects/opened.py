"""Objects of a bucket as the files of a place, each in the version that it had when it was first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from fsdp_optim.buckets.objects.base import Bucket, MissingObjectError, ObjectInfo, OvertakenError
from fsdp_optim.buckets.objects.keys import KeyedFiles, ObjectPlace, own_token
from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import MOST_DEPTH, MOST_FILES, CheckpointProbe, Opened, check_inside


class VersionedObjects(Opened):
    """The parent of classes that open objects for reading; a child gives the key of each file."""

    request_nbytes = 1 << 20

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.num_requests = bucket, bucket.can.most_reads
        self._infos: dict[str, ObjectInfo | None] = {}

    def _key(self, name: str) -> str:
        """The key of a file. Raises CheckpointError for a name that leaves the place."""
        raise NotImplementedError

    def _look(self, name: str) -> ObjectInfo | None:
        if name not in self._infos:
            self._infos[name] = self._bucket.look(self._key(name))
        return self._infos[name]

    def has(self, name: str) -> bool:
        try:
            return self._look(name) is not None
        except CheckpointError:
            return True

    def version_of(self, name: str) -> tuple[object, ...] | None:
        info = self._bucket.look(self._key(name))
        return None if info is None else (info.version,)

    def size_of(self, name: str) -> int:
        nbytes = self.nbytes_of(name)
        if nbytes < 0:
            raise CheckpointError(f"{self.named(name)}: is missing; the checkpoint is incomplete")
        return nbytes

    def nbytes_of(self, name: str) -> int:
        info = self._look(name)
        return -1 if info is None else info.nbytes

    def read_into(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(map(len, pieces))
        if not nbytes:
            return
        size = self.size_of(name)
        if offset + nbytes > size:
            raise CheckpointError(f"{self.named(name)}: ends at byte {size}: it was cut short")
        self._fill(name, pieces, offset, offset + nbytes)

    def _fill(self, name: str, pieces: Sequence[memoryview], offset: int, stop: int) -> None:
        """Fill pieces of memory with the bytes [offset, stop) of a file, which has them."""
        info = self._look(name)
        try:
            self._bucket.read_into(self._key(name), pieces, offset, version=info.version if info else None)
        except OvertakenError as error:
            raise CheckpointError(f"{self.named(name)}: was written again while it was read") from error

    def close(self) -> None:
        """There is nothing to release."""


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


class OpenedAny(VersionedObjects):
    """The objects under a prefix, in the versions that they had when they were listed or first asked for."""

    is_any = True

    def __init__(self, bucket: Bucket, prefix: str, selected: str = "") -> None:
        super().__init__(bucket)
        self._prefix, self.selected = prefix, selected
        self._names: list[str] | None = None

    @classmethod
    def at(cls, bucket: Bucket, place: ObjectPlace) -> OpenedAny:
        """The objects of a place; where the place is an object, or the beginning of the names of objects, these alone."""
        if next(iter(bucket.list(place.inside)), None) is not None:
            return cls(bucket, place.inside)
        name = place.prefix[len(place.parent) :]
        stem, dot, suffix = name.rpartition(".")
        begin, end = (f"{stem}-", f".{suffix}") if dot else (f"{name}-", "")
        if bucket.look(place.prefix) is not None or any(
            info.key.endswith(end) for info in bucket.list(f"{place.parent}{begin}")
        ):
            return cls(bucket, place.parent, name)
        raise MissingObjectError(f"{place.where}: there are no objects")

    @property
    def where(self) -> str:
        return f"{self._bucket.name}/{self._prefix}{self.selected}".rstrip("/")

    def named(self, name: str) -> str:
        return f"{self._bucket.name}/{self._prefix}{name}"

    def names(self) -> list[str]:
        if self._names is None:
            self._names = []
            for num, info in enumerate(self._bucket.list(self._prefix)):
                if num >= MOST_FILES:
                    raise CheckpointError(
                        f"{self.where}: has more than {MOST_FILES} objects: give the prefix of one checkpoint"
                    )
                name = info.key[len(self._prefix) :]
                if name and not name.endswith("/") and name.count("/") <= MOST_DEPTH:
                    self._names.append(name)
                    self._infos.setdefault(name, info)
            self._names.sort()
        return self._names

    def versions(self) -> list[tuple[str, tuple[object, ...] | None]]:
        listed = ((name, self._look(name)) for name in self.names())
        return [(name, None if info is None else (info.version,)) for name, info in listed]

    def _key(self, name: str) -> str:
        return f"{self._prefix}{check_inside(self.where, name)}"

    def was_replaced(self) -> bool:
        return False
