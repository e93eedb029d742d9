"""save and load with weights="all", "trainable" and "none": what the files have, what a load fills, and what it refuses."""

from __future__ import annotations

import copy
import json
import tempfile
import unittest
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import check_same
from kit.compare import error_text as error_of
from kit.local_parts import local_of
from kit.models import Net
from kit.optimizers import adam
from kit.options import as_options
from kit.trained import Oracle, Trained
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import fsdp_optim
from fsdp_optim.plugins import TorchFiles
from fsdp_optim.testing import run_on_ranks

FROZEN = ("stem.", "block.")
LOADERS = dict(zip(WRAPPERS, [*list(WRAPPERS)[1:], next(iter(WRAPPERS))], strict=True))
"""The wrapper that loads what each wrapper has saved."""


def error_text(call: Callable[[], Any]) -> str:
    return error_of(call)[1]


class Counted(Net):
    """A model with a buffer, which is saved although it requires no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.arange(5.0))


def freeze(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(FROZEN))


def trained(wrapper: str, steps: int) -> Trained:
    return Trained(wrapper, adam, steps, Counted, freeze)


def save_all(folder: str, wrappers: Sequence[str]) -> None:
    with cpu():
        for wrapper in wrappers:
            training = trained(wrapper, 3)
            with torch.no_grad():
                next(buffer for name, buffer in training.model.named_buffers() if name.endswith("count")).mul_(3)
            for which in ("trainable", "none"):
                at = f"{folder}/{wrapper} {which}"
                fsdp_optim.save(
                    at,
                    training.model,
                    training.optim,
                    weights=which,
                    options=fsdp_optim.SaveOptions(process_group=training.process_group),
                )
            handle = fsdp_optim.async_save(
                f"{folder}/{wrapper} async",
                training.model,
                training.optim,
                weights="trainable",
                options=fsdp_optim.SaveOptions(process_group=training.process_group),
            )
            handle.wait()


def load_all(folder: str, wrappers: Sequence[str]) -> None:
    with cpu():
        oracle = Oracle(adam, 3, Counted, freeze)
        oracle.model.get_buffer("count").mul_(3)
        trains = {name for name, param in oracle.model.named_parameters() if param.requires_grad} | {"count"}
        for saver, loader in [(saver, LOADERS[saver]) for saver in wrappers]:
            for which, at in (("trainable", "trainable"), ("trainable", "async"), ("none", "none")):
                target = trained(loader, 0)
                with torch.no_grad():
                    for param in target.params:
                        local_of(param).fill_(7.0)
                group = target.process_group
                path = f"{folder}/{saver} {at}"
                fsdp_optim.load(
                    path,
                    target.model,
                    target.optim,
                    weights=which,
                    options=fsdp_optim.LoadOptions(compare=True, process_group=group),
                )
                full = target.gather_model()
                wanted = {
                    name: value if which == "trainable" and name in trains else torch.full_like(value, 7.0)
                    for name, value in oracle.model.state_dict().items()
                }
                if which == "none":
                    wanted["count"] = torch.arange(5.0)
                check_same(f"{saver} {at} into {loader}", dict(sorted(full.items())), dict(sorted(wanted.items())))
                state = target.gather(None, "name")["state"]
                check_same(
                    f"{saver} {at} into {loader}: state", {k: v for k, v in state.items() if v}, oracle.by_name()
                )


class WrappersTest(unittest.TestCase):
    @expand(soon=[("some", tuple(WRAPPERS)[::2])], later=[("all", tuple(WRAPPERS))])
    def test_every_wrapper_saves_and_another_loads_on_more_ranks(self, _: str, wrappers: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_all, 2, folder, wrappers)
            oracle = Oracle(adam, 3, Counted, freeze)
            oracle.model.get_buffer("count").mul_(3)
            wanted = {
                name: value for name, value in sorted(oracle.model.state_dict().items()) if not name.startswith(FROZEN)
            }
            for wrapper in wrappers:
                for at in ("trainable", "async"):
                    stored = load_file(f"{folder}/{wrapper} {at}/model.safetensors")
                    check_same(wrapper, dict(sorted(stored.items())), wanted)
                names = {path.name for path in Path(folder, f"{wrapper} none").iterdir()}
                self.assertFalse({name for name in names if name.startswith("model")}, names)
            run_on_ranks(load_all, 3, folder, wrappers)


# ------------------------------------------------------------------------------------------- one process


class Valued(nn.Module):
    """A tied weight, a frozen layer, a buffer, and a value of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.body = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.counter = 0

    def get_extra_state(self) -> int:
        return self.counter

    def set_extra_state(self, state: int) -> None:
        self.counter = state


def made(*frozen: str, seed: int = 0) -> tuple[Valued, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Valued()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(frozen or ("no such",)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def stepped(*frozen: str) -> tuple[Valued, torch.optim.Optimizer]:
    model, optim = made(*frozen)
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optim.step()
    model.counter = 5
    model.norm.running_mean.fill_(2.0)  # type: ignore[union-attr]
    return model, optim


def manifest(path: str | Path) -> dict[str, Any]:
    return json.loads(Path(path, "fsdp_optim.json").read_text())["checkpoint"]


class OneProcessTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def saved(self, weights: Any, *frozen: str, **options: Any) -> tuple[str, Valued]:
        model, optim = stepped(*frozen)
        path = str(self.folder / f"{weights}-{options.get('format', 'ours')}")
        fsdp_optim.save(path, model, optim, weights=weights, **as_options(fsdp_optim.SaveOptions, **options))
        return path, model

    def check_refused(self, path: str, *frozen: str, **options: Any) -> str:
        """The error of a load, which must change nothing."""
        model, optim = made(*frozen, seed=1)
        before = copy.deepcopy((model.state_dict(), optim.state_dict()))
        text = error_text(lambda: fsdp_optim.load(path, model, optim, **as_options(fsdp_optim.LoadOptions, **options)))
        check_same("nothing is changed", (model.state_dict(), optim.state_dict()), before)
        return text

    def test_a_strict_load_of_all_names_the_way_out(self) -> None:
        path, _ = self.saved("trainable", "embed")
        text = self.check_refused(path, "embed")
        self.assertIn("embed.weight: the model has it, the checkpoint does not", text)
        self.assertIn('it was saved with weights="trainable": weights="trainable" leaves the frozen', text)

    def test_not_strict_loads_what_both_sides_have(self) -> None:
        path, saved = self.saved("trainable", "embed")
        model, optim = made("embed", seed=1)
        embed = model.embed.weight.detach().clone()
        restored = fsdp_optim.load(path, model, optim, strict=False)
        self.assertEqual(restored.missing_keys, ("embed.weight",))
        check_same("body", model.body.weight, saved.body.weight)
        check_same("embed", model.embed.weight.detach(), embed)

    @parameterized.expand([("all",), ("trainable",)])
    def test_none_is_no_checkpoint_of_weights(self, weights: str) -> None:
        for format in ("safetensors", "dcp", "torchtitan"):
            path, _ = self.saved("none", "embed", format=format)
            for strict in (True, False):
                text = self.check_refused(path, "embed", weights=weights, strict=strict)
                self.assertIn(f'{path}: was saved with weights="none"', text)
                self.assertIn('give weights="none" and optim=', text)

    def test_nothing_to_save_or_to_load(self) -> None:
        model, optim = stepped()
        text = error_text(lambda: fsdp_optim.save(self.folder / "no", model, weights="none"))
        self.assertIn('weights="none" without an optimizer leaves nothing to save', text)
        path, _ = self.saved("none")
        text = error_text(lambda: fsdp_optim.load(path, model, weights="none"))
        self.assertIn('weights="none" without an optimizer leaves nothing to load', text)
        model.requires_grad_(False)
        text = error_text(lambda: fsdp_optim.save(self.folder / "no", model, optim, weights="trainable"))
        self.assertIn("no parameter of the model requires gradients", text)
        for call in (fsdp_optim.save, fsdp_optim.load):
            text = error_text(lambda call=call: call(path, model, optim, weights="some"))  # type: ignore[misc]
            self.assertIn("weights must be 'all', 'trainable' or 'none', not 'some'", text)
        self.assertFalse((self.folder / "no").exists())

    def test_values_of_modules_and_buffers_are_saved_with_trainable_parameters(self) -> None:
        path, saved = self.saved("trainable", "embed", "norm")
        self.assertEqual(
            set(load_file(f"{path}/model.safetensors")),
            {"body.weight", "body.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"},
        )
        model, optim = made("embed", "norm", seed=1)
        fsdp_optim.load(path, model, optim, weights="trainable", options=fsdp_optim.LoadOptions(compare=True))
        self.assertEqual(model.counter, 5)
        check_same("buffer", model.norm.running_mean, saved.norm.running_mean)
        path, _ = self.saved("none", "embed")
        model, optim = made("embed", seed=1)
        fsdp_optim.load(path, model, optim, weights="none", options=fsdp_optim.LoadOptions(compare=True))
        self.assertEqual(model.counter, 0)

    def test_a_checkpoint_of_all_weights_gives_any_of_them(self) -> None:
        path, saved = self.saved("all", "embed")
        for which in ("trainable", "none"):
            model, optim = made("embed", seed=1)
            before = copy.deepcopy(model.state_dict())
            restored = fsdp_optim.load(path, model, optim, weights=which, options=fsdp_optim.LoadOptions(compare=True))
            self.assertEqual((restored.missing_keys, restored.unexpected_keys), ((), ()))
            check_same("embed", model.embed.weight.detach(), before["embed.weight"])
            wanted = saved.state_dict() if which == "trainable" else before
            check_same("body", model.state_dict()["body.weight"], wanted["body.weight"])

    def test_a_parameter_that_is_frozen_now(self) -> None:
        path, saved = self.saved("trainable", "embed")
        text = self.check_refused(path, "embed", "body.bias", weights="trainable")
        self.assertIn("body.bias: was saved as a trainable parameter, and is frozen in the model", text)
        self.assertIn("strict=False leaves frozen parameters as they are", text)
        model, optim = made("embed", "body.bias", seed=1)
        bias = model.body.bias.detach().clone()
        restored = fsdp_optim.load(path, model, optim, weights="trainable", strict=False)
        self.assertEqual(restored.unexpected_keys, ("body.bias",))
        check_same("bias", model.body.bias.detach(), bias)
        check_same("weight", model.body.weight, saved.body.weight)

    def test_a_parameter_that_trains_now_is_missing(self) -> None:
        path, _ = self.saved("trainable", "embed", "body.bias")
        text = self.check_refused(path, "embed", weights="trainable")
        self.assertIn("body.bias: the model has it, the checkpoint does not", text)

    def test_tied_weights_are_saved_once_or_not_at_all(self) -> None:
        path, saved = self.saved("trainable")
        self.assertEqual(manifest(path)["model"]["aliases"], {"head.weight": "embed.weight"})
        model, optim = made(seed=1)
        fsdp_optim.load(path, model, optim, weights="trainable", options=fsdp_optim.LoadOptions(compare=True))
        check_same("tied", model.head.weight, saved.embed.weight)
        model, optim = stepped("embed")
        fsdp_optim.save(path, model, optim, weights="trainable", overwrite=True)
        self.assertEqual(manifest(path)["model"]["aliases"], {})
        self.assertNotIn("embed.weight", load_file(f"{path}/model.safetensors"))

    def test_it_is_recorded(self) -> None:
        for which, version in (("all", 2), ("trainable", 3), ("none", 3)):
            path, model = self.saved(which, "embed")
            self.assertEqual(fsdp_optim.inspect(path).weights, which)
            said = manifest(path)
            self.assertEqual(said["version"], version)  # older readers read what they can
            self.assertEqual(said["model"].get("weights", "all"), which)
            self.assertEqual(set(said["model"]["params"]), set(model.state_dict()) - {"head.weight", "_extra_state"})
            fsdp_optim.verify(path)
            path, _ = self.saved(which, "embed", format="dcp")
            self.assertEqual(fsdp_optim.inspect(path).weights, which)

    @parameterized.expand([("dcp", "model."), ("torchtitan", "")])
    def test_folders_of_torch(self, format: str, prefix: str) -> None:
        path, saved = self.saved("trainable", "embed", format=format)
        keys = set(FileSystemReader(path).read_metadata().state_dict_metadata)
        self.assertIn(f"{prefix}body.weight", keys)
        self.assertFalse({f"{prefix}embed.weight", f"{prefix}head.weight"} & keys)
        model, optim = made("embed", seed=1)
        fsdp_optim.load(path, model, optim, weights="trainable", options=fsdp_optim.LoadOptions(compare=True))
        check_same("body", model.body.weight, saved.body.weight)
        path, _ = self.saved("none", "embed", format=format)
        keys = set(FileSystemReader(path).read_metadata().state_dict_metadata)
        self.assertTrue(all(key.startswith("optimizer.") for key in keys), keys)
        model, optim = made("embed", seed=1)
        fsdp_optim.load(path, model, optim, weights="none", options=fsdp_optim.LoadOptions(compare=True))
        self.assertEqual(len(optim.state), 4)

    def test_a_store(self) -> None:
        model, optim = stepped("embed")
        for which in ("trainable", "none"):
            url = f"file://{self.folder}/run/{which}"
            fsdp_optim.save(url, model, optim, weights=which)
            target, target_optim = made("embed", seed=1)
            fsdp_optim.load(url, target, target_optim, weights=which, options=fsdp_optim.LoadOptions(compare=True))
            check_same(which, target_optim.state_dict()["state"], optim.state_dict()["state"])
            saved, restored = dict(model.named_parameters()), dict(target.named_parameters())
            loaded = {name for name in saved if torch.equal(saved[name], restored[name])}
            trainable = {name for name, param in saved.items() if param.requires_grad}
            self.assertEqual(loaded, trainable if which == "trainable" else set())

    def test_a_conversion_keeps_it(self) -> None:
        for which in ("trainable", "none"):
            path, _ = self.saved(which, "embed")
            fsdp_optim.convert(path, f"{path}-dcp", format="dcp")
            fsdp_optim.convert(f"{path}-dcp", f"{path}-back")
            fsdp_optim.convert(path, f"{path}-copy", options=fsdp_optim.ConvertOptions(max_file_size=40))
            for at in (f"{path}-dcp", f"{path}-back", f"{path}-copy"):
                self.assertEqual(fsdp_optim.inspect(at).weights, which, at)
                model, optim = made("embed", seed=1)
                fsdp_optim.load(at, model, optim, weights=which, options=fsdp_optim.LoadOptions(compare=True))
        fsdp_optim.convert(self.folder / "none-ours", self.folder / "files", format=TorchFiles(key_by="name"))
        names = {path.name for path in (self.folder / "files").iterdir() if path.is_file()}
        self.assertEqual(names, {"optim.pt", "torch_files.json"})

    def test_resume_and_the_manager(self) -> None:
        model, optim = stepped("embed")
        with fsdp_optim.CheckpointManager(self.folder, model, optim, every=1, weights="trainable") as manager:
            manager.resume()
            manager.step(1)
        target, target_optim = made("embed", seed=1)
        embed = target.embed.weight.detach().clone()
        with fsdp_optim.CheckpointManager(self.folder, target, target_optim, weights="trainable") as manager:
            self.assertEqual(manager.resume(), 1)
        check_same("body", target.body.weight, model.body.weight)
        check_same("embed", target.embed.weight.detach(), embed)
        target, target_optim = made("embed", seed=1)
        fsdp_optim.resume(self.folder, target, target_optim, weights="trainable")
        check_same("body", target.body.weight, model.body.weight)
        with self.assertRaisesRegex(fsdp_optim.StateError, 'saved with weights="trainable"'):
            fsdp_optim.resume(self.folder, target, target_optim)


# ------------------------------------------------------------------------------------------- ranks that disagree


def disagree(folder: str) -> list[str]:
    """The error on each rank where only one of them has frozen a parameter, and where they ask for other weights."""
    texts = []
    for odd in range(dist.get_world_size()):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optim = torch.optim.Adam(model.parameters())
        model[1].requires_grad_(dist.get_rank() != odd)
        asked: Any = "none" if dist.get_rank() == odd else "all"
        for which in ("trainable", asked):
            save = partial(fsdp_optim.save, folder, model, optim, weights=which)
            texts.append(error_text(save))
    return texts


class RanksTest(unittest.TestCase):
    def test_ranks_that_disagree(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            first, *others = run_on_ranks(disagree, 3, f"{folder}/step")
            for other in others:
                self.assertEqual(other, first)
            for frozen, asked in zip(first[::2], first[1::2], strict=True):
                self.assertIn('1.weight: weights="trainable" takes this parameter on one of rank', frozen)
                self.assertIn("requires_grad must be the same on all ranks", frozen)
                self.assertIn("weights=", asked)
            self.assertFalse(Path(folder, "step").exists())
