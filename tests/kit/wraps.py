"""The nine wrappers, and the models in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

WORLD_SIZES = (1, 2, 3, 4)


def wrap_units(model: nn.Module, wrap: Callable[[nn.Module], Any], paths: Sequence[str] | None = None) -> Any:
    """Wrap the modules at these paths, inner ones first as they are listed; "" is the model itself."""
    for path in getattr(model, "units", ("",)) if paths is None else paths:
        if not path:
            return wrap(model)
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, wrap(model.get_submodule(path)))
    return model


def in_fairscale(model: nn.Module, **kwargs: Any) -> Any:
    from fsdp_optim.fairscale import (
        FullyShardedDataParallel as FairscaleFSDP,  # here, so that the others need no fairscale
    )

    return wrap_units(model, lambda module: FairscaleFSDP(module, **kwargs))


def in_fsdp1(model: nn.Module, **kwargs: Any) -> Any:
    options = {"device_id": torch.device("cpu"), "use_orig_params": False, **kwargs}
    return wrap_units(model, lambda module: TorchFSDP(module, **options))


def in_fsdp2(model: nn.Module, mesh: DeviceMesh | None = None, **kwargs: Any) -> Any:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    return wrap_units(model, lambda module: fully_shard(module, mesh=mesh, **kwargs))


def in_hsdp(model: nn.Module, shape: tuple[int, int], **kwargs: Any) -> Any:
    return in_fsdp2(model, mesh_2d(shape), **kwargs)


def in_fsdp2_over_tp(model: nn.Module, shape: tuple[int, int], **kwargs: Any) -> Any:
    mesh = mesh_2d(shape, ("dp", "tp"))
    parallelize_module(model, mesh["tp"], dict(model.tensor_parallel))
    return in_fsdp2(model, mesh["dp"], **kwargs)


def in_ddp(model: nn.Module, **kwargs: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model, **kwargs)


def mesh_2d(shape: tuple[int, int], names: tuple[str, str] = ("replicate", "shard")) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def fsdp1_hybrid(shape: tuple[int, int], strategy: ShardingStrategy, orig: bool) -> Callable[[nn.Module], Any]:
    return lambda model: in_fsdp1(model, device_mesh=mesh_2d(shape), sharding_strategy=strategy, use_orig_params=orig)


def fsdp1_hybrid_groups(model: nn.Module) -> Any:
    """HYBRID_SHARD over two process groups; the shards of a replica are not neighbours: ranks 0, 2 and 1, 3."""
    rank = dist.get_rank()
    within = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    across = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    return in_fsdp1(model, process_group=(within, across), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


_HSDP_SHAPES = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}
_TP_SHAPES = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2)}

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "fairscale flat": in_fairscale,
    "fairscale non-flat": lambda model: in_fairscale(model, flatten_parameters=False),
    "FSDP1 flat": in_fsdp1,
    "FSDP1 orig": lambda model: in_fsdp1(model, use_orig_params=True),
    "FSDP2": in_fsdp2,
    "HSDP": lambda model: in_hsdp(model, _HSDP_SHAPES[dist.get_world_size()]),
    "FSDP2 x TP": lambda model: in_fsdp2_over_tp(model, _TP_SHAPES[dist.get_world_size()]),
    "DDP": in_ddp,
    "plain": lambda model: model,
}


def fsdp1_unit(module: nn.Module, orig: bool = True) -> Any:
    return TorchFSDP(module, device_id=torch.device("cpu"), use_orig_params=orig)


def fsdp2_unit(module: nn.Module) -> Any:
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
