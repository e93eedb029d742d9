"""Blocks of a checkpoint's files, kept in a folder of this machine and verified when they are used.

<folder>/<place>/<version>/<file>/<number>    the bytes of one block, then their xxh3_64

The names but the last are hashes. A block is written under another name and renamed, so that processes share a folder without
locks: a block is whole, or it is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
from pathlib import Path

from xxhash import xxh3_64

from fsdp_optim.storage.posix.files import absolute

_HASH_NBYTES = 16  # of a name
_SUM_NBYTES = 8

log = logging.getLogger("fsdp_optim")


def _hashed(*words: object) -> str:
    return hashlib.blake2b(repr(words).encode(), digest_size=_HASH_NBYTES).hexdigest()


class BlockFolder:
    """A folder for the blocks of checkpoints. Its methods raise nothing: a block that cannot be read or written is not in it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Open the folder. Raises CheckpointError for a value that is no path."""
        self._folder = absolute(folder)
        self._can_write = True

    def blocks_of(self, where: str, version: object) -> Blocks:
        """Return the blocks of one checkpoint. Those of other checkpoints of the same place are removed."""
        place = self._folder / _hashed(where)
        kept = _hashed(where, version)
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                if name != kept:
                    shutil.rmtree(place / name, ignore_errors=True)
        return Blocks(self, place / kept)

    def write(self, path: Path, data: memoryview, digest: bytes) -> None:
        """Put a block under its name; say once where that fails."""
        if not self._can_write:
            return
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.write(data)
                file.write(digest)
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if isinstance(error, FileNotFoundError):
                return  # another process has removed the folder of an older checkpoint
            self._can_write = False
            reason = error.strerror or error
            log.warning("%s: nothing more is kept in this cache, and loading continues: %s", self._folder, reason)


class Blocks:
    """The blocks of one checkpoint, by file and number."""

    def __init__(self, folder: BlockFolder, root: Path) -> None:
        self._folder, self._root = folder, root

    def _path(self, name: str, number: int) -> Path:
        return self._root / _hashed(name) / str(number)

    def _sum(self, name: str, number: int, data: bytes | memoryview) -> bytes:
        """Return the checksum of a block in its place: a block of another one does not have it."""
        seed = xxh3_64(f"{self._root.name} {name} {number}".encode()).intdigest()
        return xxh3_64(data, seed=seed).digest()

    def get(self, name: str, number: int, nbytes: int) -> bytes | None:
        """Return a block of `nbytes` bytes; None where it is not there or is damaged."""
        try:
            with self._path(name, number).open("rb") as file:
                data = file.read(nbytes + _SUM_NBYTES + 1)
        except OSError:
            return None
        content, digest = data[:nbytes], data[nbytes:]
        return content if len(content) == nbytes and digest == self._sum(name, number, content) else None

    def put(self, name: str, number: int, data: memoryview) -> None:
        """Keep a block."""
        self._folder.write(self._path(name, number), data, self._sum(name, number, data))
