"""A child that a user's own module calls as wrappers call theirs is part of the FQN: wrappers are known by their classes."""

from __future__ import annotations

import unittest
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit.compare import Differs, check_same, refused, refused_on_ranks
from kit.folders import InFolder
from kit.options import as_options
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp_optim
from fsdp_optim.state.dicts.names import WrappedNames
from fsdp_optim.tensors.model_dict import unwrapped_path
from fsdp_optim.testing import run_on_ranks

NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module")


class Named(nn.Module):
    """A module with a weight of its own, and one below each of the names; all weights have one shape."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 3))
        self.register_buffer("scale", torch.randn(2))
        for name in NAMES if depth else ():
            self.add_module(name, Named(depth - 1))

    def forward(self, x: Tensor) -> Tensor:
        return sum((child(x) for child in self.children()), x @ self.weight.T)


class Root(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.a, self.b = Named(depth), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def model(seed: int = 0, depth: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return Root(depth)


def compiled(made: Any) -> Any:
    """torch.compile at the root and inside, and activation checkpointing between them."""
    made.a._orig_mod = checkpoint_wrapper(torch.compile(made.a._orig_mod))
    return torch.compile(made)


WRAPS: dict[str, Any] = {
    "compile": compiled,
    **{
        name: WRAPPERS[name]
        for name in ("FSDP1 flat", "FSDP1 orig", "FSDP2", "DDP", "fairscale flat", "fairscale non-flat")
    },
    "FSDP2, compile": lambda made: WRAPPERS["FSDP2"](compiled(made)),
}


def trained(kind: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A wrapped model, and an optimizer whose state depends on the name of each parameter."""
    made = WRAPS[kind](model(seed)) if kind in WRAPS else model(seed)
    return made, torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)


def kept_in(kind: str, root: Path) -> None:
    with cpu():
        plain, of_plain = trained("none")
        wanted = dict(sorted(plain.state_dict().items()))
        state = {name: {"momentum_buffer": value.detach() * 3} for name, value in plain.named_parameters()}
        of_plain.state.update({param: state[name] for name, param in plain.named_parameters()})
        full = of_plain.state_dict()
        full["param_groups"][0]["param_names"] = list(state)
        wrapped, optim = trained(kind)
        optim.load_state_dict(fsdp_optim.scatter_full_optim_state_dict(wrapped, optim, full))
        world = {"process_group": torch.distributed.group.WORLD, "durable": False}
        fsdp_optim.save(root / "it", wrapped, optim, **as_options(fsdp_optim.SaveOptions, **world))  # type: ignore[arg-type]
        check_same("saved", dict(sorted(load_file(root / "it" / "model.safetensors").items())), wanted)
        gathered = fsdp_optim.gather_full_optim_state_dict(wrapped, optim, None, key_by="name")
        check_same("state", dict(sorted(gathered["state"].items())), dict(sorted(state.items())))
        other, other_optim = trained(kind, seed=1)
        fsdp_optim.load(root / "it", other, other_optim, options=fsdp_optim.LoadOptions(compare=True))
        alone, of_alone = trained("none", seed=2)
        fsdp_optim.load(root / "it", alone, of_alone)
        check_same("in a plain model", dict(sorted(alone.state_dict().items())), wanted)
        moments = {name: of_alone.state[param] for name, param in alone.named_parameters()}
        check_same("moments of a plain model", moments, state)


def with_wrappers_names(root: Path) -> None:
    """Files with the names of a compiled model, FSDP1 around it: each weight comes to its own place."""
    wanted = dict(model(depth=1).state_dict())
    parts = {"a._orig_mod.": "a._orig_mod._orig_mod.", "a.": "a.", "b.": "b."}
    names = {}
    for name in wanted:
        start = next(part for part in parts if name.startswith(part))
        names[name] = "_fsdp_wrapped_module." + parts[start] + name.removeprefix(start)
    save_file({names[name]: value for name, value in wanted.items()}, root / "wrapped.safetensors")
    made = model(1, depth=1)
    fsdp_optim.load(root / "wrapped.safetensors", made)
    check_same("found", dict(made.state_dict()), wanted)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)


def merging(root: Path, *, equal: bool) -> None:
    """A file in which two names would be one, and a model that has one of them."""
    here = Small()
    before = {name: value.clone() for name, value in here.state_dict().items()}
    stored = {**before, "a._orig_mod.weight": before["a.weight"] * (1 if equal else 2)}
    save_file(stored, root / "two.safetensors")
    load = partial(
        fsdp_optim.load,
        root / "two.safetensors",
        here,
        options=fsdp_optim.LoadOptions(process_group=torch.distributed.group.WORLD),
    )
    refused_on_ranks("two names", load, "StateError", "a._orig_mod.weight", "the checkpoint has it, the model does not")
    check_same("kept", dict(here.state_dict()), before)
    restored = load(strict=False)
    check_same("unexpected", restored.unexpected_keys, ("a._orig_mod.weight",))
    if not torch.equal(here.a.weight, before["a.weight"]):
        raise Differs("the other tensor was loaded")


class NamesTest(InFolder):
    @parameterized.expand(WRAPS)
    def test_fqns_are_those_of_the_unwrapped_model(self, kind: str) -> None:
        run_on_ranks(kept_in, 1 if kind == "compile" else 2, kind, self.root)

    def test_wrappers_names_in_files_are_cut_as_little_as_needed(self) -> None:
        with_wrappers_names(self.root)

    @parameterized.expand([(True,), (False,)])
    def test_two_names_in_a_file_are_never_one(self, equal: bool) -> None:
        run_on_ranks(partial(merging, equal=equal), 2, self.root)

    def test_a_state_dict_of_two_names_that_would_be_one_is_refused(self) -> None:
        here = Small()
        optim = torch.optim.SGD(here.parameters(), lr=0.1, momentum=0.9)
        names = ("a.weight", "_orig_mod.a.weight", "a.bias")
        shapes = {"weight": (2, 3), "bias": (2,)}
        state = {name: {"momentum_buffer": torch.ones(shapes[name.rpartition(".")[2]])} for name in names}
        full = {"state": state, "param_groups": [{"params": list(names), "lr": 0.1}]}
        scatter = partial(fsdp_optim.scatter_full_optim_state_dict, here, optim, full)
        refused(scatter, fsdp_optim.StateError, "a.weight", "_orig_mod.a.weight", "several keys")

    def test_a_conversion_names_both(self) -> None:
        weights = {"a.weight": torch.ones(2), "_orig_mod.a.weight": torch.zeros(2)}
        save_file(weights, self.root / "two.safetensors")
        convert = partial(fsdp_optim.convert, self.root / "two.safetensors", self.root / "dst")
        refused(convert, fsdp_optim.CheckpointError, "_orig_mod.a.weight", "both called a.weight")
        self.assertFalse((self.root / "dst").exists())

    def test_names_are_found_by_the_least_cut(self) -> None:
        parts = frozenset({"_orig_mod", "_fsdp_wrapped_module"})
        names = WrappedNames({"w", "a.w", "a._orig_mod.w", "b._orig_mod.w"}, parts)
        wanted = {
            "w": "w",
            "_orig_mod.w": "w",
            "a.w": "a.w",
            "a._orig_mod.w": "a._orig_mod.w",
            "_fsdp_wrapped_module.a.w": "a.w",
            "_fsdp_wrapped_module.a._orig_mod.w": "a._orig_mod.w",
            "a._orig_mod._orig_mod.w": "a._orig_mod.w",
            "b._orig_mod._orig_mod.w": "b._orig_mod.w",
            "b.w": "b._orig_mod.w",  # as earlier versions of this library have saved it
            "c.w": None,
            "x._orig_mod": None,
        }
        self.assertEqual({name: names.find(name) for name in wanted}, wanted)
        self.assertIsNone(WrappedNames({"_orig_mod.a.w", "a._orig_mod.w"}, parts).find("a.w"))

    def test_olmos_names_lose_no_part_of_a_component(self) -> None:
        cases = {"a_orig_mod.weight": "a_orig_mod.weight", "_orig_mod.a._fsdp_wrapped_module.": "a", "_orig_mod": ""}
        self.assertEqual({name: unwrapped_path(name) for name in cases}, cases)


if __name__ == "__main__":
    unittest.main()
