"""Shapes that break other tools, in every wrapper: all verbs are exact, or torch's own refusal is named."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from kit.compare import Differs, check_refused, error_text
from kit.models import Net
from kit.optimizers import adam
from kit.shapes import REFUSES_SCALARS, SHAPES, Empty, Scalars
from kit.tables import Table
from kit.trained import STEPS, Trained
from kit.wrapping import check_trip, cpu
from kit.wraps import WRAPPERS, in_fsdp1, in_fsdp2
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


def freeze(*prefixes: str) -> Callable[[nn.Module], Any]:
    def prepare(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(prefixes))

    return prepare


CASES: dict[str, tuple[type[nn.Module], Callable[[nn.Module], Any] | None, Collection[str]]] = {
    **{case: (model, None, ()) for case, model in SHAPES.items()},
    "a frozen unit": (Net, freeze("stem"), ()),
    "the first and the last unit frozen": (Empty, freeze("first"), ()),
    "all frozen but one": (Net, freeze("scale", "mix", "stem", "head"), ()),
    "a unit without gradients": (Net, None, ("stem.weight", "stem.bias")),
}

TORCH_REFUSES = {(wrapper, "no dimensions"): "doesn't support scalar parameters" for wrapper in REFUSES_SCALARS}


def trip(wrapper: str, case: str) -> str:
    """torch's error message, for models that torch refuses to build."""
    model, prepare, unused = CASES[case]
    with cpu():
        if (wrapper, case) in TORCH_REFUSES:
            return error_text(lambda: Trained(wrapper, adam, 0, model, prepare))[1]
        check_trip(wrapper, adam, model, prepare, unused=unused)
    return ""


def alone(wrapper: str, every: int) -> None:
    """Every n-th case on one rank, beginning with another case for each wrapper."""
    with cpu():
        for case in list(CASES)[list(WRAPPERS).index(wrapper) % every :: every]:
            if (wrapper, case) not in TORCH_REFUSES:
                try:
                    trip(wrapper, case)
                except Exception as error:
                    raise Differs(f"{case}: {type(error).__name__}: {error}") from error


def size_for(wrapper: str) -> int:
    return 4 if wrapper in ("HSDP", "FSDP2 x TP") else 3  # 2 x 2


PAIRS = list(itertools.product(WRAPPERS, CASES))
QUICK = [(w, c) for (i, w), (j, c) in itertools.product(enumerate(WRAPPERS), enumerate(CASES)) if (i + j) % 7 == 0]
"""A seventh of all pairs, in which each wrapper and each case comes once or more. `test_layouts.py` has every wrapper's cut
of every shape at up to 16 ranks; what verbs do with a cut depends on the cut alone."""
TRIPS, REST = (
    Table(trip, [(size_for(wrapper), wrapper, case) for wrapper, case in pairs])
    for pairs in (QUICK, [pair for pair in PAIRS if pair not in QUICK])
)
ALONE, ALL_ALONE = (Table(alone, [(1, wrapper, every) for wrapper in WRAPPERS]) for every in (6, 1))


def check_pair(test: unittest.TestCase, trips: Table, wrapper: str, case: str) -> None:
    words = trips(size_for(wrapper), wrapper, case)
    expected = TORCH_REFUSES.get((wrapper, case))
    if expected is not None:
        for text in words:
            test.assertIn(expected, text, f"torch was to refuse {case} in {wrapper}")
        test.skipTest(f"torch refuses {case} in {wrapper}: {words[0]}")


class ShapesTest(unittest.TestCase):
    @parameterized.expand(QUICK)
    def test_on_several_ranks(self, wrapper: str, case: str) -> None:
        check_pair(self, TRIPS, wrapper, case)

    @parameterized.expand(("FSDP1 flat", "FSDP1 orig", "FSDP2", "fairscale non-flat"))
    def test_fewer_elements_than_four_ranks(self, wrapper: str) -> None:
        run_on_ranks(trip, 4, wrapper, "fewer elements than ranks")

    @parameterized.expand(WRAPPERS)
    def test_on_one_rank(self, wrapper: str) -> None:
        ALONE(1, wrapper, 6)


@pytest.mark.slow
class OtherPairsTest(unittest.TestCase):
    @parameterized.expand([pair for pair in PAIRS if pair not in QUICK])
    def test_on_several_ranks(self, wrapper: str, case: str) -> None:
        check_pair(self, REST, wrapper, case)

    @parameterized.expand(WRAPPERS)
    def test_on_one_rank(self, wrapper: str) -> None:
        ALL_ALONE(1, wrapper, 1)


# ------------------------------------------------------------------------------------------- by hand


def rows_of_every_rank() -> list[list[float]]:
    """The shards of three rows on four ranks under FSDP2, in numbers."""
    model = nn.Linear(2, 3, bias=False)
    in_fsdp2(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    buffer = torch.arange(6.0).reshape(3, 2)
    group = {**{k: v for k, v in optim.param_groups[0].items() if k != "params"}, "params": [0]}
    full = {"state": {0: {"momentum_buffer": buffer}}, "param_groups": [group]}
    shard = fsdp_optim.get_shard_from_optim_state_dict(model, optim, full)
    return shard["state"][0]["momentum_buffer"].to_local().tolist()


def scalars_outside(kind: str) -> None:
    """A parameter that torch refuses to shard stays an ordinary parameter beside the shards."""

    def wrap(model: Any) -> Any:
        scalars = [param for param in model.parameters() if not param.dim()]
        if kind == "FSDP2":
            return fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=set(scalars))
        return in_fsdp1(model, ignored_states=scalars, use_orig_params=kind == "FSDP1 orig")

    # torch FSDP1 takes some parameters of a module and leaves others, so that their order is lost.
    check_trip(wrap, model=Scalars, key_by="id" if kind == "FSDP2" else "name")


def frozen_then_wrapped(wrapper: str) -> list[tuple[str, str]]:
    """The listed parameters, and those with state, of a model with a frozen unit."""
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
        for listed in run_on_ranks(frozen_then_wrapped, 2, wrapper):
            self.assertEqual(listed, wanted)


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
            check_refused(what, [errors[place] for errors in by_rank], "StateError", "stem.weight", "stem.bias")
        check_refused("step", [errors[2] for errors in by_rank], "StateError", "3", "9")

    @parameterized.expand(("fairscale non-flat", "FSDP1 orig", "FSDP2", "HSDP", "FSDP2 x TP", "DDP", "plain"))
    def test_other_wrappers_keep_each_ones_own(self, wrapper: str) -> None:
        for errors in run_on_ranks(half_trained_flat, 2, wrapper):
            self.assertEqual(errors, [("", "")] * 4)
