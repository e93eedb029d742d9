"""save(..., rename=): weights, state, groups and values of modules under other names, and back by load(..., rename=)."""

from __future__ import annotations

import copy
import json
import tempfile
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.checkpoint_format import in_order
from kit.compare import check_same, error_text
from kit.optimizers import adam
from kit.options import as_options
from kit.trained import Oracle, Trained
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

FORTH = {"block.": "layers.", "": "model."}
BACK = {"layers.": "block.", "model.": ""}
LOADERS = dict(zip(WRAPPERS, [*list(WRAPPERS)[1:], next(iter(WRAPPERS))], strict=True))


def forth(name: str) -> str:
    return f"layers.{name.removeprefix('block.')}" if name.startswith("block.") else f"model.{name}"


def save_all(folder: str) -> None:
    with cpu():
        for wrapper in WRAPPERS:
            trained = Trained(wrapper, adam)
            for at, rename, save in (
                ("dict", FORTH, fsdp_optim.save),
                ("function", forth, fsdp_optim.async_save),
            ):
                call: Callable[..., Any] = save
                done = call(
                    f"{folder}/{wrapper} {at}",
                    trained.model,
                    trained.optim,
                    options=fsdp_optim.SaveOptions(rename=rename, process_group=trained.process_group),
                )
                if at == "function":
                    done.wait()


def load_all(folder: str) -> None:
    with cpu():
        oracle = Oracle(adam)
        for saver, loader in LOADERS.items():
            target = Trained(loader, adam, 0)
            group = target.process_group
            path = f"{folder}/{saver} dict"
            fsdp_optim.load(
                path,
                target.model,
                target.optim,
                options=fsdp_optim.LoadOptions(rename=BACK, compare=True, process_group=group),
            )
            check_same(f"{saver} into {loader}", in_order(target.gather_model()), in_order(oracle.model.state_dict()))
            check_same(f"{saver} into {loader}: state", target.gather(None, "name")["state"], oracle.by_name())


class WrappersTest(unittest.TestCase):
    def test_every_wrapper_saves_and_another_loads_on_more_ranks(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_all, 2, folder)
            oracle = Oracle(adam)
            weights = {forth(name): value for name, value in oracle.model.state_dict().items()}
            state = {
                f"state.{forth(name)}.{key}": value
                for name, values in oracle.by_name().items()
                for key, value in values.items()
            }
            for wrapper in WRAPPERS:
                for at in ("dict", "function"):
                    path = f"{folder}/{wrapper} {at}"
                    check_same(wrapper, in_order(load_file(f"{path}/model.safetensors")), in_order(weights))
                    check_same(wrapper, in_order(load_file(f"{path}/optim.safetensors")), in_order(state))
                    with safe_open(f"{path}/optim.safetensors", "pt") as file:
                        (group,) = json.loads(file.metadata()["param_groups"])
                    self.assertEqual(group["params"], [forth(name) for name in oracle.names])
            run_on_ranks(load_all, 3, folder)


class Tied(nn.Module):
    """A tied weight, a buffer and a value of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.counter = 0

    def get_extra_state(self) -> int:
        return self.counter

    def set_extra_state(self, state: int) -> None:
        self.counter = state


def stepped(seed: int = 0, steps: int = 1) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optim.step()
    return model, optim


class OneProcessTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def check_back(self, path: Path, model: Tied, **options: Any) -> None:
        target, optim = stepped(1, 0)
        fsdp_optim.load(path, target, optim, **as_options(fsdp_optim.LoadOptions, **options, compare=True))
        check_same("weights", dict(target.state_dict()), dict(model.state_dict()))

    def test_tied_weights_buffers_and_values_of_modules(self) -> None:
        model, optim = stepped()
        model.counter = 5
        fsdp_optim.save(self.folder / "a", model, optim, options=fsdp_optim.SaveOptions(rename={"": "model."}))
        self.assertEqual(
            set(load_file(self.folder / "a" / "model.safetensors")),
            {f"model.{name}" for name in model.state_dict()} - {"model.head.weight", "model._extra_state"},
        )
        summary = fsdp_optim.inspect(self.folder / "a")
        self.assertEqual(summary.aliases, {"model.head.weight": "model.embed.weight"})
        params = [f"model.{name}" for name, _ in model.named_parameters()]
        self.assertEqual((sorted(summary.state), [*summary.groups[0].params]), (sorted(params), params))
        self.check_back(self.folder / "a", model, rename={"model.": ""})

    def test_names_of_one_tied_weight_may_fall_together(self) -> None:
        model, optim = stepped()
        rename = {"head.": "embed."}
        fsdp_optim.save(self.folder / "a", model, optim, options=fsdp_optim.SaveOptions(rename=rename))
        self.assertEqual(fsdp_optim.inspect(self.folder / "a").aliases, {})
        self.check_back(self.folder / "a", model)

    @parameterized.expand([("dcp", "model."), ("torchtitan", "")])
    def test_folders_of_torch(self, format: str, prefix: str) -> None:
        model, optim = stepped()
        fsdp_optim.save(
            self.folder / "a", model, optim, options=fsdp_optim.SaveOptions(rename={"embed.": "tok."}), format=format
        )
        keys = set(FileSystemReader(self.folder / "a").read_metadata().state_dict_metadata)
        self.assertTrue({f"{prefix}tok.weight", "optimizer.state.tok.weight.exp_avg"} <= keys, keys)
        self.assertFalse([key for key in keys if "embed" in key])
        self.check_back(self.folder / "a", model, rename={"tok.": "embed."})

    @parameterized.expand([("trainable", "safetensors"), ("none", "safetensors"), ("none", "dcp")])
    def test_with_some_of_the_weights(self, which: Any, format: Any) -> None:
        """The optimizer has parameters whose weights, and so whose names, the files of the weights do not have."""
        model, optim = stepped()
        model.norm.requires_grad_(False)
        fsdp_optim.save(
            self.folder / "a",
            model,
            optim,
            options=fsdp_optim.SaveOptions(rename={"": "model."}),
            weights=which,
            format=format,
        )
        target, target_optim = stepped(1)
        target.norm.requires_grad_(False)
        embed = target.embed.weight.detach().clone()
        fsdp_optim.load(
            self.folder / "a",
            target,
            target_optim,
            options=fsdp_optim.LoadOptions(rename={"model.": ""}),
            weights=which,
        )
        check_same(
            "embed", target.embed.weight.detach(), model.embed.weight.detach() if which == "trainable" else embed
        )
        for param, other in zip(target.parameters(), model.parameters(), strict=True):
            check_same("state", in_order(target_optim.state[param]), in_order(optim.state[other]))

    def test_names_that_are_exchanged(self) -> None:
        """A stored name that is a name of the model, too, but was given to another parameter."""

        def two(seed: int) -> tuple[Any, Any]:
            torch.manual_seed(seed)
            model = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("first", "second")})
            optim = torch.optim.Adam(model.parameters(), lr=0.1)
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optim.step()
            return model, optim

        (model, optim), (target, target_optim) = two(0), two(1)
        exchange = {"first.": "second.", "second.": "first."}
        fsdp_optim.save(self.folder / "a", model, optim)
        options = fsdp_optim.LoadOptions(rename=exchange, compare=True)
        fsdp_optim.load(self.folder / "a", target, target_optim, options=options)
        for old, new in (("first", "second"), ("second", "first")):
            for name in ("weight", "bias"):
                saved, loaded = getattr(model[old], name), getattr(target[new], name)
                check_same(f"{old}.{name}", loaded.detach(), saved.detach())
                check_same(f"{old}.{name}: state", in_order(target_optim.state[loaded]), in_order(optim.state[saved]))

    def test_what_is_refused(self) -> None:
        model, optim = stepped()
        before = copy.deepcopy((model.state_dict(), optim.state_dict()))
        for rename, said in (
            ({"norm.weight": "norm.bias"}, "rename gives norm.weight and norm.bias the same name norm.bias"),
            (lambda name: "x", "rename gives embed.weight and norm.weight the same name x"),
            ({"head.weight": "norm.bias"}, "rename gives norm.bias and head.weight the same name norm.bias"),
            ({"norm.running_mean": "_extra_state"}, "the same name _extra_state"),
            (lambda name: None, "rename returned None for embed.weight, which is not a name"),
            ({"norm.bias": ""}, "rename returned '' for norm.bias, which is not a name"),
            ({"norm.bias": 3}, "rename must map beginnings of names to others"),
            ("model.", "rename must be a function or None, not 'model.'"),
        ):
            save = partial(
                fsdp_optim.save, self.folder / "a", model, optim, options=fsdp_optim.SaveOptions(rename=rename)
            )
            self.assertIn(said, error_text(save)[1])
            self.assertFalse((self.folder / "a").exists())
        check_same("nothing is changed", (model.state_dict(), optim.state_dict()), before)

    def test_a_load_without_the_way_back_is_refused(self) -> None:
        model, optim = stepped()
        fsdp_optim.save(self.folder / "a", model, optim, options=fsdp_optim.SaveOptions(rename={"": "model."}))
        text = error_text(partial(fsdp_optim.load, self.folder / "a", *stepped(1)))[1]
        self.assertIn("embed.weight: the model has it, the checkpoint does not", text)
        self.assertIn("model.embed.weight: the checkpoint has it, the model does not", text)


def disagree(folder: str) -> list[tuple[str, str]]:
    """The error on each rank where one of them gives other names, or none, or has an error."""
    torch.manual_seed(0)
    model, optim = nn.Linear(3, 2), None
    heard = []
    for odd in range(dist.get_world_size()):
        is_odd = dist.get_rank() == odd
        for own_rename in ({"": "other."}, None, lambda name: 1 / 0):
            rename: Any = own_rename if is_odd else {"": "model."}
            heard.append(
                error_text(
                    partial(fsdp_optim.save, folder, model, optim, options=fsdp_optim.SaveOptions(rename=rename))
                )
            )
    return heard


class RanksTest(unittest.TestCase):
    def test_ranks_that_disagree(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_on_ranks(disagree, 3, f"{folder}/step")
            for heard in ranks:
                for names, given in zip(heard[::3], heard[1::3], strict=True):
                    self.assertEqual(names[0], "StateError")
                    self.assertIn("rename= gives other names on some ranks than on others", names[1])
                    self.assertIn("rename=", given[1])
                for odd, failed in enumerate(heard[2::3]):
                    self.assertIn("division by zero", failed[1], odd)
            self.assertFalse(Path(folder, "step").exists())
