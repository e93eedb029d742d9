"""Names of parameters through torch's nested wrappers, and tied parameters, are those of the unwrapped model."""

from __future__ import annotations

import copy
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.tables import Table
from kit.torch_wraps import fsdp1_unit, fsdp2_unit, local
from kit.wrapping import (
    WRAPPERS,
    Differs,
    Trained,
    check_same,
    check_trip,
    cpu,
    in_ddp,
    in_fairscale,
    in_fsdp1,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.parallel import ColwiseParallel

# ------------------------------------------------------------------------------------------- names


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")  # the usual back end takes seconds to import, on each rank


class HasModule(nn.Module):
    """Children with names that wrappers use too."""

    units = ("module", "")

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 5)
        self.inner = nn.Module()
        self.inner.module = nn.Linear(2, 3)


def block_in(wrap: Callable[[nn.Module], Any]) -> Callable[[Any], Any]:
    """Only the model's block is wrapped."""

    def wrapped(model: Any) -> Any:
        model.block = wrap(model.block)
        return model

    return wrapped


def stacked(*wraps: Callable[[nn.Module], Any]) -> Callable[[Any], Any]:
    """The block, and then the whole model, in each of the wraps, the first one innermost."""

    def wrapped(model: Any) -> Any:
        for wrap in wraps:
            model.block = wrap(model.block)
        for wrap in wraps:
            model = wrap(model)
        return model

    return wrapped


NESTINGS: dict[str, Callable[[Any], Any]] = {
    "compile": stacked(compiled),
    "checkpoint": stacked(checkpoint_wrapper),
    "compile(checkpoint)": stacked(checkpoint_wrapper, compiled),
    "checkpoint(compile)": stacked(compiled, checkpoint_wrapper),
    "DDP(compile(checkpoint))": lambda model: in_ddp(stacked(checkpoint_wrapper, compiled)(model)),
    "compile(DDP(checkpoint))": lambda model: compiled(in_ddp(stacked(checkpoint_wrapper)(model))),
    "FSDP1(compile)": stacked(compiled, fsdp1_unit),
    "compile(FSDP1)": stacked(fsdp1_unit, compiled),
    "FSDP1(checkpoint)": stacked(checkpoint_wrapper, fsdp1_unit),
    "checkpoint(FSDP1)": stacked(fsdp1_unit, checkpoint_wrapper),
    "compile(FSDP1(checkpoint))": stacked(checkpoint_wrapper, fsdp1_unit, compiled),
    "checkpoint(FSDP1(compile)), flat": stacked(compiled, lambda m: fsdp1_unit(m, False), checkpoint_wrapper),
    "FSDP2(compile)": stacked(compiled, fsdp2_unit),
    "compile(FSDP2)": stacked(fsdp2_unit, compiled),
    "FSDP2(checkpoint)": stacked(checkpoint_wrapper, fsdp2_unit),
    "checkpoint(FSDP2(compile))": stacked(compiled, fsdp2_unit, checkpoint_wrapper),
    "fairscale(checkpoint)": lambda model: in_fairscale(block_in(checkpoint_wrapper)(model)),
    "compile(fairscale)": lambda model: compiled(in_fairscale(model)),
    "fairscale(FSDP of a FSDP)": lambda model: in_fairscale(in_fairscale(model)),
    "FSDP1(FSDP1)": lambda model: fsdp1_unit(fsdp1_unit(in_fsdp1(model, use_orig_params=True))),
}


def nesting(case: str) -> None:
    with cpu():
        wrap = NESTINGS[case]
        check_trip(wrap, process_group=dist.group.WORLD)


def module_named(case: str) -> None:
    with cpu():
        check_trip(WRAPPERS[case], model=HasModule, process_group=dist.group.WORLD)


NESTED = Table(nesting, *some([(2, case) for case in NESTINGS], every=3, first=1))
NAMED = Table(module_named, *some([(2, wrapper) for wrapper in WRAPPERS if wrapper != "FSDP2 x TP"], every=3))


class NamesTest(unittest.TestCase):
    @expand(*NESTED.soon_and_later)
    def test_names_are_clean_in_any_order_of_wrapping(self, *case: Any) -> None:
        NESTED(*case)

    @expand(*NAMED.soon_and_later)
    def test_a_child_that_is_called_module_keeps_its_name(self, *case: Any) -> None:
        NAMED(*case)


# ------------------------------------------------------------------------------------------- tied parameters


class Tied(nn.Module):
    """One weight with three names in two places, and one that is tied inside a unit."""

    units = ("inner", "")
    tensor_parallel = {"inner.up": ColwiseParallel()}
    names = ("embedding.weight", "between.weight", "inner.up.weight", "inner.up.bias", "inner.down.bias")
    aliases = {
        "head.weight": "embedding.weight",
        "again.weight": "embedding.weight",
        "inner.down.weight": "inner.up.weight",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.between = nn.Linear(5, 5, bias=False)
        self.inner = nn.Module()
        self.inner.up = nn.Linear(3, 3)
        self.inner.down = nn.Linear(3, 3)
        self.inner.down.weight = self.inner.up.weight
        self.head = nn.Linear(5, 7, bias=False)
        self.again = nn.Linear(5, 7, bias=False)
        self.head.weight = self.again.weight = self.embedding.weight


def tied(wrapper: str) -> None:
    with cpu():
        full = check_trip(wrapper, model=Tied)
        if full is not None:
            names = full["param_groups"][0]["param_names"]
            if names != list(Tied.names):
                raise Differs(f"{names}, not {list(Tied.names)}")
        trained = Trained(wrapper, model=Tied)
        target = Trained(wrapper, steps=0, model=Tied)
        named = trained.gather(None, "name")
        wanted = target.shard(named)
        for alias, name in Tied.aliases.items():
            renamed = {n if n != name else alias: values for n, values in named["state"].items()}
            groups = copy.deepcopy(named["param_groups"])
            for group in groups:
                for key in {"params", "param_names"} & set(group):
                    group[key] = [alias if n == name else n for n in group[key]]
            given = {**named, "state": renamed, "param_groups": groups}
            check_same(f"shard, {name} called {alias}", local(target.shard(given)), local(wanted))
            check_same(f"scatter, {name} called {alias}", local(target.scatter(given)), local(wanted))


TIES = Table(
    tied, *some([(1 if wrapper == "DDP" else 3, wrapper) for wrapper in WRAPPERS if wrapper != "FSDP2 x TP"], every=2)
)


class TiedTest(unittest.TestCase):
    @expand(*TIES.soon_and_later)
    def test_listed_once_and_every_alias_is_accepted(self, *case: Any) -> None:
        TIES(*case)
