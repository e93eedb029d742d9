"""Temporary folders of tests and of test classes, and the working directory."""

from __future__ import annotations

import contextlib
import os
import tempfile
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextlib.contextmanager
def at(folder: str | Path) -> Iterator[None]:
    """The working directory of this process is `folder` inside."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class InFolder(unittest.TestCase):
    """A class whose tests have a folder each, `root`, and the path of a checkpoint in it, `path`."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.path = self.root / "step-1"

    def check_only(self, *names: str) -> None:
        """Raise unless the folder of the checkpoints has no other files."""
        self.assertEqual(sorted(entry.name for entry in self.root.iterdir()), sorted(names))


class SharedFolder(unittest.TestCase):
    """A class whose tests share one folder, `root`, which `fill` has filled before the first of them."""

    root: Path

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = Path(folder.name)
        cls.fill()

    @classmethod
    def fill(cls) -> None:
        """Write into `cls.root`."""

    def own_folder(self) -> Path:
        """A folder in `root` that goes with this test."""
        folder = tempfile.TemporaryDirectory(dir=self.root)
        self.addCleanup(folder.cleanup)
        return Path(folder.name)


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
