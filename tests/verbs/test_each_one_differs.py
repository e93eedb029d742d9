"""What is asked once for alike things is asked again where the second of them differs: a cut, a kind, a method, a value."""

from __future__ import annotations

import copy
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_refused, check_same, error_text
from kit.wrapping import cpu
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor, Shard

import fsdp_optim
from fsdp_optim import StateError
from fsdp_optim.testing import run_on_ranks

QUIET = fsdp_optim.SaveOptions(durable=False, progress=False)


def second_local_tensor() -> tuple[str, str]:
    """Of two DTensors with one spec, the local tensor of the second is too short on rank 1."""
    with cpu():
        mesh = init_device_mesh("cpu", (2,))
        model = nn.ParameterList([DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]) for _ in range(2)])
        model[1]._spec = model[0]._spec
        if dist.get_rank() == 1:
            model[1]._local_tensor = torch.ones(1, 3)
        return error_text(partial(fsdp_optim.gather_full_model_state_dict, model))


def test_a_local_tensor() -> None:
    check_refused(
        "1", run_on_ranks(second_local_tensor, 2), "WrapperError", "1: the local tensor on rank 1 has shape [1, 3]"
    )


def second_of_a_module() -> list[str]:
    """The bias of a module is a DTensor, which another adapter reads than the weight before it."""
    with cpu():
        model = nn.Linear(3, 4)
        mesh = init_device_mesh("cpu", (2,))
        model.bias = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
        return list(fsdp_optim.gather_full_model_state_dict(model, None) or {})


def test_the_order_in_a_module() -> None:
    assert run_on_ranks(second_of_a_module, 2) == [["weight", "bias"]] * 2


def part_of_a_flat_parameter() -> None:
    """One original is not in the dict, and keeps that of the live optimizer, with which the other one's must agree."""
    with cpu():
        torch.manual_seed(0)
        model = TorchFSDP(nn.Linear(3, 4), device_id=torch.device("cpu"))
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optim.step()
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name")
        assert full is not None
        weight, bias = full["state"]["weight"], full["state"].pop("bias")
        weight["exp_avg"] = weight["exp_avg"] + 1
        full["param_groups"][0]["params"].remove("bias")
        shard = fsdp_optim.get_shard_from_optim_state_dict(model, optim, full, strict=False)
        fsdp_optim.load_optim_state_dict(optim, shard)
        again = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name") or {}
        check_same("state", again["state"], {"weight": weight, "bias": bias})


def test_part_of_a_flat_parameter() -> None:
    run_on_ranks(part_of_a_flat_parameter, 2)


def test_a_value_that_is_no_scalar() -> None:
    model = nn.Linear(3, 2)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optim.step()
    full = copy.deepcopy(fsdp_optim.gather_full_optim_state_dict(model, optim, key_by="name"))
    assert full is not None
    full["state"]["bias"]["step"] = torch.ones(2)
    with pytest.raises(StateError, match=r"bias: step has shape \[2\]"):
        fsdp_optim.get_shard_from_optim_state_dict(model, optim, full)


def test_a_method_of_one_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of two modules of one class, the second has a state_dict() of its own."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    own: Any = lambda *args, **kwargs: {}  # noqa: E731
    model[1].state_dict = own
    with caplog.at_level(logging.WARNING, "fsdp_optim"):
        fsdp_optim.save(tmp_path / "step", model, options=QUIET)
    assert "state-dict hooks are not run" in caplog.text
    assert "1 (Linear" in caplog.text
    assert "0 (Linear" not in caplog.text


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.ones(2)), 0

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def tied() -> nn.Module:
    counting = Counting()
    return nn.ModuleDict({"a": counting, "b": counting})


def test_a_value_of_a_tied_module(tmp_path: Path) -> None:
    """Equal values under both names are one; others are refused, and nothing is loaded."""
    for number in (3, 4):
        saved = tied().state_dict()
        saved["a._extra_state"], saved["b._extra_state"] = 3, number
        path, model = tmp_path / f"{number}.pt", tied()
        torch.save(saved, path)
        if number == 3:
            fsdp_optim.load(path, model)
            assert model["a"].count == 3
            continue
        with pytest.raises(StateError, match=r"b\._extra_state: the checkpoint has it, the model does not"):
            fsdp_optim.load(path, model)
        assert model["a"].count == 0
