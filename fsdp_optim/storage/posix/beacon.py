"""A proof that two processes see the same folder: one makes a file that no process has ever looked for, the others look for it.

Network file systems show the changes of another host after some seconds, because clients cache names and attributes for a time,
also that a name is *not* there. They must ask the server for a name that is new to them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from fsdp_optim.errors import CheckpointError

BEACON = ".fsdp_optim-"
"""The beginning of the names of beacons. A beacon that a killed process has left is empty, and harmless."""


_PASSING = re.compile(rf"\.nfs[0-9a-f]{{8,}}|\.fuse_hidden[0-9a-f]+|{re.escape(BEACON)}[0-9a-f]{{16}}")


def is_lasting(name: str) -> bool:
    """Return whether a file of this name is there to stay.

    A client of a network file system makes others for removed files that are open, and this library makes beacons for a moment.
    """
    return _PASSING.fullmatch(name) is None


@contextlib.contextmanager
def beacon_above(path: Path) -> Iterator[str]:
    """Make an empty file in a folder, or in the nearest existing parent, for the time of the context; yield its path.

    Raises CheckpointError where no file can be made there.
    """
    folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
    file = folder / f"{BEACON}{secrets.token_hex(8)}"
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be created: {error.strerror or error}") from error
    try:
        yield str(file)
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def refresh(folder: Path) -> None:
    """Let the client of a network file system list a folder anew: its own change makes its cached listing out of date.

    Where the folder is missing, or nothing can be written in it, nothing is done.
    """
    if folder.is_dir():
        with contextlib.suppress(CheckpointError), beacon_above(folder):
            pass


def sees(path: Path) -> bool:
    """Return whether this process sees a path. If not, list the path's folder, so that the next look asks the server anew."""
    with contextlib.suppress(OSError):
        os.lstat(path)
        return True
    with contextlib.suppress(OSError):
        os.listdir(path.parent)
    return False
