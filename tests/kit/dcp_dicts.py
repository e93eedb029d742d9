"""The comparison of the dicts of torch.distributed.checkpoint, with the cuts of their values."""

from __future__ import annotations

from typing import Any

from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from kit.compare import check_same


def plain(value: Any) -> Any:
    """A tree in which sharded tensors are what they say of themselves, with their local elements."""
    if isinstance(value, DTensor):
        return (
            "DTensor",
            str(value.placements),
            str(value.device_mesh),
            tuple(value.shape),
            value.stride(),
            value.to_local(),
        )
    if isinstance(value, ShardedTensor):
        shards = [(str(shard.metadata), shard.tensor) for shard in value.local_shards()]
        return "ShardedTensor", tuple(value.size()), [str(shard) for shard in value.metadata().shards_metadata], shards
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)([plain(item) for item in value]) if type(value) in (list, tuple) else value


def check_alike(what: str, got: Any, wanted: Any) -> None:
    check_same(what, plain(got), plain(wanted), in_order=False)
