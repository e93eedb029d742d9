"""Elementwise optimizers: their state of a fused parameter is, cut into its parts, that of the unfused training, bit for bit."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from kit.compare import check_same, sorted_state
from kit.fused import VIEWS, TrainedFused, Unfused
from kit.imports import Later
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu

import fsdp_optim
from fsdp_optim import CallOptions, LoadOptions, SaveOptions
from fsdp_optim.testing import run_on_ranks

pytorch_optimizer = Later("pytorch_optimizer")

Make = Callable[[Any], torch.optim.Optimizer]

TORCH: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "SGD, Nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adam, amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, weight_decay=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop, centered": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}
OTHERS = ("Lion", "ADOPT", "Adan")
"""Of pytorch_optimizer, without operations on lists, for some of which DTensors have no rule."""


def make_of(name: str) -> Make:
    if name in TORCH:
        return TORCH[name]
    cls: Any = getattr(pytorch_optimizer, name)
    return lambda params: cls(params, lr=0.01, foreach=False)


def compared(folder: str, wrapper: str, names: list[str]) -> None:
    """On one rank: gathered, saved and loaded into the unfused model, and trained on; the oracle was never fused or wrapped."""
    with cpu():
        for name in names:
            make, what = make_of(name), f"{wrapper}, {name}"
            fused, oracle = TrainedFused(wrapper, make, STEPS), Oracle(make, STEPS, Unfused)
            wanted = sorted_state(oracle.by_name())
            check_same(f"{what}, state", sorted_state(fused.gather(None, "name", views=VIEWS)["state"]), wanted)
            own = fused.process_group
            path = f"{folder}/{name}"
            fsdp_optim.save(path, fused.model, fused.optim, options=SaveOptions(views=VIEWS, process_group=own))
            apart = Trained(wrapper, make, 0, Unfused)
            load = LoadOptions(process_group=apart.process_group)
            fsdp_optim.load(path, apart.model, apart.optim, options=load)
            check_same(f"{what}, loaded", sorted_state(apart.gather(None, "name")["state"]), wanted)
            apart.step(range(STEPS, STEPS + 1))
            after = Oracle(make, STEPS + 1, Unfused)
            check_same(
                f"{what}, trained on", sorted_state(apart.gather(None, "name")["state"]), sorted_state(after.by_name())
            )
            options = CallOptions(process_group=apart.process_group)
            weights = fsdp_optim.gather_full_model_state_dict(apart.model, None, options=options)
            check_same(f"{what}, weights", dict(sorted(weights.items())), dict(sorted(after.values().items())))


class TestElementwise(unittest.TestCase):
    def check(self, wrapper: str, names: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(compared, 2, folder, wrapper, names)

    def test_optimizers_of_torch_under_fsdp2(self) -> None:
        """But for Rprop, which cannot step on DTensors."""
        self.check("FSDP2", [name for name in TORCH if name != "Rprop"])

    def test_optimizers_of_torch_under_fsdp1(self) -> None:
        self.check("FSDP1 orig", list(TORCH))

    @pytest.mark.skipif(find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is not installed")
    def test_optimizers_of_others(self) -> None:
        for wrapper in ("FSDP2", "FSDP1 orig"):
            self.check(wrapper, list(OTHERS))
