"""Flattened DCP checkpoints with several param groups: their groups are those that the checkpoint tells apart.

Written by torch and by torchtitan's own trainer and manager; what is converted is compared, by name, with what was saved.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from kit.compare import check_same
from kit.dcp import LAYOUTS
from kit.folders import SharedFolder
from kit.models import Net
from kit.optimizers import OfModel
from kit.options import as_options
from kit.torchtitan_cpu import everything, torchtitan_on_cpu, trainer_config
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

import fsdp_optim
from fsdp_optim import StateError
from fsdp_optim.state.dicts.flattened import unflatten
from fsdp_optim.testing import run_on_ranks

QUIET: Mapping[str, Any] = {"durable": False, "progress": False}


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    """The two groups that most trainings have: weights with decay, and all else without, each in the model's order."""
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}]
    return torch.optim.AdamW([*groups, {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}], lr=0.01)


def by_name(full: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the hyperparameters of each parameter of a full dict."""
    name_of = {
        key: name
        for group in full["param_groups"]
        for key, name in zip(group["params"], group.get("param_names", group["params"]), strict=True)
    }
    hyper = {
        name_of[key]: {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in full["param_groups"]
        for key in group["params"]
    }
    return {name_of[key]: values for key, values in full["state"].items()}, hyper


def check_converted(
    place: Path, target: Path, wanted: tuple[dict[str, Any], dict[str, Any]], sizes: Sequence[int]
) -> None:
    """By every format that is written, and by each of them back to a file of torch."""
    for format in ("torch_file", "safetensors", "dcp", "torchtitan"):
        fsdp_optim.convert(place, target / format, format=format, **as_options(fsdp_optim.ConvertOptions, **QUIET))
        fsdp_optim.convert(
            target / format,
            target / f"{format}.pt",
            format="torch_file",
            **as_options(fsdp_optim.ConvertOptions, **QUIET),
        )
        for file in (target / f"{format}.pt",):
            full = torch.load(file, weights_only=True)["optimizer"]
            check_same("sizes of groups", [len(group["params"]) for group in full["param_groups"]], list(sizes))
            for got, expected, what in zip(by_name(full), wanted, ("state", "hyperparameters"), strict=True):
                check_same(f"{format}: {what}", got, expected, in_order=False)


def save_all(root: str) -> list[Any]:
    saved = []
    with cpu():
        for layout in ("flattened", "torchtitan"):
            trained = Trained("FSDP2", OfModel(decayed))
            LAYOUTS[layout](trained, Path(root) / layout)
            full = trained.gather(None, "name")
            saved.append(by_name(full))
    return saved


def save_by_torchtitan(root: str) -> Any:
    """torchtitan's own manager, in its own trainer: norms by an Adam, all else by an AdamW."""
    with torchtitan_on_cpu():
        from torchtitan.components.checkpointer import CheckpointManager

        own = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
        trainer = trainer_config(Path(root), own, steps=2).build()
        trainer.train()
        optims = [*trainer.optimizers.optimizers]
        full = fsdp_optim.gather_full_optim_state_dict(trainer.model_parts, optims, recipient_rank=None, key_by="name")
        everything(trainer)
        trainer.close()
        return by_name(full), [len(group["params"]) for group in full["param_groups"]]


class GroupsTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        cls.saved = dict(zip(("flattened", "torchtitan"), run_on_ranks(save_all, 2, str(cls.root))[0], strict=True))

    @parameterized.expand(["flattened", "torchtitan"])
    def test_by_torch_on_two_ranks(self, layout: str) -> None:
        state, hyper = self.saved[layout]
        sizes = [len([values for values in hyper.values() if values["weight_decay"] == decay]) for decay in (0.1, 0.0)]
        self.assertEqual([bool(size) for size in sizes], [True, True])
        check_converted(self.root / layout, self.root / f"{layout}-to", (state, hyper), sizes)

    def test_by_torchtitan_itself(self) -> None:
        """Its container has two optimizers, whose dicts it flattens into one."""
        (wanted, sizes), _ = run_on_ranks(save_by_torchtitan, 2, str(self.root / "titan"))
        self.assertEqual(len(sizes), 2)
        check_converted(self.root / "titan/checkpoint/step-2", self.root / "titan-to", wanted, sizes)

    @parameterized.expand(
        [(source, groups) for source in ("flattened", "flattened-our") for groups in ("saved", "live")]
    )
    def test_loaded_into_other_groups(self, source: str, groups: Any) -> None:
        """The error of an optimizer with other groups says what helps, before a conversion and after it; and it does help."""
        if source == "flattened-our":
            fsdp_optim.convert(
                self.root / "flattened",
                self.root / source,
                overwrite=True,
                **as_options(fsdp_optim.ConvertOptions, **QUIET),
            )
        for make in (decayed, lambda model: torch.optim.AdamW(model.parameters(), lr=3.0)):
            model = Net()
            optim = make(model)
            if groups == "saved" and len(optim.param_groups) == 1:
                with self.assertRaisesRegex(StateError, "2 param groups, the optimizer has 1: .*param_groups='live'"):
                    fsdp_optim.load(self.root / source, model, optim)
                continue
            fsdp_optim.load(self.root / source, model, optim, options=fsdp_optim.LoadOptions(param_groups=groups))
            names = {param: name for name, param in model.named_parameters()}
            for param, values in optim.state.items():
                check_same(names[param], dict(values), self.saved["flattened"][0][names[param]], in_order=False)

    def test_equal_groups_are_one(self) -> None:
        """Nothing in a flattened dict tells them apart."""
        model = Net()
        optim = decayed(model)
        optim.param_groups[1]["weight_decay"] = 0.1
        model.stem(torch.ones(1, 5)).sum().backward()
        optim.step()
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        flat = get_optimizer_state_dict(model, optim, options=options)
        dcp.save({"model": get_model_state_dict(model), "optim": flat}, checkpoint_id=self.root / "equal")
        fsdp_optim.convert(
            self.root / "equal",
            self.root / "equal.pt",
            format="torch_file",
            **as_options(fsdp_optim.ConvertOptions, **QUIET),
        )
        full = torch.load(self.root / "equal.pt", weights_only=True)["optimizer"]
        self.assertEqual(len(full["param_groups"]), 1)


class Sized(torch.optim.Optimizer):
    """Its only value has the shape of its parameter, under a name that torch.optim does not have; some begin without it."""

    def __init__(self, params: Any, without: Sequence[nn.Parameter] = ()) -> None:
        super().__init__(params, {"lr": 0.1})
        self.without = {id(param) for param in without}

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if id(param) not in self.without:
                    self.state[param]["mean"] = torch.full_like(param, float(param.numel()))


class Shaped(Sized):
    """Its value has a shape of its own, of as many dimensions as it takes."""

    def __init__(self, params: Any, shape_of: Callable[[torch.Size], Sequence[int]]) -> None:
        super().__init__(params)
        self.shape_of = shape_of

    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param]["mean"] = torch.ones(*self.shape_of(param.shape))


class OrderOfIdsTest(SharedFolder):
    """A file of torch with ids alone, from an optimizer that lists its parameters in another order than the model."""

    def setUp(self) -> None:
        shapes = {"a": (4, 4), "b": (4, 3), "c": (5,), "d": (2,)}
        self.model = nn.ParameterDict({name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()})

    def file_of(self, optim: torch.optim.Optimizer) -> Path:
        optim.step()
        torch.save({"model": self.model.state_dict(), "optimizer": optim.state_dict()}, self.root / "file.pt")
        return self.root / "file.pt"

    def convert(self, file: Path, **given: Any) -> None:
        options = fsdp_optim.ConvertOptions(
            **QUIET, **{key: given.pop(key) for key in [*given] if key == "param_names"}
        )
        fsdp_optim.convert(file, self.root / "own", overwrite=True, options=options, **given)

    @parameterized.expand([("all",), ("but one",), ("by a load",)])
    def test_refused(self, which: str) -> None:
        params = dict(self.model.items())
        order = ["c", "b", "d", "a"]
        optim = Sized([params[name] for name in order], [params["b"]] if which == "but one" else [])
        file = self.file_of(optim)
        with self.assertRaisesRegex(
            StateError, r"a: mean has shape \[5\] .* \[4, 4\], .* count .* another order.*param_names="
        ):
            if which == "by a load":
                fsdp_optim.load(file, self.model, Sized(params.values()))
            else:
                self.convert(file, model=self.model)
        self.convert(file, param_names=order)
        target = Sized(params.values())
        fsdp_optim.load(self.root / "own", self.model, target)
        for name, param in params.items():
            check_same(name, dict(target.state[param]), dict(optim.state[param]))

    @parameterized.expand(
        [
            ("rows, which are those of biases", lambda shape: shape[:1]),
            ("factors", lambda shape: (shape[0], shape[0])),
            ("transposed", lambda shape: shape[::-1]),
            ("flat", lambda shape: (shape.numel(),)),
        ]
    )
    def test_shapes_of_their_own(self, _: str, shape_of: Callable[[torch.Size], Sequence[int]]) -> None:
        self.model = nn.ParameterDict(
            {
                name: nn.Parameter(torch.ones(shape))
                for name, shape in {"a": (4, 3), "b": (4,), "c": (3, 4), "d": (4, 4)}.items()
            }
        )
        optim = Shaped(self.model.parameters(), shape_of)
        self.convert(self.file_of(optim), model=self.model)
        target = Shaped(self.model.parameters(), shape_of)
        fsdp_optim.load(self.root / "own", self.model, target)
        for name, param in self.model.items():
            check_same(name, dict(target.state[param]), dict(optim.state[param]))


class UnflattenTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("numbers", [0.1, 0.0, 0.1], [["a", "c"], ["b"]]),
            ("an int and a float", [1, 1.0, True], [["a"], ["b"], ["c"]]),
            ("NaN", [float("nan"), 0.0, float("nan")], [["a", "c"], ["b"]]),
            ("tensors", [torch.ones(()), torch.zeros(()), torch.ones(())], [["a", "c"], ["b"]]),
            ("pairs", [(0.9, 0.99), (0.9, 0.9), (0.9, 0.99)], [["a", "c"], ["b"]]),
            ("one that is missing", [0.1, None, 0.1], [["a", "c"], ["b"]]),
        ]
    )
    def test_groups(self, _: str, values: list[Any], wanted: list[list[str]]) -> None:
        named = dict(zip("abc", values, strict=True))
        full = {f"state.{name}.step": torch.ones(()) for name in named}
        full |= {f"param_groups.{name}.eps": 1e-8 for name in named}
        full |= {f"param_groups.{name}.x": value for name, value in named.items() if value is not None}
        made = unflatten(full, [["a", "b", "c"]])["param_groups"]
        self.assertEqual([group["params"] for group in made], wanted)
        for group in made:
            for name in group["params"]:
                check_same(name, group.get("x"), named[name])
