"""Faults of the file system below a folder: calls that fail, or that read or write fewer bytes than requested."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

WRITING = ("write", "pwrite", "writev", "pwritev")
MAKING = ("open", "mkdir", "io.open", "truncate", "ftruncate")
MOVING = ("rename", "replace", "unlink", "rmdir")
FLUSHING = ("fsync", "fdatasync", "close")
READING = ("read", "pread", "preadv", "stat", "lstat", "scandir", "listdir", "fstat")
LOCKING = ("flock",)

SHORT = 0  # instead of an error, the call reads or writes only a part
INTERRUPT = -1  # instead of an error of the system, a KeyboardInterrupt

# The possible faults of each call. EMFILE, ENOSPC and EACCES usually last; EIO may pass.
OUTCOMES: dict[int, tuple[str, ...]] = {
    errno.EIO: (*WRITING, *MAKING, *MOVING, *FLUSHING, *READING),
    errno.ENOSPC: (*WRITING, *MAKING, "rename", "fsync", "close"),
    errno.EACCES: (*MAKING, *MOVING, "scandir", "listdir"),
    errno.EMFILE: ("open", "io.open", "scandir", "listdir"),
    errno.ESTALE: (*MAKING, *MOVING, *READING),
    errno.ENOLCK: LOCKING,
    SHORT: (*WRITING, "read", "pread", "preadv"),
}


@dataclasses.dataclass
class Fault:
    """A fault: the errno `number`, or SHORT, in the nth call of some functions and, with `lasts`, in all later calls."""

    number: int
    functions: tuple[str, ...]
    nth: int
    lasts: bool

    def __str__(self) -> str:
        name = {SHORT: "a short one", INTERRUPT: "an interrupt"}.get(self.number) or errno.errorcode[self.number]
        return f"{name} in call {self.nth} of {'/'.join(self.functions)}{' and later ones' if self.lasts else ''}"


class Calls:
    """The number of calls so far, and whether the fault has occurred."""

    def __init__(self, root: Path, fault: Fault) -> None:
        self.count = self.hit = 0
        self._root, self._fault = os.path.realpath(root), fault
        self._lock = threading.Lock()

    def _is_inside(self, path: Any, dir_fd: int | None) -> bool:
        try:
            if hasattr(path, "fileno"):
                path = path.fileno()
            if isinstance(path, int):
                where = os.readlink(f"/proc/self/fd/{path}")
            else:
                base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.getcwd()
                where = os.path.join(base, os.fspath(path))
        except (OSError, TypeError):
            return False
        return where.startswith(self._root)

    def around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            where = args[0] if args else kwargs.get("path", ".")
            if not self._is_inside(where, kwargs.get("dir_fd", kwargs.get("src_dir_fd"))):
                return real(*args, **kwargs)
            with self._lock:
                now = self.count == self._fault.nth or (self._fault.lasts and self.count > self._fault.nth)
                self.count += 1
                self.hit += now
            if not now:
                return real(*args, **kwargs)
            if self._fault.number == SHORT:
                return real(args[0], _less(name, args[1]), *args[2:], **kwargs)
            if name == "close":
                real(*args)  # the system closes the descriptor even where close() fails
            if self._fault.number == INTERRUPT:
                raise KeyboardInterrupt
            raise OSError(self._fault.number, os.strerror(self._fault.number), str(where))

        return call

    @contextlib.contextmanager
    def entered(self) -> Iterator[Calls]:
        with contextlib.ExitStack() as stack:
            for name in self._fault.functions:
                owner: Any = {"io.open": io, "flock": fcntl}.get(name, os)
                attribute = name.removeprefix("io.")
                real = getattr(owner, attribute)
                stack.enter_context(mock.patch.object(owner, attribute, self.around(attribute, real)))
            yield self


def _less(name: str, asked: Any) -> Any:
    """The first part of the data, of the memory, or of the number of bytes."""
    if isinstance(asked, int):
        return max(asked // 2, 1)
    if name.endswith("v"):
        first = memoryview(asked[0]).cast("B")
        return [first[: max(len(first) // 2, 1)]]
    whole = memoryview(asked).cast("B")
    return whole[: max(len(whole) // 2, 1)]
