"""The folders of verl's own manager and of SkyRL, a file of each kind for each rank: read at another number of ranks, to the bit.

verl's are written by verl itself. SkyRL's strategy needs Python 3.12, Ray, a GPU: the files are written here as its source does.
"""

from __future__ import annotations

import importlib
import json
import random
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from kit.compare import check_refused, check_same, error_text, gathered_state
from kit.optimizers import step_by_values
from kit.pretrained import build
from kit.verl_cpu import engine_of, small_llama_folder, verl_on_cpu
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from safetensors.torch import load_file

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.verl",)


# ------------------------------------------------------------------------------------------ verl


def by_verl(folder: Path, strategy: str) -> dict[str, Any]:
    """Save by verl's own manager."""
    plugin = importlib.import_module("fsdp_optim.integrations.verl")
    plugin.disable()
    try:
        with verl_on_cpu():
            engine = engine_of(folder / "model", strategy, external_lib=None)
            check_same("the manager", type(engine.checkpoint_manager).__name__, "FSDPCheckpointManager")
            for number in range(2):
                step_by_values(engine.module, engine.optimizer, number)
                engine.lr_scheduler.step()
            engine.save_checkpoint(str(folder / "saved"), None, 2)
            return {**gathered_state(engine.module, engine.optimizer), "schedule": engine.lr_scheduler.last_epoch}
    finally:
        plugin.enable()


def into_verl(folder: Path, strategy: str) -> dict[str, Any]:
    """Load by the plug-in, in verl's engine."""
    with verl_on_cpu():
        engine = engine_of(folder / "model", strategy)
        engine.load_checkpoint(str(folder / "saved"))
        return {**gathered_state(engine.module, engine.optimizer), "schedule": engine.lr_scheduler.last_epoch}


def from_fsdp1(folder: Path) -> None:
    """The optimizer's files have ids of flat shards: they are refused, and the weights are loaded without them."""
    with verl_on_cpu():
        engine = engine_of(folder / "model", "fsdp2")
        saved = folder / "saved"
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error_text(lambda: fsdp_optim.load(saved, engine.module, engine.optimizer)))
        check_refused("the optimizer", errors, "StateError", "optim_world_size", "FSDP1")
        fsdp_optim.load(saved, engine.module)


@unittest.skipIf(sys.version_info >= (3, 13), "verl needs a Python before 3.13")
class VerlTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        run_on_ranks(small_llama_folder, 1, self.folder / "model")

    def test_verls_own_checkpoint_resumes_at_other_numbers_of_ranks(self) -> None:
        wanted = run_on_ranks(by_verl, 2, self.folder, "fsdp2")[0]
        for ranks, strategy in ((3, "fsdp2"), (1, "fsdp")):
            for state in run_on_ranks(into_verl, ranks, self.folder, strategy):
                check_same(f"{ranks} ranks, {strategy}", state, wanted)

    def test_an_optimizer_of_fsdp1_is_refused(self) -> None:
        wanted = run_on_ranks(by_verl, 2, self.folder, "fsdp")[0]
        run_on_ranks(from_fsdp1, 3, self.folder)
        source, target = self.folder / "saved", self.folder / "converted"
        with self.assertRaisesRegex(fsdp_optim.StateError, "move these files away"):
            fsdp_optim.convert(source, target)
        for file in source.glob("optim_*"):
            file.unlink()
        fsdp_optim.convert(source, target)
        check_same("weights", dict(sorted(load_file(target / "model.safetensors").items())), wanted["weights"])


# ------------------------------------------------------------------------------------------ SkyRL


def as_skyrl(folder: Path) -> dict[str, Any]:
    """What the `save_checkpoint` of SkyRL's FSDP strategy writes: `state_dict()` of FSDP2, and of the optimizer, and the rest."""
    with cpu():
        model = WRAPPERS["FSDP2"](build("llama"))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        sched = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)
        step_by_values(model, optim, 0)
        sched.step()
        extra = {
            "lr_scheduler": sched.state_dict(),
            "client_state": {"global_step": 7},
            "tag": None,
            "fsdp_strategy": "fsdp",
            "world_size": dist.get_world_size(),
            "rank": dist.get_rank(),
            "rng": {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()},
        }
        saved = {"model": model.state_dict(), "optim": optim.state_dict(), "extra_state": extra}
        for name, values in saved.items():
            torch.save(values, folder / f"{name}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")
        if dist.get_rank() == 0:
            (folder / "huggingface").mkdir(exist_ok=True)
            (folder / "huggingface" / "config.json").write_text("{}")
            (folder / "fsdp_config.json").write_text(json.dumps({"fsdp_strategy": "fsdp"}))
        return gathered_state(model, optim)


def from_skyrl(place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with cpu():
        model = WRAPPERS["FSDP2"](build("llama"))
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        loaded = fsdp_optim.load(place, model, optim)
        check_same("the learning rate", optim.param_groups[0]["lr"], 0.005)
        kept = {name: loaded.state[name] for name in ("lr_scheduler", "client_state", "rank")}
        return gathered_state(model, optim), kept


class SkyRlTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_files_as_skyrl_writes_them_load_at_another_number_of_ranks(self) -> None:
        wanted = run_on_ranks(as_skyrl, 2, self.folder)[0]
        for place in (self.folder, self.folder / "optim_world_size_2_rank_1.pt"):
            for state, kept in run_on_ranks(from_skyrl, 3, place):
                check_same("loaded", state, wanted)
                check_same("the rest", (kept["client_state"], kept["rank"]), ({"global_step": 7}, 0))
                self.assertEqual(kept["lr_scheduler"]["last_epoch"], 1)

    def test_they_are_converted(self) -> None:
        wanted = run_on_ranks(as_skyrl, 2, self.folder)[0]
        names = [name for name, _ in build("llama").named_parameters()]  # the optimizer's ids have none
        fsdp_optim.convert(self.folder, self.folder / "ours", options=fsdp_optim.ConvertOptions(param_names=names))
        for state, kept in run_on_ranks(from_skyrl, 3, self.folder / "ours"):
            check_same("loaded", state, wanted)
            check_same("the rest", kept["client_state"], {"global_step": 7})

    def test_two_numbers_of_ranks_in_one_folder_need_the_path_of_a_file(self) -> None:
        for ranks in (3, 2):
            wanted = run_on_ranks(as_skyrl, ranks, self.folder)[0]
        with self.assertRaisesRegex(fsdp_optim.CheckpointError, "give the path of one file"):
            fsdp_optim.inspect(self.folder)
        for state, _ in run_on_ranks(from_skyrl, 1, self.folder / "model_world_size_2_rank_0.pt"):
            check_same("loaded", state, wanted)

    def test_a_missing_file_is_named(self) -> None:
        run_on_ranks(as_skyrl, 2, self.folder)
        for name in ("model", "optim", "extra_state"):
            copy = self.folder / f"without-{name}"
            shutil.copytree(self.folder, copy, ignore=shutil.ignore_patterns("without-*", f"{name}_*_rank_1.pt"))
            with self.assertRaisesRegex(fsdp_optim.CheckpointError, f"1 rank are missing.*{name}_world_size_2_rank_0"):
                fsdp_optim.inspect(copy)


if __name__ == "__main__":
    unittest.main()
