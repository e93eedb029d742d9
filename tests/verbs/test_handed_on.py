"""Values that torch's load would leave as they are do not go through it, and the result is the same as if they had."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from kit.compare import check_same
from torch import nn

from fsdp_optim import load_optim_state_dict

Dtypes = tuple[torch.dtype, ...]
WIDE, NARROW = torch.float32, torch.bfloat16


def a_run(make: Callable[..., Any], dtypes: Dtypes) -> Any:
    params = [nn.Parameter((torch.arange(3.0) + number).to(dtype)) for number, dtype in enumerate(dtypes)]
    optim = make(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optim.step()
    return optim


def wide_state(optim: Any) -> dict[str, Any]:
    """The optimizer's own dict with its moments in float32, which torch's load casts where a parameter is narrower."""
    own = copy.deepcopy(optim.state_dict())
    for values in own["state"].values():
        values.update({name: value.float() for name, value in values.items() if name != "step"})
    return own


def seen_by_torch(optim: Any, own: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Load, and return the (parameter's id, name) of each value that torch's load looks at."""
    seen = []
    process = torch.optim.Optimizer._process_value_according_to_param_policy

    def noted(param: Any, value: Any, param_id: Any, param_groups: Any, key: Any = None) -> Any:
        seen.append((param_id, key))
        return process(param, value, param_id, param_groups, key)

    with mock.patch.object(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(noted)):
        load_optim_state_dict(optim, own)
    return seen


def adam(params: Any) -> torch.optim.Adam:
    return torch.optim.Adam(params, foreach=False)


def by_number(optim: Any) -> list[tuple[int, Any]]:
    """The state in its own order, by the number of the parameter."""
    numbers = {param: number for number, param in enumerate(optim.param_groups[0]["params"])}
    return [(numbers[param], values) for param, values in optim.state.items()]


@pytest.mark.parametrize("make", [adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.ASGD])
def test_as_by_torchs_own_load(make: Any) -> None:
    saved = a_run(make, (WIDE,) * 3)
    own, before = saved.state_dict(), copy.deepcopy(saved.state_dict())
    loaded, oracle = a_run(make, (WIDE,) * 3), a_run(make, (WIDE,) * 3)
    assert {number for number, _ in seen_by_torch(loaded, own)} == {0}  # some ask the first one about all
    oracle.load_state_dict(copy.deepcopy(own))
    check_same("state", by_number(loaded), by_number(oracle))
    assert type(loaded.state) is type(oracle.state)
    for param, values in loaded.state.items():
        values["exp_avg"] = param  # the dicts of the optimizer are its own
    check_same("the shard", own, before)


@pytest.mark.parametrize("dtypes", [(WIDE, NARROW, WIDE), (NARROW, WIDE, NARROW), (NARROW, NARROW, WIDE)])
def test_beside_values_that_are_cast(dtypes: Dtypes) -> None:
    """The order of the parameters is that of the shard, as by torch's own load; every value keeps its dtype."""
    own = wide_state(a_run(adam, dtypes))
    loaded = a_run(adam, dtypes)
    seen = seen_by_torch(loaded, own)
    assert {number for number, _ in seen} == {0} | {number for number, dtype in enumerate(dtypes) if dtype is NARROW}
    check_same("state", by_number(loaded), list(own["state"].items()))
    reverse = {**own, "state": dict(reversed(own["state"].items()))}
    again = a_run(adam, dtypes)
    load_optim_state_dict(again, reverse)
    check_same("state, in reverse", by_number(again), list(reverse["state"].items()))


def test_numbers_become_tensors() -> None:
    """torch's own __setstate__ makes tensors of step counts that are numbers, as old checkpoints have them."""
    own = copy.deepcopy(a_run(adam, (WIDE, WIDE)).state_dict())
    own["state"][1]["step"] = 7.0
    loaded, oracle = a_run(adam, (WIDE, WIDE)), a_run(adam, (WIDE, WIDE))
    load_optim_state_dict(loaded, own)
    oracle.load_state_dict(copy.deepcopy(own))
    check_same("state", by_number(loaded), by_number(oracle))
    assert isinstance(dict(by_number(loaded))[1]["step"], torch.Tensor)


def test_steps_of_fused_optimizers_are_float32() -> None:
    own = copy.deepcopy(a_run(lambda params: torch.optim.Adam(params, fused=True), (WIDE, WIDE)).state_dict())
    own["state"][1]["step"] = own["state"][1]["step"].double()
    loaded = a_run(lambda params: torch.optim.Adam(params, fused=True), (WIDE, WIDE))
    assert {number for number, _ in seen_by_torch(loaded, own)} == {0, 1}
    assert [values["step"].dtype for _, values in by_number(loaded)] == [WIDE, WIDE]


def test_state_of_no_parameter_stays_behind() -> None:
    own = copy.deepcopy(a_run(adam, (WIDE, WIDE)).state_dict())
    own["state"] = {"k": torch.tensor(3), **own["state"]}
    loaded, oracle = a_run(adam, (WIDE, WIDE)), a_run(adam, (WIDE, WIDE))
    load_optim_state_dict(loaded, own)
    oracle.load_state_dict(copy.deepcopy(own))
    keys = [[key if isinstance(key, str) else "parameter" for key in optim.state] for optim in (loaded, oracle)]
    assert keys[0] == keys[1] == ["k", "parameter", "parameter"]


def test_what_setstate_asks_the_first_entry() -> None:
    """Adagrad's __setstate__ asks the first entry whether steps are tensors, and if not makes tensors of all: also of state of no
    parameter, which has other values under the same name, or is no dict.
    """
    for others in ({"schedule": {"step": 5, "best": 1.0}}, {"k": torch.tensor([3])}, {}):
        own = copy.deepcopy(a_run(torch.optim.Adagrad, (WIDE, WIDE, WIDE)).state_dict())
        own["state"].update(others)
        own["state"][2]["step"] = 7.0
        loaded, oracle = (a_run(torch.optim.Adagrad, (WIDE, WIDE, WIDE)) for _ in range(2))
        load_optim_state_dict(loaded, own)
        oracle.load_state_dict(copy.deepcopy(own))
        of_others = [{key: optim.state[key] for key in others} for optim in (loaded, oracle)]
        check_same("others", *of_others)
        steps = [
            [optim.state[param]["step"] for param in optim.param_groups[0]["params"]] for optim in (loaded, oracle)
        ]
        check_same("steps", *steps)


class CountsInSetstate(torch.optim.Adam):
    """Its __setstate__ looks at the values of each parameter."""

    counted = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.counted = sum(len(values) for values in self.state.values())


def test_a_setstate_of_its_own_sees_every_value() -> None:
    own = a_run(CountsInSetstate, (WIDE, WIDE)).state_dict()
    loaded = a_run(CountsInSetstate, (WIDE, WIDE))
    load_optim_state_dict(loaded, own)
    assert loaded.counted == 6


def test_what_a_hook_gives_stays_its_own() -> None:
    own = a_run(adam, (WIDE, WIDE)).state_dict()
    loaded, given = a_run(adam, (WIDE, WIDE)), copy.deepcopy(own)
    loaded.register_load_state_dict_pre_hook(lambda *_: given)
    load_optim_state_dict(loaded, own)
    for values in loaded.state.values():
        values.clear()
    check_same("the hook's", given, own)


def test_on_the_device_of_the_parameter() -> None:
    own = a_run(adam, (WIDE, WIDE)).state_dict()
    params = [nn.Parameter(torch.zeros(3, device="meta")) for _ in range(2)]
    loaded, oracle = adam(params), adam(params)
    load_optim_state_dict(loaded, own)
    oracle.load_state_dict(copy.deepcopy(own))
    devices = [[{n: v.device.type for n, v in values.items()} for _, values in by_number(o)] for o in (loaded, oracle)]
    assert devices[0] == devices[1]
    assert devices[0][0]["exp_avg"] == "meta"
