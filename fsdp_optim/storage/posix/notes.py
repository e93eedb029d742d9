"""Notes: small files in the folder of a save by which ranks signal to each other, and notice the death of another rank.

A rank holds the lock on its own note as long as it may have to write the note. Other ranks hold the note open, so that they can
read the note after the folder was renamed or removed. A free lock shows that the rank is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.posix.files import close_quietly, write_all

_ROOM = 2048  # bytes, reserved in advance, so that a note can be written on a full disk


class HeldNote:
    """The note of this rank. The lock belongs to this process, not to processes forked from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CheckpointError(f"{path.parent}: cannot be written: {error.strerror or error}") from None
        try:
            with contextlib.suppress(OSError):  # on a file system without locks the other ranks see none
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._put(b"")
        except OSError as error:
            self.close()
            raise CheckpointError(f"{path.parent}: cannot be written: {error.strerror or error}") from None

    def write(self, text: str) -> None:
        """Write a text, cut to the reserved room. Raises nothing: after a failed write, other ranks see the free lock."""
        with contextlib.suppress(OSError):
            self._put(text.encode(errors="replace")[:_ROOM])

    def _put(self, data: bytes) -> None:
        write_all(self._fd, self.path, [memoryview(data.ljust(_ROOM))], 0)

    def close(self) -> None:
        """Close the note, and release its lock."""
        self._fd = _closed(self._fd)


class WatchedNote:
    """The note of another rank, opened while that rank is known to be alive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        with contextlib.suppress(OSError):  # text() then reads the note by its path
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        # Some file systems have no locks, or show locks on one machine only: there a free lock proves nothing.
        self._shows_life = self._fd >= 0 and not self._is_free()

    def text(self) -> str:
        """The text of the note; empty before the rank has written it."""
        data = b""
        with contextlib.suppress(OSError):
            data = os.pread(self._fd, _ROOM, 0) if self._fd >= 0 else b""
        if not data.strip():
            with contextlib.suppress(OSError):
                data = self.path.read_bytes()
        return data.decode(errors="replace").strip()

    def is_dead(self) -> bool:
        """Whether the rank has released the lock. It will not write the note any more."""
        return self._shows_life and self._is_free()

    def _is_free(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the note."""
        self._fd = _closed(self._fd)


def _closed(fd: int) -> int:
    """Close a file descriptor unless it is -1; return -1."""
    if fd >= 0:
        close_quietly(fd)
    return -1
