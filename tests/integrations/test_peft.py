"""Adapters of the real PEFT: its files, its names, and the optimizer beside, at any world size, against an unsharded oracle."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import runpy
import sys
import tempfile
import types
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kit.checkpoint_format import in_order
from kit.compare import check_same, error_text
from kit.forked import launch
from kit.imports import Later
from kit.models import Net
from kit.optimizers import OfModel
from kit.trained import Oracle, Trained
from kit.wraps import in_ddp, wrap_units
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

peft, fsdp_peft = Later("peft"), Later("fsdp_optim.integrations.peft")
LOADED = ("kit.loaded.hugging_face",)
ROOT = Path(__file__).parents[2]
MODEL_AND_MANIFEST = {"model.safetensors", "fsdp_optim.json"}
UNITS = ("base_model.model.stem", "base_model.model.head", "")


def lora(adapter: str = "default") -> Any:
    """LoRA of two layers, one of them with DoRA's vectors, biases that train, and a whole module that trains."""
    config = peft.LoraConfig(
        r=2, target_modules=["stem", "block.0"], modules_to_save=["head"], use_dora=True, bias="lora_only"
    )
    return peft.get_peft_model(Net(), config, adapter_name=adapter)


def of_own_name() -> Any:
    """Adapters, of other values at each call, in a module that is called as torch.compile calls the module inside."""
    base = nn.ModuleDict({"_orig_mod": nn.Sequential(nn.Linear(5, 3))})
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["_orig_mod.0"], init_lora_weights=False))


def adam_of_adapters(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.01)


def in_fsdp1(model: nn.Module) -> Any:
    return wrap_units(model, partial(TorchFSDP, device_id=torch.device("cpu"), use_orig_params=True), UNITS)


WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "FSDP2": lambda model: wrap_units(model, fully_shard, UNITS),
    "FSDP1": in_fsdp1,
    "DDP": in_ddp,
}


def trained(wrapper: str, steps: int, adapter: str = "default") -> Trained:
    return Trained(WRAPS[wrapper], OfModel(adam_of_adapters), steps, partial(lora, adapter))


def oracle_of(steps: int) -> Oracle:
    return Oracle(OfModel(adam_of_adapters), steps, lora)


def save_all(folder: str) -> None:
    for wrapper in WRAPS:
        tuned = trained(wrapper, 3)
        fsdp_peft.save(f"{folder}/{wrapper}", tuned.model, tuned.optim, step=3)
        fsdp_peft.async_save(f"{folder}/{wrapper} async", tuned.model, tuned.optim).wait()
        fsdp_peft.save(f"{folder}/{wrapper} base", tuned.model, tuned.optim, base=True)


def load_all(folder: str) -> None:
    """On more ranks, in another wrapper, by another name of the adapter; then two more steps."""
    for saver, loader in (("FSDP2", "FSDP1"), ("FSDP1", "FSDP2"), ("DDP", "FSDP2"), ("FSDP2", "DDP")):
        for at, base in (("", False), (" async", False), (" base", True)):
            target = trained(loader, 0)
            start = fsdp_optim.gather_full_model_state_dict(target.model, None) or {}
            restored = fsdp_peft.load(
                f"{folder}/{saver}{at}",
                target.model,
                target.optim,
                base=base,
                options=fsdp_optim.LoadOptions(compare=True),
            )
            check_same("differences", (restored.missing_keys, restored.unexpected_keys), ((), ()))
            wanted = oracle_of(3)
            full = fsdp_optim.gather_full_model_state_dict(target.model, None) or {}
            frozen = {name for name, param in wanted.model.named_parameters() if not param.requires_grad}
            weights = {
                name: start[name] if name in frozen and not base else value
                for name, value in wanted.model.state_dict().items()
            }
            check_same(f"{saver}{at} into {loader}", in_order(full), in_order(weights))
            target.step(range(3, 5))
            check_same("state after two more steps", target.gather(None, "name")["state"], oracle_of(5).by_name())
    other = trained("FSDP2", 0, "mine")
    fsdp_peft.load(
        f"{folder}/FSDP1", other.model, other.optim, adapter="mine", options=fsdp_optim.LoadOptions(compare=True)
    )
    state = other.gather(None, "name")["state"]
    check_same(
        "another name", {key.replace(".mine", ".default"): v for key, v in state.items()}, oracle_of(3).by_name()
    )


def refuse(folder: str) -> list[tuple[str, str]]:
    """The error on ranks with a wrapper that hides the names."""
    flat = TorchFSDP(lora().requires_grad_(True), device_id=torch.device("cpu"), use_orig_params=False)
    return [error_text(partial(fsdp_peft.save, folder, flat))]


class RanksTest(unittest.TestCase):
    def test_save_on_two_ranks_and_go_on_on_three(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_all, 2, folder)
            oracle = oracle_of(3)
            wanted = peft.get_peft_model_state_dict(oracle.model)
            for wrapper in WRAPS:
                for at in ("", " async"):
                    stored = load_file(f"{folder}/{wrapper}{at}/adapter_model.safetensors")
                    check_same(f"{wrapper}{at}", in_order(stored), in_order(wanted))
                for at, base in (("", False), (" base", True)):
                    opened = peft.PeftModel.from_pretrained(Net(), f"{folder}/{wrapper}{at}")
                    trains = {name for name, param in oracle.model.named_parameters() if param.requires_grad or base}
                    check_same(
                        f"{wrapper}{at}, opened by PEFT",
                        {name: value for name, value in in_order(opened.state_dict()).items() if name in trains},
                        {name: value for name, value in in_order(oracle.model.state_dict()).items() if name in trains},
                    )
            run_on_ranks(load_all, 3, folder)

    def test_a_wrapper_that_hides_the_names(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for heard in run_on_ranks(refuse, 2, f"{folder}/a"):
                self.assertIn("give use_orig_params=True", heard[0][1])


class OneProcessTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.oracle = oracle_of(2)
        self.model, self.optim = self.oracle.model, self.oracle.optim

    def fresh(self, adapter: str = "default") -> tuple[Any, torch.optim.Optimizer]:
        model = lora(adapter)
        return model, adam_of_adapters(model)

    def test_the_config_is_the_one_that_peft_writes(self) -> None:
        fsdp_peft.save(self.folder / "a", self.model, self.optim)
        self.model.save_pretrained(self.folder / "theirs")
        saved_config, peft_config = (
            json.loads((self.folder / at / "adapter_config.json").read_text()) for at in ("a", "theirs")
        )
        for config in (saved_config, peft_config):  # sets, in any order
            config["target_modules"] = sorted(config["target_modules"])
        self.assertEqual(saved_config, peft_config)

    def test_files_that_peft_has_written(self) -> None:
        self.model.save_pretrained(self.folder / "theirs")
        model, _ = self.fresh()
        fsdp_peft.load(self.folder / "theirs" / "adapter_model.safetensors", model)
        check_same("adapter", peft.get_peft_model_state_dict(model), peft.get_peft_model_state_dict(self.model))

    def test_a_module_that_is_called_like_a_wrappers_keeps_its_name(self) -> None:
        model = of_own_name()
        wrapped = torch.compile(model)
        fsdp_peft.save(self.folder / "a", wrapped, adam_of_adapters(model))
        wanted = peft.get_peft_model_state_dict(model)
        self.assertTrue(all("._orig_mod." in key for key in wanted))
        stored = load_file(self.folder / "a" / "adapter_model.safetensors")
        check_same("saved", in_order(stored), in_order(wanted))
        other = of_own_name()
        fsdp_peft.load(self.folder / "a", other)
        check_same("loaded", peft.get_peft_model_state_dict(other), wanted)

    def test_a_damaged_config_is_named(self) -> None:
        fsdp_peft.save(self.folder / "a", self.model, self.optim)
        config = self.folder / "a" / "adapter_config.json"
        config.write_text(config.read_text().replace('"r": 2', '"r": 3'))
        for call in (
            partial(fsdp_peft.load, self.folder / "a", *self.fresh()),
            partial(fsdp_optim.verify, self.folder / "a"),
        ):
            self.assertIn("adapter_config.json: is not what was saved", error_text(call)[1])

    def test_resume(self) -> None:
        self.assertIsNone(fsdp_peft.resume(self.folder, *self.fresh()))
        for step in (1, 2, 3):
            fsdp_peft.save(self.folder / f"step-{step}", self.model, self.optim, step=step)
        model, optim = self.fresh()
        restored = fsdp_peft.resume(self.folder, model, optim)
        self.assertEqual(restored.step if restored is not None else None, 3)
        check_same("adapter", peft.get_peft_model_state_dict(model), peft.get_peft_model_state_dict(self.model))

    def test_a_url_and_a_conversion(self) -> None:
        fsdp_peft.save(f"file://{self.folder}/a", self.model, self.optim)
        fsdp_peft.load(f"file://{self.folder}/a", *self.fresh(), options=fsdp_optim.LoadOptions(compare=True))
        fsdp_peft.async_save(f"file://{self.folder}/there", self.model, self.optim).wait()
        self.assertTrue((self.folder / "there" / "adapter_config.json").exists())
        fsdp_peft.load(self.folder / "there", *self.fresh(), options=fsdp_optim.LoadOptions(compare=True))
        fsdp_optim.convert(self.folder / "a", self.folder / "b")
        names = {path.name for path in (self.folder / "b").iterdir()}
        self.assertEqual({name for name in names if name.endswith(("model.safetensors", "json"))}, MODEL_AND_MANIFEST)
        fsdp_peft.load(self.folder / "b", *self.fresh(), options=fsdp_optim.LoadOptions(compare=True))

    def test_views_are_of_the_base_model(self) -> None:
        views = [
            fsdp_optim.View("*.model.block.0.base_layer.weight", "o c", {"*.model.block.0.base_layer.kernel": "c o"})
        ]
        options = fsdp_optim.SaveOptions(views=views)
        fsdp_peft.save(self.folder / "a", self.model, self.optim, base=True, options=options)
        saved = load_file(self.folder / "a" / "adapter_model.safetensors")
        weights = self.model.state_dict()
        (name,) = (name for name in saved if name.endswith("kernel"))
        check_same("transposed", saved[name], weights[name.replace("kernel", "weight")].T.contiguous())
        model, optim = self.fresh()
        fsdp_peft.load(self.folder / "a", model, optim, base=True, options=fsdp_optim.LoadOptions(views=views))
        check_same("loaded", dict(model.state_dict()), dict(weights))
        of_adapter = [fsdp_optim.View("*.lora_A.default.weight", "r c", {"*.transposed": "c r"})]
        for call in (
            partial(fsdp_peft.save, self.folder / "b", self.model, options=fsdp_optim.SaveOptions(views=of_adapter)),
            partial(fsdp_peft.load, self.folder / "a", model, options=fsdp_optim.LoadOptions(views=of_adapter)),
        ):
            error, message = error_text(call)
            self.assertEqual(error, "StateError")
            self.assertIn("belongs to the adapter", message)
            self.assertIn("lora_A", message)

    def test_one_of_several_adapters(self) -> None:
        config = peft.LoraConfig(r=2, target_modules=["stem"])
        model = peft.get_peft_model(Net(), config)
        model.add_adapter("second", config)
        fsdp_peft.save(self.folder / "a", model)
        self.assertEqual(
            set(load_file(self.folder / "a" / "adapter_model.safetensors")), set(peft.get_peft_model_state_dict(model))
        )
        text = error_text(partial(fsdp_peft.save, self.folder / "b", model, adapter="second"))[1]
        self.assertIn("belongs to the adapter 'second' and requires no gradients", text)
        text = error_text(partial(fsdp_peft.save, self.folder / "b", model, adapter="third"))[1]
        self.assertIn("the model has no adapter 'third'; it has 'default', 'second'", text)

    def test_what_is_refused(self) -> None:
        text = error_text(partial(fsdp_peft.save, self.folder / "a", nn.Linear(2, 2)))
        self.assertEqual(text[0], "WrapperError")
        self.assertIn("the Linear that was given is neither a PeftModel nor a wrapper around one", text[1])
        chosen: dict[str, Any] = {"rename": {"": "model."}, "max_file_size": 5}
        for name, value in chosen.items():
            with self.assertRaisesRegex(TypeError, f"{name}= cannot be chosen here"):
                fsdp_peft.save(self.folder / "a", self.model, options=fsdp_optim.SaveOptions(**{name: value}))
        with self.assertRaisesRegex(TypeError, "rename= cannot be chosen here"):
            options = fsdp_optim.LoadOptions(rename=chosen["rename"])
            fsdp_peft.load(self.folder / "a", self.model, options=options)
        for call in (fsdp_peft.save, fsdp_peft.load):
            for name in ("weights", "format", "colour"):
                with self.assertRaisesRegex(TypeError, name):
                    call(self.folder / "a", self.model, **{name: "all"})
        fsdp_peft.save(self.folder / "a", self.model, self.optim)
        text = error_text(partial(fsdp_peft.load, self.folder / "a", *self.fresh(), base=True))[1]
        self.assertIn("base_layer.weight: the model has it, the checkpoint does not", text)

    def test_another_version_of_peft(self) -> None:
        name = "fsdp_optim.integrations.peft"
        with mock.patch.dict(sys.modules, {"peft": types.ModuleType("peft")}):
            del sys.modules[name]
            with self.assertRaisesRegex(ImportError, "PeftModel.*install peft 0.21.2, which was tested"):
                importlib.import_module(name)


def on_rank(*arguments: str) -> tuple[int, str]:
    """The last step of examples/fsdp2_lora.py, and what it prints on this rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main = runpy.run_path(str(ROOT / "examples" / "fsdp2_lora.py"))["main"]
        return main(list(arguments)), printed.getvalue()


class ExampleTest(unittest.TestCase):
    @pytest.mark.slow
    def test_train_by_a_launcher(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = ("--root", folder, "--every", "2", "--last")
            done = launch(2, "examples/fsdp2_lora.py", *arguments, "4", preload=LOADED)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("trained from step 0 to step 4", done.stdout)
            self.assertEqual([checkpoint.step for checkpoint in fsdp_optim.checkpoints(folder)], [4, 2])

    def test_train_and_go_on_with_fewer_ranks(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = ("--root", folder, "--every", "2", "--last")
            (step, printed), (other, _) = run_on_ranks(on_rank, 2, *arguments, "4")
            self.assertEqual((step, other), (4, 4))
            self.assertIn("trained from step 0 to step 4", printed)
            [(step, printed)] = run_on_ranks(on_rank, 1, *arguments, "7")
            self.assertEqual(step, 7)
            self.assertIn("trained from step 4 to step 7", printed)
            self.assertEqual([checkpoint.step for checkpoint in fsdp_optim.checkpoints(folder)], [7, 6, 4, 2])
            base = runpy.run_path(str(ROOT / "examples" / "fsdp2_lora.py"))["base_model"]()
            opened = peft.PeftModel.from_pretrained(base, f"{folder}/step-7")
            check_same(
                "opened by PEFT",
                in_order(peft.get_peft_model_state_dict(opened)),
                in_order(load_file(f"{folder}/step-7/adapter_model.safetensors")),
            )
