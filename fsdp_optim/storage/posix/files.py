"""Bytes to and from files: complete reads and writes at an offset, into and out of the caller's memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from fsdp_optim.errors import CheckpointError, FsdpOptimError, wrong_use

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")  # one slash, because pathlib makes `s3:/` of `s3://`
_SYNC_FILE_RANGE_WRITE = 2  # of <fcntl.h>
_NOTHING_TO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
_MOST_PIECES = 512  # of memory, in one call of the kernel (IOV_MAX is at least 1024 on Linux)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute form of a path. Raises as `local_path` does."""
    return Path(os.path.abspath(local_path(path)))


def text_of(path: str | os.PathLike[str]) -> str:
    """Return a path or a URL as text. Raises CheckpointError for a value that is neither."""
    try:
        text = os.fspath(path)
    except TypeError:
        hint = ": latest() returns None where there is no checkpoint" if path is None else ""
        raise wrong_use(f"a path is a str or a pathlib.Path, not {type(path).__name__}{hint}") from None
    if not isinstance(text, str):
        raise wrong_use(f"a path is a str or a pathlib.Path, not {type(text).__name__}: {text!r}")
    return text


def local_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text, with `~` expanded. Raises CheckpointError for a URL, and for a value that no file system accepts."""
    text = text_of(path)
    if "\0" in text:
        raise wrong_use(f"{text!r}: a path cannot have a NUL character in it")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise wrong_use(f"{text!r}: is not a path that this file system accepts: {error.reason}") from None
    scheme = _SCHEME.match(text)
    if scheme is not None:
        raise wrong_use(
            f"{text}: a path makes one slash of two, so give a URL as a str ('{scheme[1]}://...'); if {text} is the name of a "
            f"folder, give ./{text}"
        )
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise wrong_use(f"{text}: there is no such user; if {text} is the name of a folder, give ./{text}")
    return expanded


@contextlib.contextmanager
def checkpoint_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise every error of the file system inside the block as a CheckpointError that names `path`."""
    try:
        yield
    except FsdpOptimError:
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename is not None else ""
        raise CheckpointError(f"{os.fspath(path)}: {error.strerror or error}{where}") from error


def read_into(fd: int, path: Path, pieces: Sequence[memoryview], offset: int) -> None:
    """Fill pieces of memory, one after the other, from a file from byte `offset` on."""
    for batch in _batches(pieces):
        left = [piece for piece in batch if len(piece)]
        while left:
            try:
                done = os.preadv(fd, left, offset)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read at byte {offset}: {error.strerror or error}") from None
            if not done:
                raise CheckpointError(f"{path}: ends at byte {offset}: it was cut short")
            offset += done
            left = _after(left, done)


def write_all(fd: int, path: Path, pieces: Sequence[memoryview], offset: int) -> None:
    """Write pieces of memory, one after the other, to a file from byte `offset` on."""
    for batch in _batches(pieces) if len(pieces) > 1 else (pieces,):
        left = batch
        while left:
            try:
                done = os.pwritev(fd, left, offset)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: cannot be written at byte {offset}: {error.strerror or error}"
                ) from None
            if len(left) == 1 and done == len(left[0]):
                break  # nearly always
            offset += done
            left = _after(left, done)


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to begin writing some bytes of a file to the disk; return at once. The request is a hint and may fail."""
    sync_range = _sync_file_range()
    if sync_range is not None:
        sync_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        function.restype = ctypes.c_int
    return function


def write_file(path: Path, data: bytes, *, durable: bool) -> None:
    """Create a new file with the content `data`."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be created: {error.strerror or error}") from None
    try:
        try:
            write_all(fd, path, [memoryview(data)], 0)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)  # some file systems report a full disk only here
    except OSError as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{path}: {error.strerror}") from None


def path_inside(folder: Path, name: str) -> Path:
    """Return the path of a new file in the folder of a save, and create the folders that its name asks for.

    `folder` itself is not created: another process may have removed it, and nothing may come back.
    """
    path = folder / name
    for parent in [*path.relative_to(folder).parents][-2::-1]:
        try:
            (folder / parent).mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be created: {error.strerror or error}") from None
    return path


def make_file(folder: Path, name: str, nbytes: int, head: bytes) -> None:
    """Create a file of `nbytes` bytes that begins with `head`."""
    try:
        path = path_inside(folder, name)
        write_file(path, head, durable=False)
        os.truncate(path, nbytes)
    except OSError as error:
        reason = error.strerror or error
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{folder}: {reason}") from error


def sync_file(path: Path) -> None:
    """Flush a file to the disk."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            close_quietly(fd)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be made durable: {error.strerror or error}") from None


def close_quietly(fd: int) -> None:
    """Close a file descriptor and ignore errors: nothing that could be lost was written through the descriptor."""
    with contextlib.suppress(OSError):
        os.close(fd)


def close_each(fds: Iterable[int]) -> None:
    """Close file descriptors as `close_quietly` does, all of them also where an interrupt arrives meanwhile."""
    with contextlib.ExitStack() as stack:
        for fd in fds:
            stack.callback(close_quietly, fd)


def remove_tree(folder: Path) -> None:
    """Remove a folder and its content as far as possible. Raises nothing, unlike rmtree, which raises when a close fails."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk. Some network file systems have nothing to flush there, and refuse."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        sync_open_folder(fd)
    finally:
        close_quietly(fd)


def sync_open_folder(folder: int) -> None:
    """Flush the names in an open folder to the disk, as `sync_folder` does."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NOTHING_TO_FLUSH:
            raise


def _batches(pieces: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    return (pieces[first : first + _MOST_PIECES] for first in range(0, len(pieces), _MOST_PIECES))


def _after(pieces: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the pieces without their first `done` bytes."""
    left = []
    for piece in pieces:
        if done >= len(piece):
            done -= len(piece)
        else:
            left.append(piece[done:])
            done = 0
    return left
