"""An average of the weights that is kept as the state of an optimizer, which is never stepped.

`Ema` stands for torchtitan's `EMAOptimizersContainer`, which no release of torchtitan has yet (0.3.0): its parts are optimizers
without hyperparameters, whose state has `ema_params` from the start; with `offload_to_cpu` these are plain local tensors of
DTensor parameters.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.checkpoints import load, save
from kit.compare import check_same
from kit.local_parts import like, local_of
from kit.models import Net
from kit.trained import STEPS, Oracle, Trained
from kit.uneven import in_chunk_lists, in_ragged
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

WRAPS: dict[str, Any] = {"FSDP2": "FSDP2", "RaggedShard": in_ragged, "Megatron-FSDP": in_chunk_lists}
DECAY = 0.75


class Ema(torch.optim.Optimizer):
    """A stand-in for torchtitan's average: `local`, as its CPU offload keeps it."""

    def __init__(self, model: nn.Module, *, local: bool = False) -> None:
        named = list(model.named_parameters())
        super().__init__([{"params": [p for _, p in named], "param_names": [name for name, _ in named]}], {})
        for _, param in named:
            copied = local_of(param).detach().clone()
            self.state[param]["ema_params"] = copied if local else like(copied, param)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("the average is updated, and not stepped")

    def update(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                local_of(self.state[param]["ema_params"]).lerp_(local_of(param).detach(), 1.0 - DECAY)


def train(trained: Any, ema: Ema, first: int, last: int) -> None:
    for step in range(first, last):
        trained.step(range(step, step + 1))
        ema.update()


def oracle(steps: int) -> dict[str, Any]:
    """The average of each weight, of the same training without ranks."""
    plain = Oracle(steps=0)
    ema = Ema(plain.model)
    train(plain, ema, 0, steps)
    return {name: {"ema_params": ema.state[param]["ema_params"]} for name, param in plain.model.named_parameters()}


def kinds(ema: Ema) -> list[type]:
    return [type(values["ema_params"]) for values in ema.state.values()]


def save_to(path: Path, wrap: str, local: bool) -> None:
    trained = Trained(WRAPS[wrap], steps=0)
    ema = Ema(trained.model, local=local)
    train(trained, ema, 0, STEPS)
    save(path / "train", trained)
    fsdp_optim.save(
        path / "ema", trained.model, ema, weights="none", options=fsdp_optim.SaveOptions(durable=False, progress=False)
    )


def load_from(path: Path, wrap: str, local: bool) -> None:
    """Loaded, trained on, gathered, and scattered into another one: at each point the average of a training without ranks."""
    trained = Trained(WRAPS[wrap], steps=1)
    ema = Ema(trained.model, local=local)
    before = kinds(ema)
    load(path / "train", trained)
    fsdp_optim.load(path / "ema", trained.model, ema, weights="none", options=fsdp_optim.LoadOptions(progress=False))
    check_same("classes of the values", kinds(ema), before)
    full = fsdp_optim.gather_full_optim_state_dict(trained.model, ema, None, "name")
    check_same("loaded", full["state"], oracle(STEPS))
    train(trained, ema, STEPS, STEPS + 2)
    trained_on = fsdp_optim.gather_full_optim_state_dict(trained.model, ema, 0, "name")
    if dist.get_rank() == 0:
        check_same("trained on", trained_on["state"], oracle(STEPS + 2))
    other = Trained(WRAPS[wrap], steps=0)
    other_ema = Ema(other.model, local=not local)
    fsdp_optim.load_optim_state_dict(
        other_ema,
        fsdp_optim.scatter_full_optim_state_dict(other.model, other_ema, trained_on if dist.get_rank() == 0 else None),
    )
    again = fsdp_optim.gather_full_optim_state_dict(other.model, other_ema, None, "name")
    check_same("scattered", again["state"], oracle(STEPS + 2))


class EmaTest(unittest.TestCase):
    @expand(
        soon=[
            ("FSDP2", True, "FSDP2", True),
            ("FSDP2", False, "RaggedShard", False),
            (
                "RaggedShard",
                True,
                "Megatron-FSDP",
                True,
            ),  # in which some ranks have no elements, and the average empty ones
        ],
        later=[("FSDP2", False, "FSDP2", True), ("Megatron-FSDP", False, "FSDP2", False)],
    )
    def test_saved_on_two_ranks_and_loaded_on_three(
        self, wrap: str, local: bool, other: str, other_local: bool
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_to, 2, Path(folder), wrap, local)
            run_on_ranks(load_from, 3, Path(folder), other, other_local)

    def test_beside_the_optimizer_of_the_same_parameters(self) -> None:
        """A list of optimizers has each parameter once: the average is saved by itself."""
        model = Net()
        optims = [torch.optim.Adam(model.parameters()), Ema(model)]
        with self.assertRaisesRegex(fsdp_optim.WrapperError, "scale is in two of the 2 optimizers"):
            fsdp_optim.gather_full_optim_state_dict(model, optims)


if __name__ == "__main__":
    unittest.main()
