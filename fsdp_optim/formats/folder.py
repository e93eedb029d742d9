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
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.files import close_quietly, remove_tree, sync_folder
from fsdp_optim.formats.filesystem import this_host
from fsdp_optim.formats.marker import NAME
from fsdp_optim.formats.standing import Standing, is_there, standing_of, token_of
from fsdp_optim.formats.strangers import carry_over, strangers_in

LOCK = "owner.lock"
_NEW, _SAVING, OLD, _GONE = ".new-", ".saving-", ".old-", ".gone-"
UNFINISHED = (_NEW, _SAVING, _GONE)
_ATTEMPTS, _AGAIN = 10, 0.01  # times, seconds
_DEAD_AFTER = 3600.0  # seconds without a write, where the lock cannot tell
_MOST_HOST_NBYTES = 256
_TOKEN = re.compile("[0-9a-f]{16}")

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class _Seen:
    """What was at a path: by its save's token or, where that cannot be read, by its inode."""

    inode: tuple[int, int]
    token: str | None

    @classmethod
    def at(cls, path: Path) -> _Seen | None:
        if not is_there(path):
            return None
        found = os.lstat(path)
        return cls((found.st_dev, found.st_ino), token_of(path))

    def is_same(self, other: _Seen | None) -> bool:
        if other is None or self.token is None or other.token is None:
            return other is not None and self.inode == other.inode
        return self.token == other.token


@dataclass
class Staging:
    """A folder that is being written. Made by one rank; the others know its path."""

    path: Path
    folder: Path
    overwrite: bool
    lock: int = field(repr=False)
    before: _Seen | None = None  # what was at the path when this save began

    @classmethod
    def begin(cls, path: Path, *, overwrite: bool, durable: bool = True) -> Staging:
        """Make the folder. Raises CheckpointError where `path` is taken, or nothing can be written."""
        path = Path(os.path.abspath(path))
        try:
            _check_free(path, overwrite=overwrite)
            _make_parents(path.parent, durable=durable)
            _restore_old(path, overwrite=overwrite)
            _remove_leftovers(path)
            _check_free(path, overwrite=overwrite)  # what was aside may be back
            before = _Seen.at(path)
            for attempt in range(_ATTEMPTS):
                try:
                    return cls._make(path, overwrite, before)
                except FileNotFoundError:  # another save took the folder for a leftover, before it had its lock
                    if attempt == _ATTEMPTS - 1:
                        raise
            raise FileNotFoundError(errno.ENOENT, "unreachable")
        except OSError as error:
            raise _failed(path, "cannot be saved", error) from None

    @classmethod
    def _make(cls, path: Path, overwrite: bool, before: _Seen | None) -> Staging:
        """A folder that never has its name without its lock being held."""
        token = secrets.token_hex(8)
        new, folder = (path.with_name(f"{path.name}{mark}{token}") for mark in (_NEW, _SAVING))
        new.mkdir()
        lock = -1
        try:
            (new / LOCK).write_text(this_host(new))  # closed once, so that other machines see it
            lock = os.open(new / LOCK, os.O_RDWR | os.O_CLOEXEC)
            _hold(lock)
            new.rename(folder)  # fails where another save has just removed it
        except BaseException:
            if lock >= 0:
                close_quietly(lock)
            remove_tree(new)
            raise
        return cls(path, folder, overwrite, lock, before)

    @property
    def replaces(self) -> bool:
        """Whether something that was saved before goes when this is put in its place."""
        return self.overwrite and self.before is not None

    def commit(self, *, durable: bool) -> None:
        """Give the finished folder its name, and remove what was there.

        Raises CheckpointError where another save to the same path was faster, or where the new name cannot be made durable: then
        what was there is kept aside.
        """
        old = self._put_in_place(durable=durable)
        if durable:
            try:
                sync_folder(self.path.parent)
            except OSError as error:
                kept = f"; what was there before is kept as {old}" if old is not None else ""
                reason = error.strerror or error
                raise CheckpointError(
                    f"{self.path}: is written, but its name could not be made durable: {reason}{kept}"
                ) from error
        if old is not None:
            remove_tree(old)

    def _put_in_place(self, *, durable: bool) -> Path | None:
        """Rename the folder. Where what was at the path is now."""
        old = None
        try:
            _check_free(self.path, overwrite=self.overwrite)
            self._carry_over()
            if durable:
                _sync_folders(self.folder)
            if self.overwrite and is_there(self.path):
                old = self.path.with_name(f"{self.path.name}{OLD}{self.folder.name.rsplit('-', 1)[-1]}")
                self.path.rename(old)
                if self.before is None or not self.before.is_same(_Seen.at(old)):
                    raise _overtaken(self.path, "cannot be put in place")
            _check_free(self.path, overwrite=False)
            self.folder.rename(self.path)
        except OSError as error:
            if old is not None and not os.path.lexists(self.path):
                with contextlib.suppress(OSError):  # else readers and the next save find it under its other name
                    old.rename(self.path)
            raise _failed(self.path, "cannot be put in place", error) from None
        else:
            with contextlib.suppress(OSError):  # it is there now, whatever happens
                (self.path / LOCK).unlink()  # not before: without it the folder looks like a leftover
        finally:
            self._unlock()
        return old

    def _carry_over(self) -> None:
        """What somebody has put into the folder that is replaced stays."""
        if not self.overwrite or is_nothing(self.path):
            return
        strangers = strangers_in(self.path, LOCK)
        if strangers:
            carry_over(self.path, self.folder, strangers)
            log.info("%s: carried over to the new checkpoint: %s", self.path, ", ".join(strangers))

    def abandon(self) -> None:
        """Remove the folder, after a failure."""
        remove_tree(self.folder)
        self._unlock()

    def _unlock(self) -> None:
        lock, self.lock = self.lock, -1
        if lock >= 0:
            close_quietly(lock)


def _hold(lock: int) -> None:
    """Take the lock of a new folder. A save that looks for leftovers may hold it for a moment."""
    for _ in range(_ATTEMPTS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_AGAIN)
        except OSError:
            return  # a file system without locks: no leftover is removed there either
        else:
            return
    raise FileNotFoundError(errno.ENOENT, "another save took the new folder for a leftover")


def _make_parents(folder: Path, *, durable: bool) -> None:
    """Make the folders that lead to a checkpoint. Each new name is on the disk before anything is written below it."""
    missing = []
    while not is_there(folder):
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        try:
            sync_folder(one.parent)
        except OSError:
            if durable:
                raise


def _sync_folders(folder: Path) -> None:
    for one in (folder / "extra", folder):
        if one.is_dir():
            sync_folder(one)


def _check_free(path: Path, *, overwrite: bool) -> None:
    if path.is_symlink():
        raise CheckpointError(f"{path}: is a symbolic link: save to the folder that it leads to")
    if not is_there(path) or _is_empty_folder(path):
        return
    if not overwrite:
        raise CheckpointError(f"{path}: is there already: save to another path, or say overwrite=True")
    if not is_there(path / NAME):
        raise CheckpointError(f"{path}: is no checkpoint, so it is not overwritten: remove it, or save to another path")


def _is_empty_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not any(path.iterdir())
    except FileNotFoundError:  # it was given another name just now
        return False


def _failed(path: Path, what: str, error: OSError) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    file = next((one for one in path.parents if _is_file(one)), None)
    if file is not None:
        return CheckpointError(f"{path}: {what}: {file} is a file, not a folder: give another path, or remove the file")
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return _overtaken(path, what)
    return CheckpointError(f"{path}: {what}: {error.strerror or error}")


def _is_file(path: Path) -> bool:
    """Whether something else than a folder is there, as far as that can be told."""
    with contextlib.suppress(OSError):
        return not stat.S_ISDIR(os.stat(path).st_mode)
    return False


def _overtaken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {what}: another save to this path was faster. Where it is a save of the same job, its ranks do not know that "
        "they belong together: tell them with process_group=, or give each a path of its own"
    )


def _siblings(path: Path, mark: str) -> Iterator[Path]:
    """Folders beside `path` that a save of it has made."""
    return (folder for folder, base in aside(path.parent, mark) if base == path)


def aside(parent: Path, mark: str) -> Iterator[tuple[Path, Path]]:
    """Folders that saves have made in a folder, each with the path that it is of.

    Raises CheckpointError where the folder cannot be listed; one that may be entered only has nothing that is known.
    """
    try:
        entries = sorted(parent.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except OSError as error:
        raise CheckpointError(f"{parent}: cannot be listed: {error.strerror or error}") from None
    for entry in entries:
        base, found, token = entry.name.rpartition(mark)
        if found and base and _TOKEN.fullmatch(token) and _may_be_folder(entry):
            yield entry, parent / base


def _may_be_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError as error:
        return error.errno != errno.ENOENT


def new_gone(folder: Path) -> Path:
    """A name under which a folder is no checkpoint any more, and is removed by the next save at the latest."""
    return folder.with_name(f"{folder.name}{_GONE}{secrets.token_hex(8)}")


def remove_gone(folders: Sequence[Path]) -> None:
    """Remove folders that are called as `new_gone` says, when that name is on the disk.

    After a power cut one would else be there under its old name again, with a marker and without some of its files.
    """
    if not folders:
        return
    try:
        sync_folder(folders[0].parent)
    except OSError as error:
        log.warning("%s is not removed yet: its new name is not on the disk: %s", folders[0], error.strerror or error)
        return
    for folder in folders:
        remove_tree(folder)


def _remove_leftovers(path: Path) -> None:
    """Remove what saves that died have left beside `path`: folders whose lock nobody holds, and old ones that are replaced."""
    remove_gone([folder for folder, _ in aside(path.parent, _GONE)])
    for mark in UNFINISHED:
        for folder, base in aside(path.parent, mark):
            if mark != _GONE and not _is_held(folder):
                _remove_leftover(folder, base)
    for folder, base in aside(path.parent, OLD):
        if _is_replaced(folder, base):
            _remove_leftover(folder, base)


def _remove_leftover(folder: Path, base: Path) -> None:
    """Remove a folder under another name, so that its own save, should it have begun just now, finds it gone as a whole."""
    gone = new_gone(base)
    try:
        folder.rename(gone)
    except OSError:
        return  # its save, or another one, was faster
    log.info("removed %s, which a save that died had left", folder)
    remove_tree(gone)


def _is_replaced(folder: Path, base: Path) -> bool:
    """Whether what was at `base` is needed no more: what is there now is known to be complete, and on the disk; or half of it
    has been removed already. What cannot be told just now is no reason to remove the only copy.
    """
    standing = standing_of(folder)
    if standing.is_sure and not standing.has_marker:
        return True
    if not standing_of(base).is_complete:
        return False
    try:
        sync_folder(base.parent)
    except OSError:
        return False
    return True


def _is_held(folder: Path) -> bool:
    """Whether the process that writes a folder lives.

    On some cluster file systems a lock is seen on its own host only: of a folder of another one, a free lock says nothing, and
    it counts as dead when nothing in it was written for an hour. What is no regular file was made by somebody else.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            return True
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        host = os.read(lock, _MOST_HOST_NBYTES).decode(errors="replace")
    except OSError:
        return True
    finally:
        close_quietly(lock)
    return host not in ("", this_host(folder)) and time.time() - _last_written(folder) < _DEAD_AFTER


def _last_written(folder: Path) -> float:
    """When something in a folder changed last."""
    times = [0.0]
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):  # it went away meanwhile
            times.append(path.stat().st_mtime)
    return max(times)


def _restore_old(path: Path, *, overwrite: bool) -> None:
    """A save that was killed between two renames has left the old checkpoint under another name."""
    if not is_nothing(path):
        return
    old, standing = _old_of(path)
    if old is None or standing is None:
        return
    if standing.is_complete:
        old.rename(path)  # over an empty folder too
    elif not overwrite:
        raise CheckpointError(
            f"{path}: {old} may be its checkpoint, which a save that died has left aside, and cannot be read just now: "
            f"{standing.reason}; save to another path, or say overwrite=True"
        )


def _old_of(path: Path) -> tuple[Path, Standing] | tuple[None, None]:
    """The folder that a save of a path has put aside: the newest complete one, else one that may be complete."""
    found = [(old, standing_of(old)) for old in _siblings(path, OLD)]
    complete = [(standing.brief.order, old, standing) for old, standing in found if standing.brief is not None]
    if complete:
        _, old, standing = max(complete, key=lambda one: one[0])
        return old, standing
    return next(((old, standing) for old, standing in found if not standing.is_sure), (None, None))


def is_nothing(path: Path) -> bool:
    """Whether nothing is lost when a folder is put there. What cannot be looked at is something."""
    try:
        return not is_there(path) or (not path.is_symlink() and _is_empty_folder(path))
    except OSError:
        return False


def existing(path: Path) -> Path:
    """Where the checkpoint of a path is: there, or aside where a save was killed between two renames."""
    path = Path(os.path.abspath(path))
    for _ in range(_ATTEMPTS):
        if not is_nothing(path):
            return path
        old, _ = _old_of(path)
        if old is not None:  # where it cannot be read, who reads it says why
            return old
        if not any(_siblings(path, _SAVING)):
            break
        time.sleep(_AGAIN)  # it may be just between two names
    return path
