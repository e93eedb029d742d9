"""torchtitan's fused attention, SwiGLU and experts under their canonical names, learned from torchtitan's own hooks.

The classes are torchtitan's, on CPU, with the stand-ins of `kit.torchtitan_cpu`.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
import unittest
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from kit.cases import expand, some
from kit.compare import check_same, sorted_state
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.torchtitan_fused import HAND_WRITTEN, TitanFused, TitanUnfused, TrainedTitan, fused_swiglu
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import CallOptions, LoadOptions, SaveOptions, View
from fsdp_optim.layout.views import numbers_of_part
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.torchtitan",)

FUSED, UNFUSED = True, False
WRAPPERS = ("FSDP2", "FSDP1 flat", "FSDP1 orig", "DDP", "HSDP", "FSDP2 x TP")
needs_torchtitan = unittest.skipUnless(sys.version_info >= (3, 11), "torchtitan needs Python 3.11")


def trained(is_fused: bool, wrap: str, steps: int) -> Trained:
    return TrainedTitan(wrap, adam, steps) if is_fused else Trained(wrap, adam, steps, TitanUnfused)


def check_trained(what: str, target: Trained, steps: int) -> None:
    """With one option, fused or not, compare state and weights with the training of the unfused model without wrapper."""
    oracle = Oracle(adam, steps, TitanUnfused)
    state = target.gather(None, "name", views="hooks")["state"]
    check_same(f"{what}, state", sorted_state(state), sorted_state(oracle.by_name()))
    options = CallOptions(views="hooks", process_group=target.process_group)
    weights = fsdp_optim.gather_full_model_state_dict(target.model, None, options=options)
    check_same(f"{what}, weights", dict(sorted(weights.items())), dict(sorted(oracle.values().items())))


def saved(folder: str, is_fused: bool, wrapper: str) -> list[str]:
    """On one rank. Returns the Views that the checkpoint records."""
    with cpu():
        source = trained(is_fused, wrapper, STEPS)
        check_trained("trained", source, STEPS)
        options = SaveOptions(views="hooks", process_group=source.process_group)
        fsdp_optim.save(folder, source.model, source.optim, options=options)
        views = fsdp_optim.inspect(folder).about.get("views", "")
        return [line for line in views.split("\n") if line]


def resumed(folder: str, is_fused: bool, wrapper: str) -> None:
    """On one rank: load, compare, train on, compare; what is live stays where it is in memory."""
    with cpu():
        target = trained(is_fused, wrapper, 0)
        places = [(id(param), local_of(param).data_ptr()) for param in target.params]
        options = LoadOptions(views="hooks", process_group=target.process_group, compare=True)
        fsdp_optim.load(folder, target.model, target.optim, options=options)
        if wrapper != "FSDP1 flat":
            check_same("places", [(id(param), local_of(param).data_ptr()) for param in target.params], places)
        check_trained("loaded", target, STEPS)
        target.step(range(STEPS, STEPS + 2))
        check_trained("trained on", target, STEPS + 2)


def learned_on_ranks(wrapper: str) -> list[str]:
    with cpu():
        return list(map(repr, fsdp_optim.views_for(TrainedTitan(wrapper, adam, 0).model)))


def elements(views: Sequence[View], model: torch.nn.Module) -> dict[str, Any]:
    """By canonical name, the live parameter and the numbers of its elements."""
    return {
        part: (name, numbers_of_part(place))
        for name, param in model.named_parameters()
        for view in views
        if view.matches(name)
        for part, place in view.bind(name, tuple(param.shape)).parts
    }


@needs_torchtitan
class TestNames(unittest.TestCase):
    def test_learned_views_are_those_that_are_written_by_hand(self) -> None:
        model = TitanFused()
        learned, by_hand = (elements(views, model) for views in (fsdp_optim.views_for(model), HAND_WRITTEN))
        self.assertEqual(learned.keys(), by_hand.keys())
        for part, (name, numbers) in learned.items():
            self.assertEqual(name, by_hand[part][0])
            self.assertTrue(np.array_equal(numbers, by_hand[part][1]), part)
        self.assertEqual(fsdp_optim.views_for(TitanUnfused()), [])

    @parameterized.expand(["attention", "swiglu", "experts"])
    def test_large_modules_are_seen_as_torchtitan_saves_them(self, what: str) -> None:
        """Too large to be learned exactly, element by element with what state_dict() has."""
        fused = fused_swiglu()
        from torchtitan.models.common.attention import FusedQKVLinear
        from torchtitan.models.common.linear import Linear

        def linear(outer: int, inner: int) -> Any:
            return Linear.Config(in_features=inner, out_features=outer, bias=True)

        gates = {"w1": linear(1408, 512), "w2": linear(512, 1408), "w3": linear(1408, 512)}
        config = {
            "attention": FusedQKVLinear.Config(n_heads=24, n_kv_heads=6, head_dim=64, wqkv=linear(36 * 64, 640)),
            "swiglu": fused.FusedSwiGLU.Config(**gates),
            "experts": fused.FusedGroupedExperts.Config(dim=96, hidden_dim=112, num_experts=70),
        }[what]
        model = torch.nn.ModuleDict({"layer": config.build()}).double()
        largest = max(model.parameters(), key=torch.numel)
        self.assertGreater(8 * largest.numel(), 8 << 20)
        for number, param in enumerate(model.parameters()):
            param.data = torch.arange(param.numel(), dtype=torch.float64).view(param.shape) - number * 1e9
        made = {
            part: dict(model.named_parameters())[name].detach().numpy().reshape(-1)[numbers]
            for part, (name, numbers) in elements(fsdp_optim.views_for(model), model).items()
        }
        saved = {
            name: value for name, value in model.state_dict().items() if name not in dict(model.named_parameters())
        }
        self.assertEqual(made.keys(), saved.keys())
        for name, value in saved.items():
            self.assertTrue(np.array_equal(value.numpy(), made[name]), name)

    @expand(*some(list(itertools.product(WRAPPERS, (1, 2, 3))), every=4, first=1))
    def test_every_rank_learns_what_the_plain_model_shows(self, wrapper: str, world_size: int) -> None:
        plain = list(map(repr, fsdp_optim.views_for(TitanFused())))
        for views in run_on_ranks(learned_on_ranks, world_size, wrapper):
            self.assertEqual(views, plain)

    @expand(
        *some(
            [
                (first, is_fused, n, goes_on_fused, second, m)
                for (first, n), (second, m) in zip(
                    itertools.product(WRAPPERS, (1, 2, 3)),
                    [*itertools.product(WRAPPERS, (3, 1, 2))][4:] + [*itertools.product(WRAPPERS, (3, 1, 2))][:4],
                    strict=True,
                )
                for is_fused, goes_on_fused in ((FUSED, UNFUSED), (UNFUSED, FUSED), (FUSED, FUSED))
            ],
            every=5,
        )
    )
    def test_a_run_goes_on_fused_or_unfused(
        self, first: str, is_fused: bool, n: int, goes_on_fused: bool, second: str, m: int
    ) -> None:
        """With `views="hooks"` in all of them."""
        with tempfile.TemporaryDirectory() as folder:
            views = run_on_ranks(saved, n, f"{folder}/step", is_fused, first)[0]
            wanted = list(map(repr, fsdp_optim.views_for(TitanFused() if is_fused else TitanUnfused())))
            self.assertEqual(views, wanted)
            run_on_ranks(resumed, m, f"{folder}/step", goes_on_fused, second)


QKV = "layers.{i}.attention.qkv_linear.wqkv.weight"
DENSE = "layers.{i}.feed_forward.w13"
EXPERTS = "layers.{i}.moe.routed_experts.inner_experts.w13"
SHARED = "layers.{i}.moe.shared_experts.w13"
REGISTRY: list[tuple[str, str, list[str]]] = [
    ("llama3", "debugmodel", [QKV, DENSE]),
    ("llama3", "8B", [QKV, DENSE]),
    ("qwen3", "debugmodel", [QKV, DENSE]),
    ("qwen3", "debugmodel_non_fused_qkv", [DENSE]),
    ("qwen3", "debugmodel_moe", [QKV, EXPERTS]),
    ("deepseek_v3", "debugmodel", [DENSE.replace("{i}", "0"), EXPERTS, SHARED]),
    ("gpt_oss", "debugmodel", [QKV, QKV.replace(".weight", ".bias")]),  # its experts have one layout, without hooks
]
"""Of torchtitan's registry: the live parameters that are fused with all fusions on."""


def built(family: str, flavor: str, *, fused_gates: bool) -> torch.nn.Module:
    """A model of torchtitan's registry on the meta device, whose attention is fused by default."""
    place = fused_swiglu().__name__
    from torchtitan.config import OverrideConfig, apply_overrides

    spec = importlib.import_module(f"torchtitan.models.{family}").model_registry(flavor)
    for name in ("fused_swiglu", "fused_grouped_experts") if fused_gates else ():
        apply_overrides(OverrideConfig(imports=[f"{place}.{name}"]), spec.model)
    with torch.device("meta"):
        model: torch.nn.Module = spec.model.build()
    return model


def shapes_through(views: Sequence[View], model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):  # Qwen3 ties its head to its embeddings
        matching = [view for view in views if view.matches(name)]
        shapes |= matching[0].bind(name, tuple(param.shape)).shapes if matching else {name: tuple(param.shape)}
    return shapes


@needs_torchtitan
class TestRegistry(unittest.TestCase):
    @parameterized.expand(REGISTRY)
    def test_models_of_the_registry(self, family: str, flavor: str, fused: Sequence[str]) -> None:
        """Names and shapes are those of torchtitan's own state_dict(), and of the same model with its gates unfused."""
        model, plain = (built(family, flavor, fused_gates=is_fused) for is_fused in (True, False))
        views = fsdp_optim.views_for(model)
        self.assertEqual(sorted(view.name for view in views), sorted(fused))
        buffers = {name for name, _ in model.named_buffers()}
        saved = {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in buffers}
        self.assertEqual(shapes_through(views, model), saved)
        of_attention = [view for view in views if "wqkv" in view.name]
        self.assertEqual(shapes_through(of_attention, plain), saved)
        self.assertEqual(list(map(repr, fsdp_optim.views_for(plain))), list(map(repr, of_attention)))
