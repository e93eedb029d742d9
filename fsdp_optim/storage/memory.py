"""Checkpoints in memory, kept as an object store keeps them: objects under keys, no rename, the manifest put last.

A `Bucket` holds the objects; a `MemoryStore` is one place in a bucket. Other processes can use a bucket through a proxy
(`multiprocessing.managers.BaseManager`), because the methods of a bucket take and return plain values.

The objects of a save have the keys `<prefix>\\n<token>/<name>`. The manifest has the key `<prefix>`, and the tag of the manifest
names the token of the current save. A manifest is put only if the manifest there is still the one from the beginning of the save:
of two saves, one wins.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fsdp_optim.errors import CheckpointError, RankTimeoutError
from fsdp_optim.storage.base import Capabilities, Completion, Opened, Staging, Store, StoreWriter, check_name
from fsdp_optim.storage.multipart import MultipartFile

_LOOK_EVERY = 0.02  # seconds
_GRACE = 10.0  # seconds in which the other processes can learn of a failure
_TAGGED = "\n"  # between a token and what follows it in the key of an object


@dataclass
class _Object:
    data: bytearray
    tag: str = ""


class Objects(Protocol):
    """The methods of a bucket that a store uses. They take and return plain values, so a proxy of a bucket works too."""

    def put(self, key: str, data: bytes, tag: str = "") -> None: ...
    def put_if(self, key: str, data: bytes, tag: str, expected: str | None) -> bool: ...
    def tag_of(self, key: str) -> str | None: ...
    def size_of(self, key: str) -> int: ...
    def get(self, key: str, start: int, nbytes: int) -> bytes: ...
    def reserve(self, key: str, nbytes: int) -> None: ...
    def put_range(self, key: str, start: int, data: bytes) -> None: ...
    def put_part(self, key: str, number: int, data: bytes) -> None: ...
    def join_parts(self, key: str, num_parts: int) -> None: ...
    def delete(self, prefix: str) -> None: ...
    def keys(self, prefix: str) -> list[str]: ...


@dataclass
class Bucket:
    """Objects under keys. Each call is atomic."""

    _objects: dict[str, _Object] = field(default_factory=dict)
    _parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def put(self, key: str, data: bytes, tag: str = "") -> None:
        """Put a whole object."""
        with self._lock:
            self._objects[key] = _Object(bytearray(data), tag)

    def put_if(self, key: str, data: bytes, tag: str, expected: str | None) -> bool:
        """Put an object if the present one has the tag `expected` (None: is absent); return whether the object was put."""
        with self._lock:
            if self.tag_of(key) != expected:
                return False
            self.put(key, data, tag)
            return True

    def tag_of(self, key: str) -> str | None:
        """The tag of an object; None if the object is absent."""
        with self._lock:
            found = self._objects.get(key)
            return None if found is None else found.tag

    def size_of(self, key: str) -> int:
        """The size of an object in bytes; -1 if the object is absent."""
        with self._lock:
            found = self._objects.get(key)
            return -1 if found is None else len(found.data)

    def get(self, key: str, start: int, nbytes: int) -> bytes:
        """Bytes of an object: fewer than `nbytes` at the end of the object, none if the object is absent."""
        with self._lock:
            found = self._objects.get(key)
            return b"" if found is None else bytes(found.data[start : start + nbytes])

    def reserve(self, key: str, nbytes: int) -> None:
        """Create an object that will be written range by range."""
        self.put(key, bytes(nbytes))

    def put_range(self, key: str, start: int, data: bytes) -> None:
        """Write a range of a reserved object. Raises KeyError if the object was not reserved."""
        with self._lock:
            self._objects[key].data[start : start + len(data)] = data

    def put_part(self, key: str, number: int, data: bytes) -> None:
        """Upload one part of an object that does not exist yet."""
        with self._lock:
            self._parts.setdefault(key, {})[number] = data

    def join_parts(self, key: str, num_parts: int) -> None:
        """Create an object from its `num_parts` parts. Raises KeyError if a part is missing."""
        with self._lock:
            parts = self._parts.get(key, {})
            self.put(key, b"".join(parts[number] for number in range(num_parts)))
            self._parts.pop(key, None)

    def delete(self, prefix: str) -> None:
        """Delete all objects and all parts whose keys begin with `prefix`."""
        with self._lock:
            for by_key in (self._objects, self._parts):
                for key in [key for key in by_key if key.startswith(prefix)]:
                    del by_key[key]

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, of all objects and of unfinished objects that have parts."""
        with self._lock:
            return sorted(key for key in {*self._objects, *self._parts} if key.startswith(prefix))


class MemoryStore(Store):
    """One place in a bucket.

    Args:
        part_nbytes: the size of the parts in which one process uploads a file, in bytes. 0: several processes write ranges of one
            file.
    """

    def __init__(self, bucket: Objects, prefix: str, *, part_nbytes: int = 0) -> None:
        self.bucket, self.prefix, self._part_nbytes = bucket, prefix, part_nbytes

    @property
    def where(self) -> str:
        return f"memory:{self.prefix}"

    def open(self) -> Opened:
        token = self.bucket.tag_of(self.prefix)
        if token is None:
            raise CheckpointError(f"{self.where}: there is no checkpoint")
        return _MemoryOpened(self, token)

    def begin(self, *, overwrite: bool, durable: bool) -> Staging:
        before = self.bucket.tag_of(self.prefix)
        if before is not None and not overwrite:
            raise CheckpointError(f"{self.where}: exists already: save to another path, or give overwrite=True")
        return _MemoryStaging(self, secrets.token_hex(8), before)

    def join(self, address: str, *, durable: bool, who: str, budget_nbytes: int = 64 << 20) -> StoreWriter:
        return _MemoryWriter(self, address, who, self._part_nbytes)

    def completion(self, address: str, rank: int, ranks: Sequence[int], timeout: float) -> Completion:
        return _MemoryCompletion(self, address, rank, ranks, timeout)

    def machine_id(self) -> str:
        return self.where

    def siblings(self) -> Iterator[Opened]:
        folder = self.prefix.rpartition("/")[0]
        for key in self.bucket.keys(folder):
            if key.rpartition("/")[0] == folder and _TAGGED not in key:
                store = MemoryStore(self.bucket, key)
                if self.bucket.tag_of(key) is not None:
                    yield store.open()

    def key_of(self, token: str, name: str) -> str:
        """The key of a file of one save. Raises CheckpointError for a name that leads out of the place."""
        return f"{self.prefix}{_TAGGED}{token}/{check_name(self.where, name)}"

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of a bucket, as this store uses it."""
        return Capabilities("no" if self._part_nbytes else "anywhere", renames=False, part_nbytes=self._part_nbytes)


class _MemoryOpened(Opened):
    """The objects of one save. They are deleted when another save replaces this one."""

    def __init__(self, store: MemoryStore, tag: str) -> None:
        self._store, self._tag = store, tag
        self._token, self._manifest = tag.split(_TAGGED)

    @property
    def where(self) -> str:
        return self._store.where

    def _key(self, name: str) -> str:
        return self._store.prefix if name == self._manifest else self._store.key_of(self._token, name)

    def has(self, name: str) -> bool:
        return self._store.bucket.tag_of(self._key(name)) is not None

    def version_of(self, name: str) -> tuple[object, ...] | None:
        tag = self._store.bucket.tag_of(self._key(name))
        return None if tag is None else (tag,)

    def size_of(self, name: str) -> int:
        nbytes = self.nbytes_of(name)
        if nbytes < 0:
            raise CheckpointError(f"{self.named(name)}: is missing; the checkpoint is not whole")
        return nbytes

    def nbytes_of(self, name: str) -> int:
        return self._store.bucket.size_of(self._key(name))

    def read_into(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        key = self._key(name)
        for piece in pieces:
            data = self._store.bucket.get(key, offset, len(piece))
            if len(data) != len(piece):
                raise CheckpointError(f"{self.named(name)}: ends at byte {offset + len(data)}: it was cut short")
            piece[:] = data
            offset += len(piece)

    def was_replaced(self) -> bool:
        return self._store.bucket.tag_of(self._store.prefix) != self._tag

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class _MemoryStaging(Staging):
    """A save into a bucket. `before`: the tag of the manifest at the beginning of the save; None if there was none."""

    def __init__(self, store: MemoryStore, token: str, before: str | None) -> None:
        self._store, self._token, self._before = store, token, before

    @property
    def address(self) -> str:
        return self._token

    @property
    def token(self) -> str:
        return self._token

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    @property
    def replaces(self) -> bool:
        return self._before is not None

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        key = self._store.key_of(self._token, name)
        self._store.bucket.reserve(key, nbytes)
        self._store.bucket.put_range(key, 0, head)

    def seal(self, names: Sequence[str], receipts: Sequence[bytes], *, durable: bool) -> None:
        for receipt in receipts:
            for name, num_parts in json.loads(receipt).items():
                self._store.bucket.join_parts(self._store.key_of(self._token, name), num_parts)

    def put(self, name: str, data: bytes, *, durable: bool) -> None:
        self._store.bucket.put(self._store.key_of(self._token, name), data)

    def commit(self, manifest: str, data: bytes, *, durable: bool) -> None:
        tag = f"{self._token}{_TAGGED}{manifest}"
        if not self._store.bucket.put_if(self._store.prefix, data, tag, self._before):
            raise CheckpointError(f"{self._store.where}: cannot be put in place: another save to this path was faster")
        if self._before is not None:
            self._delete(self._before.split(_TAGGED)[0])

    def abandon(self) -> None:
        self._delete(self._token)

    def _delete(self, token: str) -> None:
        self._store.bucket.delete(f"{self._store.prefix}{_TAGGED}{token}/")


class _MemoryWriter(StoreWriter):
    def __init__(self, store: MemoryStore, token: str, who: str, part_nbytes: int) -> None:
        self._store, self._token, self._who, self._part_nbytes = store, token, who, part_nbytes
        self._files: dict[str, MultipartFile] = {}
        self._num_parts: dict[str, int] = {}

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        key, bucket = self._store.key_of(self._token, name), self._store.bucket
        if not self._part_nbytes:
            bucket.reserve(key, nbytes)
            bucket.put_range(key, 0, head)
            return
        self._files[name] = MultipartFile(
            name, nbytes, self._part_nbytes, lambda number, data: bucket.put_part(key, number, bytes(data))
        )
        self._num_parts[name] = -(-nbytes // self._part_nbytes)
        self._files[name].write([memoryview(head)], 0)

    def write(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        if self._part_nbytes:
            if name not in self._files:
                raise CheckpointError(f"{self._who} cannot write {self._store.where}/{name}, which it has not created")
            self._files[name].write(pieces, offset)
            return
        key = self._store.key_of(self._token, name)
        for piece in pieces:
            try:
                self._store.bucket.put_range(key, offset, bytes(piece))
            except KeyError:
                raise CheckpointError(
                    f"{self._who} cannot write {self._store.where}/{name}: it does not exist"
                ) from None
            offset += len(piece)

    def put(self, name: str, data: bytes) -> None:
        self._store.bucket.put(self._store.key_of(self._token, name), data)

    def finish(self) -> bytes:
        for file in self._files.values():
            file.check_whole()
        return json.dumps(self._num_parts).encode()

    def discard(self) -> None:
        self._files.clear()


class _MemoryCompletion(Completion):
    """Processes signal by small objects next to those of the save. The death of a process shows only after `timeout` seconds."""

    def __init__(self, store: MemoryStore, token: str, rank: int, ranks: Sequence[int], timeout: float) -> None:
        self._store, self._token, self._timeout = store, token, timeout
        self._rank, self._ranks = rank, ranks
        self._deadline = time.monotonic() + timeout

    def _key(self, signal: str) -> str:
        return f"{self._store.prefix}{_TAGGED}{self._token}:{signal}"

    def _content_of(self, signal: str) -> bytes | None:
        key = self._key(signal)
        nbytes = self._store.bucket.size_of(key)
        return None if nbytes < 0 else self._store.bucket.get(key, 0, nbytes)

    def watch(self) -> None:
        self._deadline = time.monotonic() + self._timeout

    def done(self, content: bytes) -> None:
        self._store.bucket.put(self._key(f"done-{self._rank}"), content)

    def failed(self, why: str) -> None:
        self._store.bucket.put(self._key(f"failed-{self._rank}"), why.encode())

    def wait_for_all(self) -> list[bytes]:
        contents: dict[int, bytes] = {}
        while True:
            for rank in self._ranks:
                why, content = self._content_of(f"failed-{rank}"), self._content_of(f"done-{rank}")
                if why is not None:
                    raise CheckpointError(f"rank {rank}: {why.decode()}")
                if content is not None:
                    contents[rank] = content
            missing = [rank for rank in self._ranks if rank not in contents]
            if not missing:
                self._store.bucket.delete(self._key("done-"))
                return [contents[rank] for rank in self._ranks]
            self._wait(f"rank {missing[0]} did not finish its part")

    def saved(self) -> None:
        """Do nothing: the other processes see the manifest."""

    def not_saved(self, why: str) -> None:
        self._store.bucket.put(self._key("outcome"), why.encode())
        end = time.monotonic() + _GRACE
        while any(self._content_of(f"seen-{rank}") is None for rank in self._ranks[1:]) and time.monotonic() < end:
            time.sleep(_LOOK_EVERY)
        self._store.bucket.delete(self._key(""))

    def wait_for_end(self, failed: str | None) -> None:
        while (self._store.bucket.tag_of(self._store.prefix) or "").split(_TAGGED)[0] != self._token:
            why = self._content_of("outcome")
            if why is not None:
                self._store.bucket.put(self._key(f"seen-{self._rank}"), b"")
                raise CheckpointError(why.decode())
            self._wait(f"rank {self._ranks[0]} did not finish the checkpoint", self._timeout + _GRACE)

    def _wait(self, delay: str, longer: float = 0.0) -> None:
        """Sleep for a moment; after the deadline raise RankTimeoutError, which names the `delay`."""
        if time.monotonic() > self._deadline + longer:
            raise RankTimeoutError(f"{self._store.where}: {delay} within {self._timeout:g} s")
        time.sleep(_LOOK_EVERY)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
