"""torchtitan's own classes, fused and unfused: attention with biases, SwiGLU, and grouped experts, in two layers."""

from __future__ import annotations

import importlib
import sys
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from fsdp_optim import View
from kit.elements import Numbers
from kit.torchtitan_cpu import import_torchtitan
from kit.trained import Trained

DIM, HEADS, GROUPS, SIZE, HIDDEN, EXPERTS, LAYERS = 6, 4, 2, 3, 5, 3, 2

HAND_WRITTEN = [
    *(
        View(
            f"layers.{{i}}.attention.wqkv.{name}",
            f"(g (q + k + v) d){axes}",
            {f"layers.{{i}}.attention.w{part}.{name}": f"(g {part} d){axes}" for part in "qkv"},
            q=HEADS // GROUPS,
            k=1,
            v=1,
            d=SIZE,
        )
        for name, axes in (("weight", " c"), ("bias", ""))
    ),
    View(
        "layers.{i}.feed_forward.w13",
        "f (a + b) c",
        {"layers.{i}.feed_forward.w1.weight": "(f a) c", "layers.{i}.feed_forward.w3.weight": "(f b) c"},
        a=1,
        b=1,
    ),
    View(
        "layers.{i}.experts.w13",
        "e f (a + b) c",
        {"layers.{i}.experts.w1_EFD": "e (f a) c", "layers.{i}.experts.w3_EFD": "e (f b) c"},
        a=1,
        b=1,
    ),
]


def fused_swiglu() -> Any:
    """torchtitan's module of fused SwiGLU, whose kernels are in Triton, which has a gigabyte."""
    import_torchtitan()
    name = "torchtitan.overrides.fused_swiglu"
    if name not in sys.modules:
        with mock.patch.dict(sys.modules, {"triton": mock.MagicMock(), "triton.language": mock.MagicMock()}):
            module = importlib.import_module(name)
        sys.modules[name] = module
    return sys.modules[name]


class _Layer(nn.Module):
    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        fused = fused_swiglu()  # first: it imports torchtitan with stand-ins
        from torchtitan.models.common.attention import FusedQKVLinear, QKVLinear
        from torchtitan.models.common.feed_forward import FeedForward
        from torchtitan.models.common.linear import Linear
        from torchtitan.models.common.moe import GroupedExperts

        def linear(outer: int, inner: int, bias: bool = False) -> Any:
            return Linear.Config(in_features=inner, out_features=outer, bias=bias)

        ends = {"w1": linear(HIDDEN, DIM), "w2": linear(DIM, HIDDEN), "w3": linear(HIDDEN, DIM)}
        grouped = {"dim": DIM, "hidden_dim": HIDDEN, "num_experts": EXPERTS}
        if is_fused:
            rows = (HEADS + 2 * GROUPS) * SIZE
            heads = {"n_heads": HEADS, "n_kv_heads": GROUPS, "head_dim": SIZE}
            self.attention = FusedQKVLinear.Config(**heads, wqkv=linear(rows, DIM, bias=True)).build()
            self.feed_forward = fused.FusedSwiGLU.Config(**ends).build()
            self.experts = fused.FusedGroupedExperts.Config(**grouped).build()
        else:
            ends_of_qkv = {"wq": linear(HEADS * SIZE, DIM, bias=True), "wkv": linear(GROUPS * SIZE, DIM, bias=True)}
            self.attention = QKVLinear.Config(head_dim=SIZE, **ends_of_qkv).build()
            self.feed_forward = FeedForward.Config(**ends).build()
            self.experts = GroupedExperts.Config(**grouped).build()


class TitanUnfused(nn.Module):
    """Each weight a parameter of its own."""

    is_fused = False
    units = (*(f"layers.{number}" for number in range(LAYERS)), "")
    tensor_parallel: dict[str, Any] = {
        f"layers.{number}.attention.{name}": ColwiseParallel()
        for number in range(LAYERS)
        for name in ("wq", "wk", "wv")
    }

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.layers = nn.ModuleList(_Layer(self.is_fused) for _ in range(LAYERS))


class TitanFused(TitanUnfused):
    """The same, fused."""

    is_fused = True
    tensor_parallel: dict[str, Any] = {f"layers.{number}.attention.wqkv": ColwiseParallel() for number in range(LAYERS)}


class TitanNumbers(Numbers):
    """The numbers of the unfused model's elements, which torchtitan's own hooks put where the fused model has them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(TitanUnfused())

    def give(self, model: nn.Module) -> None:
        whole = {name: self.of(name).view(shape).to(torch.get_default_dtype()) for name, shape in self.shape.items()}
        model.load_state_dict(whole)


class TrainedTitan(Trained):
    """The fused model, trained as the unfused one is: each element gets the gradients that it has there."""

    numbers_of = TitanNumbers

    def __init__(self, wrap: Any, make: Any, steps: int, **kwargs: Any) -> None:
        super().__init__(wrap, make, steps, TitanFused, **kwargs)
