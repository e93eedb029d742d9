"""Notes that ranks leave for each other in the folder of a save, without a collective call, and how one sees that another died.

A rank holds the lock on a note of its own for as long as it may have to write it. The others hold the note open: what is
written there reaches them when the folder has been moved or removed, and a lock that is free says that its holder is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.posix.files import close_quietly, write_all

_ROOM = 2048  # bytes that are reserved, so that a full disk is no hindrance


class HeldNote:
    """A note of this rank's. The lock goes with the process, not with those that it forks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CheckpointError(f"{path.parent}: cannot be written: {error.strerror or error}") from None
        try:
            with contextlib.suppress(OSError):  # a file system without locks: then the others see none
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._put(b"")
        except OSError as error:
            self.close()
            raise CheckpointError(f"{path.parent}: cannot be written: {error.strerror or error}") from None

    def write(self, text: str) -> None:
        """Say something, in the room that is reserved. Raises nothing: who waits for it sees the lock become free."""
        with contextlib.suppress(OSError):
            self._put(text.encode(errors="replace")[:_ROOM])

    def _put(self, data: bytes) -> None:
        write_all(self._fd, self.path, [memoryview(data.ljust(_ROOM))], 0)

    def close(self) -> None:
        """Let go of it, and of the lock."""
        self._fd = _closed(self._fd)


class WatchedNote:
    """A note of another rank's, to be opened while that rank is known to live."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        with contextlib.suppress(OSError):  # then it is looked for by its name
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        # Some file systems have no locks, or show them on one machine only: a free one says nothing there.
        self._shows_life = self._fd >= 0 and not self._is_free()

    def text(self) -> str:
        """What it says by now; empty: nothing yet."""
        data = b""
        with contextlib.suppress(OSError):
            data = os.pread(self._fd, _ROOM, 0) if self._fd >= 0 else b""
        if not data.strip():
            with contextlib.suppress(OSError):
                data = self.path.read_bytes()
        return data.decode(errors="replace").strip()

    def is_dead(self) -> bool:
        """Whether the rank that wrote it has let go of it: what it has not said by now it will not say."""
        return self._shows_life and self._is_free()

    def _is_free(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Let go of it."""
        self._fd = _closed(self._fd)


def _closed(fd: int) -> int:
    """Close it where it is open."""
    if fd >= 0:
        close_quietly(fd)
    return -1
