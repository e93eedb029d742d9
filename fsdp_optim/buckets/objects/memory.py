"""A bucket in memory: of this process, or of another one that serves it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fsdp_optim.buckets.objects.base import ABSENT, Bucket, BucketCan, MissingObjectError, ObjectInfo, OvertakenError
from fsdp_optim.errors import CheckpointError

Listed = tuple[str, int, str, float]
"""Key, bytes, version and age of one object; of an upload its id instead of the version."""


class Objects(Protocol):
    """The operations of `MemoryBucket` on its memory, with plain values, which a proxy of `multiprocessing.managers` supports."""

    def get(self, key: str, start: int, nbytes: int) -> tuple[bytes, int, str] | None: ...
    def put(self, key: str, data: bytes, only_if: str | None) -> str | None: ...
    def begin(self, key: str) -> str: ...
    def put_part(self, key: str, upload: str, number: int, data: bytes) -> str: ...
    def end(self, key: str, upload: str, receipts: list[str], only_if: str | None) -> str | None: ...
    def drop(self, upload: str) -> None: ...
    def listed(self, prefix: str) -> list[Listed]: ...
    def uploads(self, prefix: str) -> list[Listed]: ...
    def delete(self, keys: list[str]) -> None: ...


@dataclass
class _Object:
    data: bytes
    version: str
    at: float


@dataclass
class _Upload:
    key: str
    at: float
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


@dataclass
class Memory:
    """Objects under keys. Each call is complete before the next one begins."""

    _objects: dict[str, _Object] = field(default_factory=dict)
    _uploads: dict[str, _Upload] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def get(self, key: str, start: int, nbytes: int) -> tuple[bytes, int, str] | None:
        """Bytes of an object, its size and its version; None where there is none."""
        with self._lock:
            stored = self._objects.get(key)
            return None if stored is None else (stored.data[start : start + nbytes], len(stored.data), stored.version)

    def put(self, key: str, data: bytes, only_if: str | None) -> str | None:
        """Put an object; returns its version, or None where the condition does not hold."""
        with self._lock:
            stored = self._objects.get(key)
            if only_if is not None and only_if != (stored.version if stored is not None else ABSENT):
                return None
            version = f"v{next(self._numbers)}"
            self._objects[key] = _Object(data, version, time.monotonic())
            return version

    def begin(self, key: str) -> str:
        """Begin an upload; returns its id."""
        with self._lock:
            upload = f"u{next(self._numbers)}"
            self._uploads[upload] = _Upload(key, time.monotonic())
            return upload

    def put_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        """Put a part; returns a receipt. Raises KeyError where there is no such upload."""
        with self._lock:
            receipt = f"p{next(self._numbers)}"
            self._uploads[upload].parts[number] = (receipt, data)
            return receipt

    def end(self, key: str, upload: str, receipts: list[str], only_if: str | None) -> str | None:
        """Make an object of its parts. Raises KeyError for an upload, or a part, that is not there."""
        with self._lock:
            parts = self._uploads[upload].parts
            if [parts[number][0] for number in range(len(receipts))] != receipts:
                raise KeyError(upload)
            version = self.put(key, b"".join(parts[number][1] for number in range(len(receipts))), only_if)
            if version is not None:
                del self._uploads[upload]
            return version

    def drop(self, upload: str) -> None:
        """Remove an upload."""
        with self._lock:
            self._uploads.pop(upload, None)

    def listed(self, prefix: str) -> list[Listed]:
        """Return the objects whose keys begin so."""
        with self._lock:
            now = time.monotonic()
            items = sorted((key, stored) for key, stored in self._objects.items() if key.startswith(prefix))
            return [(key, len(stored.data), stored.version, now - stored.at) for key, stored in items]

    def uploads(self, prefix: str) -> list[Listed]:
        """Return the uploads whose keys begin so."""
        with self._lock:
            now = time.monotonic()
            return [(up.key, 0, name, now - up.at) for name, up in self._uploads.items() if up.key.startswith(prefix)]

    def delete(self, keys: list[str]) -> None:
        """Delete objects."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)


class MemoryBucket(Bucket):
    """A bucket over `Memory`, or over a proxy of one.

    `parts_by_many`: whether several processes can put the parts of one upload. `least_part_nbytes`: the smallest part.
    """

    def __init__(
        self,
        objects: Objects | None = None,
        *,
        name: str = "memory://bucket",
        parts_by_many: bool = True,
        least_part_nbytes: int = 1,
    ) -> None:
        self.objects: Objects = Memory() if objects is None else objects
        self._name = name
        self._can = BucketCan(parts_by_many, least_part_nbytes=least_part_nbytes, most_parts=10_000)

    @property
    def name(self) -> str:
        return self._name

    @property
    def can(self) -> BucketCan:
        return self._can

    def look(self, key: str) -> ObjectInfo | None:
        return next((info for info in self.list(key) if info.key == key), None)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter([ObjectInfo(*row) for row in self.objects.listed(prefix)])

    def folders(self, prefix: str) -> Iterator[str]:
        keys = (info.key for info in self.list(prefix))
        ends = {key[: key.index("/", len(prefix))] for key in keys if "/" in key[len(prefix) :]}
        return iter(sorted(ends))

    def read_into(self, key: str, pieces: Sequence[memoryview], offset: int, *, version: str | None = None) -> None:
        nbytes = sum(map(len, pieces))
        data, size, current = self._get(key, offset, nbytes)
        if version is not None and current != version:
            raise OvertakenError(f"{self.name}/{key}: has been written again since it was opened")
        if len(data) != nbytes:
            raise CheckpointError(f"{self.name}/{key}: ends at byte {size}: it was cut short")
        at = 0
        for piece in pieces:
            piece[:] = data[at : at + len(piece)]
            at += len(piece)

    def _get(self, key: str, start: int, nbytes: int) -> tuple[bytes, int, str]:
        stored = self.objects.get(key, start, nbytes)
        if stored is None:
            raise MissingObjectError(f"{self.name}/{key}: there is no such object")
        return stored

    def read(self, key: str) -> tuple[bytes, str]:
        data, _, version = self._get(key, 0, 1 << 62)
        return data, version

    def put(self, key: str, data: bytes, *, only_if: str | None = None) -> str:
        return self._put(key, self.objects.put(key, data, only_if))

    def _put(self, key: str, version: str | None) -> str:
        if version is None:
            raise OvertakenError(f"{self.name}/{key}: another process has put or removed it")
        return version

    def begin_upload(self, key: str) -> str:
        return self.objects.begin(key)

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> str:
        try:
            return self.objects.put_part(key, upload, number, bytes(data))
        except KeyError as error:
            raise CheckpointError(f"{self.name}/{key}: the upload {upload} is gone") from error

    def end_upload(self, key: str, upload: str, receipts: Sequence[str], *, only_if: str | None = None) -> str:
        try:
            return self._put(key, self.objects.end(key, upload, list(receipts), only_if))
        except KeyError as error:
            raise CheckpointError(f"{self.name}/{key}: the upload {upload}, or a part of it, is gone") from error

    def drop_upload(self, key: str, upload: str) -> None:
        self.objects.drop(upload)

    def uploads(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter([ObjectInfo(*row) for row in self.objects.uploads(prefix)])

    def delete(self, keys: Iterable[str]) -> None:
        self.objects.delete(list(keys))
