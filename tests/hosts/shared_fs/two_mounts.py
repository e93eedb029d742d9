"""Two mounts of one folder on this machine, which stand for two hosts, for the tests of the file system itself."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts.shared_fs.mounting import mounted, why_not

PATIENCE = 20.0  # seconds


def error_of(call: Callable[[], object]) -> str:
    """The name of the error that a call raises, "" without one."""
    try:
        call()
    except OSError as raised:
        return errno.errorcode[raised.errno or 0]
    return ""


@pytest.mark.hosts
class TwoMounts(unittest.TestCase):
    """Two mounts of a folder, which stand for two hosts."""

    @classmethod
    def setUpClass(cls) -> None:
        if reason := why_not():
            raise unittest.SkipTest(reason)

    def setUp(self) -> None:
        self.mounts = contextlib.ExitStack()
        self.addCleanup(self.mounts.close)
        self.backing = Path(self.mounts.enter_context(tempfile.TemporaryDirectory(prefix="shared_fs_backing_")))

    def mount(self, *switches: str) -> tuple[Path, Path]:
        return tuple(self.mounts.enter_context(mounted(self.backing, *switches)) for _ in range(2))  # type: ignore[return-value]

    def descriptor(self, path: Path, flags: int = os.O_RDONLY) -> int:
        fd = os.open(path, flags, 0o644)
        self.mounts.callback(os.close, fd)
        return fd

    def eventually(self, true: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not true():
            self.assertLess(time.monotonic(), until, "not within the time")
            time.sleep(0.01)
