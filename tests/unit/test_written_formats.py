"""Every format that is written for other programs passes `WrittenConformance`."""

from __future__ import annotations

import unittest
from pathlib import Path

from fsdp_optim.formats.base import Format
from fsdp_optim.formats.dcp_format import DCP_FOLDER, TORCHTITAN_FOLDER
from fsdp_optim.formats.foreign import NO_JUDGE
from fsdp_optim.formats.torch_writer import WrittenTorchFiles
from fsdp_optim.storage.base import Opened, Store
from fsdp_optim.storage.posix.store import Folder
from fsdp_optim.testing import WrittenConformance


class InFolders(WrittenConformance):
    num_flips, num_cuts = 40, 6

    def make_store(self, folder: Path) -> Store:
        return Folder(folder, self.make_format().judge)

    def open_any(self, folder: Path) -> Opened:
        return Folder(folder, NO_JUDGE).open_any()


class DcpTest(InFolders, unittest.TestCase):
    def make_format(self) -> Format:
        return DCP_FOLDER


class TorchtitanTest(InFolders, unittest.TestCase):
    def make_format(self) -> Format:
        return TORCHTITAN_FOLDER


class TorchFilesTest(InFolders, unittest.TestCase):
    def make_format(self) -> Format:
        return WrittenTorchFiles()

    @property
    def extra_read(self) -> object:
        return {"trainer": self._extra()}


class TorchFilesByNameTest(TorchFilesTest):
    def make_format(self) -> Format:
        return WrittenTorchFiles(by_id=False)


class OneTorchFileTest(InFolders, unittest.TestCase):
    def make_format(self) -> Format:
        return WrittenTorchFiles(in_one=True)


if __name__ == "__main__":
    unittest.main()
