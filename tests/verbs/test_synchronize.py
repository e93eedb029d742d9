"""Optimizers that make their replicas equal only when they are asked to, by `synchronize_for_checkpoint`, as Dion does."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_refused, check_same, error_text
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


class Lagging(torch.optim.SGD):
    """Momentum that differs between replicas until it is synchronised, which takes a collective."""

    num_calls = 0

    def synchronize_for_checkpoint(self) -> None:
        self.num_calls += 1
        for values in self.state.values():
            dist.broadcast(values["momentum_buffer"], 0)


class Wrapped:
    """An optimizer around an optimizer, as trainers make them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


def made() -> tuple[nn.Module, Lagging]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optim = Lagging(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    for values in optim.state.values():
        values["momentum_buffer"].fill_(dist.get_rank() + 7)
    return model, optim


def all_calls(folder: Path) -> None:
    calls: dict[str, Callable[[nn.Module, Any], Any]] = {
        "gather": lambda model, optim: fsdp_optim.gather_full_optim_state_dict(model, optim),
        "iterate": lambda model, optim: list(fsdp_optim.iter_full_optim_state(model, optim)),
        "save": lambda model, optim: fsdp_optim.save(
            folder / "a", model, optim, options=fsdp_optim.SaveOptions(durable=False)
        ),
        "async_save": lambda model, optim: fsdp_optim.async_save(
            folder / "b", model, optim, options=fsdp_optim.SaveOptions(durable=False)
        ).wait(),
        "transfer": lambda model, optim: fsdp_optim.transfer_optim_state(model, optim, *other()),
        "wrapped": lambda model, optim: fsdp_optim.gather_full_optim_state_dict(model, Wrapped(optim)),
        "a list": lambda model, optim: fsdp_optim.gather_full_optim_state_dict(model, [optim], key_by="name"),
    }
    for name, call in calls.items():
        model, optim = made()
        call(model, optim)
        check_same(f"{name}: calls", optim.num_calls, 1)
        for values in optim.state.values():
            check_same(f"{name}: equal", set(values["momentum_buffer"].flatten().tolist()), {7.0})


def other() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    return model, Lagging(model.parameters(), lr=0.1, momentum=0.9)


def refused() -> None:
    """A rank whose arguments are wrong makes no collective; the others do not wait for it."""
    model, optim = made()
    for rank in range(dist.get_world_size()):
        given: Any = "no optimizer" if dist.get_rank() == rank else optim
        errors: list[Any] = [None] * dist.get_world_size()
        error = error_text(
            lambda: fsdp_optim.gather_full_optim_state_dict(model, given, options=fsdp_optim.CallOptions(timeout=60))  # noqa: B023
        )
        dist.all_gather_object(errors, error)
        check_refused(f"rank {rank}", [(("any", text)) for _, text in errors], "any", f"rank {rank}")
    check_same("calls", optim.num_calls, 0)


class SynchronizeTest(unittest.TestCase):
    def test_it_is_called_once_by_whatever_reads_the_state(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(all_calls, 2, Path(folder))

    def test_a_rank_that_fails_before(self) -> None:
        run_on_ranks(refused, 2)


if __name__ == "__main__":
    unittest.main()
