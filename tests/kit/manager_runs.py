"""Runs under a CheckpointManager that several files about it share."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kit.checkpoints import before_writes
from kit.wrapping import Differs

# ------------------------------------------------------------------------------------------ as if it had not stopped


def each(function: Callable[..., None], root: Path, cases: list[Any]) -> None:
    """All cases in one world; an error names its case."""
    for case in cases:
        try:
            function(root, *case)
        except Exception as error:
            raise Differs(f"{case}: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------------ failures


@contextlib.contextmanager
def full_disk(is_full: bool = True) -> Iterator[None]:
    """Writes of files with tensors fail in the background."""

    def fail(file: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        if is_full and path.endswith(".safetensors") and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with before_writes(fail):
        yield
