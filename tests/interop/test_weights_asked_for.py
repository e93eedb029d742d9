"""A load that is asked for weights loads them or raises, whatever lies beside them and whichever format they are in."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.accelerate_loop import Loop
from kit.checkpoints import Whole, load, mine, save, scramble
from kit.compare import check_same, refused_on_ranks
from kit.folders import SharedFolder
from kit.hugging_face import enabled, on_cpu
from kit.optimizers import OfModel, two_groups
from kit.trained import STEPS, Trained
from kit.wrapping import cpu
from parameterized import parameterized
from safetensors.torch import save_file

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.testing import run_on_ranks

ADAM = OfModel(two_groups)


OTHERS: dict[str, Callable[[], Any]] = {
    "int": lambda: 3,
    "None": lambda: None,
    "str": lambda: "x",
    "object": lambda: Namespace(hidden=8),
    "dict": lambda: {"hidden": 8},
}
LOADED = ("kit.loaded.hugging_face",)
WRAPPERS = ("FSDP2", "FSDP1 flat")


def trained(wrapper: str, steps: int = STEPS) -> Trained:
    return Trained(wrapper, ADAM, steps, Whole)


def load_beside_others(root: Path) -> None:
    """On two ranks: the weights are loaded, and the other value is named or given back."""
    for wrapper in WRAPPERS:
        with cpu():
            alike, target = trained(wrapper), trained(wrapper, 0)
            scramble(target)
            before = mine(target)
            for name in OTHERS:
                inside, bare = root / f"{name}-inside.pt", root / f"{name}-bare.pt"
                refused_on_ranks(
                    f"{name}: strict", partial(load, inside, target), "StateError", "other: the checkpoint has it"
                )
                check_same(f"{name}: nothing was loaded", mine(target), before)
                restored = load(inside, target, strict=False)
                check_same(f"{name}: loaded", mine(target), mine(alike))
                check_same(f"{name}: named", (restored.missing_keys, restored.unexpected_keys), ((), ("other",)))
                scramble(target)
                restored = fsdp_optim.load(
                    bare, target.model, options=fsdp_optim.LoadOptions(progress=False, allow_pickle=name == "object")
                )
                check_same(f"{name}: bare", mine(target)["values"], mine(alike)["values"])
                check_same(f"{name}: given back", type(restored.state["other"]).__name__, type(OTHERS[name]()).__name__)
                target = trained(wrapper, 0)
                scramble(target)
                before = mine(target)


def refuse_to_load_none(root: Path) -> None:
    """On two ranks: with strict=False too, in every format and by every call, weights of other names only are no weights."""
    for wrapper in WRAPPERS:
        with cpu():
            target = trained(wrapper, 0)
            scramble(target)
            before = mine(target)
            full = fsdp_optim.gather_full_model_state_dict(target.model) or {}
            for name in ("own", "dcp", "torch", "safetensors"):
                asked = partial(
                    load, root / name, target, strict=False, **({"rename": {"": "other."}} if name == "own" else {})
                )
                if name in ("safetensors", "dcp"):
                    asked = partial(
                        fsdp_optim.load,
                        root / name,
                        target.model,
                        strict=False,
                        options=fsdp_optim.LoadOptions(progress=False),
                    )
                refused_on_ranks(
                    f"{name}, {wrapper}", asked, "StateError", "no weight would be loaded", "rename=", 'weights="none"'
                )
            for given in ({}, {f"other.{key}": value for key, value in full.items()}):
                asked = partial(fsdp_optim.scatter_full_model_state_dict, target.model, given, strict=False)
                refused_on_ranks(f"scatter, {wrapper}", asked, "StateError", "no weight would be loaded")
            check_same("nothing was loaded", mine(target), before)


def refuse_by_every_call(root: Path) -> None:
    """On two ranks: what loads by itself, or for another library, is no way around it."""
    target = trained("FSDP2", 0)
    scramble(target)
    before = mine(target)
    others = ("no weight would be loaded", "other.", "rename=")
    for name, words in (("run", others), ("run without weights", ('was saved with weights="none"',))):
        asked = partial(
            fsdp_optim.resume,
            root / name,
            target.model,
            target.optim,
            strict=False,
            options=fsdp_optim.LoadOptions(progress=False),
        )
        refused_on_ranks(f"resume, {name}", asked, "StateError", *words)
    asked = partial(
        fsdp_optim.resume,
        root / "run",
        target.model,
        target.optim,
        strict=False,
        on_damage="previous",
        options=fsdp_optim.LoadOptions(progress=False),
    )
    refused_on_ranks("resume, previous", asked, "StateError", *others)
    manager = fsdp_optim.CheckpointManager(
        root / "managed", target.model, target.optim, every=1, options=fsdp_optim.ManagerOptions(progress=False)
    )
    refused_on_ranks("manager", partial(manager.resume, strict=False), "StateError", "no weight would be loaded")
    rollback = partial(manager.rollback, to=1, strict=False)
    refused_on_ranks("rollback", rollback, "StateError", "no weight would be loaded")
    manager.close()
    asked = partial(load, root / "metrics.pt", target, strict=False)
    refused_on_ranks(
        "only metrics", asked, "StateError", "has an optimizer and no weights", "metrics, epoch", "no dicts of tensors"
    )
    check_same("nothing was loaded", mine(target), before)


def refuse_for_accelerate(root: Path) -> None:
    """On two ranks."""
    for kind in ("FSDP2", "DDP"):
        with on_cpu(kind), enabled({}):
            loop = Loop(kind)
            before = loop.state
            asked = partial(loop.accelerator.load_state, str(root / "run" / "step-1"), strict=False)
            refused_on_ranks(f"load_state, {kind}", asked, "StateError", "no weight would be loaded")
            check_same("nothing was loaded", loop.state, before)


def write(root: Path) -> None:
    """On one rank."""
    with cpu():
        saved = trained("FSDP2")
        model = fsdp_optim.gather_full_model_state_dict(saved.model)
        optim = fsdp_optim.gather_full_optim_state_dict(saved.model, saved.optim, key_by="name")
        for name, make in OTHERS.items():
            torch.save({"model": {**model, "other": make()}, "optimizer": optim}, root / f"{name}-inside.pt")
            torch.save({**model, "other": make()}, root / f"{name}-bare.pt")
        save(root / "own", saved)
        renamed = {f"other.{key}": value for key, value in model.items()}
        torch.save({"model": renamed, "optimizer": optim}, root / "renamed.pt")
        torch.save(renamed, root / "renamed-model.pt")
    if dist.get_rank() == 0:
        fsdp_optim.convert(
            root / "renamed.pt", root / "torch", format="torch", options=fsdp_optim.ConvertOptions(progress=False)
        )
        fsdp_optim.convert(
            root / "renamed-model.pt", root / "dcp", format="dcp", options=fsdp_optim.ConvertOptions(progress=False)
        )
        fsdp_optim.convert(root / "renamed.pt", root / "converted", options=fsdp_optim.ConvertOptions(progress=False))
        fsdp_optim.convert(
            root / "renamed.pt", root / "run" / "step-1", options=fsdp_optim.ConvertOptions(progress=False)
        )
        torch.save(optim, root / "optim.pt")
        fsdp_optim.convert(
            root / "optim.pt",
            root / "run without weights" / "step-1",
            options=fsdp_optim.ConvertOptions(progress=False),
        )
        torch.save({"optimizer": optim, "metrics": {"mean": torch.ones(3), "n": 4}, "epoch": 3}, root / "metrics.pt")
        linear = torch.nn.Linear(5, 3)
        with fsdp_optim.CheckpointManager(
            root / "managed", linear, None, every=1, options=fsdp_optim.ManagerOptions(durable=False, progress=False)
        ) as manager:
            manager.step(1)
        (root / "safetensors").mkdir()
        shutil.copy(root / "converted" / "model.safetensors", root / "safetensors" / "model.safetensors")


class WeightsAskedForTest(SharedFolder):
    """Weights beside other values, and files without any weights of the model."""

    @classmethod
    def fill(cls) -> None:
        run_on_ranks(write, 1, cls.root)

    @parameterized.expand(
        [(function.__name__, function) for function in (load_beside_others, refuse_to_load_none, refuse_by_every_call)]
    )
    def test_on_two_ranks(self, _: str, function: Callable[[Path], None]) -> None:
        run_on_ranks(function, 2, self.root)

    def test_accelerate(self) -> None:
        run_on_ranks(refuse_for_accelerate, 2, self.root)

    def test_convert(self) -> None:
        """Weights of other names are converted as they are; a file without anything is not a checkpoint."""
        save_file({}, self.root / "nothing.safetensors")
        torch.save({"epoch": 3, "loss": torch.tensor(0.5)}, self.root / "no-model.pt")
        for name, words in (
            ("nothing.safetensors", r"nothing\.safetensors: has neither weights nor an optimizer"),
            ("no-model.pt", "has neither a model .*nor an optimizer"),
        ):
            with self.assertRaisesRegex(CheckpointError, words):
                fsdp_optim.convert(
                    self.root / name, self.root / "none", options=fsdp_optim.ConvertOptions(progress=False)
                )
            self.assertFalse((self.root / "none").exists())
        mixed = {"actor": {"0.weight": torch.ones(2, 3), **{f"setting_{number}": number for number in range(9)}}}
        torch.save({**mixed, "epoch": 3}, self.root / "mixed.pt")
        fsdp_optim.convert(
            self.root / "mixed.pt", self.root / "mixed", options=fsdp_optim.ConvertOptions(progress=False)
        )
        model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False))
        restored = fsdp_optim.load(
            self.root / "mixed", model, strict=False, options=fsdp_optim.LoadOptions(progress=False)
        )
        self.assertEqual((model[0].weight.tolist(), restored.state["epoch"]), (torch.ones(2, 3).tolist(), 3))
        self.assertEqual(restored.unexpected_keys, tuple(f"setting_{number}" for number in range(9)))
