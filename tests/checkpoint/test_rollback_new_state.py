"""A rollback to a step at which a parameter had no state yet: it has none again, and the run continues as it did then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kit.compare import check_same
from kit.folders import InFolder
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import StateError
from fsdp_optim.testing import run_on_ranks


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.uses = 1

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for expert in self.experts[: self.uses]:
            batch = expert(batch)
        return batch


def made(wrapper: str) -> tuple[Any, Experts, torch.optim.Optimizer]:
    torch.manual_seed(0)
    inner = Experts()
    model = WRAPPERS[wrapper](inner)
    return model, inner, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: nn.Module, inner: Experts, optim: torch.optim.Optimizer, uses: int) -> torch.Tensor:
    inner.uses = uses
    loss = model(torch.arange(8.0).reshape(2, 4)).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def roll_back(root: Path, wrapper: str) -> None:
    with cpu():
        model, inner, optim = made(wrapper)
        oracle, inside, oracle_optim = made(wrapper)
        with fsdp_optim.CheckpointManager(root / "run", model, optim) as manager:
            for step in (1, 2):
                train(model, inner, optim, uses=1)
                train(oracle, inside, oracle_optim, uses=1)
                manager.save(step)
            train(model, inner, optim, uses=2)
            manager.wait()
            num_states = len(oracle_optim.state)
            check_same("states", len(optim.state) > num_states, True)
            check_same("step", manager.rollback(to=2), 2)
            check_same("states after it", len(optim.state), num_states)
            for uses in (1, 2, 2):
                losses = [train(*each, uses=uses) for each in ((model, inner, optim), (oracle, inside, oracle_optim))]
                check_same("losses", losses[0], losses[1])


class RollbackTest(InFolder):
    @parameterized.expand([("plain",), ("FSDP2",)])  # the others give unused parameters gradients of zeros
    def test_an_expert_that_was_used_later(self, wrapper: str) -> None:
        run_on_ranks(roll_back, 2, self.root, wrapper)

    def test_a_load_refuses_to_drop_state(self) -> None:
        """Nothing says there that the state belongs to the steps that are taken back."""
        model, inner, optim = made("plain")
        train(model, inner, optim, uses=1)
        fsdp_optim.save(self.root / "a", model, optim)
        train(model, inner, optim, uses=2)
        with self.assertRaisesRegex(StateError, "has no state for this parameter"):
            fsdp_optim.load(self.root / "a", model, optim)
