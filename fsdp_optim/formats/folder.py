"""The folder of a checkpoint: written aside under another name, then renamed; leftovers told from work in progress.

`<path>.saving-<token>` is being written while the process that made it holds the lock on `owner.lock` in it, and is a
leftover else. `<path>.old-<token>` is what was at `path` before, until the new one is there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.files import sync_folder
from fsdp_optim.formats.filesystem import this_host
from fsdp_optim.formats.marker import NAME, Marker, read_marker

LOCK = "owner.lock"
_NEW, _SAVING, _OLD, _GONE = ".new-", ".saving-", ".old-", ".gone-"
_ATTEMPTS, _AGAIN = 10, 0.01  # times, seconds
_DEAD_AFTER = 3600.0  # seconds without a write, where the lock cannot tell
_MOST_HOST_NBYTES = 256
_TOKEN = re.compile("[0-9a-f]{16}")

log = logging.getLogger("fsdp_optim")


@dataclass
class Staging:
    """A folder that is being written. Made by one rank; the others know its path."""

    path: Path
    folder: Path
    overwrite: bool
    lock: int = field(repr=False)

    @classmethod
    def begin(cls, path: Path, *, overwrite: bool) -> Staging:
        """Make the folder. Raises CheckpointError where `path` is taken, or nothing can be written."""
        path = Path(os.path.abspath(path))
        _check_free(path, overwrite=overwrite)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _restore_old(path)
            _remove_leftovers(path)
            _check_free(path, overwrite=overwrite)  # what was aside may be back
            for attempt in range(_ATTEMPTS):
                try:
                    return cls._make(path, overwrite)
                except FileNotFoundError:  # another save took the folder for a leftover, before it had its lock
                    if attempt == _ATTEMPTS - 1:
                        raise
            raise FileNotFoundError(errno.ENOENT, "unreachable")
        except OSError as error:
            raise _failed(path, "cannot be saved", error) from error

    @classmethod
    def _make(cls, path: Path, overwrite: bool) -> Staging:
        """A folder that never has its name without its lock being held."""
        token = secrets.token_hex(8)
        new, folder = (path.with_name(f"{path.name}{mark}{token}") for mark in (_NEW, _SAVING))
        new.mkdir()
        lock = -1
        try:
            (new / LOCK).write_text(this_host(new))  # closed once, so that other machines see it
            lock = os.open(new / LOCK, os.O_RDWR | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a file system without locks: then no leftover is removed there either
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(folder)
        except BaseException:
            if lock >= 0:
                os.close(lock)
            shutil.rmtree(new, ignore_errors=True)
            raise
        return cls(path, folder, overwrite, lock)

    def commit(self, *, durable: bool) -> None:
        """Give the finished folder its name. Another save to the same path may have been faster: then this one raises."""
        old = None
        try:
            _check_free(self.path, overwrite=self.overwrite)
            if durable:
                _sync_folders(self.folder)
            if self.overwrite and os.path.lexists(self.path):
                old = self.path.with_name(f"{self.path.name}{_OLD}{self.folder.name.rsplit('-', 1)[-1]}")
                self.path.rename(old)
            _check_free(self.path, overwrite=False)
            self.folder.rename(self.path)
        except OSError as error:
            if old is not None and not os.path.lexists(self.path):
                with contextlib.suppress(OSError):  # else readers and the next save find it under its other name
                    old.rename(self.path)
            raise _failed(self.path, "cannot be put in place", error) from error
        else:
            with contextlib.suppress(OSError):  # it is there now, whatever happens
                (self.path / LOCK).unlink()  # not before: without it the folder looks like a leftover
                if durable:
                    sync_folder(self.path.parent)
        finally:
            self._unlock()
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """Remove the folder, after a failure."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def _sync_folders(folder: Path) -> None:
    for one in (folder / "extra", folder):
        if one.is_dir():
            sync_folder(one)


def _check_free(path: Path, *, overwrite: bool) -> None:
    if path.is_symlink():
        raise CheckpointError(f"{path}: is a symbolic link: save to the folder that it leads to")
    if not overwrite and _is_empty_folder(path):
        return
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(f"{path}: is there already: save to another path, or say overwrite=True")
    if os.path.lexists(path) and not (path / NAME).exists() and not _is_empty_folder(path):
        raise CheckpointError(f"{path}: is no checkpoint, so it is not overwritten: remove it, or save to another path")


def _is_empty_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not any(path.iterdir())
    except FileNotFoundError:  # it was given another name just now
        return False


def _failed(path: Path, what: str, error: OSError) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    file = next((one for one in path.parents if one.exists() and not one.is_dir()), None)
    if file is not None:
        return CheckpointError(f"{path}: {what}: {file} is a file, not a folder: give another path, or remove the file")
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return CheckpointError(f"{path}: {what}: another save to this path was faster")
    return CheckpointError(f"{path}: {what}: {error.strerror or error}")


def _siblings(path: Path, mark: str) -> Iterator[Path]:
    """Folders beside `path` that a save of it has made."""
    return (folder for folder, base in _aside(path.parent, mark) if base == path)


def _aside(parent: Path, mark: str) -> Iterator[tuple[Path, Path]]:
    """Folders that saves have made in a folder, each with the path that it is of."""
    with contextlib.suppress(OSError):
        for entry in sorted(parent.iterdir()):
            base, found, token = entry.name.rpartition(mark)
            if found and base and _TOKEN.fullmatch(token) and entry.is_dir() and not entry.is_symlink():
                yield entry, parent / base


def _remove_leftovers(path: Path) -> None:
    """Remove what saves that died have left beside `path`: folders whose lock nobody holds, and old ones that are replaced."""
    for mark in (_SAVING, _NEW):
        for folder, _ in _aside(path.parent, mark):
            if not _is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)
    for folder, _ in _aside(path.parent, _GONE):
        shutil.rmtree(folder, ignore_errors=True)
    for folder, base in _aside(path.parent, _OLD):
        if is_complete(base) or not is_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    """Whether the process that writes a folder lives.

    On some cluster file systems a lock is seen on its own host only: of a folder of another one, a free lock says nothing, and
    it counts as dead when nothing in it was written for an hour.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        host = os.read(lock, _MOST_HOST_NBYTES).decode(errors="replace")
    except OSError:
        return True
    finally:
        os.close(lock)
    return host not in ("", this_host(folder)) and time.time() - _last_written(folder) < _DEAD_AFTER


def _last_written(folder: Path) -> float:
    """When something in a folder changed last."""
    times = [0.0]
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):  # it went away meanwhile
            times.append(path.stat().st_mtime)
    return max(times)


def _restore_old(path: Path) -> None:
    """A save that was killed between two renames has left the old checkpoint under another name."""
    if _is_nothing(path):
        for old in _siblings(path, _OLD):
            if is_complete(old):
                old.rename(path)  # over an empty folder too
                return


def _is_nothing(path: Path) -> bool:
    """Whether nothing is lost when a folder is put there."""
    return not os.path.lexists(path) or (not path.is_symlink() and _is_empty_folder(path))


def existing(path: Path) -> Path:
    """Where the checkpoint of a path is: there, or aside where a save was killed between two renames."""
    path = Path(os.path.abspath(path))
    for _ in range(_ATTEMPTS):
        if not _is_nothing(path):
            return path
        for aside in _siblings(path, _OLD):
            if is_complete(aside):
                return aside
        if not any(_siblings(path, _SAVING)):
            break
        time.sleep(_AGAIN)  # it may be just between two names
    return path


def is_complete(folder: Path) -> bool:
    """Whether a folder has a marker that can be read, and all files that it names in their sizes."""
    try:
        return _read_complete(folder) is not None
    except OSError:
        return False


def _read_complete(folder: Path) -> Marker | None:
    """The marker of a folder with all files in their sizes; None where one differs. Raises OSError where one is missing."""
    marker = read_marker(folder)
    whole = all((folder / name).stat().st_size == info.nbytes for name, info in marker.files.items())
    return marker if whole else None


def complete_in(root: Path) -> list[Path]:
    """The complete checkpoints in a folder, the oldest first.

    A listing that is made while a folder is renamed may have neither name of it: it counts when the next one is the same.
    """
    for _ in range(_ATTEMPTS):
        before = _names_of(root)
        found, vanished = _scan(root)
        if not vanished and _names_of(root) == before:
            break
        time.sleep(_AGAIN)
    return [folder for *_, folder in sorted(found)]


def _names_of(root: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return set(os.listdir(root))
    return set()


def _scan(root: Path) -> tuple[list[tuple[int, str, Path]], bool]:
    """Complete checkpoints with their times; and whether a folder went away meanwhile, so that one may be missing."""
    replaced = {folder for folder, base in _aside(root, _OLD) if not _is_nothing(base)}
    unfinished = {folder for mark in (_NEW, _SAVING, _GONE) for folder, _ in _aside(root, mark)}
    found, vanished = [], False
    try:
        entries = [entry for entry in root.iterdir() if entry not in replaced | unfinished]
    except OSError:
        return [], False
    for folder in entries:
        if not folder.is_dir():
            vanished = vanished or not os.path.lexists(folder)
            continue
        try:
            marker = _read_complete(folder)
            if marker is not None:
                found.append((int(marker.said["created_ns"]), folder.name, folder))
        except OSError as error:
            vanished = vanished or not folder.exists()
            if folder.exists() and (folder / NAME).exists():
                log.warning("%s has a marker, and is no checkpoint that can be read: %s", folder, error)
    return found, vanished


def keep_newest(path: Path, number: int) -> None:
    """Remove complete checkpoints of the same model beside `path` that are older than the newest `number`; never `path`."""
    names = set(read_marker(path).said["model"]["params"])
    alike = [folder for folder in complete_in(path.parent) if not folder.is_symlink() and _names_in(folder) == names]
    for folder in alike[:-number]:
        if folder != path:
            gone = folder.with_name(f"{folder.name}{_GONE}{secrets.token_hex(8)}")
            with contextlib.suppress(OSError):
                folder.rename(gone)  # from here on it is no checkpoint, and whoever saves next removes it
            shutil.rmtree(gone, ignore_errors=True)


def _names_in(folder: Path) -> set[str] | None:
    """The names of the parameters of a checkpoint; None where it went away."""
    try:
        return set(read_marker(folder).said["model"]["params"])
    except OSError:
        return None
