"""The folder of a save under way: written aside under another name, then renamed to its own."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Can, Judge, Staging
from fsdp_optim.storage.posix.files import close_quietly, make_file, remove_tree, sync_file, sync_folder, write_file
from fsdp_optim.storage.posix.filesystem import WRITTEN_IN_PLACE, has_sparse_files, kind_of, this_host
from fsdp_optim.storage.posix.leftovers import LOCK, NEW, OLD, SAVING, remove_leftovers, restore_old
from fsdp_optim.storage.posix.looks import is_empty_folder, is_nothing, is_there, token_of
from fsdp_optim.storage.posix.strangers import carry_over, strangers_in

_ATTEMPTS, _AGAIN = 10, 0.01  # times, seconds

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class _Seen:
    """What was at a path: by its save's token or, where that cannot be read, by its inode."""

    inode: tuple[int, int]
    token: str | None

    @classmethod
    def at(cls, path: Path, judge: Judge[Any]) -> _Seen | None:
        if not is_there(path):
            return None
        found = os.lstat(path)
        return cls((found.st_dev, found.st_ino), token_of(path, judge))

    def is_same(self, other: _Seen | None) -> bool:
        if other is None or self.token is None or other.token is None:
            return other is not None and self.inode == other.inode
        return self.token == other.token


@dataclass
class FolderStaging(Staging):
    """A folder that is being written. Made by one process; the others know its path."""

    path: Path
    folder: Path
    judge: Judge[Any] = field(repr=False)
    overwrite: bool
    lock: int = field(repr=False)
    before: _Seen | None = None  # what was at the path when this save began

    @classmethod
    def begin(cls, path: Path, judge: Judge[Any], *, overwrite: bool, durable: bool = True) -> FolderStaging:
        """Make the folder. Raises CheckpointError where `path` is taken, or nothing can be written."""
        path = Path(os.path.abspath(path))
        try:
            _check_free(path, judge, overwrite=overwrite)
            _make_parents(path.parent, durable=durable)
            restore_old(path, judge, overwrite=overwrite)
            remove_leftovers(path, judge)
            _check_free(path, judge, overwrite=overwrite)  # what was aside may be back
            before = _Seen.at(path, judge)
            for attempt in range(_ATTEMPTS):
                try:
                    return cls._make(path, judge, overwrite, before)
                except FileNotFoundError:  # another save took the folder for a leftover, before it had its lock
                    if attempt == _ATTEMPTS - 1:
                        raise
            raise FileNotFoundError(errno.ENOENT, "unreachable")
        except OSError as error:
            raise _failed(path, "cannot be saved", error) from None

    @classmethod
    def _make(cls, path: Path, judge: Judge[Any], overwrite: bool, before: _Seen | None) -> FolderStaging:
        """A folder that never has its name without its lock being held."""
        token = secrets.token_hex(8)
        new, folder = (path.with_name(f"{path.name}{mark}{token}") for mark in (NEW, SAVING))
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
        return cls(path, folder, judge, overwrite, lock, before)

    @property
    def replaces(self) -> bool:
        """Whether something that was saved before goes when this is put in its place."""
        return self.overwrite and self.before is not None

    @property
    def address(self) -> str:
        return str(self.folder)

    @property
    def token(self) -> str:
        return self.folder.name

    @cached_property
    def can(self) -> Can:
        """What the file system can do, tried and looked up.

        Where files are not sparse, making a whole one writes it once for nothing: then each process writes files of its own.
        """
        if not has_sparse_files(self.folder):
            return Can("no")
        return Can("anywhere" if kind_of(self.folder) in WRITTEN_IN_PLACE else "on one machine")

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        make_file(self.folder, name, nbytes, head)

    def seal(self, names: Sequence[str], receipts: Sequence[bytes], *, durable: bool) -> None:
        if durable:  # also those into which nobody had anything to write
            for name in names:
                sync_file(self.folder / name)

    def put(self, name: str, data: bytes, *, durable: bool) -> None:
        write_file(self.folder / name, data, durable=durable)

    def commit(self, manifest: str, data: bytes, *, durable: bool) -> None:
        self.put(manifest, data, durable=durable)
        self.take_place(durable=durable)

    def take_place(self, *, durable: bool) -> None:
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
            _check_free(self.path, self.judge, overwrite=self.overwrite)
            self._carry_over()
            if durable:
                _sync_folders(self.folder)
            if self.overwrite and is_there(self.path):
                old = self.path.with_name(f"{self.path.name}{OLD}{self.folder.name.rsplit('-', 1)[-1]}")
                self.path.rename(old)
                if self.before is None or not self.before.is_same(_Seen.at(old, self.judge)):
                    raise _overtaken(self.path, "cannot be put in place")
            _check_free(self.path, self.judge, overwrite=False)
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
        strangers = strangers_in(self.path, LOCK, self.judge)
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


def _check_free(path: Path, judge: Judge[Any], *, overwrite: bool) -> None:
    if path.is_symlink():
        raise CheckpointError(f"{path}: is a symbolic link: save to the folder that it leads to")
    if not is_there(path) or is_empty_folder(path):
        return
    if not overwrite:
        raise CheckpointError(f"{path}: is there already: save to another path, or say overwrite=True")
    if not is_there(path / judge.manifest):
        raise CheckpointError(f"{path}: is no checkpoint, so it is not overwritten: remove it, or save to another path")


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
