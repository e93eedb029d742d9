"""Optimizers with one number for each row of a parameter, in files that record no kinds of values: those of DCP and of torch."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import torch
from kit.compare import check_same
from kit.folders import InFolder
from parameterized import parameterized
from torch import nn

import fsdp_optim

QUIET = fsdp_optim.SaveOptions(durable=False, progress=False)


class Rows(torch.optim.Optimizer):
    """As Adam-mini, with the square of each row's gradients; vectors have a square for each element."""

    def __init__(self, params: Any, name: str, *, keepdim: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self._name, self._keepdim = name, keepdim

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            dims = tuple(range(1, param.dim()))
            square = param.grad.square()
            rows = square.mean(dims, keepdim=self._keepdim) if dims else square
            self.state[param] = {"exp_avg": param.grad.clone(), self._name: rows}


def mostly_vectors() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4), nn.LayerNorm(4))


def mostly_matrices() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 3), nn.Linear(3, 4, bias=False), nn.Linear(4, 1, bias=False))


def trained(make: Callable[[], nn.Module], name: str, keepdim: bool, seed: int) -> tuple[nn.Module, Rows]:
    torch.manual_seed(seed)
    model = make()
    optim = Rows(model.parameters(), name, keepdim=keepdim)
    model(torch.randn(2, 2, 2, 2)).square().sum().backward()
    optim.step()
    return model, optim


def values_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    return {fqn: dict(optim.state[param]) for fqn, param in model.named_parameters()}


class RowValuesTest(InFolder):
    @parameterized.expand(
        [
            (f"{make.__name__}, {name}, {keepdim}", make, name, keepdim)
            for make in (mostly_vectors, mostly_matrices)
            for name in ("row", "exp_avg_sq")
            for keepdim in (False, True)
        ]
    )
    def test_what_a_save_or_a_conversion_writes_is_loaded(
        self, _: str, make: Callable[[], nn.Module], name: str, keepdim: bool
    ) -> None:
        model, optim = trained(make, name, keepdim, 0)
        wanted = values_of(model, optim)
        for format in ("safetensors", "dcp", "torchtitan"):
            fsdp_optim.save(self.path / format, model, optim, format=format, options=QUIET)
        for format in ("safetensors", "dcp", "torch", "torch_file"):
            fsdp_optim.convert(self.path / "dcp", self.path / f"from dcp to {format}", format=format)
        torch.save({"model": model.state_dict(), "optimizer": optim.state_dict()}, self.path / "torch's own")
        for path in sorted(self.path.iterdir()):
            fresh, fresh_optim = trained(make, name, keepdim, 1)
            fsdp_optim.load(path, fresh, fresh_optim)
            check_same(path.name, values_of(fresh, fresh_optim), wanted)
        shard = fsdp_optim.get_shard_from_optim_state_dict(fresh, fresh_optim, optim.state_dict())
        check_same("in memory", dict(enumerate(wanted.values())), shard["state"])

    def test_a_shard_of_the_rows_is_refused(self) -> None:
        model, optim = trained(mostly_matrices, "exp_avg_sq", False, 0)
        full = optim.state_dict()
        full["state"][0]["exp_avg_sq"] = full["state"][0]["exp_avg_sq"][:2]
        with self.assertRaisesRegex(fsdp_optim.StateError, r"1\.weight: exp_avg_sq has shape \[2\]"):
            fsdp_optim.get_shard_from_optim_state_dict(model, optim, full)


if __name__ == "__main__":
    unittest.main()
