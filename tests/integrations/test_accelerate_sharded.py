"""Folders that Accelerate and the Trainer themselves have saved as sharded: a run that switches to the plug-in continues.

Accelerate's own function loads the optimizer of FSDP1 into what `FSDP.optim_state_dict` gives of the new optimizer, which has no
state before its first step, so nothing is loaded.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import unittest
from typing import Any
from unittest import mock

from kit.accelerate_loop import Loop, load_and_go_on, with_lora
from kit.cases import expand, some
from kit.compare import check_same
from kit.hugging_face import enabled, on_cpu, tiny_llama, train
from kit.options import as_options

import fsdp_optim
from fsdp_optim import StateError
from fsdp_optim.testing import RanksFailed, run_on_ranks

LOADED = ("kit.loaded.hugging_face",)


def by_accelerate_alone(kind: str, folder: str, adapters: bool = False) -> dict[str, Any]:
    """Five steps without the plug-in. Accelerate saves after the third."""
    with on_cpu(kind), enabled(None):
        loop = Loop(kind, adapters=adapters)
        losses = [loop.step() for _ in range(3)]
        third, rest = loop.state, loop.rest
        loop.accelerator.save_state(folder)
        losses += [loop.step() for _ in range(2)]
        return {"third": third, "rest of third": rest, "losses": losses[3:], "end": loop.state, "rest": loop.rest}


def trainer_with_adapters(
    kind: str, folder: str, settings: Any, resume: Any = None, seed: int = 0, **options: Any
) -> dict[str, Any]:
    """A Trainer of adapters; only their weights are compared, because a checkpoint has no others."""
    done = train(kind, folder, settings, resume, model=with_lora(tiny_llama(), seed), **options)
    for state in (done["end"], done["begun"], done["second"]):
        if state is not None:
            state["weights"] = {name: value for name, value in state["weights"].items() if "lora" in name}
    return done


def by_the_trainers_own(kind: str, folder: str, resume: str) -> dict[str, Any]:
    """As for adapters whose values PEFT makes when it saves: their names say nothing."""
    made = StateError("PEFT makes this value")
    with mock.patch("fsdp_optim.integrations.peft.AdapterNames.of", side_effect=made):
        return trainer_with_adapters(kind, folder, {}, resume, 1, save_strategy="no", max_steps=3)


def written_for_accelerate(kind: str, folder: str) -> None:
    """Files of this library in the form of torch.distributed.checkpoint, read by Accelerate's functions, also adapters alone."""
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer

    quiet: Any = {"format": "dcp", "durable": False, "progress": False}

    def without_adapter(name: str) -> str:
        return name.replace(".default", "")

    with on_cpu(kind), enabled(None):
        loop = Loop(kind, adapters=True)
        for _ in range(3):
            loop.step()
        wanted = loop.state
        fsdp_optim.save(f"{folder}/all/pytorch_model_fsdp_0", loop.model, **as_options(fsdp_optim.SaveOptions, **quiet))
        fsdp_optim.save(
            f"{folder}/all/optimizer_0",
            loop.model,
            loop.optim.optimizer,
            weights="none",
            **as_options(fsdp_optim.SaveOptions, **quiet),
        )
        path = f"{folder}/adapters/pytorch_model_fsdp_0"
        fsdp_optim.save(
            path, loop.model, weights="trainable", **as_options(fsdp_optim.SaveOptions, **quiet, rename=without_adapter)
        )
        both = (("all", False), ("adapters", True))
        for name, adapter_only in (
            both if kind == "FSDP2" else both[:1]
        ):  # in FSDP1 Accelerate reads no adapters, nor its own
            other = Loop(kind, seed=1, adapters=True)
            start = other.state["weights"]
            plugin = other.accelerator.state.fsdp_plugin
            load_fsdp_model(plugin, other.accelerator, other.model, f"{folder}/{name}", adapter_only=adapter_only)
            weights = {
                key: start[key] if adapter_only and "lora" not in key else value
                for key, value in wanted["weights"].items()
            }
            check_same(f"{kind}: weights, {name}", other.state["weights"], weights)
            if adapter_only:
                continue
            if kind == "FSDP1":  # Accelerate's own function finds no state to load into before the first step
                other.step()
            load_fsdp_optimizer(plugin, other.accelerator, other.optim.optimizer, other.model, f"{folder}/{name}")
            check_same(f"{kind}: state, {name}", other.state["state"], wanted["state"], in_order=False)


class AdaptersTest(unittest.TestCase):
    """A frozen base with adapters of PEFT."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.root = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.root)

    @expand(soon=[("FSDP2", 3, "FSDP1")], later=[("FSDP1", 1, "none"), ("FSDP2", 2, "DDP")])
    def test_base_and_adapters_of_an_accelerator(self, kind: str, world_size: int, other: str) -> None:
        folder = f"{self.root}/{kind}-{world_size}"
        oracle = run_on_ranks(by_accelerate_alone, 2, kind, folder, True)
        for rank, resumed in enumerate(run_on_ranks(load_and_go_on, 2, kind, folder, {}, False, 2, True)):
            check_same(f"{kind}: a run that switches", resumed, oracle[rank], in_order=False)
        for moved in run_on_ranks(load_and_go_on, world_size, other, folder, {}, False, 0, True):
            check_same(f"{kind} in {other} on {world_size}", moved["third"], oracle[0]["third"], in_order=False)

    def test_adapters_alone_of_a_trainer(self) -> None:
        kind, folder = "FSDP2", f"{self.root}/trainer"
        oracle = run_on_ranks(trainer_with_adapters, 2, kind, folder, None)
        old = f"{folder}/checkpoint-2"
        self.assertIn("pytorch_model_fsdp_0", os.listdir(old))
        for rank, resumed in enumerate(
            run_on_ranks(trainer_with_adapters, 2, kind, folder, {}, old, 1, save_strategy="no")
        ):
            check_same(f"{kind}, begun", resumed["begun"], oracle[rank]["second"], in_order=False)
            check_same(f"{kind}, end", resumed["end"], oracle[rank]["end"], in_order=False)

        for state in run_on_ranks(trainer_with_adapters, 3, "DDP", folder, {}, old, 1, save_strategy="no", max_steps=3):
            check_same("in DDP on 3", state["begun"], oracle[0]["second"], in_order=False)

        for state in run_on_ranks(by_the_trainers_own, 2, kind, folder, old):
            check_same("by the Trainer's own function", state["begun"], oracle[0]["second"], in_order=False)

    def test_adapters_that_accelerate_has_not_saved(self) -> None:
        """In FSDP1 its own function writes a folder without weights, and its own load says nothing."""
        folder = f"{self.root}/trainer-FSDP1"
        run_on_ranks(trainer_with_adapters, 2, "FSDP1", folder, None, max_steps=2)
        old = f"{folder}/checkpoint-2"
        with self.assertRaises(RanksFailed) as caught:
            run_on_ranks(trainer_with_adapters, 2, "FSDP1", folder, {}, old, 1, save_strategy="no")
        for error in caught.exception.errors.values():
            self.assertIsInstance(error, fsdp_optim.CheckpointError)
            self.assertIn(f"{old}: has no weights: Accelerate saves none of PEFT's adapters with FSDP1", str(error))
        self.assertEqual(len(caught.exception.errors), 2)

    @expand(soon=[("FSDP2",)], later=[("FSDP1",)])
    def test_what_this_library_writes_is_read_by_accelerate(self, kind: str) -> None:
        run_on_ranks(written_for_accelerate, 2, kind, f"{self.root}/written-{kind}")


class ShardedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.root = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.root)

    @expand(*some([("FSDP1", 3, "FSDP2"), ("FSDP2", 3, "FSDP1"), ("FSDP1", 1, "none"), ("FSDP2", 2, "DDP")], every=4))
    def test_an_accelerator_goes_on_bit_for_bit(self, kind: str, world_size: int, other: str) -> None:
        folder = f"{self.root}/{kind}-{world_size}"
        oracle = run_on_ranks(by_accelerate_alone, 2, kind, folder)
        for rank, resumed in enumerate(run_on_ranks(load_and_go_on, 2, kind, folder, {}, False)):
            check_same(f"{kind}: a run that switches", resumed, oracle[rank], in_order=False)
        for moved in run_on_ranks(load_and_go_on, world_size, other, folder, {}, False, 0):
            check_same(f"{kind} in {other} on {world_size}", moved["third"], oracle[0]["third"], in_order=False)
            check_same(f"{kind} in {other} on {world_size}", moved["rest of third"], oracle[0]["rest of third"])

    @expand(*some([("FSDP1", 3, "FSDP2"), ("FSDP2", 3, "FSDP1"), ("FSDP1", 1, "none")], every=3))
    def test_a_trainer_goes_on_bit_for_bit(self, kind: str, world_size: int, other: str) -> None:
        folder = f"{self.root}/trainer-{kind}-{world_size}"
        oracle = run_on_ranks(train, 2, kind, folder, None)
        old = f"{folder}/checkpoint-2"
        for rank, resumed in enumerate(run_on_ranks(train, 2, kind, folder, {}, old, 1, save_strategy="no")):
            check_same(f"{kind}, begun", resumed["begun"], oracle[rank]["second"], in_order=False)
            check_same(
                f"{kind}, losses", [resumed["losses"][n] for n in (3, 4)], [oracle[rank]["losses"][n] for n in (3, 4)]
            )
            check_same(f"{kind}, end", resumed["end"], oracle[rank]["end"], in_order=False)
        options = {"save_strategy": "no", "max_steps": 3}
        for moved in run_on_ranks(train, world_size, other, folder, {}, old, 1, **options):
            check_same(f"{kind} in {other} on {world_size}", moved["begun"], oracle[0]["second"], in_order=False)
