"""Live hyperparameters (param_groups="live", keep=) that need a value which the saved state lacks are refused, not stepped on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.compare import check_same
from kit.options import as_options
from kit.wraps import in_ddp, in_fsdp1, in_fsdp2
from torch import nn

import fsdp_optim
from fsdp_optim import (
    CheckpointManager,
    StateError,
    gather_full_optim_state_dict,
    get_shard_from_optim_state_dict,
    load_optim_state_dict,
    scatter_full_optim_state_dict,
    transfer_optim_state,
)
from fsdp_optim.testing import run_on_ranks

SWITCHES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "Adam": (torch.optim.Adam, {"amsgrad": True}, "max_exp_avg_sq"),
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
    "RMSprop centered": (torch.optim.RMSprop, {"centered": True}, "grad_avg"),
    "RMSprop momentum": (torch.optim.RMSprop, {"momentum": 0.9}, "momentum_buffer"),
}


def a_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def step(model: nn.Module, optim: torch.optim.Optimizer, seed: int = 1) -> None:
    torch.manual_seed(seed)
    optim.zero_grad()
    model(torch.randn(4, 5)).square().sum().backward()
    optim.step()


def shard(model: Any, optim: Any, new: Any, new_optim: Any, path: Path, **kept: Any) -> None:
    groups = {"param_groups": kept["param_groups"]} if "param_groups" in kept else {}
    keep = {"keep_hyperparameters": kept["keep_hyperparameters"]} if "keep_hyperparameters" in kept else {}
    full = gather_full_optim_state_dict(model, optim, recipient_rank=None)
    load_optim_state_dict(
        new_optim,
        get_shard_from_optim_state_dict(new, new_optim, full, **as_options(fsdp_optim.CallOptions, **groups)),
        **keep,
    )


def scatter(model: Any, optim: Any, new: Any, new_optim: Any, path: Path, **kept: Any) -> None:
    groups = {"param_groups": kept["param_groups"]} if "param_groups" in kept else {}
    keep = {"keep_hyperparameters": kept["keep_hyperparameters"]} if "keep_hyperparameters" in kept else {}
    full = gather_full_optim_state_dict(model, optim)
    load_optim_state_dict(
        new_optim,
        scatter_full_optim_state_dict(new, new_optim, full, **as_options(fsdp_optim.CallOptions, **groups)),
        **keep,
    )


def transfer(model: Any, optim: Any, new: Any, new_optim: Any, path: Path, **kept: Any) -> None:
    transfer_optim_state(model, optim, new, new_optim, **as_options(fsdp_optim.CallOptions, **kept))


def load(model: Any, optim: Any, new: Any, new_optim: Any, path: Path, **kept: Any) -> None:
    fsdp_optim.save(path, model, optim, overwrite=True)
    fsdp_optim.load(path, new, new_optim, **as_options(fsdp_optim.LoadOptions, **kept))


def resume(model: Any, optim: Any, new: Any, new_optim: Any, path: Path, **kept: Any) -> None:
    fsdp_optim.save(path / "step-1", model, optim, overwrite=True)
    fsdp_optim.resume(path, new, new_optim, **as_options(fsdp_optim.LoadOptions, **kept))


WAYS = [shard, scatter, load, resume]


def check_refused(way: Any, name: str, path: Path, wrap: Any, kept: str) -> None:
    make, switch, value = SWITCHES[name]
    (key, on) = next(iter(switch.items()))
    model, new = wrap(a_model()), wrap(a_model())
    optim, new_optim = make(model.parameters(), 0.1), make(new.parameters(), 0.1, **switch)
    step(model, optim)
    before = {fqn: param.detach().clone() for fqn, param in new.named_parameters()}
    how: dict[str, Any] = {"param_groups": "live"} if kept == "groups" else {"keep_hyperparameters": [key]}
    with pytest.raises(StateError, match=f"{make.__name__} needs {value} in its next step with {key}={on}") as caught:
        way(model, optim, new, new_optim, path, **how)
    assert f"build the optimizer with {key}=" in str(caught.value)
    assert not new_optim.state
    assert new_optim.param_groups[0][key] == on
    for fqn, param in new.named_parameters():
        assert torch.equal(param, before[fqn]), f"{way.__name__}: {fqn} has changed"
    # As the message says: with the switch off, or the saved group, the load works.
    way(model, optim, new, new_optim, path)
    step(new, new_optim)


@pytest.mark.parametrize("kept", ["groups", "keep"])
@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_switch_that_only_the_live_optimizer_has_is_refused(way, name, kept, tmp_path):
    check_refused(way, name, tmp_path / "checkpoint", lambda model: model, kept)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_transfer_to_live_groups_is_refused(name, tmp_path):
    check_refused(transfer, name, tmp_path, lambda model: model, "groups")


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_only_the_saved_optimizer_has_may_stay_off(name):
    make, switch, value = SWITCHES[name]
    model, new, twin = a_model(), a_model(), a_model()
    optim, new_optim = make(model.parameters(), 0.1, **switch), make(new.parameters(), 0.1)
    step(model, optim)
    full = gather_full_optim_state_dict(model, optim)
    load_optim_state_dict(new_optim, get_shard_from_optim_state_dict(new, new_optim, full, param_groups="live"))
    step(new, new_optim, 2)
    # The same as an optimizer without the switch, whose other values are these.
    twin_optim = make(twin.parameters(), 0.1)
    own = optim.state_dict()
    for values in own["state"].values():
        values.pop(value)
    twin_optim.load_state_dict({"state": own["state"], "param_groups": twin_optim.state_dict()["param_groups"]})
    step(twin, twin_optim, 2)
    check_same("weights", dict(new.state_dict()), dict(twin.state_dict()))


def test_a_parameter_without_state_is_no_failure():
    """It begins at its next step."""
    model, new = a_model(), a_model()
    optim = torch.optim.Adam(model.parameters(), 0.1)
    new_optim = torch.optim.Adam(new.parameters(), 0.1, amsgrad=True)
    full = gather_full_optim_state_dict(model, optim)
    load_optim_state_dict(new_optim, get_shard_from_optim_state_dict(new, new_optim, full, param_groups="live"))
    step(new, new_optim)
    assert "max_exp_avg_sq" in next(iter(new_optim.state.values()))


def test_the_manager_refuses_it_too(tmp_path):
    model, new = a_model(), a_model()
    optim = torch.optim.Adam(model.parameters(), 0.1)
    step(model, optim)
    with CheckpointManager(tmp_path / "run", model, optim, every=1) as manager:
        manager.resume()
        manager.step(1)
    new_optim = torch.optim.Adam(new.parameters(), 0.1, amsgrad=True)
    wanted = pytest.raises(StateError, match="needs max_exp_avg_sq in its next step with amsgrad=True")
    with CheckpointManager(tmp_path / "run", new, new_optim, every=1) as manager, wanted:
        manager.resume(options=fsdp_optim.LoadOptions(param_groups="live"))
    assert not new_optim.state


def _on_ranks(folder: str) -> None:
    for wrap in (in_ddp, in_fsdp1, in_fsdp2):
        for way in (shard, scatter, load):
            for kept in ("groups", "keep"):
                check_refused(way, "AdamW", Path(folder) / f"{wrap.__name__} {way.__name__}", wrap, kept)


def test_every_rank_refuses_it(tmp_path):
    run_on_ranks(_on_ranks, 2, str(tmp_path))
