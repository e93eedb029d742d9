"""The access of one process to the folder of a save: writes at an offset, and flushes if the save is durable."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import VISIBLE_WITHIN, StoreWriter
from fsdp_optim.storage.posix.beacon import sees
from fsdp_optim.storage.posix.claim import is_of_this_machine
from fsdp_optim.storage.posix.files import (
    close_each,
    make_file,
    path_inside,
    start_writeback,
    sync_file,
    write_all,
    write_file,
)
from fsdp_optim.storage.posix.filesystem import is_of_one_machine

_MOST_OPEN = 64  # files
_LOOK_EVERY = 0.1  # seconds
_ASK_NBYTES = 1 << 20  # after which the disk is asked to begin


@dataclass(slots=True)
class _Unasked:
    """The range [first, last) of the writes for which the disk was not asked yet, and their bytes."""

    first: int
    last: int
    nbytes: int = 0


class FolderWriter(StoreWriter):
    """Writes into the folder of a save. `who`: the name of this process, for errors."""

    def __init__(self, folder: Path, *, durable: bool, who: str) -> None:
        self._folder, self._durable, self._who = folder, durable, who
        self._open: dict[str, int] = {}
        self._made: list[str] = []
        self._unasked: dict[str, _Unasked] = {}
        self._paths: dict[str, Path] = {}  # making a Path takes longer than writing a short range

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        make_file(self._folder, name, nbytes, head)
        self._made.append(name)

    def write(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        fd = self._open.get(name)
        if fd is None:
            fd = self._fd(name)
        write_all(fd, self._paths[name], pieces, offset)
        if self._durable:  # finish() will wait for the disk, so the disk begins now
            nbytes = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
            self._written(name, fd, offset, nbytes)

    def _written(self, name: str, fd: int, start: int, nbytes: int) -> None:
        """Note bytes that were written. The disk is asked for short ones together: each request is a call of the kernel."""
        unasked = self._unasked.get(name)
        if unasked is None:
            unasked = self._unasked[name] = _Unasked(start, start)
        if start < unasked.first:
            unasked.first = start
        if start + nbytes > unasked.last:
            unasked.last = start + nbytes
        unasked.nbytes += nbytes
        if unasked.nbytes >= _ASK_NBYTES:
            start_writeback(fd, unasked.first, unasked.last - unasked.first)
            del self._unasked[name]

    def put(self, name: str, data: bytes) -> None:
        write_file(path_inside(self._folder, name), data, durable=self._durable)

    def _fd(self, name: str) -> int:
        """Open a file, and close another where too many are open."""
        path = self._paths.setdefault(name, self._folder / name)
        while len(self._open) >= _MOST_OPEN:
            self._close(next(iter(self._open)))
        fd = self._open[name] = self._opened(path)
        return fd

    def _opened(self, path: Path) -> int:
        """Open a file that the leader has made. A file that another machine has made may be visible some seconds later."""
        begun = time.monotonic()
        while True:
            try:
                return os.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                is_missing = error.errno in (errno.ENOENT, errno.ESTALE)
                waited = time.monotonic() - begun
                if not is_missing or waited > VISIBLE_WITHIN or self._is_made_here:
                    after = f" after {waited:.0f} s" if waited > 1 else ""
                    hint = "; the folder must be on a file system that all ranks share" if is_missing else ""
                    reason = error.strerror or error
                    raise CheckpointError(f"{self._who} cannot open {path}{after}: {reason}{hint}") from None
            sees(path)
            time.sleep(_LOOK_EVERY)

    @property
    def _is_made_here(self) -> bool:
        """Whether this machine has begun the save, so that a file that is not visible does not exist."""
        return is_of_one_machine(self._folder) or is_of_this_machine(self._folder)

    def finish(self) -> bytes:
        """Close the files. Some file systems report a full disk only here."""
        for name in list(self._open):
            self._close(name)
        if self._durable:
            for name in self._made:  # also files into which nothing was written after their heads
                sync_file(self._folder / name)
        return b""

    def _close(self, name: str) -> None:
        fd = self._open.pop(name)
        try:
            try:
                if self._durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise CheckpointError(f"{self._folder / name}: cannot be written: {error.strerror or error}") from None

    def discard(self) -> None:
        fds, self._open = [*self._open.values()], {}
        close_each(fds)
