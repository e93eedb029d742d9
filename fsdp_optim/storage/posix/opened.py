"""A folder held open, of a checkpoint or of any files: whatever happens to its path, all reads are from what was opened."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fsdp_optim.errors import CheckpointError, wrong_use
from fsdp_optim.storage.base import MOST_DEPTH, MOST_FILES, Opened, check_inside, check_name
from fsdp_optim.storage.posix.files import close_each, close_quietly, read_into

_MOST_OPEN = 64  # files; the least recently used file is closed first
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
ANY_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_FILE = ANY_FILE | os.O_NOFOLLOW  # O_NONBLOCK: opening a pipe would wait
_TOO_MANY = (errno.EMFILE, errno.ENFILE)


class OpenFolder(Opened):
    """A folder and its files. Open files can still be read when another save has removed them. Several threads may read.

    Args:
        path: the folder.
        asked: the path of the checkpoint, if `path` is an earlier checkpoint that a save has renamed.
    """

    def __init__(self, path: Path, *, asked: Path | None = None) -> None:
        self.path = path
        self._asked = asked or path
        self._files: dict[str, int] = {}
        self._readers: dict[str, int] = {}  # how many threads read a file now
        self._lock = threading.RLock()
        self._paths: dict[str, Path] = {}
        try:
            self._fd = os.open(path, _FOLDER)
        except (FileNotFoundError, NotADirectoryError) as error:
            if isinstance(error, NotADirectoryError) and path.is_file():
                raise wrong_use(
                    f"{path}: is a file of an unknown format: a checkpoint of this library is a folder"
                ) from None
            raise wrong_use(f"{path}: there is no such folder, so no checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from None

    @property
    def where(self) -> str:
        return str(self.path)

    def close(self) -> None:
        """Close the folder and its files."""
        self._readers.clear()
        fds, self._files = [*self._files.values(), self._fd], {}
        self._fd = -1
        close_each(fd for fd in fds if fd >= 0)

    @contextmanager
    def held(self) -> Iterator[int]:
        """Yield a descriptor of this folder, for names in it, valid inside the block. Raises OSError where the folder is gone."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            yield fd
        finally:
            close_quietly(fd)

    def _close_files(self, num: int | None = None) -> None:
        """Close the `num` least recently used files of those without a reading thread; None: all of them."""
        idle = [name for name in self._files if name not in self._readers]
        close_each([self._files.pop(name) for name in idle[:num]])

    def _stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """Return whether a file or anything else has this name; True where the system cannot tell."""
        try:
            self._stat(name)
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR)  # a read of the file reports the problem
        return True

    def version_of(self, name: str) -> tuple[int, ...] | None:
        """Return numbers that change when the file is written again or replaced. None: the file is gone."""
        try:
            status = self._stat(name)
        except OSError:
            return None
        return (status.st_ino, status.st_size, status.st_mtime_ns)

    def was_replaced(self) -> bool:
        """Return whether the path of the checkpoint leads to another folder by now, or the folder has lost its name."""
        try:
            held = os.fstat(self._fd)
        except OSError:  # a network file system has forgotten a folder that another machine has removed
            return True
        for path in (self._asked, self.path):
            try:
                now = os.stat(path)
            except FileNotFoundError:
                continue  # an earlier checkpoint that was renamed is current until another takes its place
            except OSError:
                return True
            return (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino)
        return True

    def file(self, name: str) -> int:
        """Return a file descriptor of a regular file, valid until the next call of `file`. Symbolic links are refused."""
        with self._lock:
            fd = self._files.pop(name, None)
            if fd is None:
                if len(self._files) >= _MOST_OPEN:
                    self._close_files(len(self._files) - _MOST_OPEN + 1)
                fd = self._open(name)
            self._files[name] = fd
            return fd

    def size_of(self, name: str) -> int:
        """Return the size of a file in bytes."""
        with self._lock:
            return os.fstat(self.file(name)).st_size

    def nbytes_of(self, name: str) -> int:
        """Return the size of a file in bytes, without opening the file; -1 for anything but a regular file."""
        try:
            status = self._stat(name)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path / name}: is missing; the checkpoint is incomplete") from None
        except OSError as error:
            raise CheckpointError(f"{self.path / name}: cannot be read: {error.strerror or error}") from error
        return status.st_size if stat.S_ISREG(status.st_mode) else -1

    def read_into(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        """Fill pieces of memory, one after the other, from a file from byte `offset` on."""
        with self._lock:
            fd, path = self.file(name), self._paths.get(name)
            self._readers[name] = self._readers.get(name, 0) + 1
        try:
            if path is None:
                path = self._paths[name] = self.path / name  # making a Path takes longer than reading a short range
            read_into(fd, path, pieces, offset)
        finally:
            with self._lock:
                self._readers[name] -= 1
                if not self._readers[name]:
                    del self._readers[name]

    def _open(self, name: str) -> int:
        path = self.path / self._checked(name)
        try:
            fd = self._open_at(name)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: is missing; the checkpoint is incomplete") from None
        except OSError as error:
            link = next((part for part in (path.parent, path) if part != self.path and part.is_symlink()), None)
            reason = (
                "is a symbolic link, and checkpoints have no links: replace the link by the file"
                if link is not None
                else error.strerror or error
            )
            raise CheckpointError(f"{link or path}: cannot be read: {reason}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointError(f"{path}: is not a regular file")
        except BaseException:
            close_quietly(fd)
            raise
        return fd

    def _checked(self, name: str) -> str:
        return check_name(str(self.path), name)

    def _open_at(self, name: str) -> int:
        try:
            return self._open_inside(name)
        except OSError as error:
            if error.errno not in _TOO_MANY or not self._files:
                raise
        self._close_files()  # the process has no free file descriptors
        return self._open_inside(name)

    def _open_inside(self, name: str) -> int:
        *folders, last = name.split("/")
        inside: list[int] = []
        try:
            for folder in folders:  # one after the other, because only the last part of a path is checked for a link
                at = inside[-1] if inside else self._fd
                inside.append(os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=at))
            return os.open(last, _FILE, dir_fd=inside[-1] if inside else self._fd)
        finally:
            close_each(inside)


class OpenFiles(OpenFolder):
    """The files of a folder, or one file of it, as `Store.open_any` opens them."""

    is_any = True

    def __init__(self, path: Path, selected: str = "") -> None:
        super().__init__(path)
        self.selected = selected
        self._names: list[str] | None = None

    @classmethod
    def at(cls, path: Path) -> OpenFiles:
        """Return the folder at a path; the folder of the file at a path, or of files whose names begin like the path."""
        try:
            is_file = stat.S_ISREG(os.stat(path).st_mode)
        except OSError:
            stem = f"{path.stem}-"
            is_file = any(name.startswith(stem) and name.endswith(path.suffix) for name in _listed(path.parent))
        return cls(path.parent, path.name) if is_file else cls(path)

    @property
    def where(self) -> str:
        return str(self.path / self.selected) if self.selected else str(self.path)

    def named(self, name: str) -> str:
        return f"{self.path}/{name}"

    def names(self) -> list[str]:
        if self._names is None:
            try:
                self._names = sorted(self._walk())
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be listed: {error.strerror or error}") from error
        return self._names

    def _walk(self) -> Iterator[str]:
        num = 0
        for folder, folders, files in os.walk(self.path):
            inside = Path(folder).relative_to(self.path)
            if len(inside.parts) >= MOST_DEPTH:
                folders.clear()
            num += len(files)
            if num > MOST_FILES:
                raise CheckpointError(
                    f"{self.path}: has more than {MOST_FILES} files: give the folder of one checkpoint"
                )
            yield from (str(inside / file) for file in files)

    def was_replaced(self) -> bool:
        return False

    def _stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._fd)

    def _checked(self, name: str) -> str:
        return check_inside(str(self.path), name)

    def _open_inside(self, name: str) -> int:
        return os.open(name, ANY_FILE, dir_fd=self._fd)


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
