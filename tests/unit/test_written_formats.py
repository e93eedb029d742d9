"""Every format that is written for other programs passes `WrittenConformance`."""

from __future__ import annotations

import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kit.written_conformance import WrittenConformance

from fsdp_optim.foreign.dcp.format import DCP_FOLDER, TORCHTITAN_FOLDER
from fsdp_optim.formats.base.description import SCALAR
from fsdp_optim.formats.base.protocols import written
from fsdp_optim.formats.own import PROBE
from fsdp_optim.plugins import DeepSpeedUniversal, FairscaleShards, Format, Half, TorchFiles
from fsdp_optim.storage.base import Opened, Store
from fsdp_optim.storage.posix import Folder
from fsdp_optim.testing import WrittenSample
from fsdp_optim.testing.foreign_readers import Tensors

STEP = torch.tensor(3.0)


class InFolders(WrittenConformance):
    num_flips, num_cuts = 40, 6

    def make_store(self, folder: Path) -> Store:
        return Folder(folder, written(self.make_format()).probe)

    def open_any(self, folder: Path) -> Opened:
        return Folder(folder, PROBE).open_any()


class DcpTest(InFolders, unittest.TestCase):
    def make_format(self) -> Format:
        return DCP_FOLDER


class TorchtitanTest(InFolders, unittest.TestCase):
    def make_format(self) -> Format:
        return TORCHTITAN_FOLDER


class TorchFilesTest(InFolders, unittest.TestCase):
    def make_format(self) -> Format:
        return TorchFiles()


class TorchFilesByNameTest(TorchFilesTest):
    def make_format(self) -> Format:
        return TorchFiles(key_by="name")


class OneTorchFileTest(InFolders, unittest.TestCase):
    def make_format(self) -> Format:
        return TorchFiles(one_file=True)


class FairscaleTest(TorchFilesTest):
    def make_format(self) -> Format:
        return TorchFiles(for_fairscale=True)


class FairscaleShardsTest(InFolders, unittest.TestCase):
    """Files of two ranks, in which one weight is flattened. 0-dim tensors of the state are in each of them."""

    def make_format(self) -> Format:
        return FairscaleShards(2, {"": ["große"]})

    def write(self, folder: Path) -> WrittenSample:
        written = super().write(folder)
        return replace(written, optim=[*written.optim, STEP])

    def _values(self) -> tuple[tuple[Any, str, Any], ...]:
        return (
            *(value for value in super()._values() if value[0] != "step"),
            ("step", SCALAR, STEP),
        )

    def _halves(self) -> dict[Half, Tensors]:
        halves = super()._halves()
        return {**halves, "optim": {key: tensor for key, tensor in halves["optim"].items() if tensor.shape}}


class DeepSpeedUniversalTest(InFolders, unittest.TestCase):
    """A file for each value. The step is a file by itself, whose bytes the writer makes."""

    def make_format(self) -> Format:
        return DeepSpeedUniversal()

    def _values(self) -> tuple[tuple[Any, str, Any], ...]:
        return tuple(value for value in super()._values() if value[0] != "ratio")


if __name__ == "__main__":
    unittest.main()
