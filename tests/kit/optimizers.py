"""Optimizers of parameters and of whole models: torch's, and one whose state has values of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Optim = torch.optim.Optimizer
Make = Callable[[Any], Optim]


class Peculiar(torch.optim.Optimizer):
    """An optimizer whose state has scalars of every type, and elements of other dtypes than the parameter's."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, steps = self.state[p], self.state[p].get("step", 0) + 1
                state["step"] = steps
                # Names of moments of torch.optim: a single element under another name would not show its kind.
                state["square_avg"] = state.get("square_avg", 0) + p.grad.double()
                state["grad_avg"] = p.grad.to(torch.bfloat16)
                state["prev"] = p.grad.mul(10).to(torch.int8)
                state["step_size"] = p.grad > 0
                state["decay"] = 0.9**steps
                state["warm"] = steps > 1
                state["phase"] = "warm" if steps > 1 else "cold"
                state["nothing"] = None
                state["seen"] = torch.tensor(steps, dtype=torch.int64)
                state["mu"] = torch.tensor(0.5**steps, dtype=torch.float64)
                p.sub_(state["square_avg"].to(p.dtype), alpha=group["lr"])


# Weight decay makes the state depend on the parameters too.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw_amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.25, "weight_decay": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01, "weight_decay": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1, "t0": 1.0, "lambd": 0.5}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "peculiar": (Peculiar, {"lr": 0.1}),
}

# State values that are one number per parameter; all other values have the shape of the parameter.
ONE_PER_PARAMETER = {"step", "mu_product", "eta", "mu", "decay", "warm", "phase", "nothing", "seen"}


def adam(params: Any) -> Optim:
    return torch.optim.Adam(params, lr=0.01)


def sgd(params: Any) -> Optim:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def adamw_tensor_lr(params: Any) -> Optim:
    return torch.optim.AdamW(params, lr=torch.tensor(0.01), weight_decay=0.1)


def without_stem(model: nn.Module) -> Optim:
    """An optimizer of the other parameters."""
    return adam([param for name, param in model.named_parameters() if "stem" not in name.split(".")])


def two_groups(model: nn.Module) -> Optim:
    """Two groups that every wrapper keeps apart: the unit `stem`, and the rest."""
    named = list(model.named_parameters())
    stem = [param for name, param in named if "stem" in name.split(".")]
    rest = [param for name, param in named if "stem" not in name.split(".")]
    groups = [{"params": stem, "lr": 0.5, "weight_decay": 0.25}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=0.125, betas=(0.5, 0.75))


class OfModel:
    """Makes an optimizer, or a list of them, of the whole model instead of its parameters()."""

    def __init__(self, make: Callable[[nn.Module], Any]) -> None:
        self.of_model = make

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfModel) and self.of_model == other.of_model

    def __hash__(self) -> int:
        return hash(self.of_model)


def make_optimizer(make: Any, model: nn.Module) -> Any:
    """`make` is an `OfModel`, or a function of parameters."""
    return make.of_model(model) if hasattr(make, "of_model") else make(model.parameters())


def each_of(optim: Any) -> list[Optim]:
    return list(optim) if isinstance(optim, (list, tuple)) else [optim]


GROUPED: dict[str, Any] = {"one group": adam, "two groups": OfModel(two_groups)}
"""Optimizers of a model by the number of their groups."""


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    stem = [param for name, param in named if "stem" in name.split(".")]
    rest = [param for name, param in named if "stem" not in name.split(".")]
    return [adam(stem), sgd(rest)]


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer after one step, which does to each element what it does to it in any other wrapper."""
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.25)
    optim.step()
    return optim


def step_by_values(model: nn.Module, optim: torch.optim.Optimizer, number: int) -> None:
    """A step in which gradients do not depend on the wrapper: each is a function of its parameter."""
    for param in model.parameters():
        param.grad = param.detach() * (0.5 + number)
    optim.step()
    optim.zero_grad()
