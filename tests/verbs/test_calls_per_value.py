"""How many calls of functions a value takes: what no noisy clock can blur. The bounds are those of today, with little room."""

from __future__ import annotations

import cProfile
import pstats
import tempfile
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fsdp_optim
from fsdp_optim import CallOptions, LoadOptions, SaveOptions, View, dcp
from fsdp_optim.fairscale import FullyShardedDataParallel as FairscaleFSDP
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

FEW, MANY = 100, 300
VALUES = 4  # of a parameter: the weight, two moments and the step
PARTS = 3  # of a fused parameter: each has values of its own in a checkpoint
VIEWS = [View("{u}.{i}.weight", "(q + k + v) c", {f"{{u}}.{{i}}.{part}": f"{part} c" for part in "qkv"}, q=2, k=1, v=1)]

# Calls of functions, in Python and C, that each further value takes on the rank that makes most.
MOST = {
    "FSDP2": {
        "save": 140,
        "load": 131,
        "gather": 89,
        "stall": 139,
        "set_state_dict": 383,
        "save of DCP": 229,
        "load of DCP": 386,
    },
    "FSDP1": {"save": 129, "load": 136, "gather": 69, "stall": 128},
    "fairscale": {"save": 106, "load": 100, "gather": 46, "stall": 104},
    "DDP": {"save": 157, "load": 145, "gather": 92, "stall": 156},
    "HSDP": {"save": 176, "load": 152, "gather": 113, "stall": 176},
    "FSDP2 and tensor parallel": {"save": 144, "load": 179, "gather": 105, "stall": 144},
    "no wrapper": {"save": 153, "load": 148, "gather": 90, "stall": 152},
    "FSDP2, Views": {"save": 120, "load": 139, "gather": 57, "stall": 115},
}
WORLDS = {"HSDP": 4, "FSDP2 and tensor parallel": 4, "no wrapper": 1}  # all others have 2 ranks


def in_fsdp2(units: list[nn.Module]) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(nn.Sequential(*(fully_shard(unit, mesh=mesh) for unit in units)), mesh=mesh)


def in_hsdp(units: list[nn.Module]) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return fully_shard(nn.Sequential(*(fully_shard(unit, mesh=mesh) for unit in units)), mesh=mesh)


def in_tensor_parallel(units: list[nn.Module]) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    ways = (ColwiseParallel, RowwiseParallel)
    for unit in units:
        parallelize_module(unit, mesh["tensor"], {name: ways[int(name) % 2]() for name, _ in unit.named_children()})
    mesh = mesh["data"]
    return fully_shard(nn.Sequential(*(fully_shard(unit, mesh=mesh) for unit in units)), mesh=mesh)


def in_fsdp1(units: list[nn.Module]) -> nn.Module:
    def wrap(module: nn.Module) -> nn.Module:
        return TorchFSDP(module, use_orig_params=True, device_id=torch.device("cpu"))

    return wrap(nn.Sequential(*map(wrap, units)))


def in_fairscale(units: list[nn.Module]) -> nn.Module:
    model = FairscaleFSDP(nn.Sequential(*(FairscaleFSDP(unit) for unit in units)))
    for module in model.modules():
        if isinstance(module, FairscaleFSDP):
            module._lazy_init()
    return model


WRAPPERS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "FSDP2": in_fsdp2,
    "FSDP1": in_fsdp1,
    "fairscale": in_fairscale,
    "DDP": lambda units: DistributedDataParallel(nn.Sequential(*units)),
    "HSDP": in_hsdp,
    "FSDP2 and tensor parallel": in_tensor_parallel,
    "no wrapper": lambda units: nn.Sequential(*units),
    "FSDP2, Views": in_fsdp2,
}


def trained(wrapper: str, num_params: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    units = [nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(10))) for _ in range(num_params // 10)]
    model = WRAPPERS[wrapper](list(units))
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    return model, optim


def counted(call: Callable[[], Any]) -> int:
    profile = cProfile.Profile()
    profile.enable()
    try:
        call()
    finally:
        profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def calls_of(wrapper: str, num_params: int, path: str, handles: list[Any]) -> dict[str, Callable[[], Any]]:
    model, optim = trained(wrapper, num_params)
    views = VIEWS if wrapper.endswith("Views") else []
    save, load, call = SaveOptions(views=views), LoadOptions(views=views), CallOptions(views=views)

    def stall() -> None:
        handles.append(fsdp_optim.async_save(f"{path}-async", model, optim, overwrite=True, options=save))

    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: fsdp_optim.save(path, model, optim, overwrite=True, options=save),
        "load": lambda: fsdp_optim.load(path, model, optim, options=load),
        "gather": lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, options=call),
        "stall": stall,
    }
    if wrapper == "FSDP2":
        calls["save of DCP"] = lambda: fsdp_optim.save(f"{path}-dcp", model, optim, overwrite=True, format="dcp")
        calls["load of DCP"] = lambda: fsdp_optim.load(f"{path}-dcp", model, optim)
        weights, state = dcp.get_state_dict(model, optim)
        calls["set_state_dict"] = lambda: dcp.set_state_dict(
            model, optim, model_state_dict=weights, optim_state_dict=state
        )
    return calls


def count(wrapper: str, folder: str) -> dict[str, list[int]]:
    """The calls of each call of the library, with few and with many parameters, in the second round."""
    with fairscale_on_cpu():
        return _counted(wrapper, folder)


def _counted(wrapper: str, folder: str) -> dict[str, list[int]]:
    counts: dict[str, list[int]] = {}
    for num_params in (FEW, MANY):
        handles: list[Any] = []
        calls = calls_of(wrapper, num_params, f"{folder}/{num_params}", handles)
        for is_second in (False, True):
            for name, call in calls.items():
                if is_second:
                    counts.setdefault(name, []).append(counted(call))
                else:
                    call()
                while handles:
                    handles.pop().wait()
    return counts


class CallsTest(unittest.TestCase):
    @parameterized.expand(list(MOST))
    def test_calls_per_value(self, wrapper: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_on_ranks(count, WORLDS.get(wrapper, 2), wrapper, folder)
        for name, most in MOST[wrapper].items():
            values = VALUES * (MANY - FEW) * (PARTS if wrapper.endswith("Views") else 1)
            slopes = [(counts[name][1] - counts[name][0]) / values for counts in by_rank]
            with self.subTest(name):
                self.assertLess(max(slopes), most)
