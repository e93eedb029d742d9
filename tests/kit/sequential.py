"""A folder as mountpoints of buckets have it: each file is made once, written from begin to end, and never opened again to write.

The interpreter's audit events are what refuses: they come before the system is asked, whoever asks. Writes at an offset have
none, so the functions for these are replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

_CHANGES = {"os.rename", "os.link", "os.symlink", "os.truncate", "os.utime"}
_refused: list[
    Path
] = []  # folders; an audit hook cannot be removed, so it has nothing to refuse outside of `sequential`
_has_hook: list[bool] = []


def _is_inside(path: Any) -> bool:
    if isinstance(path, int):
        try:
            path = os.readlink(f"/proc/self/fd/{path}")
        except OSError:
            return False
    try:
        text = os.path.abspath(os.fsdecode(path))
    except (TypeError, ValueError):
        return False
    return any(text.startswith(f"{folder}/") for folder in _refused)


def _refuse(what: str) -> None:
    raise OSError(errno.EPERM, f"{os.strerror(errno.EPERM)}: {what}")


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _refused:
        return
    if event in _CHANGES and any(_is_inside(path) for path in args[:2]):
        _refuse(event)
    if event == "open" and isinstance(args[0], (str, bytes)) and isinstance(args[2], int) and _is_inside(args[0]):
        path, _, flags = args
        access = flags & os.O_ACCMODE
        if access == os.O_RDWR or (access == os.O_WRONLY and (not flags & os.O_CREAT or os.path.lexists(path))):
            _refuse(f"opened for writing again: {os.fsdecode(path)}")


@contextlib.contextmanager
def sequential(folder: Path) -> Iterator[None]:
    """Inside the block, files in a folder can only be made, written from begin to end, read and removed."""
    if not _has_hook:
        sys.addaudithook(_hook)
        _has_hook.append(True)
    real = os.pwritev

    def pwritev(fd: int, pieces: Any, offset: int, *flags: int) -> int:
        if _is_inside(fd) and offset != os.fstat(fd).st_size:
            _refuse("written elsewhere than at the end")
        return real(fd, pieces, offset, *flags)

    def seek(file: Any, *args: Any) -> int:
        if "r" not in file.mode:
            _refuse("sought while it is written")
        return int(file.f.seek(*args))

    from fsspec.implementations.local import LocalFileOpener

    with mock.patch.object(os, "pwritev", pwritev), mock.patch.object(LocalFileOpener, "seek", seek):
        _refused.append(folder)
        try:
            yield
        finally:
            _refused.remove(folder)
