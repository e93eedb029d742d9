"""Trees of tensors that are cut over ranks in many ways, with other elements in them, and complete again."""

from __future__ import annotations

from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def numbers(*shape: int, first: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Distinct elements, so that one in a wrong place shows."""
    count = int(numpy.prod(shape, dtype=int))
    return torch.arange(first, first + count).to(dtype).reshape(shape)


FULL = {
    "rows": numbers(7, 5),
    "columns": numbers(3, 10, first=100),
    "short_rows": numbers(50, 6, first=1000, dtype=torch.int64),
    "grid": numbers(9, 8, first=200),
    "uneven": numbers(2, 3, first=300),
    "empty": numbers(0, 4),
    "copies": numbers(5, first=400),
    "half": numbers(6, 2, first=500, dtype=torch.bfloat16),
    "scalar": torch.tensor(7.5),
    "flags": torch.tensor([True, False, True]),
    "strided": numbers(4, 6, first=600).t(),
}


def meshes() -> tuple[Any, Any]:
    """A mesh of one dimension, and one of two."""
    size = dist.get_world_size()
    return init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))


def cut(flat: Any, grid: Any, *, other: bool = False) -> dict[str, Any]:
    """Each of FULL, cut over meshes of one and two dimensions; `other`: cut in other ways."""
    ways: dict[str, tuple[Any, list[Any]]] = {
        "rows": (flat, [Shard(1) if other else Shard(0)]),
        "columns": (grid, [Shard(0), Replicate()] if other else [Replicate(), Shard(1)]),
        "short_rows": (flat, [Shard(0) if other else Shard(1)]),
        "grid": (grid, [Shard(1), Shard(0)] if other else [Shard(0), Shard(1)]),
        "uneven": (flat, [Shard(0)]),
        "empty": (flat, [Shard(0)]),
        "half": (flat, [Replicate() if other else Shard(0)]),
    }
    return {
        name: distribute_tensor(full.clone(), *ways[name]) if name in ways else full.clone()
        for name, full in FULL.items()
    }


def sharded(full: torch.Tensor) -> ShardedTensor:
    """A ShardedTensor as FSDP1 without a mesh has it: rows in equal chunks, none on the last ranks where they are few."""
    rank, step = dist.get_rank(), -(-full.shape[0] // dist.get_world_size())
    part = full[rank * step : (rank + 1) * step].clone()
    offsets = [rank * step, *[0] * (full.dim() - 1)]
    shards = [LocalShard.from_tensor_and_offsets(part, offsets, rank)] if len(part) else []
    return init_from_local_shards(shards, *full.shape)


def emptied(tree: Any) -> Any:
    """The same tree with other elements in its tensors."""
    if isinstance(tree, ShardedTensor):
        return sharded(torch.full(tuple(tree.shape), -1, dtype=tree.dtype))
    if isinstance(tree, torch.Tensor):
        return tree.logical_not() if tree.dtype is torch.bool else torch.full_like(tree, -1)
    if isinstance(tree, dict):
        return type(tree)((key, emptied(item)) for key, item in tree.items())
    return type(tree)([emptied(item) for item in tree]) if isinstance(tree, (list, tuple)) else tree


def complete(tree: Any) -> Any:
    """The same tree with unsharded tensors. Called by all ranks."""
    if isinstance(tree, dict):
        return {key: complete(item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([complete(item) for item in tree])
    if isinstance(tree, ShardedTensor):
        return _gathered(tree)
    return tree.full_tensor() if isinstance(tree, DTensor) else tree


def _gathered(tree: ShardedTensor) -> torch.Tensor:
    own = [(shard.metadata.shard_offsets, shard.tensor) for shard in tree.local_shards()]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    full = torch.empty(tuple(tree.shape), dtype=tree.dtype)
    for offsets, part in (pair for pairs in parts for pair in pairs):
        where = tuple(slice(start, start + num) for start, num in zip(offsets, part.shape, strict=True))
        full[where] = part
    return full
