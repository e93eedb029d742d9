"""An optimizer's own load_state_dict, its __setstate__ and its load hooks: they see every value, and what they make stays.

The parameters are bf16, the moments fp32, so that torch's load casts every moment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kit.compare import check_same
from kit.ways import by_file, by_scatter, by_transfer
from torch import nn

import fsdp_optim
from fsdp_optim import (
    gather_full_optim_state_dict,
    get_shard_from_optim_state_dict,
    load_optim_state_dict,
    transfer_optim_state,
)

STEPS = 3


class WideMomentum(torch.optim.Optimizer):
    """Momentum in fp32 for bf16 parameters, and a name."""

    def __init__(self, params: Any, lr: float = 0.25) -> None:
        super().__init__(params, {"lr": lr})

    def begun(self, param: torch.Tensor) -> dict[str, Any]:
        return {"exp_avg": torch.zeros(param.shape), "step": torch.zeros(()), "name": "momentum"}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(self.begun(param))
                state["step"] += 1
                exp_avg = self.momentum_of(state)
                exp_avg = exp_avg * 0.875 + param.grad.float()
                self.put(state, exp_avg)
                param.sub_((exp_avg * group["lr"]).to(param.dtype))

    def momentum_of(self, state: dict[str, Any]) -> torch.Tensor:
        return state["exp_avg"]

    def put(self, state: dict[str, Any], exp_avg: torch.Tensor) -> None:
        state["exp_avg"] = exp_avg


class Quantised(WideMomentum):
    """The momentum is int8 with a scale; the dict has it in fp32, and `load_state_dict` makes the live form of it."""

    def begun(self, param: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"step": torch.zeros(()), "name": "momentum"}
        self.put(state, torch.zeros(param.shape))
        return state

    def momentum_of(self, state: dict[str, Any]) -> torch.Tensor:
        return state["codes"].float() * state["scale"]

    def put(self, state: dict[str, Any], exp_avg: torch.Tensor) -> None:
        scale = torch.exp2(torch.ceil(torch.log2(exp_avg.abs().max().clamp(min=1e-20)))) / 64  # exact both ways
        state.update(codes=torch.round(exp_avg / scale).to(torch.int8), scale=scale)

    def state_dict(self) -> dict[str, Any]:
        content = super().state_dict()
        for local_id, values in content["state"].items():
            content["state"][local_id] = {
                "exp_avg": self.momentum_of(values),
                **{name: value for name, value in values.items() if name not in ("codes", "scale")},
            }
        return content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            assert (
                state["exp_avg"].dtype == torch.float32
            )  # what is quantised is the saved value, not torch's cast of it
            self.put(state, state.pop("exp_avg"))


class QuantisedInSetstate(Quantised):
    """The same in `__setstate__`, which gets torch's casts."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.optim.Optimizer.load_state_dict(self, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for values in self.state.values():
            if "exp_avg" in values:
                self.put(values, values.pop("exp_avg").float())


class OwnWay(Quantised):
    """A load of its own, without torch's."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for local_id, values in state_dict["state"].items():
            values = dict(values)
            self.put(values, values.pop("exp_avg"))
            self.state[params[local_id]] = values


def by_shard(model: Any, optim: Any, new: Any, new_optim: Any, path: Path) -> None:
    full = gather_full_optim_state_dict(model, optim)
    before = copy.deepcopy(full)
    shard = get_shard_from_optim_state_dict(new, new_optim, full)
    given = copy.deepcopy(shard)
    load_optim_state_dict(new_optim, shard)
    check_same("the full dict stays as it is", full, before)
    check_same("the shard stays as it is", shard, given)


all_ways = pytest.mark.parametrize("way", [by_shard, by_scatter, by_transfer, by_file], ids=lambda way: way.__name__)


def a_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(torch.bfloat16)


def train(model: nn.Module, optim: torch.optim.Optimizer, first: int) -> None:
    for step in range(first, first + STEPS):
        torch.manual_seed(step)
        optim.zero_grad()
        model(torch.randn(4, 5, dtype=torch.bfloat16)).float().square().sum().backward()
        optim.step()


def a_run(make: Callable[..., Any]) -> tuple[nn.Module, Any]:
    model = a_model()
    optim = make(model.parameters())
    train(model, optim, 0)
    return model, optim


def a_new(make: Callable[..., Any], model: nn.Module) -> tuple[nn.Module, Any]:
    new = a_model()
    new.load_state_dict(model.state_dict())
    return new, make(new.parameters())


@all_ways
@pytest.mark.parametrize("make", [WideMomentum, Quantised, OwnWay], ids=lambda make: make.__name__)
def test_the_run_continues_as_if_it_had_not_stopped(make, way, tmp_path):
    model, optim = a_run(make)
    new, new_optim = a_new(make, model)
    way(model, optim, new, new_optim, tmp_path / "checkpoint")
    check_same("live state", dict(enumerate(new_optim.state.values())), dict(enumerate(optim.state.values())))
    for own, ran in ((new, new_optim), (model, optim)):
        train(own, ran, STEPS)
    check_same("weights", dict(new.state_dict()), dict(model.state_dict()))


@all_ways
def test_the_form_that_setstate_makes_stays(way, tmp_path):
    """torch itself gives its casts to __setstate__: the same as torch's own load."""
    model, optim = a_run(QuantisedInSetstate)
    new, new_optim = a_new(QuantisedInSetstate, model)
    _twin, twin_optim = a_new(QuantisedInSetstate, model)
    twin_optim.load_state_dict(optim.state_dict())
    way(model, optim, new, new_optim, tmp_path / "checkpoint")
    for values, wanted in zip(new_optim.state.values(), twin_optim.state.values(), strict=True):
        check_same("codes", values["codes"], wanted["codes"])
        check_same("scale", values["scale"], wanted["scale"])
        assert "exp_avg" not in values
    train(new, new_optim, STEPS)


@all_ways
@pytest.mark.parametrize("make", [WideMomentum, torch.optim.SGD], ids=["own class", "torch's"])
def test_what_a_pre_hook_changes_stays_in_the_saved_dtype(make, way, tmp_path):
    """One that returns another dict, and one that changes the dict."""

    def optimizer(params: Any) -> Any:
        return make(params, lr=0.25, momentum=0.875) if make is torch.optim.SGD else make(params)

    name = "momentum_buffer" if make is torch.optim.SGD else "exp_avg"
    model, optim = a_run(optimizer)
    for state in optim.state.values():
        state[name] = torch.randn(state[name].shape)  # fp32, of which bf16 does not hold all bits
    new, new_optim = a_new(optimizer, model)
    seen: list[Any] = []

    def doubled(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append({key: sorted(values) for key, values in state_dict["state"].items()})
        state = {k: {**values, name: values[name] * 2} for k, values in state_dict["state"].items()}
        return {**state_dict, "state": state}

    new_optim.register_load_state_dict_pre_hook(doubled)
    new_optim.register_load_state_dict_pre_hook(lambda _, sd: sd["state"][0].update({name: sd["state"][0][name] + 1}))
    way(model, optim, new, new_optim, tmp_path / "checkpoint")
    wanted = [2 * state[name] for state in optim.state.values()]
    wanted[0] = wanted[0] + 1
    check_same("moments", [state[name] for state in new_optim.state.values()], wanted)
    assert seen == [{key: sorted(values) for key, values in optim.state_dict()["state"].items()}]


@all_ways
@pytest.mark.parametrize("make", [WideMomentum, torch.optim.SGD], ids=["own class", "torch's"])
def test_a_post_hook_sees_every_value_in_its_saved_dtype(make, way, tmp_path):
    def optimizer(params: Any) -> Any:
        return make(params, lr=0.25, momentum=0.875) if make is torch.optim.SGD else make(params)

    name = "momentum_buffer" if make is torch.optim.SGD else "exp_avg"
    model, optim = a_run(optimizer)
    for state in optim.state.values():
        state[name] = torch.randn(state[name].shape)
    new, new_optim = a_new(optimizer, model)

    def halve(own: Any) -> None:
        for state in own.state.values():
            state[name] = state[name] / 2  # KeyError where the value is withheld

    new_optim.register_load_state_dict_post_hook(halve)
    way(model, optim, new, new_optim, tmp_path / "checkpoint")
    wanted = [state[name] / 2 for state in optim.state.values()]
    check_same("moments", [state[name] for state in new_optim.state.values()], wanted)


def test_no_hook_stays():
    model, optim = a_run(WideMomentum)
    new, new_optim = a_new(WideMomentum, model)
    transfer_optim_state(model, optim, new, new_optim)
    assert not new_optim._optimizer_load_state_dict_pre_hooks
    assert not new_optim._optimizer_load_state_dict_post_hooks


def test_no_hook_stays_after_a_load_that_fails():
    model, optim = a_run(WideMomentum)
    new, new_optim = a_new(WideMomentum, model)

    def refuse(_: Any) -> None:
        raise ValueError("no")

    handle = new_optim.register_load_state_dict_post_hook(refuse)
    with pytest.raises(fsdp_optim.errors.StateError, match="refused the saved state"):
        transfer_optim_state(model, optim, new, new_optim)
    handle.remove()
    assert not new_optim._optimizer_load_state_dict_pre_hooks
    assert not new_optim._optimizer_load_state_dict_post_hooks
    assert not new_optim.state


def two_groups() -> tuple[list[nn.Parameter], torch.optim.Adam]:
    """Only the second group is fused: torch keeps its step counts in fp32, and casts no others."""
    params = [nn.Parameter(torch.arange(3.0) + number) for number in range(2)]
    optim = torch.optim.Adam([{"params": params[:1]}, {"params": params[1:], "fused": True}], foreach=False)
    for param in params:
        param.grad = torch.ones(3)
    optim.step()
    return params, optim


def test_torch_finds_the_group_of_each_value() -> None:
    """As by torch's own load, in which each value is looked for in the lists of all groups."""
    saved = copy.deepcopy(two_groups()[1].state_dict())
    for values in saved["state"].values():
        values["step"] = values["step"].double()
    (params, oracle), (own_params, own) = two_groups(), two_groups()
    oracle.load_state_dict(copy.deepcopy(saved))
    looked_in = []
    process = torch.optim.Optimizer._process_value_according_to_param_policy

    def noted(param: Any, value: Any, param_id: Any, param_groups: Any, key: Any = None) -> Any:
        looked_in.append([group["params"] for group in param_groups])
        return process(param, value, param_id, param_groups, key)

    with mock.patch.object(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(noted)):
        load_optim_state_dict(own, saved)
    for param, own_param in zip(params, own_params, strict=True):
        check_same("state", own.state[own_param], oracle.state[param])
    assert [oracle.state[param]["step"].dtype for param in params] == [torch.float64, torch.float32]
    assert looked_in
    for ids in looked_in:
        assert ids == [[0], [1]]
        assert all(type(listed).__contains__ is not list.__contains__ for listed in ids), "a search for each value"
