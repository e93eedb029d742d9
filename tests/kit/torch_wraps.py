"""Models in torch's wrappers that several files share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import (
    fully_shard,
)

# ------------------------------------------------------------------------------------------- names


def fsdp1_unit(module: nn.Module, orig: bool = True) -> Any:
    return TorchFSDP(module, device_id=torch.device("cpu"), use_orig_params=orig)


def fsdp2_unit(module: nn.Module) -> Any:
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


# ------------------------------------------------------------------------------------------- tied parameters


def local(value: Any) -> Any:
    """DTensors as this rank's part."""
    if isinstance(value, Tensor):
        return value.to_local() if hasattr(value, "to_local") else value
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    return [local(item) for item in value] if isinstance(value, list) else value
