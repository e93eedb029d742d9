"""Every format of another library that is read passes `ReaderConformance`."""

from __future__ import annotations

import json
import unittest
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint
from kit.verified import VerifiedConformance
from kit.zero_files import write_universal, write_zero
from safetensors.torch import save_file

from fsdp_optim.foreign.dcp.reader import DCP
from fsdp_optim.foreign.deepspeed.reader import DEEPSPEED
from fsdp_optim.foreign.hugging_face.reader import HUGGING_FACE
from fsdp_optim.foreign.torch.reader import TORCH_FILE
from fsdp_optim.formats.own import PROBE
from fsdp_optim.plugins import Format
from fsdp_optim.storage.base import Opened
from fsdp_optim.storage.posix import Folder
from fsdp_optim.testing import WrittenSample

WEIGHTS = {
    "größe": torch.arange(35, dtype=torch.float32).reshape(7, 5),
    "none": torch.empty(0, 4),
    "scalar": torch.tensor(-0.0),
    "half": torch.arange(9, dtype=torch.bfloat16).reshape(3, 3),
    "flags": torch.tensor([True, False, True]),
}


class InFolders(VerifiedConformance):
    num_flips, num_cuts = 60, 10

    @pytest.mark.slow
    def test_much_damage(self) -> None:
        with mock.patch.multiple(type(self), num_flips=300, num_cuts=40):
            self.test_damage_is_an_error_and_no_crash()

    def open_any(self, folder: Path) -> Opened:
        return Folder(folder, PROBE).open_any()


class SafetensorsTest(InFolders, unittest.TestCase):
    has_checksums = False

    def make_format(self) -> Format:
        return HUGGING_FACE

    def write(self, folder: Path) -> WrittenSample:
        save_file(WEIGHTS, folder / "model.safetensors")
        return WrittenSample(WEIGHTS)


class SplitSafetensorsTest(InFolders, unittest.TestCase):
    has_checksums = False

    def make_format(self) -> Format:
        return HUGGING_FACE

    def write(self, folder: Path) -> WrittenSample:
        for number, name in enumerate(WEIGHTS, start=1):
            save_file({name: WEIGHTS[name]}, folder / f"model-{number:05}-of-{len(WEIGHTS):05}.safetensors")
        return WrittenSample(WEIGHTS)


class TorchFileTest(InFolders, unittest.TestCase):
    legacy = False

    def make_format(self) -> Format:
        return TORCH_FILE

    def write(self, folder: Path) -> WrittenSample:
        state = {name: tensor.clone() for name, tensor in WEIGHTS.items() if tensor.is_floating_point()}
        optim = {"state": {0: {**state, "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        value = {"model": WEIGHTS, "optimizer": optim, "epoch": 3, "seen": [1, (2.5, "x")]}
        torch.save(value, folder / "last.pt", _use_new_zipfile_serialization=not self.legacy)
        extra = {"epoch": 3, "seen": [1, (2.5, "x")]}
        return WrittenSample(WEIGHTS, [*state.values(), torch.tensor(3.0)], extra)


class LegacyTorchFileTest(TorchFileTest):
    has_checksums = False

    legacy = True


class TorchFilesTest(InFolders, unittest.TestCase):
    """A model in two files with an index, an optimizer, and a file of the trainer."""

    def make_format(self) -> Format:
        return TORCH_FILE

    def write(self, folder: Path) -> WrittenSample:
        halves = dict(list(WEIGHTS.items())[:2]), dict(list(WEIGHTS.items())[2:])
        names = [f"pytorch_model-{number:05}-of-00002.bin" for number in (1, 2)]
        for name, half in zip(names, halves, strict=True):
            torch.save(half, folder / name)
        listed = {key: name for name, half in zip(names, halves, strict=True) for key in half}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
        torch.save({"state": {0: {"m": torch.ones(2)}}, "param_groups": [{"params": [0]}]}, folder / "optimizer.bin")
        torch.save({"last_epoch": 4}, folder / "scheduler.bin")
        return WrittenSample(WEIGHTS, [torch.ones(2)], {"scheduler": {"last_epoch": 4}})


class DcpTest(InFolders, unittest.TestCase):
    """A folder that torch.distributed.checkpoint has written in one process."""

    def make_format(self) -> Format:
        return DCP

    def write(self, folder: Path) -> WrittenSample:
        state = {"große": {"exp_avg": torch.ones(7, 5), "step": torch.tensor(3.0)}}
        groups = [{"lr": 0.1, "params": ["große"]}]
        weights = {"große": WEIGHTS["größe"], "half": WEIGHTS["half"]}
        saved = {"model": weights, "optimizer": {"state": state, "param_groups": groups}, "epoch": 3}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.distributed.checkpoint.save(saved, checkpoint_id=folder)
        return WrittenSample(weights, list(state["große"].values()), {"epoch": 3})


class ZeroTest(InFolders, unittest.TestCase):
    """Files of DeepSpeed's ZeRO 2, of two ranks."""

    stage = 2

    def make_format(self) -> Format:
        return DEEPSPEED

    def write(self, folder: Path) -> WrittenSample:
        weights = {"a": torch.arange(35.0).reshape(7, 5), "b": torch.arange(3.0)}
        moments = {name: weight + 0.5 for name, weight in weights.items()}
        write_zero(folder, self.stage, 2, [weights], {"exp_avg": [moments]}, step=3)
        return WrittenSample(weights, list(moments.values()))


class Zero3Test(ZeroTest):
    stage = 3


class UniversalTest(ZeroTest):
    """The result of DeepSpeed's converter to universal checkpoints for files of two ranks."""

    num_flips, num_cuts = 12, 2

    def write(self, folder: Path) -> WrittenSample:
        weights = {"a": torch.arange(35.0).reshape(7, 5), "b": torch.arange(3.0)}
        moments = {name: weight + 0.5 for name, weight in weights.items()}
        write_universal(folder, self.stage, [weights], {"exp_avg": [moments]}, step=3)
        steps = {name: [torch.tensor(3.0)] if self.stage < 3 else [] for name in weights}
        return WrittenSample(weights, [value for name in weights for value in (moments[name], *steps[name])])


class Universal3Test(UniversalTest):
    stage = 3


if __name__ == "__main__":
    unittest.main()
