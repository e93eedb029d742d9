"""The state values of an optimizer before its first step: what its class makes, without a step and outside of any optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fsdp_optim.errors import StateError
from fsdp_optim.state.live.local import OptimizerLike
from fsdp_optim.state.values.classes import OptimizerClass, innermost, is_on

Hyper = Mapping[str, Any]
_Make = Callable[[Hyper, torch.Tensor], dict[str, Any]]


def initial_maker(optim: OptimizerLike) -> _Make:
    """Return the function (hyperparameters of the group, parameter) -> the values of a parameter before the first step.

    Values that follow the parameter are like it: DTensors with its mesh and placements, its dtype and strides.

    Raises StateError for an optimizer whose values only its own first step shows.
    """
    inner, name = innermost(optim), OptimizerClass.of(optim).torch_name
    parent: Any = getattr(torch.optim, name, None)
    make = _MAKERS.get(name)
    if make is None or parent is None or _step_of(type(inner)) is not _step_of(parent):
        raise StateError(
            f"this {type(inner).__name__} has no state yet, and which values it will have only its first step shows, which "
            "fsdp_optim.dcp does not take: load the checkpoint with fsdp_optim.load(path, model, optim), which needs no values "
            "to load into, or make this call after a step"
        )
    return make


def _step_of(kind: type) -> object:
    """Return the function that a class has as its `step`, without what torch's profiler puts around it."""
    return inspect.unwrap(getattr(kind, "step"))  # noqa: B009  # `type` has no such attribute


def _zeros(param: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(param.detach())


def _number(value: float, hyper: Hyper, param: torch.Tensor, *, on_device: bool = False) -> torch.Tensor:
    """Return a number that counts, as torch.optim keeps it: on the device of the parameter where a step there needs it."""
    is_fused = is_on(hyper, "fused")
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not is_fused else torch.float32
    there = on_device or is_fused or is_on(hyper, "capturable")
    return torch.tensor(value, dtype=dtype, device=param.device if there else "cpu")


def _sgd(hyper: Hyper, param: torch.Tensor) -> dict[str, Any]:
    return {"momentum_buffer": _zeros(param)} if hyper["momentum"] else {}


def _muon(hyper: Hyper, param: torch.Tensor) -> dict[str, Any]:
    return {"momentum_buffer": _zeros(param)}


def _adam(hyper: Hyper, param: torch.Tensor) -> dict[str, Any]:
    moments = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if hyper["amsgrad"] else ()))
    return {"step": _number(0, hyper, param), **{name: _zeros(param) for name in moments}}


def _radam(hyper: Hyper, param: torch.Tensor) -> dict[str, Any]:
    return {"step": _number(0, hyper, param), "exp_avg": _zeros(param), "exp_avg_sq": _zeros(param)}


def _nadam(hyper: Hyper, param: torch.Tensor) -> dict[str, Any]:
    step, product = _number(0, hyper, param), _number(1, hyper, param)
    return {"step": step, "mu_product": product, "exp_avg": _zeros(param), "exp_avg_sq": _zeros(param)}


def _adamax(hyper: Hyper, param: torch.Tensor) -> dict[str, Any]:
    return {"step": _number(0, hyper, param), "exp_avg": _zeros(param), "exp_inf": _zeros(param)}


def _adadelta(hyper: Hyper, param: torch.Tensor) -> dict[str, Any]:
    return {"step": _number(0, hyper, param), "square_avg": _zeros(param), "acc_delta": _zeros(param)}


def _adagrad(hyper: Hyper, param: torch.Tensor) -> dict[str, Any]:
    total = torch.full_like(param.detach(), hyper["initial_accumulator_value"])
    return {"step": _number(0, hyper, param), "sum": total}


def _rmsprop(hyper: Hyper, param: torch.Tensor) -> dict[str, Any]:
    names = ["square_avg", *(["momentum_buffer"] if hyper["momentum"] > 0 else [])]
    names += ["grad_avg"] if hyper["centered"] else []
    return {"step": _number(0, hyper, param), **{name: _zeros(param) for name in names}}


def _asgd(hyper: Hyper, param: torch.Tensor) -> dict[str, Any]:
    rate = _number(float(hyper["lr"]), hyper, param, on_device=True)
    mean, step = _number(1, hyper, param, on_device=True), _number(0, hyper, param, on_device=True)
    return {"step": step, "eta": rate, "mu": mean, "ax": _zeros(param)}


def _rprop(hyper: Hyper, param: torch.Tensor) -> dict[str, Any]:
    rate = torch.full_like(param.detach(), float(hyper["lr"]))
    return {"step": _number(0, hyper, param), "prev": _zeros(param), "step_size": rate}


_MAKERS: dict[str, _Make] = {
    "SGD": _sgd,
    "Muon": _muon,
    "Adam": _adam,
    "AdamW": _adam,
    "RAdam": _radam,
    "NAdam": _nadam,
    "Adamax": _adamax,
    "Adadelta": _adadelta,
    "Adagrad": _adagrad,
    "RMSprop": _rmsprop,
    "ASGD": _asgd,
    "Rprop": _rprop,
}
"""By the name of the class in torch.optim."""
