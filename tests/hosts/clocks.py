"""Hosts whose clocks differ: libfaketime in each process that a bench's run starts there."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from hosts.host import PYTHON_PATH

LIBRARY = "libfaketimeMT.so.1"
PATCHES = Path(__file__).parent / "other_clock"
"""The folder with what Python must find there at its start."""


def other_clock(offset: float) -> dict[str, str]:
    """The variables of a new process whose clock is `offset` seconds ahead. Times of files are as the file system has them."""
    return {
        "LD_PRELOAD": _library(),
        "FAKETIME": f"{offset:+f}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "PYTHONPATH": os.pathsep.join([str(PATCHES), PYTHON_PATH]),
    }


def missing_clocks() -> str:
    """Why no host can have another clock here; empty where one can."""
    return "" if _library() else f"{LIBRARY} of the package faketime is missing"


@functools.cache
def _library() -> str:
    libraries = sorted(Path("/usr/lib").glob(f"**/faketime/{LIBRARY}"))
    return str(libraries[0]) if libraries else ""
