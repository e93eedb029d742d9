"""One new file that is complete or absent: it is written under a temporary name beside its place, and then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from fsdp_optim.errors import CheckpointError, wrong_use
from fsdp_optim.storage.base import FileSink
from fsdp_optim.storage.posix.files import absolute, sync_folder, write_all

_ENDING = ".writing"


class NewFile(FileSink):
    """A file that is being written from its beginning to its end. `at`: the number of bytes so far."""

    def __init__(self, fd: int, path: Path) -> None:
        self.at = 0
        self._fd, self._path = fd, path

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes at the end."""
        view = memoryview(data)
        write_all(self._fd, self._path, [view], self.at)
        self.at += view.nbytes


def local_file(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a file of this machine. Raises CheckpointError for a folder."""
    file = absolute(path)
    if file.is_dir():
        raise wrong_use(f"{file}: is a folder: give the path of a file")
    return file


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[NewFile]:
    """Open a new file that gets its name when the block ends, on the disk; an error or a kill leaves the place as it was.

    A kill leaves the temporary file, whose name begins with a dot and the name of the file, and ends with `.writing`.

    Raises CheckpointError if there is a file, and it must not be replaced.
    """
    file = local_file(path)
    if not overwrite and os.path.lexists(file):
        raise _taken(file)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}{_ENDING}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be created: {error.strerror or error}") from None
    try:
        try:
            yield NewFile(fd, file)
            os.fsync(fd)
        finally:
            os.close(fd)
        if overwrite:
            os.replace(temporary, file)
        else:
            _link(temporary, file)
        sync_folder(file.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _link(temporary: Path, file: Path) -> None:
    """Give a file its name, unless another file has taken it meanwhile."""
    try:
        os.link(temporary, file)
    except FileExistsError:
        raise _taken(file) from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        os.replace(temporary, file)  # a file system without hard links
    else:
        os.unlink(temporary)


def _taken(file: Path) -> CheckpointError:
    return wrong_use(f"{file}: already exists: give another path, or overwrite=True to replace it")
