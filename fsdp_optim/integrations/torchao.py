"""torchao's CPUOffloadOptimizer: one optimizer for each large parameter on the CPU, one for the others on the device.

    from fsdp_optim.integrations.torchao import OffloadedOptimizer

    optim = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    fsdp_optim.save("run/step-100", model, OffloadedOptimizer(optim))
    fsdp_optim.load("run/step-100", model, OffloadedOptimizer(optim))

The checkpoint is that of one optimizer of the model's parameters, which any wrapper loads. Tested with torchao 0.18.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_optim import StateError, WrapperError

__all__ = ["OffloadedOptimizer"]

_NEEDED = ("optim_dict", "param_d2h_map", "d_param_groups", "d_opt", "step")
_NOT_HYPER = frozenset({"params", "param_names"})


@dataclass(frozen=True)
class _Member:
    """One group of one of the optimizers inside: its parameters as the model has them, and as the optimizer has them."""

    optim: torch.optim.Optimizer
    group: Mapping[str, Any]
    params: tuple[torch.Tensor, ...]

    @property
    def hyper(self) -> dict[str, Any]:
        return {key: value for key, value in self.group.items() if key not in _NOT_HYPER}


class OffloadedOptimizer:
    """torchao's `CPUOffloadOptimizer` as functions of this library take an optimizer; it steps nothing itself.

    State of large parameters is on the CPU, and a load reads it there. The optimizer has copies of their weights on the CPU,
    which its next step after a load takes from the model, whichever of the two was loaded first. Groups with equal
    hyperparameters count as one.

    Raises WrapperError for an optimizer that is not torchao's.
    """

    keeps_state_on_cpu = True

    def __init__(self, optim: Any) -> None:
        lacking = [name for name in _NEEDED if not hasattr(optim, name)]
        if lacking:
            raise WrapperError(
                f"OffloadedOptimizer takes a CPUOffloadOptimizer of torchao, and this {type(optim).__name__} has no "
                f"{' and no '.join(lacking)}: give all other optimizers to the functions of fsdp_optim as they are"
            )
        self._offloading = optim
        self.optimizer: torch.optim.Optimizer = next(self._members()).optim  # whose class is the optimizer's

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers inside, with the parameters of the model."""
        return [
            {**members[0].hyper, "params": [param for member in members for param in member.params]}
            for members in self._merged()
        ]

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The state of each parameter of the model that has some."""
        held = ((param, self._held(member, param)) for member in self._members() for param in member.params)
        return {param: member_state for param, member_state in held if member_state is not None}

    def state_dict(self) -> dict[str, Any]:
        state, groups = self.state, self.param_groups
        params = [param for group in groups for param in group["params"]]
        ids = {id(param): number for number, param in enumerate(params)}
        return {
            "state": {ids[id(param)]: dict(state[param]) for param in params if param in state},
            "param_groups": [{**group, "params": [ids[id(param)] for param in group["params"]]} for group in groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a dict as `state_dict` gives it. Raises StateError for other groups, before anything is changed."""
        merged, given = self._merged(), state_dict["param_groups"]
        lengths = [sum(len(member.params) for member in members) for members in merged]
        if [len(group["params"]) for group in given] != lengths:
            raise StateError(
                f"this dict has {[len(group['params']) for group in given]} parameters in its groups, the optimizer {lengths}: "
                "build the optimizer with the groups of the dict"
            )
        parts: dict[int, tuple[torch.optim.Optimizer, dict[int, Any]]] = {}
        for group, members in zip(given, merged, strict=True):
            keys = iter(group["params"])
            hyper = {key: value for key, value in group.items() if key not in _NOT_HYPER}
            for member in members:
                states = [state_dict["state"].get(next(keys)) for _ in member.params]
                number = next(n for n, live in enumerate(member.optim.param_groups) if live is member.group)
                parts.setdefault(id(member.optim), (member.optim, {}))[1][number] = hyper, states
        for optim, groups in parts.values():
            _load(optim, [groups[number] for number in sorted(groups)])
        inside = self._offloading
        if inside.d_opt is not None:
            inside.d_param_groups = inside.d_opt.param_groups  # a load has made them anew, and schedulers change these
        self._copy_weights_before_the_next_step()

    def _members(self) -> Iterator[_Member]:
        inside = self._offloading
        for group in inside.d_opt.param_groups if inside.d_opt is not None else ():
            yield _Member(inside.d_opt, group, tuple(group["params"]))
        for param, optim in inside.optim_dict.items():
            yield _Member(optim, optim.param_groups[0], (param,))

    def _merged(self) -> list[list[_Member]]:
        """Return the members in groups of equal hyperparameters, in the order of the first of each."""
        merged: list[list[_Member]] = []
        for member in self._members():
            known = next((members for members in merged if _same(members[0].hyper, member.hyper)), None)
            if known is None:
                merged.append([member])
            else:
                known.append(member)
        return merged

    def _held(self, member: _Member, param: torch.Tensor) -> Any:
        return member.optim.state.get(self._offloading.param_d2h_map.get(param, param)) or None

    def _copy_weights_before_the_next_step(self) -> None:
        """The weights may be loaded after the state, and a step would put the old ones back into the model."""
        inside, own_step = self._offloading, self._offloading.step

        def step(*args: Any, **kwargs: Any) -> Any:
            if is_due:
                is_due.clear()
                with torch.no_grad():
                    for param, copy in inside.param_d2h_map.items():
                        copy.copy_(param.detach())
            return own_step(*args, **kwargs)

        is_due = [True]
        inside.step = step


def _load(optim: torch.optim.Optimizer, groups: list[tuple[dict[str, Any], list[Any]]]) -> None:
    """Load the state of an optimizer by its own function, and give every value its own dtype again, which torch casts."""
    params = [param for group in optim.param_groups for param in group["params"]]
    states = [values for _, listed in groups for values in listed]
    ids = iter(range(len(params)))
    packed = [{**hyper, "params": [next(ids) for _ in listed]} for hyper, listed in groups]
    optim.load_state_dict(
        {"state": {i: values for i, values in enumerate(states) if values is not None}, "param_groups": packed}
    )
    for param, values in zip(params, states, strict=True):
        for name, value in (values or {}).items():
            cast = optim.state[param][name]
            if isinstance(value, torch.Tensor) and name != "step" and cast.dtype != value.dtype:
                optim.state[param][name] = value.to(cast.device)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    return type(a) is type(b) and bool(a == b)
