"""Functions for ranks that several files about fsdp_optim.testing share."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def blocks() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def nested(model: nn.Sequential, **kwargs: Any) -> nn.Module:
    """One unit for each of the first two Linears, one (the root) for the rest."""
    from fairscale.nn import FullyShardedDataParallel

    class Subclass(FullyShardedDataParallel):  # type: ignore[misc]
        """A wrapper of a user's own must work as well."""

    inner = [FullyShardedDataParallel(model[0], **kwargs), model[1], Subclass(model[2], **kwargs), *model[3:]]
    return Subclass(nn.Sequential(*inner), **kwargs)


def rank_and_size() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()
