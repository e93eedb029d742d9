"""A state value that is made for a DTensor parameter is the DTensor that torch's own `from_local` makes."""

from __future__ import annotations

import unittest

import torch
from kit.compare import check_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_optim.adapters import ModelReader
from fsdp_optim.testing import run_on_ranks


def form(value: torch.Tensor) -> dict[str, object]:
    """What torch's operations look at, and the elements."""
    assert isinstance(value, DTensor)
    meta = value._spec.tensor_meta
    local = value.to_local()
    return {
        "class": type(value),
        "mesh": value.device_mesh,
        "placements": value.placements,
        "shape": tuple(value.shape),
        "stride": value.stride(),
        "dtype": value.dtype,
        "requires_grad": value.requires_grad,
        "is_leaf": value.is_leaf,
        "recorded": (tuple(meta.shape), tuple(meta.stride), meta.dtype) if meta is not None else None,
        "local": local.tolist(),
        "local stride": local.stride(),
        "doubled": (value + value).full_tensor().tolist(),
    }


def check_forms() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1, bias=False))
    fully_shard(model, mesh=mesh)
    columns = nn.Parameter(distribute_tensor(torch.arange(12.0).view(4, 3).t().contiguous().t(), mesh, [Shard(1)]))
    model.columns, model.copies = columns, nn.Parameter(distribute_tensor(torch.arange(3.0), mesh, [Replicate()]))
    for named in ModelReader(model).read().handles:
        handle, param = named.handle, named.handle.param
        for dtype in (torch.float32, torch.bfloat16):
            flat = torch.arange(handle.local_numel, dtype=dtype)
            made = handle.from_local(flat.clone())
            local = torch.empty_like(param.to_local(), dtype=dtype)
            local.copy_(flat.view(local.shape))
            like = DTensor.from_local(
                local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
            check_same(f"{named.fqns[0]} in {dtype}", form(made), form(like))
        weights = handle.weights()
        check_same(f"weights of {named.fqns[0]}", form(weights), form(param.detach()))
        if weights.to_local().data_ptr() != param.to_local().data_ptr() or weights.requires_grad:
            raise AssertionError(f"{named.fqns[0]}: weights() is no detached view of the parameter")


class FormsTest(unittest.TestCase):
    def test_forms(self) -> None:
        run_on_ranks(check_forms, 2)
