"""The folder of a checkpoint, held open: whatever happens to its path meanwhile, all that is read is of one checkpoint."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Opened, check_name
from fsdp_optim.storage.posix.files import close_quietly, read_into

_MOST_OPEN = 64  # files; the one that was used longest ago is closed for another
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait
_TOO_MANY = (errno.EMFILE, errno.ENFILE)


class OpenFolder(Opened):
    """A folder and its files. Files stay open, so that they can still be read when another save has removed them.

    Args:
        path: the folder.
        asked: the path of the checkpoint, where the folder is the one that a save has set aside.
    """

    def __init__(self, path: Path, *, asked: Path | None = None) -> None:
        self.path = path
        self._asked = asked or path
        self._files: dict[str, int] = {}
        self._paths: dict[str, Path] = {}
        try:
            self._fd = os.open(path, _FOLDER)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{path}: there is no such folder, so no checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from None

    @property
    def where(self) -> str:
        return str(self.path)

    def close(self) -> None:
        """Let go of the folder and of its files."""
        self._close_files()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_quietly(fd)

    def _close_files(self) -> None:
        while self._files:
            close_quietly(self._files.popitem()[1])

    def has(self, name: str) -> bool:
        """Whether there is a file, or anything else, of this name."""
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR)  # what is wrong is said by who reads it
        return True

    def version_of(self, name: str) -> tuple[int, ...] | None:
        """What differs when a file has been written again, or another has its name; None: it has gone."""
        try:
            found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return None
        return (found.st_ino, found.st_size, found.st_mtime_ns)

    def was_replaced(self) -> bool:
        """Whether the path that was asked for leads to another folder by now, or the folder has lost its name."""
        held = os.fstat(self._fd)
        for path in (self._asked, self.path):
            try:
                now = os.stat(path)
            except FileNotFoundError:
                continue  # a folder that was set aside still is the checkpoint as long as no other has its place
            except OSError:
                return True
            return (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino)
        return True

    def file(self, name: str) -> int:
        """A file descriptor of a regular file, to be used before the next one is asked for. Symbolic links are refused."""
        fd = self._files.pop(name, None)
        if fd is None:
            while len(self._files) >= _MOST_OPEN:
                close_quietly(self._files.pop(next(iter(self._files))))
            fd = self._open(name)
        self._files[name] = fd
        return fd

    def size_of(self, name: str) -> int:
        """The bytes of a file."""
        return os.fstat(self.file(name)).st_size

    def nbytes_of(self, name: str) -> int:
        """As `size_of`, without opening the file; -1 of what is no regular file. Raises OSError."""
        found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        return found.st_size if stat.S_ISREG(found.st_mode) else -1

    def read_into(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        """Fill pieces of memory, one after the other, from a file's bytes at `offset`."""
        fd, path = self.file(name), self._paths.get(name)
        if path is None:
            path = self._paths[name] = self.path / name  # it takes longer to make than a short range to read
        read_into(fd, path, pieces, offset)

    def _open(self, name: str) -> int:
        path = self.path / check_name(str(self.path), name)
        try:
            fd = self._open_at(name)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: is missing; the checkpoint is not whole") from None
        except OSError as error:
            link = next((one for one in (path.parent, path) if one != self.path and one.is_symlink()), None)
            reason = "is a symbolic link; a checkpoint has none" if link is not None else error.strerror or error
            raise CheckpointError(f"{link or path}: cannot be read: {reason}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointError(f"{path}: is not a regular file")
        except BaseException:
            close_quietly(fd)
            raise
        return fd

    def _open_at(self, name: str) -> int:
        try:
            return self._open_inside(name)
        except OSError as error:
            if error.errno not in _TOO_MANY or not self._files:
                raise
        self._close_files()  # the process has few to spare
        return self._open_inside(name)

    def _open_inside(self, name: str) -> int:
        folder, _, last = name.rpartition("/")
        if not folder:
            return os.open(name, _FILE, dir_fd=self._fd)
        inside = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=self._fd)
        try:
            return os.open(last, _FILE, dir_fd=inside)
        finally:
            close_quietly(inside)
