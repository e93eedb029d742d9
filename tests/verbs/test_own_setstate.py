"""A `__setstate__` of an optimizer's own, which sees every value: fp32 state of bf16 parameters stays fp32, also in DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.wraps import in_ddp, in_fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

RANKS = 3


class Defaults(torch.optim.Optimizer):
    """As many packages write it: `__setstate__` adds a hyperparameter that old checkpoints lack."""

    def __init__(self, params: Any, mesh: Any = None) -> None:
        super().__init__(params, {"lr": 0.5, "added": False})
        self.mesh = mesh

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("added", False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, param in enumerate(self.param_groups[0]["params"]):
            held = param.to_local() if isinstance(param, DTensor) else param
            value = torch.linspace(-1, 1, max(held.numel(), 1))[: held.numel()].reshape(held.shape) / 3 + number
            self.state[param] = {"exp_avg": self._like(param, value), "step": torch.tensor(5.0), "words": ["a", number]}

    def _like(self, param: Any, value: torch.Tensor) -> torch.Tensor:
        if isinstance(param, DTensor):
            strides = param.stride()
            return DTensor.from_local(value, param.device_mesh, param.placements, shape=param.shape, stride=strides)
        if self.mesh is None:
            return value
        return DTensor.from_local(value, self.mesh, [Replicate()], run_check=False).redistribute(self.mesh, [Shard(0)])


def model_of(wrap: str) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 2)).to(torch.bfloat16)
    return in_fsdp2(model) if wrap == "FSDP2" else in_ddp(model)


def optim_of(wrap: str, model: Any) -> Defaults:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if wrap == "DDP, DTensors" else None
    optim = Defaults(model.parameters(), mesh)
    optim.step()
    return optim


def every_way(wrap: str, folder: str) -> None:
    model = model_of(wrap)
    optim = optim_of(wrap, model)
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None)
    fsdp_optim.save(folder, model, optim)

    def sharded(optim: Any) -> None:
        fsdp_optim.load_optim_state_dict(optim, fsdp_optim.get_shard_from_optim_state_dict(model, optim, full))

    def scattered(optim: Any) -> None:
        given = full if dist.get_rank() == 0 else None
        fsdp_optim.load_optim_state_dict(optim, fsdp_optim.scatter_full_optim_state_dict(model, optim, given))

    for how, load in {
        "shard": sharded,
        "scatter": scattered,
        "load": lambda new: fsdp_optim.load(folder, model, new, options=fsdp_optim.LoadOptions(compare=True)),
        "transfer": lambda new: fsdp_optim.transfer_optim_state(model, optim, model, new),
    }.items():
        new = optim_of(wrap, model)
        for values in new.state.values():
            values["exp_avg"].zero_()
        load(new)
        for number, param in enumerate(model.parameters()):
            loaded_values, saved_values = new.state[param], optim.state[param]
            check_same(f"{how}: {number}, names", list(loaded_values), list(saved_values))
            check_same(f"{how}: {number}, dtype", loaded_values["exp_avg"].dtype, torch.float32)
            parts = [
                getattr(state["exp_avg"], "to_local", lambda state=state: state["exp_avg"])()
                for state in (loaded_values, saved_values)
            ]
            check_same(f"{how}: {number}, exp_avg", *parts)
            check_same(
                f"{how}: {number}, the others",
                [loaded_values["step"], loaded_values["words"]],
                [saved_values["step"], saved_values["words"]],
            )


@pytest.mark.parametrize("wrap", ["FSDP2", "DDP", "DDP, DTensors"])
def test_wide_state_stays_wide(wrap: str, tmp_path: Path) -> None:
    run_on_ranks(every_way, RANKS, wrap, str(tmp_path / "c"))
