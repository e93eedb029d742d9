"""Reading: the files of one checkpoint, as they were when it was opened."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from fsdp_optim.errors import CheckpointError


class Opened(Protocol):
    """The files of one checkpoint, as they were when it was opened.

    A read fails where the store cannot serve those files any more; it never returns bytes of another checkpoint.
    """

    request_nbytes: int = 0
    """Below this size, a message from a rank that reads the neighbouring bytes is cheaper than a request of their own."""

    num_requests: int = 1
    """The best number of concurrent `read_into` calls."""

    is_any: bool = False
    """Whether `Store.open_any` opened the files."""

    selected: str = ""
    """The name of the only requested file, or the common name of files such as `<name>-shard0.pt`; else ""."""

    @property
    def where(self) -> str: ...

    def has(self, name: str) -> bool:
        """Return whether a file or anything else has this name. True where the store cannot tell."""

    def names(self) -> list[str]:
        """Return the names of all files, sorted, with "/" between folders. Only for `Store.open_any`. Raises CheckpointError."""
        raise CheckpointError(f"{self.where}: cannot be listed")

    def versions(self) -> list[tuple[str, tuple[object, ...] | None]]:
        """Return the names of all files, each with its `version_of` as of now or of the listing."""
        return [(name, self.version_of(name)) for name in self.names()]

    def version_of(self, name: str) -> tuple[object, ...] | None:
        """Return a value that changes when the file is written again. None: the file is gone."""

    def size_of(self, name: str) -> int:
        """Return the size of a file in bytes. Raises CheckpointError where the file is missing, or is not a regular file."""

    def nbytes_of(self, name: str) -> int:
        """Return the size of a file in bytes, without opening the file; -1 for anything but a regular file. Raises OSError."""

    def read_into(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        """Fill pieces of memory, one after the other, from a file from byte `offset` on."""

    def was_replaced(self) -> bool:
        """Return whether another checkpoint has taken the place since the opening."""

    def close(self) -> None:
        """Release the files. Raises nothing."""

    def named(self, name: str) -> str:
        """Return the name of a file in words for users: the place and the file."""
        return f"{self.where}/{name}"

    def read(self, name: str, start: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes of a file, from byte `start` on."""
        try:
            data = bytearray(nbytes)
        except MemoryError as error:
            raise CheckpointError(f"{self.named(name)}: {nbytes} bytes do not fit into memory") from error
        self.read_into(name, [memoryview(data)], start)
        return bytes(data)

    def read_whole(self, name: str, nbytes: int | None = None, *, most_nbytes: int | None = None) -> bytes:
        """Return the content of a small file. Raises CheckpointError unless its size is `nbytes`, and at most `most_nbytes`."""
        size = self.size_of(name)
        if nbytes is not None and size != nbytes:
            raise CheckpointError(f"{self.named(name)}: has {size} bytes, {nbytes} were saved")
        if most_nbytes is not None and size > most_nbytes:
            raise CheckpointError(f"{self.named(name)}: has {size} bytes, and at most {most_nbytes} are allowed")
        return self.read(name, 0, size)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
