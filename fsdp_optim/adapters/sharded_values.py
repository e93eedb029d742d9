"""Values of a sharded optimizer dict as torch makes them: DTensor (FSDP2) and ShardedTensor (FSDP1)."""

from __future__ import annotations

import sys
from typing import Any

import torch

from fsdp_optim.adapters import dtensor
from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import Block, Box, Boxes, Placement
from fsdp_optim.memory import flatten

_SHARDED_MODULE = "torch.distributed._shard.sharded_tensor"


def is_sharded_value(value: object) -> bool:
    """Whether a state value is spread over ranks."""
    return dtensor.is_dtensor(value) or _is_sharded_tensor(value)


def read_sharded_value(fqn: str, value: Any) -> tuple[Placement, torch.Tensor]:
    """Where a value lives, and this rank's elements of it as a 1-D tensor."""
    if dtensor.is_dtensor(value):
        placement = dtensor.placement_of(fqn, tuple(value.shape), value.device_mesh, value.placements)
        return placement, flatten(value.to_local())
    if not _is_sharded_tensor(value):
        raise WrapperError(f"{fqn}: a {type(value).__name__} is not spread over ranks")
    shape = tuple(value.size())
    by_rank: dict[int, list[Block]] = {}
    for shard in value.metadata().shards_metadata:
        rank = shard.placement.rank()  # a global one, also off the default group
        blocks = by_rank.setdefault(rank, [])
        box = Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes))
        if box.numel:
            blocks.append(Block(box, sum(block.box.numel for block in blocks)))
    local = [flatten(shard.tensor) for shard in value.local_shards()]
    flat = (
        torch.cat(local) if len(local) > 1 else local[0] if local else torch.empty(0, dtype=value.dtype, device="cpu")
    )
    return Boxes(shape, tuple((rank, tuple(blocks)) for rank, blocks in sorted(by_rank.items()))), flat


def _is_sharded_tensor(value: object) -> bool:
    module = sys.modules.get(_SHARDED_MODULE)
    return module is not None and isinstance(value, module.ShardedTensor)
