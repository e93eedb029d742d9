"""Tensors that describe their own shards, as torch.distributed.checkpoint asks for it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

import torch

from fsdp_optim.adapters.base import Adapter
from fsdp_optim.adapters.tree import ModuleTree
from fsdp_optim.layout import Block, Box, Boxes, Placement, Ranks
from fsdp_optim.memory import flatten
from fsdp_optim.view import Handle

_SHARDED_MODULE = "torch.distributed._shard.sharded_tensor"


class CheckpointableAdapter(Adapter):
    """ShardedTensor, as torch FSDP1 makes them in sharded dicts."""

    name = "ShardedTensor"

    def is_present(self) -> bool:
        return _SHARDED_MODULE in sys.modules

    def rank_sets(self, tree: ModuleTree) -> Iterable[Ranks]:
        return ()

    def handles(self, tree: ModuleTree, ranks: tuple[int, ...], claimed: Collection[int]) -> Iterable[Handle]:
        return ()

    def is_sharded_value(self, value: torch.Tensor) -> bool:
        return isinstance(value, sys.modules[_SHARDED_MODULE].ShardedTensor)

    def read_sharded_value(self, fqn: str, value: Any) -> tuple[Placement, torch.Tensor]:
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
            torch.cat(local)
            if len(local) > 1
            else local[0]
            if local
            else torch.empty(0, dtype=value.dtype, device="cpu")
        )
        return Boxes(shape, tuple((rank, tuple(blocks)) for rank, blocks in sorted(by_rank.items()))), flat
