"""Shapes that break other tools, in every wrapper: all verbs are exact, or torch's own refusal is named."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Callable, Collection
from typing import Any

import torch
from kit.wrapping import (
    STEPS,
    WRAPPERS,
    Differs,
    Net,
    Trained,
    adam,
    check_refused,
    check_trip,
    cpu,
    error_text,
    in_fsdp1,
    in_fsdp2,
)
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


class Indivisible(nn.Module):
    """No dimension that 2, 3 or 4 divide."""

    units = ("inner", "")
    tensor_parallel = {"inner": ColwiseParallel(), "last": RowwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.conv = nn.Conv2d(1, 5, (1, 7), bias=False)
        self.last = nn.Linear(13, 11)


class Tiny(nn.Module):
    """Fewer elements than ranks: some ranks hold nothing of a parameter, or of a unit."""

    units = ("inner", "norm", "")
    tensor_parallel = {"inner": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.norm = nn.LayerNorm(1, bias=False)
        self.wide = nn.Parameter(torch.empty(1, 9))
        self.row = nn.Parameter(torch.empty(3, 2))


class Zeros(nn.Module):
    """Parameters without elements, first, in the middle and last."""

    units = ("inner", "")
    tensor_parallel = {"inner": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0, 5))
        self.inner = nn.Linear(4, 3)
        self.inner.nothing = nn.Parameter(torch.empty(3, 0))
        self.between = nn.Parameter(torch.empty(2, 2))
        self.last = nn.Parameter(torch.empty(0))


class Scalars(nn.Module):
    """Parameters without dimensions."""

    units = ("inner", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.empty(()))
        self.inner = nn.Linear(3, 2)
        self.inner.gain = nn.Parameter(torch.empty(()))


class OneHuge(nn.Module):
    """One parameter that is larger than all others, which are many."""

    units = ("many.3", "many.4", "")
    tensor_parallel = {"huge": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.empty(1))
        self.huge = nn.Linear(211, 97, bias=False)
        self.many = nn.ModuleList(
            nn.ParameterList([torch.empty(1 + i % 3), torch.empty(2, 1 + i % 2)]) for i in range(20)
        )


class Hollow(nn.Module):
    """Units without parameters, around and beside those with some."""

    units = ("nothing", "inner.nothing", "inner", "around", "")
    tensor_parallel = {"inner.linear": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Tanh()
        self.inner = nn.Module()
        self.inner.nothing = nn.Sequential(nn.ReLU(), nn.Dropout())
        self.inner.linear = nn.Linear(3, 5)
        self.around = nn.Sequential(nn.Identity())
        self.head = nn.Linear(2, 3)


class Empty(nn.Module):
    """The root unit has no parameters of its own."""

    units = ("first", "second", "")
    tensor_parallel = {"first": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 1)


def freeze(*prefixes: str) -> Callable[[nn.Module], Any]:
    def prepare(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(prefixes))

    return prepare


CASES: dict[str, tuple[type[nn.Module], Callable[[nn.Module], Any] | None, Collection[str]]] = {
    "indivisible": (Indivisible, None, ()),
    "fewer elements than ranks": (Tiny, None, ()),
    "no elements": (Zeros, None, ()),
    "no dimensions": (Scalars, None, ()),
    "one huge and many tiny": (OneHuge, None, ()),
    "units without parameters": (Hollow, None, ()),
    "root without parameters": (Empty, None, ()),
    "a frozen unit": (Net, freeze("stem"), ()),
    "the first and the last unit frozen": (Empty, freeze("first"), ()),
    "all frozen but one": (Net, freeze("scale", "mix", "stem", "head"), ()),
    "a unit without gradients": (Net, None, ("stem.weight", "stem.bias")),
}

TORCH_REFUSES: dict[tuple[str, str], str] = {
    ("FSDP1 flat", "no dimensions"): "doesn't support scalar parameters",
    ("FSDP1 orig", "no dimensions"): "doesn't support scalar parameters",
    ("FSDP2", "no dimensions"): "doesn't support scalar parameters",
    ("HSDP", "no dimensions"): "doesn't support scalar parameters",
    ("FSDP2 x TP", "no dimensions"): "doesn't support scalar parameters",
}


def trip(wrapper: str, case: str) -> str:
    """torch's words, where torch is known not to build this."""
    model, prepare, unused = CASES[case]
    with cpu():
        if (wrapper, case) in TORCH_REFUSES:
            return error_text(lambda: Trained(wrapper, adam, 0, model, prepare))[1]
        check_trip(wrapper, adam, model, prepare, unused=unused)
    return ""


def alone(wrapper: str) -> None:
    """Every case on one rank."""
    with cpu():
        for case in CASES:
            if (wrapper, case) not in TORCH_REFUSES:
                try:
                    trip(wrapper, case)
                except Exception as error:
                    raise Differs(f"{case}: {type(error).__name__}: {error}") from error


class ShapesTest(unittest.TestCase):
    @parameterized.expand(list(itertools.product(WRAPPERS, CASES)))
    def test_on_several_ranks(self, wrapper: str, case: str) -> None:
        world_size = 4 if wrapper in ("HSDP", "FSDP2 x TP") else 3  # 2 x 2
        words = run_on_ranks(trip, world_size, wrapper, case)
        expected = TORCH_REFUSES.get((wrapper, case))
        if expected is not None:
            for text in words:
                self.assertIn(expected, text, f"torch was to refuse {case} in {wrapper}")
            self.skipTest(f"torch refuses {case} in {wrapper}: {words[0]}")

    @parameterized.expand(("FSDP1 flat", "FSDP1 orig", "FSDP2", "fairscale non-flat"))
    def test_fewer_elements_than_four_ranks(self, wrapper: str) -> None:
        run_on_ranks(trip, 4, wrapper, "fewer elements than ranks")

    @parameterized.expand(WRAPPERS)
    def test_on_one_rank(self, wrapper: str) -> None:
        run_on_ranks(alone, 1, wrapper)


# ------------------------------------------------------------------------------------------- by hand


def rows_of_every_rank() -> list[list[float]]:
    """Three rows on four ranks under FSDP2: what each rank's shard is, in numbers."""
    model = nn.Linear(2, 3, bias=False)
    in_fsdp2(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    buffer = torch.arange(6.0).reshape(3, 2)
    group = {**{k: v for k, v in optim.param_groups[0].items() if k != "params"}, "params": [0]}
    full = {"state": {0: {"momentum_buffer": buffer}}, "param_groups": [group]}
    shard = fsdp_optim.get_shard_from_optim_state_dict(model, optim, full)
    return shard["state"][0]["momentum_buffer"].to_local().tolist()


def scalars_outside(kind: str) -> None:
    """What torch refuses to shard stays an ordinary parameter beside the shards."""

    def wrap(model: Any) -> Any:
        scalars = [param for param in model.parameters() if not param.dim()]
        if kind == "FSDP2":
            return fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=set(scalars))
        return in_fsdp1(model, ignored_states=scalars, use_orig_params=kind == "FSDP1 orig")

    # torch FSDP1 takes some parameters of a module and leaves others, so that nobody knows their order any more.
    check_trip(wrap, model=Scalars, key_by="id" if kind == "FSDP2" else "name")


def frozen_then_wrapped(wrapper: str) -> list[tuple[str, str]]:
    """What is listed, and what has state, when a unit is frozen."""
    with cpu():
        trained = Trained(wrapper, prepare=freeze("stem"))
        full = trained.gather(None, "name")
        group = full["param_groups"][0]["params"]
        return [(name, "state" if name in full["state"] else "none") for name in group]


class ByHandTest(unittest.TestCase):
    def test_three_rows_on_four_ranks(self) -> None:
        self.assertEqual(run_on_ranks(rows_of_every_rank, 4), [[[0.0, 1.0]], [[2.0, 3.0]], [[4.0, 5.0]], []])

    @parameterized.expand(("FSDP1 flat", "FSDP1 orig", "FSDP2"))
    def test_parameters_without_dimensions_beside_shards(self, kind: str) -> None:
        run_on_ranks(scalars_outside, 2, kind)

    @parameterized.expand([w for w in WRAPPERS if "FSDP1" in w or "fairscale" in w or "FSDP2" in w])
    def test_a_frozen_unit_is_listed_and_has_no_state(self, wrapper: str) -> None:
        wanted = [
            ("scale", "state"),
            ("mix", "state"),
            ("stem.weight", "none"),
            ("stem.bias", "none"),
            ("block.0.weight", "state"),
            ("block.0.bias", "state"),
            ("block.1.weight", "state"),
            ("block.1.bias", "state"),
            ("block.2.weight", "state"),
            ("head.weight", "state"),
            ("head.bias", "state"),
        ]
        for found in run_on_ranks(frozen_then_wrapped, 2, wrapper):
            self.assertEqual(found, wanted)


def half_trained_flat(wrapper: str) -> list[tuple[str, str]]:
    """A full dict in which one original of a flat parameter has no state, or another step."""
    with cpu():
        source = Trained("plain")
        full = source.gather(None)
        names = full["param_groups"][0]["param_names"]
        bias = names.index("stem.bias")
        without = {**full, "state": {i: values for i, values in full["state"].items() if i != bias}}
        other_step = {**full["state"][bias], "step": torch.tensor(float(STEPS + 6))}
        disagreeing = {**full, "state": {**full["state"], bias: other_step}}
        target = Trained(wrapper, steps=0)
        return [
            error_text(lambda: target.shard(without)),
            error_text(lambda: target.scatter(without)),
            error_text(lambda: target.shard(disagreeing)),
            error_text(lambda: target.scatter(disagreeing)),
        ]


class DisagreeingTest(unittest.TestCase):
    """Originals of one flat parameter that disagree cannot be flattened: an error that names both."""

    @parameterized.expand(("fairscale flat", "FSDP1 flat"))
    def test_flat_parameters_refuse_them_by_both_names(self, wrapper: str) -> None:
        by_rank = run_on_ranks(half_trained_flat, 2, wrapper)
        for place, what in enumerate(("absent", "absent, scatter", "step", "step, scatter")):
            check_refused(what, [mine[place] for mine in by_rank], "StateError", "stem.weight", "stem.bias")
        check_refused("step", [mine[2] for mine in by_rank], "StateError", "3", "9")

    @parameterized.expand(("fairscale non-flat", "FSDP1 orig", "FSDP2", "HSDP", "FSDP2 x TP", "DDP", "plain"))
    def test_other_wrappers_keep_each_ones_own(self, wrapper: str) -> None:
        for mine in run_on_ranks(half_trained_flat, 2, wrapper):
            self.assertEqual(mine, [("", "")] * 4)
