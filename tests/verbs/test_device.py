"""Verbs and checkpoints of models on a device whose memory the host cannot read: no `.cpu()`, no `.to(device)` is forgotten."""

from __future__ import annotations

import pickle
import tempfile
import unittest
from typing import Any

import torch
from kit.cases import expand, some
from kit.compare import check_same
from kit.described import CUTS, DescribedAdapter, Training
from kit.device import CPU, DEVICE, Device, OnHost
from kit.optimizers import adam, sgd

import fsdp_optim
from fsdp_optim.adapters import use_adapters
from fsdp_optim.prints.coefficients import coefficients_on, signs_on
from fsdp_optim.state.values import fingerprint_of
from fsdp_optim.state.values import same as same_values
from fsdp_optim.tensors import memory
from fsdp_optim.testing import run_on_threads
from fsdp_optim.transport import world_here


class StepsThere(torch.optim.Adam):
    """An Adam whose `step` lies on the device, as one that is captured in a graph has it."""

    def step(self, closure: Any = None) -> None:
        for values in self.state.values():
            values["step"] = values["step"].cpu()
        super().step(closure)
        for values in self.state.values():
            values["step"] = values["step"].to(DEVICE)


MAKES: dict[str, Any] = {
    "Adam, steps there": StepsThere,
    "SGD": sgd,
    "Adam": adam,
    "AdamW": torch.optim.AdamW,
    "Adadelta": torch.optim.Adadelta,
}
VERBS = ("gather", "iterate", "shard", "scatter", "transfer", "save", "async_save")
NEXT = dict(zip(CUTS, [*list(CUTS)[1:], *list(CUTS)[:1]], strict=True))


def on_host(value: Any) -> Any:
    """A state as it is compared: (device, elements) of tensors."""
    if isinstance(value, torch.Tensor):
        return value.device.type if value.dim() else "", value.detach().cpu().clone()
    return {key: on_host(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def one_verb(device: Device, verb: str, cut: str, make: str, folder: str) -> None:
    """A verb between models on the device: state comes whole to the host, and back to the device."""
    world = world_here()
    ranks, rank = tuple(range(world.size)), world.rank
    with device, use_adapters([DescribedAdapter()]):
        run = Training(cut, ranks, rank, MAKES[make], device=DEVICE)
        target = Training(NEXT[cut], ranks, rank, MAKES[make], steps=0, device=DEVICE)
        wanted = Training(NEXT[cut], ranks, rank, MAKES[make], device=DEVICE)
        path = f"{folder}/saved"
        if verb in ("gather", "iterate", "shard", "scatter"):
            full = fsdp_optim.gather_full_optim_state_dict(
                run.model, run.optim, None, options=fsdp_optim.CallOptions(bucket_nbytes=100)
            )
            pickle.dumps(full)  # the full dict is the host's
            if verb == "iterate":
                full["state"] = dict(
                    enumerate(dict(fsdp_optim.iter_full_optim_state(run.model, run.optim, None)).values())
                )
            if verb == "scatter":
                given = full if rank == 0 else None
                shard = fsdp_optim.scatter_full_optim_state_dict(
                    target.model, target.optim, given, options=fsdp_optim.CallOptions(bucket_nbytes=100)
                )
            else:
                shard = fsdp_optim.get_shard_from_optim_state_dict(target.model, target.optim, full)
            fsdp_optim.load_optim_state_dict(target.optim, shard)
        elif verb == "transfer":
            fsdp_optim.transfer_optim_state(
                run.model, run.optim, target.model, target.optim, options=fsdp_optim.CallOptions(bucket_nbytes=100)
            )
        else:
            if verb == "save":
                fsdp_optim.save(
                    path,
                    run.model,
                    run.optim,
                    options=fsdp_optim.SaveOptions(durable=False, bucket_nbytes=100, fingerprint=True),
                )
            else:
                fsdp_optim.async_save(path, run.model, run.optim, options=fsdp_optim.SaveOptions(durable=False)).wait()
            fsdp_optim.load(
                path, target.model, target.optim, options=fsdp_optim.LoadOptions(compare=True, bucket_nbytes=100)
            )
            prints = [
                fsdp_optim.fingerprint(training.model, training.optim, projections=2) for training in (run, target)
            ]
            check_same("fingerprints", prints[1].differences(prints[0]), ())
            for param, wanted_param in zip(target.model.parameters(), wanted.model.parameters(), strict=True):
                check_same("weights", on_host(param), on_host(wanted_param))
        got, right = (on_host(training.optim.state_dict()["state"]) for training in (target, wanted))
        check_same(f"rank {rank}: {verb}", got, right)


def run_verb(verb: str, cut: str = "rows", make: str = "Adam", size: int = 2) -> None:
    for cached in (coefficients_on, signs_on):
        cached.cache_clear()  # each test has a device of its own
    with tempfile.TemporaryDirectory() as folder:
        run_on_threads(one_verb, size, Device(), verb, cut, make, folder, timeout=60.0)


class VerbsOnTheDeviceTest(unittest.TestCase):
    @expand(*some([(verb, cut) for verb in VERBS for cut in CUTS], every=3))
    def test_every_cut(self, verb: str, cut: str) -> None:
        run_verb(verb, cut, size=3)

    @expand(*some([(verb, make) for verb in VERBS for make in MAKES if make != "Adam"], every=3))
    def test_every_optimizer(self, verb: str, make: str) -> None:
        run_verb(verb, make=make)


class CopiesTest(unittest.TestCase):
    """The ways of values of the optimizer to the host: an opaque value, a digest, a comparison."""

    def test_a_copy_of_a_value(self) -> None:
        with Device() as device:
            there = torch.arange(3.0, device=DEVICE)
            for copied in (
                memory.detached_copy(there),
                memory.detached_copy([there])[0],
                memory.detached_copy({"a": (there,)})["a"][0],
            ):
                self.assertEqual((device.has(copied), copied.tolist()), (False, [0.0, 1.0, 2.0]))

    def test_a_digest(self) -> None:
        with Device():
            there, here = torch.arange(3.0, device=DEVICE), torch.arange(3.0)
            self.assertEqual(fingerprint_of(there), fingerprint_of(here))
            self.assertEqual(fingerprint_of({"a": [there]}), fingerprint_of({"a": [here]}))
            self.assertNotEqual(fingerprint_of(there), fingerprint_of(there + 1))

    def test_a_comparison(self) -> None:
        with Device():
            there, here = torch.arange(3.0, device=DEVICE), torch.arange(3.0)
            self.assertTrue(same_values(there, here) and same_values([here], [there]))
            self.assertFalse(same_values(there, here + 1))


class DeviceTest(unittest.TestCase):
    """The stand-in refuses what a device refuses."""

    def test_what_the_host_cannot_read(self) -> None:
        with Device() as device:
            there, here = torch.ones(3, device=DEVICE), torch.ones(3)
            self.assertEqual((there.device, here.device, there[1:].device), (DEVICE, CPU, DEVICE))
            self.assertTrue(
                device.has(there + 1) and device.has(torch.zeros_like(there)) and device.has(here.to(DEVICE))
            )
            self.assertFalse(device.has(there.cpu()) or device.has(there.to("cpu", copy=True)) or device.has(here))
            for read in (
                lambda: there.numpy(),
                lambda: there.tolist(),
                lambda: there.data_ptr(),
                lambda: memoryview(there.numpy()),
                lambda: there.untyped_storage().tolist(),
                lambda: pickle.dumps(there),
                lambda: there + here,
                lambda: torch.cat([there, here]),
                lambda: torch.equal(there, here),
            ):
                with self.assertRaises(OnHost):
                    read()
            self.assertEqual(here.copy_(there).tolist(), [1.0, 1.0, 1.0])


if __name__ == "__main__":
    unittest.main()
