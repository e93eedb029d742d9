"""Models with experts that only some groups of ranks have, and their wrapping and training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard

import fsdp_optim
import fsdp_optim.fairscale
from kit.optimizers import adam
from kit.trained import Oracle, Trained


class Experts(nn.Module):
    """A trunk, experts, a head."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(num))
        self.head = nn.Linear(3, 2)


class OwnExperts(Experts):
    """The part of the model on one rank: its experts have the values of the same experts in the whole model."""

    mine: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__(len(self.mine))


def global_name(expert_ids: tuple[int, ...], name: str) -> str:
    parts = name.split(".")
    if "experts" in parts:
        place = parts.index("experts") + 1
        parts[place] = str(expert_ids[int(parts[place])])
    return ".".join(parts)


def expert_wrap(kind: str, group_ranks: tuple[int, ...]) -> Callable[[Any], Any]:
    """Wrap each expert on its own ranks, and the rest of the model on all ranks."""
    per_group = len(group_ranks)
    members = [list(range(i, i + per_group)) for i in range(0, dist.get_world_size(), per_group)]
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    place = dist.get_rank() // per_group
    group = [dist.new_group(ranks) for ranks in members][place]
    # One mesh of all ranks, cut: torch names a group made by some of the ranks by its ranks, and a second one of the same
    # name can meet the first one's addresses in the store.
    grid = init_device_mesh("cpu", (len(members), per_group), mesh_dim_names=("groups", "shards"))
    mesh = grid["shards"]

    def wrap(model: Any) -> Any:
        for index, expert in enumerate(model.experts):
            if kind == "FSDP2":
                fully_shard(expert, mesh=mesh)
            elif kind == "fairscale":
                model.experts[index] = fsdp_optim.fairscale.FullyShardedDataParallel(expert, process_group=group)
            else:
                model.experts[index] = TorchFSDP(
                    expert, process_group=group, device_id=torch.device("cpu"), use_orig_params="orig" in kind
                )
        if kind == "FSDP2":
            return fully_shard(model, mesh=everyone)
        if kind == "fairscale":
            return fsdp_optim.fairscale.FullyShardedDataParallel(model)
        return TorchFSDP(model, device_id=torch.device("cpu"), use_orig_params="orig" in kind)

    return wrap


def train_experts(
    kind: str, expert_ids: tuple[int, ...], ranks: tuple[int, ...], oracle: Oracle, steps: int
) -> Trained:
    """The values and gradients of this rank's parts, taken from the whole model."""
    wrap = expert_wrap(kind, ranks)

    def number_and_wrap(model: nn.Module) -> Any:
        for name, param in model.named_parameters():
            start = oracle.numbers.start[global_name(expert_ids, name)]
            param.data = torch.arange(start, start + param.numel(), dtype=torch.float32).reshape(param.shape)
        return wrap(model)

    class Mine(OwnExperts):
        pass

    Mine.mine = expert_ids
    trained = Trained.__new__(Trained)
    model = number_and_wrap(Mine())
    trained.numbers = oracle.numbers
    trained.adopt(model, adam)
    trained.step(range(steps))
    return trained
