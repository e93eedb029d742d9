"""This rank's parts of live parameters and state values, whatever their class, and steps of an optimizer on them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_of(param: Tensor) -> Tensor:
    """This rank's part of a live parameter or a state value."""
    return access_of(param).local_of(param)


class LocalAccess:
    """Access to this rank's elements of one class of live parameters, and construction of tensors of that class."""

    @staticmethod
    def local_of(param: Tensor) -> Tensor:
        return param

    @staticmethod
    def like(local: Tensor, param: Tensor) -> Tensor:
        return local

    @staticmethod
    def put(local: Tensor, param: Tensor) -> None:
        """Write changes of `local_of` back, if that is a copy."""


class DTensorAccess(LocalAccess):
    @staticmethod
    def local_of(param: Any) -> Tensor:
        return param.to_local()

    @staticmethod
    def like(local: Tensor, param: Any) -> Tensor:
        return DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )


LOCAL_ACCESS: list[tuple[Callable[[Tensor], bool], type[LocalAccess]]] = [
    (lambda param: isinstance(param, DTensor), DTensorAccess)
]
"""The classes of live parameters; the first that fits counts, and kit.shards puts others first."""


def access_of(param: Tensor) -> type[LocalAccess]:
    return next((access for fits, access in LOCAL_ACCESS if fits(param)), LocalAccess)


def like(local: Tensor, param: Tensor) -> Tensor:
    """A local tensor as the live parameter's gradient, or its state value."""
    return access_of(param).like(local, param)


def steps_local_parts(optim: Any) -> bool:
    """Whether `LocalSteps` can take the place of `optim.step()`, and there is a DTensor that makes it worth while."""
    options = ("foreach", "fused", "capturable", "differentiable")
    return (
        type(optim) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
        and all(not group.get(option) for group in optim.param_groups for option in options)
        and any(access_of(param) is not LocalAccess for group in optim.param_groups for param in group["params"])
    )


class LocalSteps:
    """The effect of `optim.step()` on DTensors where every element is stepped by itself, without torch's dispatch of DTensors.

    That dispatch takes more time than everything else that most tests do. `StepTest` in test_torch_optimizers.py compares both.
    The optimizer itself has its state again after `finish`.
    """

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._optim = optim
        self._twin = object.__new__(type(optim))
        self._twin.__dict__.update(optim.__dict__)
        self._twin.state = collections.defaultdict(dict)
        self._local = {param: local_of(param).detach() for param in params_of(optim)}
        for param, local in self._local.items():
            if param in optim.state:
                self._twin.state[local] = {name: local_of(value) for name, value in optim.state[param].items()}
        self._twin.param_groups = [
            {**group, "params": [self._local[param] for param in group["params"]]} for group in optim.param_groups
        ]

    def step(self, gradients: Mapping[Tensor, Tensor | None]) -> None:
        """`gradients`: local tensors, by live parameter."""
        for param, local in self._local.items():
            local.grad = gradients.get(param)
        self._twin.step()

    def finish(self) -> None:
        """Give the optimizer the state of its twin."""
        for param, local in self._local.items():
            access_of(param).put(local, param)
            if local in self._twin.state:
                self._optim.state[param] = {
                    name: like(value, param) if name != "step" and isinstance(value, Tensor) else value
                    for name, value in self._twin.state[local].items()
                }


def params_of(optim: Any) -> list[Tensor]:
    return [param for group in optim.param_groups for param in group["params"]]


def local(value: Any) -> Any:
    """DTensors as this rank's part."""
    if isinstance(value, Tensor):
        return value.to_local() if hasattr(value, "to_local") else value
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    return [local(item) for item in value] if isinstance(value, list) else value
