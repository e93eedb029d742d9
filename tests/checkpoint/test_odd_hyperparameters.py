"""Param groups in a folder of torch.distributed.checkpoint as no optimizer writes them, but a flipped bit of `.metadata` does."""

from __future__ import annotations

import copy
import tempfile
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from kit.compare import check_same
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import fsdp_optim
from fsdp_optim import CheckpointError, StateError
from fsdp_optim.state.values import same
from fsdp_optim.testing import run_on_ranks

SEVERAL = torch.tensor([1.0, 0.0, 1.0])


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    optim = torch.optim.AdamW(
        [{"params": list(half.parameters()), "lr": lr} for half, lr in zip(model, (0.1, 0.2), strict=True)]
    )
    model(torch.ones(4, 3)).square().sum().backward()
    optim.step()
    return model, optim


def put(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Save as torch does, with something else in the first param group."""
    model, optim = trained()
    weights, state = get_state_dict(model, optim)
    change(state["param_groups"][0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a job of one rank
        torch_dcp.save({"model": weights, "optim": state}, checkpoint_id=place)


def load_on_ranks(place: Path) -> list[Any]:
    """The hyperparameters after a load into a sharded model."""
    with cpu():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
        fully_shard(model)
        optim = torch.optim.AdamW([{"params": list(half.parameters())} for half in model])
        fsdp_optim.load(place, model, optim)
        return [{key: value for key, value in group.items() if key != "params"} for group in optim.param_groups]


class OddHyperparametersTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.place, self.good = self.root / "step-1", self.root / "good"

    @parameterized.expand([("fused",), ("capturable",), ("amsgrad",), ("decoupled_weight_decay",)])
    def test_a_switch_that_is_a_tensor_of_several_elements(self, key: str) -> None:
        put(self.place, lambda group: group.update({key: SEVERAL}))
        model, optim = trained(1)
        before = copy.deepcopy((model.state_dict(), optim.state_dict()))
        with self.assertRaisesRegex(
            StateError, rf"hyperparameter {key} of a param group is a Tensor of the shape \[3\]"
        ):
            fsdp_optim.load(self.place, model, optim)
        check_same("nothing has changed", (model.state_dict(), optim.state_dict()), before)
        full = fsdp_optim.gather_full_optim_state_dict(*trained())
        full["param_groups"][0][key] = SEVERAL
        scatter = fsdp_optim.scatter_full_optim_state_dict
        if key in ("fused", "capturable"):  # by which torch's load goes
            with self.assertRaisesRegex(StateError, f"hyperparameter {key} of a param group"):
                scatter(model, optim, full)

    def test_numbers_that_are_tensors_of_several_elements(self) -> None:
        """They are values like others: loaded, converted, and compared bit by bit."""
        odd = {"lr": SEVERAL, "betas": (SEVERAL, torch.ones(2, 2)), "eps": torch.zeros(0)}
        put(self.place, lambda group: group.update(odd))
        put(self.good, lambda group: group.update({**odd, "betas": (SEVERAL, torch.full((2, 2), 2.0))}))
        for groups in run_on_ranks(load_on_ranks, 2, self.place):
            self.assertTrue(same(groups[0]["lr"], SEVERAL), groups)
            self.assertTrue(same(list(groups[0]["betas"]), list(odd["betas"])), groups)
            self.assertEqual(groups[1]["lr"], 0.2)
        converted = self.root / "converted"
        fsdp_optim.convert(self.place, converted)
        self.assertTrue(fsdp_optim.diff(self.place, converted).equal)
        self.assertFalse(fsdp_optim.diff(self.place, self.good).equal)

    def test_a_group_without_its_parameters(self) -> None:
        put(self.place, lambda group: group.pop("params"))
        put(self.good, dict)
        calls: dict[str, Callable[[], object]] = {
            "load": lambda: fsdp_optim.load(self.place, *trained(1)),
            "inspect": lambda: fsdp_optim.inspect(self.place),
            "convert": lambda: fsdp_optim.convert(self.place, self.root / "converted"),
            "diff": lambda: fsdp_optim.diff(self.place, self.good),
            "diff from": lambda: fsdp_optim.diff(self.good, self.place),
        }
        for name, call in calls.items():
            with self.subTest(name), self.assertRaisesRegex(CheckpointError, "step-1.* is not written as it should be"):
                call()


if __name__ == "__main__":
    unittest.main()
