"""The folder of a save under way, which is written under another name and renamed at the end."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import (
    Capabilities,
    CheckpointProbe,
    Staging,
)
from fsdp_optim.storage.posix.claim import LOCK, claim
from fsdp_optim.storage.posix.files import (
    close_quietly,
    make_file,
    path_inside,
    remove_tree,
    sync_file,
    sync_folder,
    write_file,
)
from fsdp_optim.storage.posix.filesystem import WRITTEN_IN_PLACE, filesystem_type, has_sparse_files
from fsdp_optim.storage.posix.filling import Filling
from fsdp_optim.storage.posix.leftovers import (
    NEW,
    OLD,
    SAVING,
    give_up,
    remove_leftovers,
    restore_old,
)
from fsdp_optim.storage.posix.path_status import (
    check_free,
    check_name,
    is_empty_folder,
    is_nothing,
    is_there,
    may_be_there,
    token_of,
)
from fsdp_optim.storage.posix.strangers import carry_over, strangers_in

_ATTEMPTS = 10  # times
_EXTRA = "extra"  # the folder of small files, which is removed where a save has written none
_REFUSALS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class _FolderIdentity:
    """The identity of a folder: the token of its save or, where the token cannot be read, its inode."""

    inode: tuple[int, int]
    token: str | None

    @classmethod
    def at(cls, path: Path, probe: CheckpointProbe[Any]) -> _FolderIdentity | None:
        if not is_there(path):
            return None
        status = os.lstat(path)
        return cls((status.st_dev, status.st_ino), token_of(path, probe))

    def is_same(self, other: _FolderIdentity | None) -> bool:
        if other is None or self.token is None or other.token is None:
            return other is not None and self.inode == other.inode
        return self.token == other.token


@dataclass
class FolderStaging(Staging):
    """A folder that is being written. One process creates the folder; the other processes get its path."""

    path: Path
    folder: Path
    probe: CheckpointProbe[Any] = field(repr=False)
    overwrite: bool
    lock: int = field(repr=False)
    before: _FolderIdentity | None = None  # the folder at the path when this save began
    filling: Filling | None = None  # files of a trainer that the checkpoint gets too
    made: set[str] = field(default_factory=set)  # the files that this process has created

    @classmethod
    def begin(
        cls,
        path: Path,
        probe: CheckpointProbe[Any],
        *,
        overwrite: bool,
        durable: bool = True,
        filling: Filling | None = None,
    ) -> FolderStaging:
        """Create the folder. Raises CheckpointError where `path` is taken, or nothing can be written."""
        path = Path(os.path.abspath(path))
        check_name(path)
        filled = filling is not None
        try:
            check_free(path, probe, overwrite=overwrite, filled=filled)
            _make_parents(path.parent, durable=durable)
            restore_old(path, probe, overwrite=overwrite)
            remove_leftovers(path, probe)
            # Checked again: restore_old may have brought a checkpoint back.
            check_free(path, probe, overwrite=overwrite, filled=filled)
            before = _FolderIdentity.at(path, probe)
            for attempt in range(_ATTEMPTS):
                try:
                    return cls._make(path, probe, overwrite, before, filling)
                except FileNotFoundError:  # another save took the unlocked folder for a leftover
                    if attempt == _ATTEMPTS - 1:
                        raise
            raise FileNotFoundError(errno.ENOENT, "unreachable")
        except OSError as error:
            raise _failed(path, "cannot be saved", error) from None

    @classmethod
    def _make(
        cls,
        path: Path,
        probe: CheckpointProbe[Any],
        overwrite: bool,
        before: _FolderIdentity | None,
        filling: Filling | None,
    ) -> FolderStaging:
        """Create the folder and hold its lock before the folder gets its name."""
        token = secrets.token_hex(8)
        new, folder = (path.with_name(f"{path.name}{mark}{token}") for mark in (NEW, SAVING))
        new.mkdir()
        lock = -1
        try:
            with _with_alternative(path):
                lock = claim(new)
                new.rename(folder)  # fails where another save has just removed it
        except BaseException:
            if lock >= 0:
                close_quietly(lock)
            remove_tree(new)
            raise
        return cls(
            path=path, folder=folder, probe=probe, overwrite=overwrite, lock=lock, before=before, filling=filling
        )

    @property
    def replaces(self) -> bool:
        """Whether `commit` removes an earlier checkpoint."""
        return self.overwrite and self.before is not None

    @property
    def address(self) -> str:
        return str(self.folder)

    @property
    def token(self) -> str:
        return os.fsencode(self.folder.name).decode(errors="backslashreplace")  # for the manifest, which is UTF-8

    @cached_property
    def capabilities(self) -> Capabilities:
        """The abilities of the file system, found by a trial and by its name.

        Where files are not sparse, creating a file in its full length writes all its bytes once too often: there each process
        writes files of its own.
        """
        if not has_sparse_files(self.folder):
            return Capabilities("no")
        return Capabilities("anywhere" if filesystem_type(self.folder) in WRITTEN_IN_PLACE else "on one machine")

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        make_file(self.folder, name, nbytes, head)
        self.made.add(name)

    def seal(self, names: Sequence[str], receipts: Sequence[bytes], *, durable: bool) -> None:
        if durable:  # also files into which no process wrote; other processes have flushed their own files
            for name in names:
                if name in self.made:
                    sync_file(self.folder / name)

    def put(self, name: str, data: bytes, *, durable: bool) -> None:
        write_file(path_inside(self.folder, name), data, durable=durable)

    def commit(self, manifest: str, data: bytes, *, durable: bool) -> None:
        self.put(manifest, data, durable=durable)
        self.take_place(durable=durable)

    def take_place(self, *, durable: bool) -> None:
        """Give the finished folder its name, and remove the earlier checkpoint.

        Raises CheckpointError where another save to the same path was faster, or where the new name cannot be made durable; in
        the latter case the earlier checkpoint is kept under another name.
        """
        old = self._put_in_place(durable=durable)
        if durable:
            try:
                sync_folder(self.path.parent)
            except OSError as error:
                kept = f"; the earlier checkpoint is kept as {old}" if old is not None else ""
                reason = error.strerror or error
                raise CheckpointError(
                    f"{self.path}: was written, but its name could not be made durable: {reason}{kept}"
                ) from error
        if old is not None:
            remove_tree(old)
            self._warn_of_kept(old)
        if self.filling is not None:
            self.filling.remove()

    def _put_in_place(self, *, durable: bool) -> Path | None:
        """Rename the folder; return the new path of the earlier checkpoint, or None if there was none."""
        old = None
        try:
            check_free(self.path, self.probe, overwrite=self.overwrite, filled=self.filling is not None)
            if self.filling is not None:
                self.filling.carry_into(self.folder, self.probe, durable=durable)
            else:
                self._carry_over()
            with contextlib.suppress(OSError):  # the folder has files
                (self.folder / _EXTRA).rmdir()
            if durable:
                _sync_folders(self.folder)
            if self.overwrite and is_there(self.path):
                old = self.path.with_name(f"{self.path.name}{OLD}{self.folder.name.rsplit('-', 1)[-1]}")
                self.path.rename(old)
                # Checked after the rename, because another save may have taken the path since `before` was read.
                if self.filling is not None and self.filling.is_trainers(old, self.probe):
                    self.filling.carry_from(old, self.folder, self.probe)  # files that were put there meanwhile
                elif self.before is None or not self.before.is_same(_FolderIdentity.at(old, self.probe)):
                    raise _overtaken(self.path, "cannot be put in place")
            if is_there(self.path) and not is_empty_folder(self.path):  # it was free a moment ago
                raise _overtaken(self.path, "cannot be put in place")
            self.folder.rename(self.path)
        except OSError as error:
            if old is not None and not os.path.lexists(self.path):
                # If this rename fails too, readers and the next save find the checkpoint under its other name.
                with contextlib.suppress(OSError):
                    old.rename(self.path)
            raise _failed(self.path, "cannot be put in place", error) from None
        finally:
            self._unlock()
        # The claim goes last: without it the folder would look like a leftover. It is closed by now, or NFS would keep a copy.
        with contextlib.suppress(OSError):  # the checkpoint is complete, even if the file stays
            (self.path / LOCK).unlink()
        return old

    def _warn_of_kept(self, old: Path) -> None:
        """Warn where the replaced folder is still there, because it is another account's."""
        if may_be_there(old) and not os.access(old, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            log.warning("%s was replaced, and is kept as %s, which this user may not remove", self.path, old)

    def _carry_over(self) -> None:
        """Carry foreign files of the replaced folder over to the new folder; files that this user may not read stay behind."""
        if not self.overwrite or is_nothing(self.path):
            return
        try:
            strangers = strangers_in(self.path, LOCK, self.probe)
        except PermissionError:
            return
        if strangers:
            carry_over(self.path, self.folder, strangers)
            log.info("%s: carried over to the new checkpoint: %s", self.path, ", ".join(strangers))

    def abandon(self, *, late: bool = False) -> None:
        """Remove the folder, after a failure. Raises nothing. No process can create a file in a removed folder (`late`)."""
        gone = give_up(self.folder)
        self._unlock()  # before the removal: NFS keeps a copy of an open file, and so the folder
        remove_tree(gone or self.folder)
        if self.filling is not None:
            self.filling.remove()

    def _unlock(self) -> None:
        lock, self.lock = self.lock, -1
        if lock >= 0:
            close_quietly(lock)


@contextlib.contextmanager
def _with_alternative(path: Path) -> Iterator[None]:
    """Name another way to save, where a file system takes new files only: in user space over a bucket, or over HDFS."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        raise CheckpointError(
            f"{path}: cannot be saved: this file system does not let files be renamed, extended, or opened for writing again "
            f"({error.strerror or error}): save to file://{path}, which writes each file once, from beginning to end"
        ) from error


def _make_parents(folder: Path, *, durable: bool) -> None:
    """Create the folders that lead to a checkpoint. Each new name is on the disk before anything is written below it."""
    missing = []
    while not is_there(folder):
        missing.append(folder)
        folder = folder.parent
    for parent in reversed(missing):
        parent.mkdir(exist_ok=True)
        try:
            sync_folder(parent.parent)
        except OSError:
            if durable:
                raise


def _sync_folders(folder: Path) -> None:
    for written, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(written))


def _failed(path: Path, failure: str, error: OSError) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    file = next((parent for parent in path.parents if _is_file(parent)), None)
    if file is not None:
        return CheckpointError(
            f"{path}: {failure}: {file} is a file, not a folder: give another path, or remove the file"
        )
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return _overtaken(path, failure)
    return CheckpointError(f"{path}: {failure}: {error.strerror or error}")


def _is_file(path: Path) -> bool:
    """Return whether the path is something other than a folder; False where the system cannot tell."""
    with contextlib.suppress(OSError):
        return not stat.S_ISDIR(os.stat(path).st_mode)
    return False


def _overtaken(path: Path, failure: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {failure}: another save to this path was faster. If both saves are of one job, its ranks do not know that they "
        "belong together: give process_group= with all of them, or give each save a path of its own"
    )
