"""Models whose DTensors are cut in another way than torch cuts: stand-ins for veScale's RaggedShard, and Megatron-FSDP's cut.

`RaggedShard` stands for veScale's class, which is in no package that installs: a placement with `dims` and `local_units`, as its
public description says (docs/texts/raggedshard.md of its repository), without its operations. What is cut by it, and the runs of
each rank, are computed here element by element.

Megatron-FSDP's own functions are in the package megatron-fsdp, whose wrapper needs a GPU. `in_buffer` cuts as it does: the
parameters lie one after the other in a buffer, of which each rank has an equal part that begins at a row, so that each DTensor is
`Shard(0)` with any number of rows. Its `update_uneven_dtensor_chunk_metadata` is called where the package is installed, and a
stand-in that does the same otherwise; `megatron_fsdp_slice` is what its wrapper sets on each parameter.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

HAS_MEGATRON = importlib.util.find_spec("megatron_fsdp") is not None


@dataclass(frozen=True)
class RaggedShard(Placement):
    """A stand-in for veScale's placement: consecutive runs of the flattened tensor, in proportion to `local_units`."""

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__init__()  # a class of C++ since torch 2.10, which would crash without it


@dataclass(frozen=True)
class StridedRaggedShard(RaggedShard):
    """A stand-in for veScale's `_StridedRaggedShard`."""

    split_factor: int = 2


def dtensor(local: Tensor, mesh: DeviceMesh, spec: Sequence[Placement], whole: Tensor) -> Any:
    return DTensor.from_local(local, mesh, spec, run_check=False, shape=whole.shape, stride=whole.contiguous().stride())


def replace_params(model: nn.Module, make: Callable[[Tensor, int], nn.Parameter]) -> nn.Module:
    for number, (name, param) in enumerate(list(model.named_parameters())):
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._parameters[attribute] = make(param.detach(), number)
    return model


def units_for(shape: Sequence[int], number: int, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(dims, units): rows, single elements, or the complete tensor on one rank; uneven, and some ranks with none."""
    dims = tuple(range(min((number % 3), len(shape))))
    total = math.prod(shape[: len(dims)]) if dims else 1
    if not total:
        return dims, (1,) * ranks
    units = [0] * ranks
    for unit in range(total):
        units[
            (unit * unit + number) % ranks if total < 4 else min(unit * unit * ranks // (total * total), ranks - 1)
        ] += 1
    return dims, tuple(units)


def run_of(units: Sequence[int], place: int, numel: int) -> slice:
    unit = numel // sum(units)
    return slice(sum(units[:place]) * unit, sum(units[: place + 1]) * unit)


def in_ragged(model: nn.Module) -> nn.Module:
    """Every parameter cut by a RaggedShard of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def make(whole: Tensor, number: int) -> nn.Parameter:
        dims, units = units_for(whole.shape, number, mesh.size())
        local = whole.reshape(-1)[run_of(units, dist.get_rank(), whole.numel())].clone()
        return nn.Parameter(dtensor(local, mesh, [RaggedShard(dims, units)], whole))

    return replace_params(model, make)


def in_ragged_replicas(model: nn.Module) -> nn.Module:
    """As `in_ragged` over the second dimension of a mesh, with replicas over the first."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))

    def make(whole: Tensor, number: int) -> nn.Parameter:
        dims, units = units_for(whole.shape, number, mesh.size(1))
        local = whole.reshape(-1)[run_of(units, mesh.get_local_rank(1), whole.numel())].clone()
        return nn.Parameter(dtensor(local, mesh, [Replicate(), RaggedShard(dims, units)], whole))

    return replace_params(model, make)


def in_ragged_over_tp(model: nn.Module) -> nn.Module:
    """As `in_ragged` over the first dimension of a mesh, of what tensor parallel over the second one leaves on a rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))

    def make(whole: Tensor, number: int) -> nn.Parameter:
        cuts: list[Placement] = [Replicate()]
        part = whole
        for dim, size in enumerate(whole.shape):
            if size % 2 == 0 and size and isinstance(cuts[0], Replicate):
                cuts, part = [Shard(dim)], whole.chunk(2, dim)[mesh.get_local_rank(1)]
        dims, units = units_for(part.shape, number, mesh.size(0))
        local = part.reshape(-1)[run_of(units, mesh.get_local_rank(0), part.numel())].clone()
        return nn.Parameter(dtensor(local, mesh, [RaggedShard(dims, units), *cuts], whole))

    return replace_params(model, make)


def rows_of(shapes: Sequence[Sequence[int]], ranks: int) -> list[list[tuple[int, int]]]:
    """Of each parameter, the rows [start, stop) of each rank, as a buffer gives them that is cut evenly, between rows."""
    total, at, rows = sum(map(math.prod, shapes)), 0, []
    for shape in shapes:
        row = math.prod(shape[1:])
        bounds = [
            min(max(-(-(rank * total // ranks - at) // row), 0), shape[0]) if row and shape else 0
            for rank in range(ranks)
        ]
        rows.append(list(zip(bounds, [*bounds[1:], shape[0]], strict=True)))
        at += math.prod(shape)
    return rows


def tell_chunks(param: Any, rows: Sequence[tuple[int, int]], place: int) -> None:
    """What Megatron-FSDP's update_uneven_dtensor_chunk_metadata does; on all ranks."""
    if HAS_MEGATRON:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that it would like to have
            from megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata
        update_uneven_dtensor_chunk_metadata(param)
        return
    local = param._local_tensor
    chunk = ChunkStorageMetadata(torch.Size([rows[place][0], *[0] * (local.dim() - 1)]), local.shape)
    local.__create_chunk_list__ = lambda: [chunk]


def in_buffer(model: nn.Module, *, tells: str = "chunks", replicas: int = 1) -> nn.Module:
    """Parameters cut as Megatron-FSDP cuts. `tells`: how they say which rows they have: "chunks", "slices", or "nothing"."""
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", shape if replicas > 1 else shape[1:])
    spec: list[Placement] = [Replicate(), Shard(0)] if replicas > 1 else [Shard(0)]
    place = mesh.get_local_rank(mesh.ndim - 1)
    rows = rows_of([param.shape for param in model.parameters()], mesh.size(mesh.ndim - 1))

    def make(whole: Tensor, number: int) -> nn.Parameter:
        start, stop = rows[number][place]
        param = nn.Parameter(dtensor(whole[start:stop].clone(), mesh, spec, whole))
        if tells == "chunks":
            tell_chunks(param, rows[number], place)
        elif tells == "slices":
            row = math.prod(whole.shape[1:])
            param.megatron_fsdp_slice = slice(start * row, stop * row)  # type: ignore[attr-defined]
            param.orig_param = nn.Parameter(torch.empty_like(whole))  # type: ignore[attr-defined]
        param.without_gradient = not param.to_local().numel()  # type: ignore[attr-defined]  # as Megatron-FSDP has it
        return param

    return replace_params(model, make)


def in_chunk_lists(model: nn.Module) -> nn.Module:
    return in_buffer(model)


def in_slices(model: nn.Module) -> nn.Module:
    return in_buffer(model, tells="slices")


def in_replicated_buffers(model: nn.Module) -> nn.Module:
    return in_buffer(model, replicas=2)


UNEVEN: dict[str, tuple[Callable[[nn.Module], nn.Module], Sequence[int]]] = {
    "RaggedShard": (in_ragged, (4, 3, 2, 1)),
    "RaggedShard, replicas": (in_ragged_replicas, (4, 2)),
    "RaggedShard over TP": (in_ragged_over_tp, (4, 2)),
    "Megatron-FSDP, chunk lists": (in_chunk_lists, (4, 3, 2, 1)),
    "Megatron-FSDP, slices": (in_slices, (4, 3, 2, 1)),
    "Megatron-FSDP, replicas": (in_replicated_buffers, (4, 2)),
}
"""Wrap, and the world sizes that it can have."""
