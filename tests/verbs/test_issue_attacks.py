"""Cases that were found by trying the promises about optimizer state as a user meets them."""

from __future__ import annotations

import unittest
from typing import Any

import torch
from torch import nn

import fsdp_optim


class IntNames(torch.optim.Optimizer):
    """Keeps state under a name that is an int."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state[7] = state.get(7, 0) + param.grad
                param.sub_(state[7], alpha=group["lr"])


class OtherIntNames(IntNames):
    """Another class with the same state."""


def _stepped(make: type[IntNames], steps: int) -> tuple[nn.Module, IntNames]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optim = make(model.parameters())
    for _ in range(steps):
        optim.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optim.step()
    return model, optim


class IntNamesTest(unittest.TestCase):
    def _loads(self, make: type[IntNames], strict: bool) -> None:
        model, optim = _stepped(IntNames, 3)
        full = fsdp_optim.gather_full_optim_state_dict(model, optim)
        assert full is not None
        for steps in (0, 1):
            with self.subTest(steps=steps):
                other, live = _stepped(make, steps)
                shard = fsdp_optim.get_shard_from_optim_state_dict(other, live, full, strict=strict)
                fsdp_optim.load_optim_state_dict(live, shard)
                for live_param, saved_param in zip(
                    live.param_groups[0]["params"], optim.param_groups[0]["params"], strict=True
                ):
                    self.assertEqual(list(live.state[live_param]), [7])
                    self.assertTrue(torch.equal(live.state[live_param][7], optim.state[saved_param][7]))

    def test_they_load_into_an_optimizer_that_has_stepped(self) -> None:
        self._loads(IntNames, strict=True)

    def test_what_both_classes_have_is_taken(self) -> None:
        self._loads(OtherIntNames, strict=False)


if __name__ == "__main__":
    unittest.main()
