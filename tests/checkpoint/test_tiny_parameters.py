"""Models in which each rank holds at most one element of a parameter: shapes do not show which values are cut like it.

The oracle is the unwrapped model, trained alike; files are opened with safetensors alone.
"""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from kit.checkpoints import check_files, everything, load, mine, save, scramble
from kit.compare import check_same
from kit.optimizers import adam
from kit.tables import Table
from kit.trained import STEPS, Trained, known_oracle
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn


class One(nn.Module):
    """A single element: all ranks but one hold nothing."""

    units = ("",)

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Parameter(torch.empty(1))


class Two(nn.Module):
    """Two elements: one on each of two ranks; on three, a rank holds nothing."""

    units = ("",)

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Parameter(torch.empty(2, 1))


class OnesOfUnits(nn.Module):
    """Parameters of one element in units of their own, and a buffer of one element."""

    units = ("inner", "")

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(1, 1))
        self.inner = nn.Module()
        self.inner.gain = nn.Parameter(torch.empty(1))
        self.register_buffer("mean", torch.tensor([0.5]))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one element": One,
    "two elements": Two,
    "one element in each unit": OnesOfUnits,
}
WRAPPERS = ("FSDP1 orig", "FSDP1 flat", "fairscale flat", "FSDP2")


def round_trip(wrapper: str, case: str) -> None:
    """Save, gather and load, and compare each with training that was not interrupted."""
    model = MODELS[case]
    with cpu(), tempfile.TemporaryDirectory() as made:
        folder = [made]
        dist.broadcast_object_list(folder)
        path = Path(folder[0], "step-1")
        trained, oracle = Trained(wrapper, adam, STEPS, model), known_oracle(adam, STEPS, model)
        before = everything(trained)
        save(path, trained)
        check_same("after saving", everything(trained), before)
        if dist.get_rank() == 0:
            check_files(path, oracle)
        gathered = trained.gather_model()
        check_same("the gathered model", gathered, {name: oracle.model.state_dict()[name] for name in gathered})
        check_same("its names", sorted(gathered), sorted(oracle.model.state_dict()))
        full = trained.gather(None, "name")
        check_same("the gathered optimizer", full["state"], oracle.by_name())
        target = Trained(wrapper, adam, 0, model)
        scramble(target)
        load(path, target)
        check_same("loaded", mine(target), mine(trained))
        for run in (target, trained):
            run.step([STEPS])
        check_same("trained on", mine(target), mine(trained))
        dist.barrier()  # before the folder goes


TRIPS = Table(round_trip, [(size, wrapper, case) for size in (2, 3) for wrapper in WRAPPERS for case in MODELS])


class TinyParametersTest(unittest.TestCase):
    @parameterized.expand(TRIPS.cases)
    def test_save_gather_and_load_are_exact(self, size: int, wrapper: str, case: str) -> None:
        TRIPS(size, wrapper, case)
