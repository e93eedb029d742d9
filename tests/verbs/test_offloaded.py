"""Optimizers that keep their state on the CPU, beside parameters on a device: a load never passes it through the device.

The device is the stand-in of `kit.device`, which counts every element that is allocated there; `Offloaded` stands for optimizers
that move their state to the CPU after each step (DeepSpeed's, verl's and torchtitan's offloading do).
"""

from __future__ import annotations

import tempfile
import unittest
from typing import Any

import torch
from kit.cases import expand, some
from kit.compare import check_same
from kit.described import CUTS, DescribedAdapter, Training
from kit.device import CPU, DEVICE, Device

import fsdp_optim
from fsdp_optim.adapters import use_adapters
from fsdp_optim.testing import run_on_threads
from fsdp_optim.transport import world_here

VERBS = ("shard", "scatter", "transfer", "save", "async_save")
NEXT = dict(zip(CUTS, [*list(CUTS)[1:], *list(CUTS)[:1]], strict=True))
STATES = ("all", "some", "none", "float64")
"""What the live optimizer has before the load: state of all parameters, of the first one, or none, and an attribute that says
where it keeps its state; float64, which torch casts."""


class Offloaded(torch.optim.Adam):
    """Adam whose state is on the CPU between steps."""

    def step(self, closure: Any = None) -> None:
        self.move(DEVICE)
        super().step(closure)
        self.move(CPU)

    def move(self, device: torch.device) -> None:
        for values in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                values[name] = values[name].to(device)


def in_float64(run: Training) -> None:
    for values in run.optim.state.values():
        values["exp_avg"] = values["exp_avg"].double() / 3


def of_first_only(run: Training) -> None:
    for param in list(run.optim.state)[1:]:
        del run.optim.state[param]


def states(run: Training) -> list[dict[str, Any]]:
    """The state of each parameter as (device, elements)."""
    return [
        {n: (v.device.type, v.detach().cpu().clone()) if v.dim() else v.clone() for n, v in run.optim.state[p].items()}
        for p in run.model.parameters()
    ]


def made_by(device: Device, call: Any) -> int:
    before = device.numel_made
    call()
    return device.numel_made - before


def one_verb(device: Device, verb: str, cut: str, held: str, folder: str) -> None:
    world = world_here()
    ranks, rank, path = tuple(range(world.size)), world.rank, f"{folder}/saved"
    with device, use_adapters([DescribedAdapter()]):
        run = Training(cut, ranks, rank, Offloaded, device=DEVICE)
        target = Training(NEXT[cut], ranks, rank, Offloaded, steps=1, device=DEVICE)
        wanted = Training(NEXT[cut], ranks, rank, Offloaded, device=DEVICE)
        if held == "some":
            of_first_only(target)
        if held == "float64":
            for training in (run, wanted):
                in_float64(training)
        if held == "none":
            target.optim.state.clear()
            target.optim.keeps_state_on_cpu = True
        load_shard = lambda shard: fsdp_optim.load_optim_state_dict(target.optim, shard)  # noqa: E731
        if verb == "transfer":
            made = made_by(
                device,
                lambda: fsdp_optim.transfer_optim_state(run.model, run.optim, target.model, target.optim),
            )
        elif verb in ("shard", "scatter"):
            full = fsdp_optim.gather_full_optim_state_dict(run.model, run.optim, None)
            if verb == "shard":
                shard = lambda: fsdp_optim.get_shard_from_optim_state_dict(target.model, target.optim, full)  # noqa: E731
            else:
                given = full if rank == 0 else None
                shard = lambda: fsdp_optim.scatter_full_optim_state_dict(target.model, target.optim, given)  # noqa: E731
            made = made_by(device, lambda: load_shard(shard()))
        else:
            options = fsdp_optim.SaveOptions(durable=False)
            if verb == "save":
                fsdp_optim.save(path, run.model, run.optim, options=options)
            else:
                fsdp_optim.async_save(path, run.model, run.optim, options=options).wait()
            weights = made_by(device, lambda: fsdp_optim.load(path, target.model))
            made = made_by(device, lambda: fsdp_optim.load(path, target.model, target.optim)) - weights
        check_same(f"rank {rank}: elements that the load has made on the device", made, 0)
        check_same(f"rank {rank}: {verb}", states(target), states(wanted))
        if held != "float64":  # of which the step on the device makes float32
            for training in (target, wanted):
                training.step([7])
            check_same(f"rank {rank}: trained on", states(target), states(wanted))


class OffloadedTest(unittest.TestCase):
    @expand(*some([(verb, cut, held) for verb in VERBS for cut in CUTS for held in STATES], every=3))
    def test_no_element_of_state_is_made_on_the_device(self, verb: str, cut: str, held: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_threads(one_verb, 3, Device(), verb, cut, held, folder, timeout=60.0)

    def test_the_counter(self) -> None:
        with Device() as device:
            there = torch.zeros(3, device=DEVICE)
            torch.zeros(4).to(DEVICE)
            torch.zeros(5)
            there.copy_(torch.ones(3))
        self.assertEqual(device.numel_made, 7)


if __name__ == "__main__":
    unittest.main()
