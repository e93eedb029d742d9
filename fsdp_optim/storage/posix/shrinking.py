"""Changes of a checkpoint in a folder: it gets a small file beside its own, or loses some of its files.

Before files go, a new manifest without them takes the place of the old one.

# killed before the rename  | the complete checkpoint, and a file <manifest>.new-<token>, which the next call removes
# killed after the rename   | the checkpoint without these files; the next call removes those that are left

All names are looked up in the folder that was opened, so that another save may take its path meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.posix.files import close_quietly, sync_open_folder, write_all

_NEW = ".new-"  # after the name of a manifest; is_reserved() of storage/base knows such names
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def shrink_folder(path: Path, folder: int, manifest: str, data: bytes | None, names: Sequence[str]) -> int:
    """Replace the manifest, then remove files; return the bytes of the removed files.

    `path`: the name of the folder, for errors; `folder`: its descriptor. `data` None: the manifest was replaced before.

    Raises OSError.
    """
    _remove_leftovers(folder, manifest)
    if data is not None:
        replace_file(path, folder, manifest, data)
    # The new manifest is on the disk before a file goes: after a power cut the old one would name files that are gone.
    sync_open_folder(folder)
    freed = sum(_removed(path, folder, name) for name in names)
    if freed:
        sync_open_folder(folder)
    return freed


def _remove_leftovers(folder: int, name: str) -> None:
    """Remove what killed calls of `replace_file` have left."""
    for other in os.listdir(folder):
        if other.startswith(f"{name}{_NEW}"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(other, dir_fd=folder)


def attach_file(path: Path, folder: int, name: str, data: bytes) -> None:
    """Put a file into a folder, in place of an earlier one. Raises OSError."""
    _remove_leftovers(folder, name)
    replace_file(path, folder, name, data)
    sync_open_folder(folder)


def replace_file(path: Path, folder: int, name: str, data: bytes) -> None:
    """Give a file new content, at once."""
    new = f"{name}{_NEW}{secrets.token_hex(8)}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        try:
            write_all(fd, path / new, [memoryview(data)], 0)
            os.fsync(fd)
        finally:
            os.close(fd)  # some file systems report a full disk only here
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise


def _removed(path: Path, folder: int, name: str) -> int:
    """Remove a file; return its bytes, or 0 where it is gone already. A folder that is a symbolic link is not followed."""
    parent, _, last = name.rpartition("/")
    try:
        inside = os.open(parent or ".", _FOLDER | (os.O_NOFOLLOW if parent else 0), dir_fd=folder)
    except FileNotFoundError:
        return 0
    try:
        status = os.stat(last, dir_fd=inside, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path / name}: is not a regular file, so it is not removed")
        os.unlink(last, dir_fd=inside)
        return status.st_size
    except FileNotFoundError:
        return 0
    finally:
        close_quietly(inside)
