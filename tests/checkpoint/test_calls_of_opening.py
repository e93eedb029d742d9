"""How many calls of functions a tensor takes where a checkpoint is opened, and what stays of a checkpoint that was closed.

The bounds are those of today, with little room: no noisy clock can blur them.
"""

from __future__ import annotations

import cProfile
import gc
import json
import pstats
import tempfile
import unittest
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from parameterized import parameterized
from safetensors.torch import save_file
from torch import nn

import fsdp_optim
from fsdp_optim.plugins import CheckpointIndex

FEW, MANY = 100, 300

# Calls of functions, in Python and C, that each further tensor takes, by format: `load` without a model, and `inspect`.
MOST = {"ours": (3, 8), "safetensors": (6, 9), "dcp": (175, 200)}


def trained(num_params: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(2, 3, bias=False) for _ in range(num_params)))
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    return model, optim


def ours(path: Path, num_params: int) -> int:
    fsdp_optim.save(path, *trained(num_params))
    return 4 * num_params


def with_index(path: Path, num_params: int) -> int:
    """Five files of safetensors with an index."""
    path.mkdir()
    weight_map = {}
    for number in range(5):
        tensors = {f"{number}.{index}": torch.full((2, 3), float(index)) for index in range(num_params // 5)}
        save_file(tensors, path / f"model-{number + 1:05}-of-00005.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{number + 1:05}-of-00005.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
    return num_params


def of_dcp(path: Path, num_params: int) -> int:
    fsdp_optim.save(path, *trained(num_params), format="dcp")
    return 4 * num_params


MAKE = {"ours": ours, "safetensors": with_index, "dcp": of_dcp}


def calls_of(function: Callable[[Path], object], path: Path) -> int:
    function(path)  # what only a first call does is done
    profile = cProfile.Profile()
    profile.enable()
    try:
        function(path)
    finally:
        profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


class CallsOfOpeningTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    @parameterized.expand(list(MOST))
    def test_a_tensor_takes_few_calls(self, kind: str) -> None:
        for function, most in zip((fsdp_optim.load, fsdp_optim.inspect), MOST[kind], strict=True):
            numbers = []
            for num_params in (FEW, MANY):
                path = self.folder / f"{function.__name__}-{num_params}"
                numbers.append((MAKE[kind](path, num_params), calls_of(function, path)))
            (few, calls_of_few), (many, calls_of_many) = numbers
            each = (calls_of_many - calls_of_few) / (many - few)
            self.assertLess(each, most, f"{kind}: {function.__name__}")
            self.assertGreater(each, most / 2, f"{kind}: {function.__name__}: lower the bound")

    @parameterized.expand(list(MOST)[:1])  # readers of other formats keep theirs, which may be asked for later
    def test_the_index_of_a_closed_checkpoint_is_freed_at_once(self, kind: str) -> None:
        """Without the collector, which may come late: an index of 200,000 tensors has a hundred megabytes."""
        path = self.folder / "step"
        MAKE[kind](path, FEW)
        made: list[weakref.ref[CheckpointIndex]] = []
        real = CheckpointIndex.__init__

        def remembered(index: CheckpointIndex, *args: object, **kwargs: object) -> None:
            made.append(weakref.ref(index))
            real(index, *args, **kwargs)  # type: ignore[arg-type]

        gc.collect()
        gc.disable()
        try:
            with mock.patch.object(CheckpointIndex, "__init__", remembered):
                fsdp_optim.inspect(path)
            self.assertEqual([ref() is None for ref in made], [True] * len(made))
            self.assertTrue(made)
        finally:
            gc.enable()


class SameTensorsTest(unittest.TestCase):
    def test_inspect_tells_each_tensor(self) -> None:
        """Alike tensors share one description; it is right for each, of any shape and dtype."""
        kinds = [
            ((), torch.float32),
            ((0, 3), torch.float64),
            ((2, 3), torch.bfloat16),
            ((2, 3), torch.int8),
            ((5,), torch.bool),
        ]
        tensors = {f"t.{number}": torch.ones(kinds[number % 5][0], dtype=kinds[number % 5][1]) for number in range(15)}
        with tempfile.TemporaryDirectory() as folder:
            save_file(tensors, Path(folder) / "model.safetensors", metadata={"a:b": "c:d"})
            model = fsdp_optim.inspect(folder).model
        told = {name: (info.dtype, info.shape, info.nbytes) for name, info in model.items()}
        wanted = {
            name: (str(t.dtype).removeprefix("torch."), tuple(t.shape), t.numel() * t.element_size())
            for name, t in tensors.items()
        }
        self.assertEqual(told, wanted)


if __name__ == "__main__":
    unittest.main()
