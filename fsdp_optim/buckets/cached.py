"""A store whose checkpoints are read through a cache: bytes that were read once are kept in a folder of this machine."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from fsdp_optim.buckets.blocks import BlockFolder, Blocks
from fsdp_optim.storage.base import CheckpointDirectory, CheckpointProbe, Opened, Staging, Store, StoreWriter

BLOCK_NBYTES = 1 << 20
"""The size of a block. The store is asked for whole blocks only."""

_MOST_MISSING = 8  # blocks, in one read of the store
_MOST_REQUESTS = 8  # at the same time: each holds its blocks
_MOST_HELD = 4  # blocks in memory: many small reads fall into one block


class CachedStore(Store):
    """A store whose `open` reads through a cache. Everything else is done by the store itself.

    Args:
        folder: keeps the blocks; several processes may share it.
        manifest: the name of the manifest. Its version says which checkpoint a block is of.
        block_nbytes: the size of a block.
    """

    def __init__(self, store: Store, folder: BlockFolder, manifest: str, *, block_nbytes: int = BLOCK_NBYTES) -> None:
        self.store, self._folder, self._manifest, self._block_nbytes = store, folder, manifest, block_nbytes

    @property
    def where(self) -> str:
        return self.store.where

    def open(self) -> Opened:
        opened = self.store.open()
        try:
            version = opened.version_of(self._manifest)
            if version is None or opened.was_replaced():  # then the version may belong to another checkpoint
                return opened
            blocks = self._folder.blocks_of(self.where, version)
            return CachedOpened(opened, blocks, self._manifest, self._block_nbytes)
        except BaseException:
            opened.close()
            raise

    def open_any(self) -> Opened:
        """Return the files, each read through the cache by its own version."""
        opened = self.store.open_any()
        try:
            versions = [entry for entry in opened.versions() if opened.selected in ("", entry[0])]
            return CachedOpened(opened, self._folder.blocks_of(self.where, versions), "", self._block_nbytes)
        except BaseException:
            opened.close()
            raise

    def with_probe(self, probe: CheckpointProbe[Any]) -> Store:
        return CachedStore(self.store.with_probe(probe), self._folder, probe.manifest, block_nbytes=self._block_nbytes)

    def above(self) -> tuple[Store, str] | None:
        above = self.store.above()
        if above is None:
            return None
        return CachedStore(above[0], self._folder, self._manifest, block_nbytes=self._block_nbytes), above[1]

    def begin(self, *, overwrite: bool, durable: bool) -> Staging:
        return self.store.begin(overwrite=overwrite, durable=durable)

    def join(self, address: str, *, durable: bool, who: str, budget_nbytes: int = 64 << 20) -> StoreWriter:
        return self.store.join(address, durable=durable, who=who, budget_nbytes=budget_nbytes)

    def machine_id(self) -> str:
        return self.store.machine_id()

    def sees(self, address: str) -> bool:
        return self.store.sees(address)

    def beacon(self) -> AbstractContextManager[str]:
        return self.store.beacon()

    @property
    def can_shrink(self) -> bool:
        return self.store.can_shrink

    def shrink(self, opened: Opened, manifest: str, data: bytes | None, names: Sequence[str]) -> int:
        inner = opened._opened if isinstance(opened, CachedOpened) else opened
        return self.store.shrink(inner, manifest, data, names)

    @property
    def can_attach(self) -> bool:
        return self.store.can_attach

    def attach(self, opened: Opened, name: str, data: bytes) -> None:
        self.store.attach(opened._opened if isinstance(opened, CachedOpened) else opened, name, data)

    def directory(self) -> CheckpointDirectory[Any]:
        return self.store.directory()

    def siblings(self, known: Collection[str] = ()) -> Iterator[Opened]:
        return self.store.siblings(known)


def cached_in(store: Store, folder: str | PathLike[str], manifest: str) -> CachedStore:
    """Return the same store, read through a cache in a folder of this machine."""
    return CachedStore(store, BlockFolder(folder), manifest)


@dataclass
class _Held:
    """The blocks that were used last."""

    blocks: dict[tuple[str, int], bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: tuple[str, int]) -> bytes | None:
        with self.lock:
            block = self.blocks.pop(key, None)
            if block is not None:
                self.blocks[key] = block
            return block

    def put(self, key: tuple[str, int], data: bytes) -> None:
        with self.lock:
            self.blocks[key] = data
            while len(self.blocks) > _MOST_HELD:
                del self.blocks[next(iter(self.blocks))]


class CachedOpened(Opened):
    """The files of one checkpoint, read through a cache. Its manifest, and the sizes and versions of files, come from the store.

    `manifest`: the name of the manifest; "" where there is none.
    """

    def __init__(self, opened: Opened, blocks: Blocks, manifest: str, block_nbytes: int) -> None:
        self._opened, self._blocks, self._manifest, self._block_nbytes = opened, blocks, manifest, block_nbytes
        self._held = _Held()
        self.request_nbytes, self.num_requests = opened.request_nbytes, min(opened.num_requests, _MOST_REQUESTS)
        self.selected, self.is_any = opened.selected, opened.is_any

    @property
    def where(self) -> str:
        return self._opened.where

    def has(self, name: str) -> bool:
        return self._opened.has(name)

    def names(self) -> list[str]:
        return self._opened.names()

    def version_of(self, name: str) -> tuple[object, ...] | None:
        return self._opened.version_of(name)

    def size_of(self, name: str) -> int:
        return self._opened.size_of(name)

    def nbytes_of(self, name: str) -> int:
        return self._opened.nbytes_of(name)

    def was_replaced(self) -> bool:
        return self._opened.was_replaced()

    def close(self) -> None:
        self._opened.close()

    def named(self, name: str) -> str:
        return self._opened.named(name)

    def read_into(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(piece.nbytes for piece in pieces)
        if name == self._manifest or not nbytes or offset + nbytes > self.size_of(name):
            self._opened.read_into(name, pieces, offset)
            return
        target = _Target(pieces, offset)
        missing: list[int] = []
        for number in range(offset // self._block_nbytes, (offset + nbytes - 1) // self._block_nbytes + 1):
            block = self._kept(name, number)
            if missing and (block is not None or len(missing) == _MOST_MISSING):
                self._fetch(name, missing, target)
                missing = []
            if block is None:
                missing.append(number)
            else:
                target.fill(block, number * self._block_nbytes)
        if missing:
            self._fetch(name, missing, target)

    def _nbytes(self, name: str, number: int) -> int:
        return min(self._block_nbytes, self.size_of(name) - number * self._block_nbytes)

    def _kept(self, name: str, number: int) -> bytes | None:
        block = self._held.get((name, number))
        if block is None:
            block = self._blocks.get(name, number, self._nbytes(name, number))
            if block is not None:
                self._held.put((name, number), block)
        return block

    def _fetch(self, name: str, numbers: Sequence[int], target: _Target) -> None:
        """Read blocks that follow one another from the store, and keep them."""
        start = numbers[0] * self._block_nbytes
        data = self._opened.read(name, start, sum(self._nbytes(name, number) for number in numbers))
        target.fill(data, start)
        for number in numbers:
            at = number * self._block_nbytes - start
            block = memoryview(data)[at : at + self._block_nbytes]
            self._blocks.put(name, number, block)
        self._held.put((name, numbers[-1]), bytes(block))


@dataclass
class _Target:
    """Memory that is filled from byte `offset` of a file on, in the order of the file."""

    pieces: Sequence[memoryview]
    offset: int
    _num_full: int = 0  # pieces

    def fill(self, data: bytes, start: int) -> None:
        """Take the wanted part of the bytes from byte `start` of the file on."""
        while self._num_full < len(self.pieces):
            piece = self.pieces[self._num_full]
            end = self.offset + piece.nbytes
            first, last = max(self.offset, start), min(end, start + len(data))
            if first < last:
                piece.cast("B")[first - self.offset : last - self.offset] = data[first - start : last - start]
            if end > start + len(data):
                return
            self.offset, self._num_full = end, self._num_full + 1
