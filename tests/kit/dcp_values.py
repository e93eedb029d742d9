"""A checkpoint of torch.distributed.checkpoint of a few tensors, in a folder of a test."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.dcp.reader import DCP
from fsdp_optim.foreign.reader import NO_JUDGE, ForeignReader
from fsdp_optim.storage.base import Opened
from fsdp_optim.storage.posix.store import Folder
from fsdp_optim.testing.foreign_readers import read_elements
from kit.dcp_files import DcpFiles, grid, rows

TALL = torch.arange(70, dtype=torch.float32).reshape(10, 7)
WIDE = torch.arange(48, dtype=torch.bfloat16).reshape(4, 12)
CUBE = torch.arange(120, dtype=torch.int64).reshape(4, 5, 6)
TURNED = torch.arange(24, dtype=torch.float64).reshape(4, 6).t()
MOMENT = TALL * 2


def fill(files: DcpFiles) -> DcpFiles:
    """A model in chunks of all kinds, an optimizer, and values of a trainer."""
    files.tensor(["model", "größe"], TALL, rows(TALL, 3, 0, 6, 1))
    files.tensor(["model", "wide"], WIDE, grid(WIDE, 3, 5))
    cubes = [((0, 0, 0), (4, 2, 6)), ((0, 2, 0), (2, 3, 6)), ((2, 2, 0), (2, 3, 1)), ((2, 2, 1), (2, 3, 5))]
    files.tensor(["model", "cube"], CUBE, cubes)
    files.tensor(["model", "turned"], TURNED, rows(TURNED, 2, 4))
    files.tensor(["model", "scalar"], torch.tensor(-0.0))
    files.tensor(["model", "flags"], torch.tensor([True, False, True]))
    files.tensor(["model", "none"], torch.empty(0, 4), [])
    files.tensor(["optim", "state", "größe", "exp_avg"], MOMENT, rows(MOMENT, 4, 6))
    files.tensor(["optim", "state", "größe", "step"], torch.tensor(3.0))
    files.value(["optim", "param_groups", 0, "lr"], 0.5)
    files.value(["optim", "param_groups", 0, "betas"], (0.5, 0.75))
    files.value(["optim", "param_groups", 0, "params"], ["größe"])
    return files.value(["epoch"], 3).tensor(["rng", "cpu"], torch.arange(5, dtype=torch.uint8))


MODEL = {
    "größe": TALL,
    "wide": WIDE,
    "cube": CUBE,
    "turned": TURNED,
    "scalar": torch.tensor(-0.0),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
}


def open_any(folder: Path) -> Opened:
    return Folder(folder, NO_JUDGE).open_any()


def opened(folder: Path) -> ForeignReader:
    files = open_any(folder)
    try:
        return DCP.open(files, verify=True)
    except BaseException:
        files.close()
        raise


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name) / "checkpoint"

    def check_refused(self, *words: str) -> str:
        """Opening is an error that has these words."""
        with self.assertRaises(CheckpointError) as caught:
            opened(self.folder).close()
        for word in words:
            self.assertIn(word, str(caught.exception))
        return str(caught.exception)

    def check_model(self, reader: ForeignReader) -> None:
        for name, tensor in MODEL.items():
            found = read_elements(reader, reader.model[name], 0, tensor.numel())
            self.assertEqual(
                found, bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if found else b"", name
            )
