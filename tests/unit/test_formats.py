"""Every format passes `FormatConformance`: this library's own, and the second format of the tests' kit."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

from kit.raw_format import RAW

from fsdp_optim.formats.own import OURS
from fsdp_optim.plugins import Format
from fsdp_optim.storage.base import Store
from fsdp_optim.storage.posix import Folder
from fsdp_optim.testing import FormatConformance


class InFolders(FormatConformance):
    def make_store(self, format: Format) -> Store:
        folder = tempfile.TemporaryDirectory()
        self._case.addCleanup(folder.cleanup)
        return Folder(Path(folder.name) / "step", format.probe)


class OursTest(InFolders, unittest.TestCase):
    def make_format(self) -> Format:
        return OURS


class RawTest(InFolders, unittest.TestCase):
    def make_format(self) -> Format:
        return RAW


if __name__ == "__main__":
    unittest.main()
