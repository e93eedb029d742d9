"""The checkpoint manager for torchtitan, in torchtitan's own Trainer: stopped and resumed, other numbers of ranks, other options.

The Trainer runs on CPU with the stand-ins of `kit.torchtitan_cpu`.
"""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand
from kit.checkpoint_damage import flip
from kit.compare import check_refused, check_same, error_text
from kit.folders import SharedFolder
from kit.imports import import_without
from kit.torchtitan_cpu import (
    everything,
    import_torchtitan,
    torchtitan_on_cpu,
    trained,
    trainer_config,
    trainer_of,
    without,
)
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.torchtitan",)
NEEDS = sys.version_info >= (3, 11)
WHY = "torchtitan needs Python 3.11"


def stop_and_resume(folder: Path, **options: Any) -> None:
    whole = trained(folder / "whole", 6, enable=False, **options)
    saved = trained(folder / "run", 4, **options)
    with trainer_of(folder / "run", 6, **options) as trainer:
        trainer.checkpointer.load()
        check_same("a run that was loaded", without(everything(trainer), "num_drawn"), without(saved, "num_drawn"))
    with trainer_of(folder / "run", 6, **options) as trainer:
        trainer.train()  # its new iterators of loaders draw random numbers
        check_same("a run that stopped and continued", without(everything(trainer), "random"), without(whole, "random"))
        check_same(
            "the steps",
            [checkpoint.step for checkpoint in fsdp_optim.checkpoints(folder / "run/checkpoint")],
            [6, 4, 2],
        )


def saved_alike(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a run that never stopped after 4 steps, which were saved, and after 6."""
    at_4 = trained(folder / "run", 4, alike=True, async_mode="async")
    return at_4, trained(folder / "whole", 6, alike=True, enable=False)


def loaded_and_resumed(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with trainer_of(folder / "run", 6, alike=True, load_only=True) as trainer:
        trainer.checkpointer.load()
        before = everything(trainer)
    with trainer_of(folder / "run", 6, alike=True, load_only=True) as trainer:
        trainer.train()
        return before, everything(trainer)


@unittest.skipUnless(NEEDS, WHY)
class TestResume(SharedFolder):
    @expand(
        soon=[("disabled", {}), ("async", {"fuse_qkv": True})],
        later=[("async_with_pinned_mem", {"parallelism": {"pipeline_parallel_degree": 2}})],
    )
    def test_a_run_that_stopped_goes_on_as_if_it_had_not(self, mode: str, spec: dict[str, Any]) -> None:
        """Two optimizers, the loader of each rank, the schedule, random states; parameters that a hook joins; a pipeline."""
        run_on_ranks(stop_and_resume, 2, self.root / mode, async_mode=mode, spec=spec)

    @expand(soon=[], later=[(1,), (3,), (4,)])  # test_torchtitan_layouts.py has another number in `make test-all`
    def test_other_numbers_of_ranks(self, world_size: int) -> None:
        """The sums of two and of four equal gradients are exact, those of three are not, so three ranks only load."""
        folder = self.root / f"alike {world_size}"
        [(saved, whole), _] = run_on_ranks(saved_alike, 2, folder)
        by_rank, other = run_on_ranks(loaded_and_resumed, world_size, folder), ("random", "num_drawn", "tokens")
        for loaded, resumed in by_rank:
            check_same(f"loaded on {world_size}", without(loaded, *other), without(saved, *other))
            if world_size != 3:
                check_same(f"trained on {world_size}", without(resumed, *other), without(whole, *other))
        check_same("tokens of all ranks", sum(loaded["tokens"] for loaded, _ in by_rank), 2 * saved["tokens"])


# ------------------------------------------------------------------------------------------ errors


def a_rank_fails(folder: Path, rank: int) -> tuple[str, str]:
    def lost() -> None:
        raise OSError("the loader is lost")

    with trainer_of(folder, 4) as trainer:
        trainer.checkpointer.load()
        if torch.distributed.get_rank() == rank:
            trainer.dataloader.state_dict = lost
        return error_text(lambda: trainer.checkpointer.save(2))


def damaged(folder: Path) -> dict[str, tuple[str, str]]:
    trained(folder, 4, keep_latest_k=0)
    if torch.distributed.get_rank() == 0:
        flip(folder / "checkpoint/step-00000004/optim.safetensors", -5)
    torch.distributed.barrier()
    with trainer_of(folder, 6) as trainer:
        refused = error_text(trainer.checkpointer.load)
    with trainer_of(folder, 6, on_damage="previous") as trainer:
        assert trainer.checkpointer.load()
        check_same("the step", trainer.step, 2)
    return {"load": refused}


def import_without_a_name() -> str:
    """The error of the plug-in's import where torchtitan does not have a name."""
    import_torchtitan()
    base = "torchtitan.components.checkpointer.base"
    return import_without("fsdp_optim.integrations.torchtitan", base, "ModelWrapper")


FUSED, UNFUSED = {"fuse_qkv": True}, {"fuse_qkv": False}


def canonical(trainer: Any) -> dict[str, Any]:
    """What runs with the fusion on and off have in common, by the names of the unfused model."""
    options = fsdp_optim.CallOptions(views="hooks")
    parts, optims = trainer.model_parts, [*trainer.optimizers.optimizers]
    full = fsdp_optim.gather_full_optim_state_dict(parts, optims, None, "name", options=options)
    weights = fsdp_optim.gather_full_model_state_dict(parts, None, options=options)
    state = {name: dict(sorted(values.items())) for name, values in sorted(full["state"].items())}
    rest = without(everything(trainer), "model", "state", "random", "num_drawn", "tokens")
    return {"model": dict(sorted(weights.items())), "state": state, **rest}


def of_run(folder: Path, steps: int, spec: dict[str, Any], views: str, trains: bool) -> dict[str, Any]:
    """Train to a number of steps, or load only, with the attention fused or not."""
    options = {"views": views} if trains else {"views": views, "exclude_from_loading": ["dataloader"]}
    with trainer_of(folder, steps, spec=spec, **options) as trainer:
        if trains:
            trainer.train()
            trainer.checkpointer.maybe_wait_for_saving()
        else:
            assert trainer.checkpointer.load()
        return canonical(trainer)


@unittest.skipUnless(NEEDS, WHY)
class TestFusion(unittest.TestCase):
    """A checkpoint of a fused attention is one of the attention that is not fused, with the moments, and the reverse."""

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    @parameterized.expand([("fused", FUSED, UNFUSED), ("unfused", UNFUSED, FUSED)])
    def test_a_run_resumes_with_the_fusion_switched(self, _: str, spec: dict[str, Any], other: dict[str, Any]) -> None:
        wanted = run_on_ranks(of_run, 2, self.folder, 2, spec, "hooks", True)[0]
        names = fsdp_optim.inspect(self.folder / "checkpoint/step-00000002").model
        self.assertIn("layers.0.attention.qkv_linear.wq.weight", names)
        self.assertNotIn("layers.0.attention.qkv_linear.wqkv.weight", names)
        for world_size, resumed in ((2, other), (3, spec)):
            for state in run_on_ranks(of_run, world_size, self.folder, 2, resumed, "hooks", False):
                check_same(f"{resumed} on {world_size} ranks", state, wanted)

    def test_a_checkpoint_under_live_names_is_resumed_through_the_hooks(self) -> None:
        wanted = run_on_ranks(of_run, 2, self.folder, 2, FUSED, "no", True)[0]
        self.assertIn(
            "layers.0.attention.qkv_linear.wqkv.weight",
            fsdp_optim.inspect(self.folder / "checkpoint/step-00000002").model,
        )
        for views in ("no", "hooks"):
            for state in run_on_ranks(of_run, 3, self.folder, 2, FUSED, views, False):
                check_same(views, state, wanted)


@unittest.skipUnless(NEEDS, WHY)
class TestFailures(unittest.TestCase):
    def test_a_rank_that_fails_fails_the_save_on_all_ranks(self) -> None:
        for rank in (0, 1):
            with self.subTest(rank), tempfile.TemporaryDirectory() as folder:
                errors = run_on_ranks(a_rank_fails, 2, Path(folder), rank)
                check_refused("the save", errors, "StateError", "state['dataloader']", "the loader is lost")
                self.assertEqual(fsdp_optim.checkpoints(f"{folder}/checkpoint"), [])

    def test_a_damaged_newest_checkpoint_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            errors = [each["load"] for each in run_on_ranks(damaged, 2, Path(folder))]
            check_refused("the load", errors, "CheckpointError", "step-00000004", "optim.safetensors", "previous")

    def test_a_version_without_a_name_is_refused_in_one_line(self) -> None:
        [text] = run_on_ranks(import_without_a_name, 1)
        self.assertIn("torchtitan 0.3.0 does not have torchtitan.components.checkpointer.base.ModelWrapper", text)
        self.assertNotIn("\n", text)


# ------------------------------------------------------------------------------------------ options


def retention(folder: Path) -> None:
    trained(folder, 6, keep_latest_k=2, enable_first_step_checkpoint=True)
    check_same("kept", [checkpoint.step for checkpoint in fsdp_optim.checkpoints(folder / "checkpoint")], [6, 4])
    check_same(
        "kept of hf", [checkpoint.step for checkpoint in fsdp_optim.checkpoints(folder / "checkpoint/hf")], [6, 4]
    )
    with trainer_of(folder, 8, load_step=4) as trainer:
        trainer.train()
        check_same(
            "the steps after going back",
            [checkpoint.step for checkpoint in fsdp_optim.checkpoints(folder / "checkpoint")],
            [8, 6, 4],
        )
    with trainer_of(folder, 8, load_only=True) as trainer:
        assert trainer.checkpointer.load()
        assert not trainer.checkpointer.save(8)
        missing = error_text(lambda: trainer.checkpointer.load(5))
        check_refused("a step that is not there", [missing], "CheckpointError", "no checkpoint of step 5", "4, 6, 8")


def weights_alone(folder: Path) -> None:
    with trainer_of(folder, 3, last_save_model_only=True, export_dtype="bfloat16") as trainer:
        trainer.train()
        final = everything(trainer)
    tensors = fsdp_optim.inspect(folder / "checkpoint/weights/step-3").model
    check_same("dtypes", {tensor.dtype for tensor in tensors.values()}, {"bfloat16"})
    for place in ("weights/step-3", "step-00000002"):
        with trainer_of(folder / place, 6, initial_load_path=str(folder / "checkpoint" / place)) as trainer:
            assert trainer.checkpointer.load()
            assert trainer.step == 0
            if place != "weights/step-3":
                continue
            half = {name: value.bfloat16().float() for name, value in final["model"].items()}
            check_same("weights", everything(trainer)["model"], half)


def left_out(folder: Path) -> None:
    trained(folder, 4)
    with trainer_of(folder, 6) as trainer:
        assert trainer.checkpointer.load()
        assert trainer.dataloader.next_iter_state is not None
    with trainer_of(folder, 6, exclude_from_loading=["dataloader", "lr_scheduler"]) as trainer:
        assert trainer.checkpointer.load()
        assert trainer.dataloader.next_iter_state is None
        check_same("schedule", trainer.lr_schedulers.state_dict(), {"last_epoch": 0})
        check_same("step", trainer.step, 4)


def from_torchtitan_itself(folder: Path, fuse_qkv: bool) -> None:
    """A run of torchtitan's own manager continues in a folder of this one's."""
    with torchtitan_on_cpu():
        from torchtitan.components.checkpointer import CheckpointManager

        own = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
        trainer = trainer_config(folder / "own", own, steps=4, fuse_qkv=fuse_qkv).build()
        trainer.train()
        saved = everything(trainer)
        trainer.close()
    options = {"initial_load_path": str(folder / "own/checkpoint/step-4"), "spec": {"fuse_qkv": fuse_qkv}}
    with trainer_of(folder / "new", 6, **options) as trainer:
        assert trainer.checkpointer.load()
        check_same("weights", everything(trainer)["model"], saved["model"])
    with trainer_of(folder / "new", 6, initial_load_model_only=False, **options) as trainer:
        assert trainer.checkpointer.load()
        got, wanted = (without(content, "random", "num_drawn") for content in (everything(trainer), saved))
        check_same("all", got, wanted, in_order=False)


def seed(folder: Path) -> dict[str, Any]:
    with trainer_of(folder, 4, create_seed_checkpoint=True, last_save_model_only=True) as trainer:
        trainer.checkpointer.save(0, last_step=True)
        return everything(trainer)["model"]


def seeded(folder: Path) -> dict[str, Any]:
    torch.manual_seed(1)
    with trainer_of(folder, 4) as trainer:
        assert trainer.checkpointer.load()
        return everything(trainer)["model"]


def hugging_face(folder: Path, fuse_qkv: bool) -> dict[str, Any]:
    from transformers import LlamaConfig

    assets = folder / "assets"
    if torch.distributed.get_rank() == 0:
        assets.mkdir(parents=True)
        config = LlamaConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
        )
        config.save_pretrained(assets)
    torch.distributed.barrier()
    spec = {"fuse_qkv": fuse_qkv}
    with trainer_of(folder, 3, spec=spec, last_save_model_only=True, last_save_in_hf=True) as trainer:
        trainer.train()
        saved = everything(trainer)["model"]
        tokens = torch.arange(8)[None]
        logits = trainer.model_parts[0](tokens).detach()
    place = str(folder / "checkpoint/hf/step-3")
    options = {"initial_load_in_hf": True, "initial_load_path": place}
    with trainer_of(folder / "again", 3, spec=spec, **options) as trainer:
        assert trainer.checkpointer.load()
        check_same("weights", everything(trainer)["model"], saved)
    return {"logits": logits, "place": place}


def opened_by_transformers(place: str) -> tuple[dict[str, Any], torch.Tensor]:
    """The report of transformers about the weights, and the output of its model for some tokens."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    return {key: list(names) for key, names in info.items() if names}, model(torch.arange(8)[None]).logits.detach()


def refused_options() -> list[tuple[str, str]]:
    import_torchtitan()
    manager = importlib.import_module("fsdp_optim.integrations.torchtitan").FsdpOptimCheckpointManager
    quantized = {"initial_load_in_hf": True, "initial_load_path": "/somewhere", "initial_load_in_hf_quantized": True}
    options: list[dict[str, Any]] = [quantized, {"exclude_from_loading": ["optimizer"]}, {"async_mode": "fast"}]
    return [error_text(functools.partial(manager.Config, enable=True, **given)) for given in options]


def on_several_machines(folder: Path) -> list[str]:
    """Rank 0 alone finds the seed, and fails when it copies the assets. The calls and errors of this rank."""
    import_torchtitan()
    plug_in = importlib.import_module("fsdp_optim.integrations.torchtitan")
    manager, is_first, done = plug_in.FsdpOptimCheckpointManager, dist.get_rank() == 0, []
    stand_in = SimpleNamespace(
        folder=str(folder),
        _group=dist.group.WORLD,
        _adapter=SimpleNamespace(hf_assets_path=str(folder), to_hf=dict),
        _manager=SimpleNamespace(resume=lambda **_: False),
        _config=SimpleNamespace(on_damage="error"),
        _save_tensors=lambda *_, **__: None,
        _load_weights=lambda place: done.append("the seed"),
        _load_initial=lambda: done.append("an initial checkpoint"),
    )
    seeds = [SimpleNamespace(complete=True, step=0)] if is_first else []
    with mock.patch.object(fsdp_optim, "checkpoints", create=True, return_value=seeds):
        manager._load(stand_in)
    broken = OSError(5, "Input/output error")
    with mock.patch.object(plug_in, "copy_beside", side_effect=broken if is_first else None, return_value=[]):
        done.append(": ".join(error_text(lambda: manager._save_hf(stand_in, 1, {}))))
    return done


@unittest.skipUnless(NEEDS, WHY)
class TestSeveralMachines(unittest.TestCase):
    def test_all_ranks_do_what_rank_0_finds_and_raise_its_errors(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for seed, error in run_on_ranks(on_several_machines, 2, Path(folder)):
                self.assertEqual(seed, "the seed")
                self.assertIn("CheckpointError: rank 0", error)
                self.assertIn("Input/output error", error)


@unittest.skipUnless(NEEDS, WHY)
class TestOptions(unittest.TestCase):
    def run_2(self, fn: Callable[..., Any], *args: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return run_on_ranks(fn, 2, Path(folder), *args)

    @pytest.mark.slow
    def test_keep_latest_k_load_step_load_only_and_the_first_step(self) -> None:
        self.run_2(retention)

    @pytest.mark.slow
    def test_the_weights_of_the_last_step_and_initial_load_path(self) -> None:
        self.run_2(weights_alone)

    @pytest.mark.slow
    def test_exclude_from_loading(self) -> None:
        self.run_2(left_out)

    @parameterized.expand([(False,), (True,)])
    @pytest.mark.slow
    def test_a_checkpoint_of_torchtitans_own_manager(self, fuse_qkv: bool) -> None:
        self.run_2(from_torchtitan_itself, fuse_qkv)

    @pytest.mark.slow
    def test_a_seed_of_one_rank(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            [wanted] = run_on_ranks(seed, 1, Path(folder))
            for got in run_on_ranks(seeded, 2, Path(folder)):
                check_same("the seed", got, wanted)

    @expand(soon=[(True,)], later=[(False,)])
    def test_transformers_opens_the_weights(self, fuse_qkv: bool) -> None:
        """Llama's queries and keys are in another order there, so that names alone are not enough."""
        with tempfile.TemporaryDirectory() as folder:
            told = run_on_ranks(hugging_face, 2, Path(folder), fuse_qkv)[0]
            for step in (2, 3):
                place = str(Path(told["place"]).with_name(f"step-{step}"))
                [(info, logits)] = run_on_ranks(opened_by_transformers, 1, place)
                self.assertEqual(info, {})
            torch.testing.assert_close(logits, told["logits"], rtol=1e-4, atol=1e-4)

    def test_what_is_refused(self) -> None:
        words = ("initial_load_in_hf_quantized", "'optimizer'", "fast")
        [refusals] = run_on_ranks(refused_options, 1)
        for word, (kind, text) in zip(words, refusals, strict=True):
            with self.subTest(word):
                self.assertEqual(kind, "ValueError")
                self.assertIn(word, text)
