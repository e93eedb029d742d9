"""The checkpoint manager for verl, in verl's own FSDP engine: stopped and resumed, other numbers of ranks, contents.

The engine makes the manager, and runs on CPU with the stand-ins of `kit.verl_cpu`. The tests call its `save_checkpoint` and
`load_checkpoint` as verl's trainers do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand
from kit.checkpoint_damage import flip
from kit.checkpoints import before_writes
from kit.compare import check_refused, check_same, error_text
from kit.folders import SharedFolder
from kit.imports import import_without
from kit.verl_cpu import engine_of, import_verl, small_llama_folder, verl_on_cpu
from parameterized import parameterized
from safetensors.torch import load_file

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.verl",)
TRACKER = "latest_checkpointed_iteration.txt"


def train(engine: Any, steps: Sequence[int], *, alike: bool = False) -> None:
    """Training steps on random tokens: of each rank's own random state, or the same on all ranks."""
    for step in steps:
        generator = torch.Generator().manual_seed(step) if alike else None
        tokens = torch.randint(0, 40, (2, 8), generator=generator)
        engine.optimizer_zero_grad()
        engine.module(input_ids=tokens).logits.float().square().mean().backward()
        engine.optimizer_step()
        engine.lr_scheduler_step()


def everything(engine: Any) -> dict[str, Any]:
    full = fsdp_optim.gather_full_optim_state_dict(engine.module, engine.optimizer, recipient_rank=None, key_by="name")
    assert full is not None
    return {
        "model": fsdp_optim.gather_full_model_state_dict(engine.module, recipient_rank=None),
        "state": full["state"],
        "lr": [group["lr"] for group in engine.optimizer.param_groups],
        "scheduler": engine.lr_scheduler.last_epoch,
    }


@contextlib.contextmanager
def engine(folder: Path, strategy: str = "fsdp2", **options: Any) -> Iterator[Any]:
    lora = {key: options.pop(key) for key in ("lora_rank", "external_lib") if key in options}
    with verl_on_cpu():
        made = engine_of(folder / "model", strategy, options, **lora)
        yield made
        if hasattr(made.checkpoint_manager, "wait"):
            made.checkpoint_manager.wait()


def folder_of(folder: Path, step: int, role: str = "actor") -> str:
    return str(folder / f"global_step_{step}" / role)


@unittest.skipIf(sys.version_info >= (3, 13), "verl needs a Python before 3.13")
class VerlTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        run_on_ranks(small_llama_folder, 1, cls.root / "model")


# ------------------------------------------------------------------------------------------ names


def small_experts(folder: Path) -> None:
    """A pretrained model with stacked experts, in the names of the hub."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "architectures": ["Qwen3MoeForCausalLM"]}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, **heads)).save_pretrained(folder)


def by_names(folder: Path, views: str, trains: bool) -> dict[str, Any]:
    """Train two steps and save, or load."""
    with mock.patch.dict(os.environ, {"FSDP_OPTIM_VIEWS": views}), engine(folder, "fsdp2") as made:
        if trains:
            for number in range(2):
                for param in made.module.parameters():
                    param.grad = param.detach() * (0.5 + number)
                made.optimizer_step()
            made.save_checkpoint(folder_of(folder, 2), None, 2)
        else:
            made.load_checkpoint(folder_of(folder, 2), None, True)
        return everything(made)


@unittest.skipIf(sys.version_info >= (3, 13), "verl needs a Python before 3.13")
class NamesTest(unittest.TestCase):
    def test_experts_are_saved_under_the_names_of_the_hub(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        run_on_ranks(small_experts, 1, folder / "model")
        saved = run_on_ranks(by_names, 2, folder, "hub", True)[0]
        place = Path(folder_of(folder, 2), "huggingface")
        names = set(load_file(place / "model.safetensors"))
        self.assertEqual(names, set(load_file(folder / "model/model.safetensors")))
        self.assertIn("model.layers.1.mlp.experts.3.up_proj.weight", fsdp_optim.inspect(place).state)
        for loaded in run_on_ranks(by_names, 3, folder, "hub", False):
            check_same("loaded", loaded, saved)


# ------------------------------------------------------------------------------------------ resume


def stop_and_resume(folder: Path, strategy: str, in_background: bool) -> None:
    root = folder / f"{strategy}-{in_background}"
    torch.manual_seed(50 + dist.get_rank())
    with engine(folder, strategy) as whole:
        train(whole, range(4))
        wanted, drawn = everything(whole), torch.rand(3)
    torch.manual_seed(50 + dist.get_rank())
    with engine(folder, strategy, async_save=in_background) as first:
        train(first, range(2))
        first.save_checkpoint(folder_of(root, 2), None, 2)
        train(first, [2])  # what comes later is not saved
    torch.manual_seed(9)
    with engine(folder, strategy) as second:
        check_same("the manager", type(second.checkpoint_manager).__name__, "FsdpOptimCheckpointManager")
        second.load_checkpoint(folder_of(root, 2), None, True)
        train(second, [2, 3])
        check_same("a run that stopped and continued", everything(second), wanted)
        check_same("random states", torch.rand(3), drawn)


def saved_alike(folder: Path, strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with engine(folder, strategy) as first:
        train(first, range(2), alike=True)
        first.save_checkpoint(folder_of(folder / strategy, 2), None, 2)
        saved = everything(first)
        train(first, [2, 3], alike=True)
        return saved, everything(first)


def loaded_alike(folder: Path, strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with engine(folder, strategy) as second:
        second.load_checkpoint(folder_of(folder / strategy, 2))
        loaded = everything(second)
        train(second, [2, 3], alike=True)
        return loaded, everything(second)


class TestResume(VerlTest):
    @parameterized.expand([("fsdp2", True), ("fsdp", False)])
    def test_a_run_that_stopped_goes_on_as_if_it_had_not(self, strategy: str, in_background: bool) -> None:
        run_on_ranks(stop_and_resume, 2, self.root, strategy, in_background)

    @expand(soon=[("fsdp2", (3,))], later=[("fsdp2", (1, 4)), ("fsdp", (1, 3, 4))])
    def test_other_numbers_of_ranks(self, strategy: str, world_sizes: tuple[int, ...]) -> None:
        """The averages of two and of four equal gradients are exact, those of three are not, so three ranks only load."""
        [(saved, whole), _] = run_on_ranks(saved_alike, 2, self.root, strategy)
        for world_size in world_sizes:
            with self.subTest(world_size):
                for loaded, resumed in run_on_ranks(loaded_alike, world_size, self.root, strategy):
                    check_same(f"loaded on {world_size}", loaded, saved, in_order=False)
                    if world_size != 3:
                        check_same(f"trained on {world_size}", resumed, whole, in_order=False)


# ------------------------------------------------------------------------------------------ in the background


def wait_for(path: Path, seconds: float = 60.0) -> str:
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise AssertionError(f"{path} does not come")
        time.sleep(0.02)
    return path.read_text()


def in_background(folder: Path) -> None:
    """The tracker names a step after the manifests of all roles, and after the loader's state."""
    root, go_on = folder / "background", threading.Event()
    hold = {"is_on": False}

    def held(_: Any) -> None:
        if hold["is_on"] and threading.current_thread() is not threading.main_thread():
            go_on.wait(60)

    options = {"async_save": True, "save_contents": ["model", "optimizer", "extra", "hf_model"]}
    with engine(folder, **options) as actor, before_writes(held):
        train(actor, [0])
        hold["is_on"] = True
        actor.save_checkpoint(folder_of(root, 1), None, 1)
        place = Path(folder_of(root, 1)) / "huggingface"
        train(actor, [1])  # continues
        assert not (place / "fsdp_optim.json").exists()
        if dist.get_rank() == 0:
            (root / "global_step_1/critic/huggingface.saving-1").mkdir(parents=True)  # another role, not ready
            torch.save({}, root / "global_step_1/data.pt")
        go_on.set()
        actor.checkpoint_manager.wait()
        dist.barrier()
        assert (place / "fsdp_optim.json").exists()
        assert (place / "config.json").exists()
        assert not (root / TRACKER).exists(), "the critic is not ready"
        actor.save_checkpoint(folder_of(root, 2), None, 2)
        if dist.get_rank() == 0:
            torch.save({}, root / "global_step_2/data.pt")
            check_same("the tracker", wait_for(root / TRACKER), "2")
        dist.barrier()
        actor.save_checkpoint(
            str(root / "sft/global_step_3"), None, 3
        )  # as the SFT trainer, which writes the tracker at once
        assert (root / "sft/global_step_3/huggingface/fsdp_optim.json").exists()


def opened_by_transformers(place: str) -> dict[str, Any]:
    """The report of transformers about the weights: the missing and the unknown ones."""
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    return {key: list(names) for key, names in info.items() if names}


class TestBackground(VerlTest):
    def test_the_tracker_is_written_after_the_marker(self) -> None:
        run_on_ranks(in_background, 2, self.root)
        place = f"{self.root}/background/global_step_2/actor/huggingface"
        self.assertEqual(run_on_ranks(opened_by_transformers, 1, place), [{}])


# ------------------------------------------------------------------------------------------ errors


def failures(folder: Path) -> list[tuple[str, str]]:
    errors = []
    for rank in (0, 1):
        with engine(folder) as actor:
            train(actor, [0])

            def lost() -> None:
                raise OSError("the schedule is lost")

            if dist.get_rank() == rank:
                actor.lr_scheduler.state_dict = lost
            place = folder_of(folder / f"fails-{rank}", 1)
            errors.append(error_text(functools.partial(actor.save_checkpoint, place, None, 1)))
    with engine(folder) as actor:
        train(actor, [0])
        place = folder_of(folder / "damaged", 1)
        actor.save_checkpoint(place, None, 1)
        train(actor, [1])
        before, draws = everything(actor), torch.random.get_rng_state()

        def refuses(schedule: object, state: object) -> None:
            if dist.get_rank() == 1:
                raise OSError("the schedule is refused")

        schedule = actor.lr_scheduler.state_dict()
        with mock.patch.object(type(actor.lr_scheduler), "load_state_dict", refuses):
            errors.append(error_text(lambda: actor.load_checkpoint(place)))
        check_same("after a schedule that rank 1 refuses", everything(actor), before)
        check_same("its schedule", actor.lr_scheduler.state_dict(), schedule)
        check_same("its random states", torch.random.get_rng_state(), draws)
        if dist.get_rank() == 0:
            flip(Path(place) / "huggingface/optim.safetensors", -5)
        dist.barrier()
        before = everything(actor)
        errors.append(error_text(lambda: actor.load_checkpoint(place)))
        check_same("after the refusal", everything(actor), before)
    return errors


PLUG_IN = "fsdp_optim.integrations.verl"


def import_without_a_name() -> str:
    """The error of the plug-in's import where verl does not have a name."""
    import_verl()
    return import_without(PLUG_IN, "verl.utils.checkpoint.checkpoint_manager", "get_checkpoint_tracker_filename")


def disable_and_enable() -> list[list[str]]:
    """The class that verl's modules find, without the plug-in and with it again."""
    import_verl()
    plug_in = importlib.import_module(PLUG_IN)
    names = ("verl.utils.checkpoint.fsdp_checkpoint_manager", "verl.workers.engine.fsdp.transformer_impl")
    modules = [importlib.import_module(name) for name in names]
    classes = []
    for change in (plug_in.disable, plug_in.enable):
        change()
        classes.append([module.FSDPCheckpointManager.__name__ for module in modules])
    return classes


class TestFailures(VerlTest):
    def test_a_failing_rank_and_a_damaged_checkpoint(self) -> None:
        by_rank = run_on_ranks(failures, 2, self.root)
        for rank in (0, 1):
            check_refused(
                f"rank {rank}", [errors[rank] for errors in by_rank], "StateError", "lr_scheduler", "schedule is lost"
            )
            self.assertFalse((self.root / f"fails-{rank}/global_step_1/actor/huggingface").exists())
        check_refused(
            "schedule", [errors[2] for errors in by_rank], "StateError", "lr_scheduler", "schedule is refused"
        )
        check_refused("damage", [errors[3] for errors in by_rank], "CheckpointError", "optim.safetensors")

    def test_a_version_without_a_name_is_refused_in_one_line(self) -> None:
        [text] = run_on_ranks(import_without_a_name, 1)
        self.assertIn("verl 0.9.1 does not have verl.utils.checkpoint.checkpoint_manager.get_", text)
        self.assertNotIn("\n", text)

    def test_disable_puts_verls_own_back(self) -> None:
        wanted = [["FSDPCheckpointManager"] * 2, ["FsdpOptimCheckpointManager"] * 2]
        self.assertEqual(run_on_ranks(disable_and_enable, 1), [wanted])


# ------------------------------------------------------------------------------------------ contents


def contents(folder: Path) -> None:
    with engine(folder, save_contents=["model"], load_contents=["model"]) as actor:
        train(actor, [0])
        saved = everything(actor)
        actor.save_checkpoint(folder_of(folder / "model-only", 1), None, 1)
    with engine(folder, load_contents=["model"]) as restored:
        restored.load_checkpoint(folder_of(folder / "model-only", 1))
        check_same("weights", everything(restored)["model"], saved["model"])
        assert restored.lr_scheduler.last_epoch == 0
        assert not restored.optimizer.state
    options = {"save_contents": ["optimizer", "extra"], "load_contents": ["optimizer", "extra"]}
    with engine(folder, **options) as actor:
        train(actor, [0])
        saved = everything(actor)
        actor.save_checkpoint(folder_of(folder / "no-model", 1), None, 1)
    with engine(folder, **options) as restored:
        base = everything(restored)["model"]
        restored.load_checkpoint(folder_of(folder / "no-model", 1))
        check_same("the optimizer", everything(restored)["state"], saved["state"])
        check_same("the model stays", everything(restored)["model"], base)
        check_same("the schedule", restored.lr_scheduler.last_epoch, 1)
    with engine(folder, save_contents=["extra"]) as actor:
        refused = error_text(lambda: actor.save_checkpoint(folder_of(folder / "nothing", 1), None, 1))
        check_refused("extra alone", [refused], "CheckpointError", "save_contents", "'optimizer'")


def keeps(folder: Path) -> None:
    with engine(folder) as actor:
        train(actor, [0])
        for step in (1, 2, 3):
            actor.save_checkpoint(folder_of(folder / "kept", step), None, step, 2)
        dist.barrier()
        left = [step for step in (1, 2, 3) if Path(folder_of(folder / "kept", step)).exists()]
        check_same("what is left", left, [2, 3])
        url = f"file://{folder}/uploaded"
        actor.save_checkpoint(folder_of(folder / "local", 4), f"{url}/actor", 4)
        saved = everything(actor)
    with engine(folder) as restored:
        restored.load_checkpoint(None, f"{url}/actor")
        check_same("uploaded", everything(restored), saved)
        restored.load_checkpoint(folder_of(folder / "local", 4), None, True)
        assert (Path(folder_of(folder / "local", 4)) / "huggingface/model.safetensors").exists()


def lora_only(folder: Path) -> None:
    with engine(folder, lora_rank=2, save_lora_only=True) as actor:
        train(actor, [0])
        saved = everything(actor)
        actor.save_checkpoint(folder_of(folder / "lora", 1), None, 1)
        names = fsdp_optim.inspect(Path(folder_of(folder / "lora", 1)) / "huggingface").model
        assert names
        assert all("lora_" in name for name in names), list(names)
    with engine(folder, lora_rank=2, save_lora_only=True) as restored:
        train(restored, [7])
        restored.load_checkpoint(folder_of(folder / "lora", 1))
        check_same("adapters and base", everything(restored), saved)


def from_verl_itself(folder: Path) -> None:
    with engine(folder) as actor:
        train(actor, [0])
        saved = everything(actor)
        importlib.import_module("fsdp_optim.integrations.verl").disable()
        try:
            with engine(folder, external_lib=None) as own:
                check_same("the manager", type(own.checkpoint_manager).__name__, "FSDPCheckpointManager")
                train(own, [0])
                own.save_checkpoint(folder_of(folder / "own", 1), None, 1)
        finally:
            importlib.import_module("fsdp_optim.integrations.verl").enable()
    with engine(folder) as restored:
        restored.load_checkpoint(folder_of(folder / "own", 1))
        check_same("what verl saved", restored.lr_scheduler.last_epoch, 1)
        assert set(everything(restored)["state"]) == set(saved["state"])


class TestContents(VerlTest):
    def test_adapters_only(self) -> None:
        run_on_ranks(lora_only, 2, self.root)

    @pytest.mark.slow
    def test_save_contents_and_load_contents(self) -> None:
        run_on_ranks(contents, 2, self.root)

    @pytest.mark.slow
    def test_max_ckpt_to_keep_hdfs_path_and_del_local_after_load(self) -> None:
        run_on_ranks(keeps, 2, self.root)

    @pytest.mark.slow
    def test_a_checkpoint_of_verls_own_manager(self) -> None:
        run_on_ranks(from_verl_itself, 2, self.root)
