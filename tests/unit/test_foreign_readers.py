"""Every format of another library that is read passes `ReaderConformance`."""

from __future__ import annotations

import unittest
from pathlib import Path

import torch
from safetensors.torch import save_file

from fsdp_optim.formats.base import Format
from fsdp_optim.formats.foreign import NO_JUDGE
from fsdp_optim.formats.hugging_face import HUGGING_FACE
from fsdp_optim.storage.base import Opened
from fsdp_optim.storage.posix.store import Folder
from fsdp_optim.testing import ReaderConformance, Written

WEIGHTS = {
    "größe": torch.arange(35, dtype=torch.float32).reshape(7, 5),
    "none": torch.empty(0, 4),
    "scalar": torch.tensor(-0.0),
    "half": torch.arange(9, dtype=torch.bfloat16).reshape(3, 3),
    "flags": torch.tensor([True, False, True]),
}


class InFolders(ReaderConformance):
    def open_any(self, folder: Path) -> Opened:
        return Folder(folder, NO_JUDGE).open_any()


class SafetensorsTest(InFolders, unittest.TestCase):
    def make_format(self) -> Format:
        return HUGGING_FACE

    def write(self, folder: Path) -> Written:
        save_file(WEIGHTS, folder / "model.safetensors")
        return Written(WEIGHTS)


class SplitSafetensorsTest(InFolders, unittest.TestCase):
    def make_format(self) -> Format:
        return HUGGING_FACE

    def write(self, folder: Path) -> Written:
        for number, name in enumerate(WEIGHTS, start=1):
            save_file({name: WEIGHTS[name]}, folder / f"model-{number:05}-of-{len(WEIGHTS):05}.safetensors")
        return Written(WEIGHTS)


if __name__ == "__main__":
    unittest.main()
