"""The rendezvous store of the job, which every process group has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from fsdp_optim.errors import WrapperError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def rendezvous_store() -> Store:
    """Return the store in which any ranks of the job can meet without a collective call.

    The store of a user's process group would not do: ranks with different values of `process_group=` must find each other,
    so that all of them raise the error.

    Raises WrapperError where torch.distributed is not initialized.
    """
    world = dist.group.WORLD
    if world is None:
        raise WrapperError("torch.distributed is not initialized, and this model lives on several ranks")
    if hasattr(world, "get_group_store"):
        return world.get_group_store()
    return dist.distributed_c10d._get_process_group_store(world)  # torch < 2.8 has no public way
