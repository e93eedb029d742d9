"""State that is narrower than its parameter (trained in bf16, resumed in fp32) is widened, exactly, with one log line."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.compare import check_same
from kit.wraps import in_ddp, in_fsdp1, in_fsdp2
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_optim
from fsdp_optim import (
    StateError,
    gather_full_optim_state_dict,
    get_shard_from_optim_state_dict,
    load_optim_state_dict,
    transfer_optim_state,
)
from fsdp_optim.testing import run_on_ranks

LINE = "narrower than its parameters"


def a_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def step(model: nn.Module, optim: torch.optim.Optimizer, seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    optim.zero_grad()
    model(torch.randn(4, 5).to(dtype)).square().sum().backward()
    optim.step()


def by_shard(model: Any, optim: Any, new: Any, new_optim: Any, path: Path) -> None:
    full = gather_full_optim_state_dict(model, optim, recipient_rank=None)
    load_optim_state_dict(new_optim, get_shard_from_optim_state_dict(new, new_optim, full))


def by_transfer(model: Any, optim: Any, new: Any, new_optim: Any, path: Path) -> None:
    transfer_optim_state(model, optim, new, new_optim)


def by_file(model: Any, optim: Any, new: Any, new_optim: Any, path: Path) -> None:
    fsdp_optim.save(path, model, optim)
    fsdp_optim.load(path, new, new_optim, options=fsdp_optim.LoadOptions(cast=True))


WAYS = [by_shard, by_transfer, by_file]
all_ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
CLASSES = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, 0.1, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, 0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, 0.1, fused=True),
    "NAdam": lambda params: torch.optim.NAdam(params, 0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, 0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, 0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, 0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 0.1, momentum=0.9, centered=True),
    "ASGD": lambda params: torch.optim.ASGD(params, 0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, 0.1),
    "Adafactor": lambda params: torch.optim.Adafactor(params, 0.1),
}
FROM_TO = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64)]


@all_ways
@pytest.mark.parametrize(("narrow", "wide"), FROM_TO, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_the_run_continues_as_with_torch_s_own_load(name, narrow, wide, way, tmp_path, caplog):
    make = CLASSES[name]
    model = a_model(narrow)
    optim = make(model.parameters())
    for seed in range(2):
        step(model, optim, seed, narrow)
    new, twin = a_model(wide), a_model(wide)
    for other in (new, twin):
        other.load_state_dict(model.state_dict())
    new_optim, twin_optim = make(new.parameters()), make(twin.parameters())
    twin_optim.load_state_dict(copy.deepcopy(optim.state_dict()))
    saved = copy.deepcopy(optim.state_dict())
    with caplog.at_level(logging.INFO, "fsdp_optim"):
        way(model, optim, new, new_optim, tmp_path / "checkpoint")
    lines = [record.getMessage() for record in caplog.records if LINE in record.getMessage()]
    if way is not by_file:  # where cast=True asks for it
        assert len(lines) == 1, lines
        assert f"{str(narrow).removeprefix('torch.')} -> {str(wide).removeprefix('torch.')}" in lines[0]
    for values, saved_values in zip(twin_optim.state.values(), saved["state"].values(), strict=True):
        # torch's load also casts numbers that its optimizers do not keep in the dtype of the parameter
        values.update({n: saved_values[n] for n in ("eta", "mu", "mu_product") if n in values})
    check_same("state", new_optim.state_dict()["state"], twin_optim.state_dict()["state"])
    check_same("the source", optim.state_dict(), saved)
    for own, ran in ((new, new_optim), (twin, twin_optim)):
        step(own, ran, 5, wide)
    check_same("weights", dict(new.state_dict()), dict(twin.state_dict()))


@all_ways
def test_wider_state_and_equal_state_stay_as_they_are(way, tmp_path, caplog):
    model = a_model(torch.bfloat16)
    optim = CLASSES["SGD"](model.parameters())
    step(model, optim, 0, torch.bfloat16)
    for values in list(optim.state.values())[:2]:
        values["momentum_buffer"] = torch.randn(values["momentum_buffer"].shape)
    new = a_model(torch.bfloat16)
    new_optim = CLASSES["SGD"](new.parameters())
    with caplog.at_level(logging.INFO, "fsdp_optim"):
        way(model, optim, new, new_optim, tmp_path / "checkpoint")
    check_same("state", new_optim.state_dict()["state"], optim.state_dict()["state"])
    assert LINE not in caplog.text


@pytest.mark.parametrize("way", [by_shard, by_transfer], ids=lambda way: way.__name__)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)], ids=str)
def test_a_dtype_that_does_not_hold_the_other_is_refused_before_any_change(dtypes, way, tmp_path):
    saved, live = dtypes
    model = a_model(saved)
    optim = CLASSES["Adam"](model.parameters())
    step(model, optim, 0, saved)
    new = a_model(live)
    new_optim = CLASSES["Adam"](new.parameters())
    with pytest.raises(
        StateError, match=r"exp_avg of local parameter 0 is .*float16.* neither holds .* build the model in"
    ):
        way(model, optim, new, new_optim, tmp_path / "checkpoint")
    assert not new_optim.state


class NarrowMoments(torch.optim.Optimizer):
    """bf16 moments for fp32 parameters, on purpose."""

    def __init__(self, params: Any, narrow: bool = True) -> None:
        super().__init__(params, {"lr": 0.1})
        self._dtype = torch.bfloat16 if narrow else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, dtype=self._dtype)
                state["exp_avg"].mul_(0.9).add_(param.grad.to(state["exp_avg"].dtype))
                param.sub_(state["exp_avg"].to(param.dtype) * group["lr"])


@all_ways
@pytest.mark.parametrize("has_state", [False, True])
def test_an_optimizer_that_keeps_narrow_state_keeps_it(has_state, way, tmp_path, caplog):
    model = a_model(torch.float32)
    optim = NarrowMoments(model.parameters())
    step(model, optim, 0, torch.float32)
    new = a_model(torch.float32)
    new_optim = NarrowMoments(new.parameters())
    if has_state:
        step(new, new_optim, 3, torch.float32)
    with caplog.at_level(logging.INFO, "fsdp_optim"):
        way(model, optim, new, new_optim, tmp_path / "checkpoint")
    check_same("state", new_optim.state_dict()["state"], optim.state_dict()["state"])
    assert LINE not in caplog.text


@all_ways
def test_an_optimizer_of_another_class_whose_live_state_is_wide_gets_it_wide(way, tmp_path):
    model = a_model(torch.bfloat16)
    optim = NarrowMoments(model.parameters(), narrow=False)
    step(model, optim, 0, torch.bfloat16)
    new = a_model(torch.float32)
    new_optim = NarrowMoments(new.parameters(), narrow=False)
    step(new, new_optim, 3, torch.float32)
    way(model, optim, new, new_optim, tmp_path / "checkpoint")
    wanted = [values["exp_avg"].float() for values in optim.state.values()]
    check_same("moments", [values["exp_avg"] for values in new_optim.state.values()], wanted)


def _on_ranks(folder: str) -> None:
    torch.manual_seed(0)
    for wrap in (in_ddp, in_fsdp1, in_fsdp2):
        narrow = torch.bfloat16
        for way in WAYS:
            model, new = wrap(a_model(narrow)), wrap(a_model(torch.float32))
            optim, new_optim = CLASSES["Adam"](model.parameters()), CLASSES["Adam"](new.parameters())
            step(model, optim, 1, narrow)
            way(model, optim, new, new_optim, Path(folder) / f"{wrap.__name__} {way.__name__}")
            pairs = zip(new_optim.state.values(), optim.state.values(), strict=True)
            for own, (values, saved) in enumerate(pairs):
                for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                    what = f"{wrap.__name__} {way.__name__} {own} {name}"
                    check_same(what, _local(values[name]), _local(saved[name]).float())
            step(new, new_optim, 2, torch.float32)


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def test_every_wrapper_steps_on(tmp_path):
    run_on_ranks(_on_ranks, 2, str(tmp_path))
