"""Small files of a trainer: written completely or not at all, and looked for.

A look that fails is an error, and does not mean that a file is missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import NOT_THERE
from fsdp_optim.storage.posix.beacon import BEACON, is_lasting, refresh
from fsdp_optim.storage.posix.files import checkpoint_errors, sync_folder, write_file
from fsdp_optim.storage.posix.filesystem import is_of_one_machine
from fsdp_optim.storage.posix.path_status import names_in

_LOOKS = 5  # times, where a client has kept a folder that another machine has replaced: the next look is a new one


@contextlib.contextmanager
def put_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`. The file of that name, which the block makes, is renamed to `path` afterwards."""
    aside = path.with_name(
        f"{BEACON}{secrets.token_hex(8)}"
    )  # listings leave such names out, if this process is killed
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def replace_text(file: str | os.PathLike[str], text: str) -> None:
    """Write a small file, and flush it to the disk; readers see the old text or the new text, and no part of either.

    Several processes may write the same file at once: one of their texts stays. Raises CheckpointError.
    """
    path = Path(file)
    with checkpoint_errors(path):
        with put_atomically(path) as aside:
            write_file(aside, text.encode(), durable=True)
        sync_folder(path.parent)


def has_file(folder: str | os.PathLike[str], name: str) -> bool:
    """Return whether a folder has a file of this name. Raises CheckpointError where the system cannot tell."""
    return _is(Path(folder, name), stat.S_ISREG)


def folders_in(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the folders in a folder; none if it is missing. Raises CheckpointError where the system cannot tell.

    On a file system that machines share, the client is made to list the folder anew.
    """
    where = Path(folder)
    with contextlib.suppress(OSError):  # of a look; the listing raises its own
        if not is_of_one_machine(where):
            refresh(where)
    return [name for name in sorted(names_in(where)) if _is(where / name, stat.S_ISDIR)]


def sizes_in(folder: str | os.PathLike[str], counts: Callable[[str], bool] = is_lasting) -> dict[str, int]:
    """Return the sizes in bytes of all files below a folder, by name with "/" between folders; -1 for links.

    `counts`: whether a file or a folder in the folder itself counts, by its name. Raises CheckpointError where the system cannot
    tell.
    """
    sizes: dict[str, int] = {}
    for name in sorted(filter(counts, names_in(Path(folder)))):
        path = Path(folder, name)
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode):
                sizes.update({f"{name}/{inside}": nbytes for inside, nbytes in sizes_in(path).items()})
            else:
                sizes[name] = seen_size(path)
        except FileNotFoundError:
            continue  # it went away meanwhile
        except OSError as error:
            raise _failed(path, "cannot be looked at", error) from error
    return sizes


def seen_size(path: Path) -> int:
    """Return the size of a file in bytes; -1 for anything but a regular file. Raises OSError.

    The file is opened anew, so that the client of a network file system asks the server.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        return os.lstat(path).st_size
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def has_size(path: Path, nbytes: int) -> bool:
    """Return whether this process sees a file with this size, or, for -1, anything but a regular file."""
    with contextlib.suppress(OSError):
        return seen_size(path) == nbytes
    with contextlib.suppress(OSError):
        os.listdir(path.parent)  # so that the next look asks the server again
    return False


def _is(path: Path, kind: Callable[[int], bool]) -> bool:
    """Return whether a path, or the target of a link there, is of this kind."""
    for looks in range(1, _LOOKS + 1):
        try:
            return kind(os.stat(path).st_mode)
        except OSError as error:
            if error.errno in NOT_THERE:
                return False
            if error.errno != errno.ESTALE or looks == _LOOKS:
                raise _failed(path, "cannot be looked at", error) from error
    raise AssertionError("unreachable")


def _failed(path: Path, failure: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: {failure}: {error.strerror or error}")
