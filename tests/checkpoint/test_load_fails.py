"""A load that fails half-way: the model and the optimizer are as before on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.checkpoints import Whole, everything, load, mine, optims_of, save_trained
from kit.compare import check_refused, check_same, error_text
from kit.folders import InFolder
from kit.optimizers import OfModel, adam
from kit.trained import STEPS, Trained
from kit.wrapping import cpu
from torch import nn

from fsdp_optim.testing import run_on_ranks


class Failing(torch.optim.Adam):
    """Loads a state and then raises, on one rank."""

    rank = 0

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if (dist.get_rank() if dist.is_initialized() else 0) == self.rank:
            raise MemoryError("the loader of this optimizer has failed")


class FailingLike:
    """A wrapper around an optimizer that is no optimizer of torch: only its state_dict shows the state."""

    def __init__(self, params: Any) -> None:
        self.inner, self.fails = Failing(params), True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        if self.fails:
            self.fails = False  # it takes back what it had
            self.inner.load_state_dict(state_dict)
        else:
            torch.optim.Adam.load_state_dict(self.inner, state_dict)

    def step(self) -> None:
        self.inner.step()


class FailingAgain(FailingLike):
    """And once more when it is given back what it had."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class WithScale(Failing):
    """Keeps something of its own beside the state, and changes its groups in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.loss_scale = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "loss_scale": self.loss_scale}

    def load_state_dict(self, state_dict: Any) -> None:
        self.loss_scale = 512.0
        for group in self.param_groups:
            group["lr"] = 99.0
            group["new"] = True
        super().load_state_dict(state_dict)


def load_failing(path: Path, wrapper: str, kind: Any, rank: int) -> list[tuple[str, str]]:
    """With state before, and without; the model and the optimizer must be as before on every rank."""
    errors = []
    with cpu(), mock.patch.object(Failing, "rank", rank):
        for steps in (0, 1):
            target = Trained(wrapper, kind, steps=steps, model=Whole)
            # those that are no torch.optim.Optimizer make groups of their own from what they are given
            seen = everything if kind in (Failing, WithScale) or isinstance(kind, OfModel) else mine
            seen = values_of if kind is FailingAgain else seen
            before, optims = seen(target), [id(optim) for optim in optims_of(target)]
            errors.append(error_text(lambda: load(path, target)))  # noqa: B023
            check_same("after the failure", seen(target), before)
            check_same("optimizers", [id(optim) for optim in optims_of(target)], optims)
            check_same("loss scale", getattr(target.optim, "loss_scale", 1.0), 1.0)
            target.step([STEPS])  # and it can continue
    return errors


class HalfWayTest(InFolder):
    @expand(
        *some(
            [
                (wrapper, Failing, rank)
                for wrapper, rank in (("FSDP2", 0), ("FSDP2", 1), ("fairscale flat", 1), ("DDP", 0))
            ]
            + [("FSDP1 orig", FailingLike, 1), ("FSDP2", FailingAgain, 0), ("FSDP2", WithScale, 1)],
            every=3,
        )
    )
    def test_an_optimizer_that_fails_on_one_rank(self, wrapper: str, kind: Any, rank: int) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"model": Whole})
        by_rank = run_on_ranks(load_failing, 2, self.path, wrapper, kind, rank)
        for errors in zip(*by_rank, strict=True):
            check_refused("failed", errors, "RankError", f"rank {rank}", "the loader of this optimizer has failed")

    def test_the_second_of_two(self) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"model": Whole})
        by_rank = run_on_ranks(load_failing, 2, self.path, "FSDP2", OfModel(failing_second), 1)
        for errors in zip(*by_rank, strict=True):
            check_refused("failed", errors, "RankError", "rank 1", "the loader of this optimizer has failed")


def values_of(trained: Trained) -> Any:
    """Parameters and buffers."""
    return {key: value for key, value in mine(trained).items() if key in ("values", "buffers")}


def failing_second(model: nn.Module) -> list[Any]:
    params = list(model.parameters())
    return [adam(params[:3]), Failing(params[3:])]
