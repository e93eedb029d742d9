"""Parts of files that are read together, because small archives follow each other, and a part that is in memory already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.reader import Archive
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.memory import in_batches

_MOST_TOGETHER = 8 << 20  # bytes that are read at once
_GAP_NBYTES = 8 << 10  # between two archives, which are read too, because another read costs more


def close_together(archives: Iterable[Archive]) -> Iterator[list[Archive]]:
    """Yield archives in their order, in batches that one read takes."""
    return in_batches(archives, lambda archive: archive.nbytes + _GAP_NBYTES, _MOST_TOGETHER, _are_close)


def _are_close(archive: Archive, following: Archive) -> bool:
    gap = following.start - archive.start - archive.nbytes
    return archive.file == following.file and 0 <= gap <= _GAP_NBYTES


def read_together(opened: Opened, archives: Sequence[Archive]) -> bytes:
    """Return the bytes of a batch of `close_together`, with those between the archives."""
    first, last = archives[0], archives[-1]
    return opened.read(first.file, first.start, last.start + last.nbytes - first.start)


class PartInMemory(Opened):
    """A file with some of its bytes already in memory."""

    def __init__(self, opened: Opened, start: int, data: bytes) -> None:
        self._opened, self._start, self._data = opened, start, data

    @property
    def where(self) -> str:
        return self._opened.where

    def named(self, name: str) -> str:
        return self._opened.named(name)

    def size_of(self, name: str) -> int:
        return self._start + len(self._data)

    nbytes_of = size_of

    def has(self, name: str) -> bool:
        return self._opened.has(name)

    def version_of(self, name: str) -> tuple[object, ...] | None:
        return self._opened.version_of(name)

    def was_replaced(self) -> bool:
        return self._opened.was_replaced()

    def close(self) -> None:
        """Do nothing: the files belong to another object."""

    def read_into(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        at = offset - self._start
        if at < 0 or at + sum(map(len, pieces)) > len(self._data):
            raise CheckpointError(f"{self.named(name)}: an archive reaches outside of its {len(self._data)} bytes")
        for piece in pieces:
            piece[:] = self._data[at : at + len(piece)]
            at += len(piece)


class InMemory(PartInMemory):
    """A file that is in memory only. `where`: its name for errors."""

    def __init__(self, where: str, data: bytes) -> None:
        self._where, self._start, self._data = where, 0, data

    @property
    def where(self) -> str:
        return self._where

    def named(self, name: str) -> str:
        return self._where
