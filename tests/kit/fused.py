"""One model as it is written down, and as trainers fuse it: interleaved q, k and v, pairs of gates, stacked experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from fsdp_optim import View
from kit.elements import Numbers
from kit.local_parts import local_of
from kit.trained import Trained

C, G, Q, D, F, E = 6, 2, 2, 3, 4, 3  # width, groups of heads, queries of each, head size, hidden size, experts

VIEWS = [
    *(
        View(
            f"attention.wqkv.{name}",
            f"(g (q + k + v) d){axes}",
            {f"attention.w{part}.{name}": f"(g {part} d){axes}" for part in "qkv"},
            q=Q,
            k=1,
            v=1,
            d=D,
        )
        for name, axes in (("weight", " c"), ("bias", ""))
    ),
    View("ff.w13", "f (a + b) c", {"ff.w1.weight": "(f a) c", "ff.w3.weight": "(f b) c"}, a=1, b=1),
    View("experts.gate_up", "e (a + b) c", {"experts.{e}.gate.weight": "a c", "experts.{e}.up.weight": "b c"}),
    View("*.oss", "e c (f (a + b))", {"*.oss.{e}.w1": "(f a) c", "*.oss.{e}.w3": "(f b) c"}, a=1, b=1),
    View("experts.scale", "n", {"experts.renamed": "n"}),
]


class _Linears(nn.Module):
    def __init__(self, *, bias: bool = False, **sizes: tuple[int, int]) -> None:
        super().__init__()
        for name, (outer, inner) in sizes.items():
            setattr(self, name, nn.Linear(inner, outer, bias=bias))


class _Expert(_Linears):
    def __init__(self) -> None:
        super().__init__(gate=(F, C), up=(F, C))


class _Oss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.empty(F, C)) for _ in range(2))


class Unfused(nn.Module):
    """Each weight a parameter of its own, under its canonical name."""

    units = ("attention", "ff", "")
    tensor_parallel: dict[str, Any] = {"attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.attention = _Linears(wq=(G * Q * D, C), wk=(G * D, C), wv=(G * D, C), bias=True)
        self.norm = nn.LayerNorm(C)
        self.ff = _Linears(w1=(F, C), w3=(F, C), w2=(C, F))
        self.experts = nn.ModuleList([_Expert() for _ in range(E)])
        self.experts.oss = nn.ModuleList([_Oss() for _ in range(E)])
        self.experts.renamed = nn.Parameter(torch.empty(5))


class _FusedFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(F, 2, C))
        self.w2 = nn.Linear(F, C, bias=False)


class _Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(E, 2 * F, C))
        self.oss = nn.Parameter(torch.empty(E, C, 2 * F))
        self.scale = nn.Parameter(torch.empty(5))


class Fused(nn.Module):
    """The same, as trainers keep it: `fused_from` says which element is which."""

    units = ("attention", "ff", "")
    tensor_parallel: dict[str, Any] = {"attention.wqkv": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.attention = _Linears(wqkv=(G * (Q + 2) * D, C), bias=True)
        self.norm = nn.LayerNorm(C)
        self.ff = _FusedFeedForward()
        self.experts = _Stacked()


def fused_from(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole values of the fused model, by name, from those of the unfused model."""
    fused = {name: value for name, value in values.items() if name.startswith(("norm.", "ff.w2."))}
    for name in ("weight", "bias"):
        heads = [values[f"attention.w{part}.{name}"].unflatten(0, (G, -1, D)) for part in "qkv"]
        fused[f"attention.wqkv.{name}"] = torch.cat(heads, 1).flatten(0, 2)
    fused["ff.w13"] = torch.stack([values["ff.w1.weight"], values["ff.w3.weight"]], 1)
    fused["experts.gate_up"] = torch.stack(
        [torch.cat([values[f"experts.{e}.gate.weight"], values[f"experts.{e}.up.weight"]]) for e in range(E)]
    )
    pairs = [(values[f"experts.oss.{e}.w1"], values[f"experts.oss.{e}.w3"]) for e in range(E)]
    fused["experts.oss"] = torch.stack([torch.stack([w1.T, w3.T], 2).flatten(1) for w1, w3 in pairs])
    fused["experts.scale"] = values["experts.renamed"]
    return fused


class Factored(torch.optim.Optimizer):
    """Adafactor's way: the state of a matrix is a row and a column."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            local = local_of(param).detach().clone()
            factor = local.flatten(1).sum(1) if local.dim() > 1 else local
            self.state[param] = {"step": torch.tensor(1.0), "row_var": factor}


class FusedNumbers(Numbers):
    """The numbers of the unfused model's elements, which the fused model has in other places."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(Unfused())

    def give(self, model: nn.Module) -> None:
        numbers = fused_from({name: self.of(name).view(shape) for name, shape in self.shape.items()})
        assert list(numbers.keys() ^ dict(model.named_parameters()).keys()) == []
        for name, param in model.named_parameters():
            param.data = numbers[name].reshape(param.shape).to(param.dtype)


class TrainedFused(Trained):
    """The fused model, trained as the unfused one is: each element gets the gradients that it has there."""

    numbers_of = FusedNumbers

    def __init__(self, wrap: Any, make: Any, steps: int, **kwargs: Any) -> None:
        super().__init__(wrap, make, steps, Fused, **kwargs)
