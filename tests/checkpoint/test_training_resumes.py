"""Training with a forward and a backward pass, a save, and a resume in every wrapper, bit for bit as if the run had not stopped.

This file is short, and runs on the oldest torch too, where FSDP2 gets gradients by hand.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.models import Net
from kit.options import as_options
from kit.torch_limits import NO_FORWARD
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized
from torch.distributed.fsdp import FSDPModule

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

KINDS = ("DDP", "FSDP1 flat", "FSDP1 orig", "fairscale flat", "fairscale non-flat", "FSDP2", "HSDP")


def made(kind: str, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Net()
    for param in model.parameters():
        torch.nn.init.normal_(param)
    wrapped = WRAPPERS[kind](model)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01)


def train(model: Any, optim: Any, first: int, last: int) -> list[torch.Tensor]:
    """Train some steps, on another batch on each rank. Returns the losses of this rank."""
    losses = []
    for step in range(first, last):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        if isinstance(model, FSDPModule) and NO_FORWARD:
            for param in model.parameters():
                param.grad = param.detach() * (step + 1)
        else:
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
        optim.step()
        optim.zero_grad()
    return losses


def state_of(model: Any, optim: Any) -> dict[str, Any]:
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name")
    assert full is not None
    return {"weights": fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None), "state": full["state"]}


def stop_and_resume(folder: Path, kind: str) -> dict[str, Any]:
    """Returns the state that was saved."""
    options = {"durable": False, "progress": False}
    with cpu():
        model, optim = made(kind, 0)
        losses = train(model, optim, 0, 5)
        whole = state_of(model, optim)
        model, optim = made(kind, 0)
        train(model, optim, 0, 3)
        saved = state_of(model, optim)
        fsdp_optim.save(folder, model, optim, step=3, **as_options(fsdp_optim.SaveOptions, **options))
        model, optim = made(kind, 1)
        fsdp_optim.load(folder, model, optim, options=fsdp_optim.LoadOptions(progress=False))
        check_same("loaded", state_of(model, optim), saved)
        check_same("losses", train(model, optim, 3, 5), losses[3:])
        check_same("trained on", state_of(model, optim), whole)
        return saved


def loaded(folder: Path, kind: str) -> dict[str, Any]:
    with cpu():
        model, optim = made(kind, 2)
        fsdp_optim.load(folder, model, optim, options=fsdp_optim.LoadOptions(progress=False))
        return state_of(model, optim)


class TestTraining(unittest.TestCase):
    @parameterized.expand([(kind,) for kind in KINDS])
    def test_a_run_that_stopped_goes_on_bit_for_bit(self, kind: str) -> None:
        with tempfile.TemporaryDirectory() as root:
            saved = run_on_ranks(stop_and_resume, 2, Path(root, "step-3"), kind)[0]
            check_same("on one rank", run_on_ranks(loaded, 1, Path(root, "step-3"), kind)[0], saved)
