"""Calls as another account of the machine, which only the root user can make."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534

can_change = os.geteuid() == 0


@contextmanager
def as_nobody(root: Path) -> Iterator[None]:
    """A context in which this process has the rights of an account that owns nothing, and may write into a folder."""
    root.chmod(0o777)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def close(folder: Path) -> None:
    """Let only its owner enter a folder, as under umask 077."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
