"""Who makes a collective call: its ranks, and what carries their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fsdp_optim.errors import WrapperError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BUCKET_NBYTES = 64 << 20
"""Bytes that a rank may hold beyond what it keeps, while a call moves data."""

DEFAULT_TIMEOUT = 600.0
"""Seconds that ranks wait for each other before the missing ones are named."""


@dataclass(frozen=True)
class Callers:
    """The global ranks that make a call together, sorted, and the process group that carries their messages.

    `group` None: the default group carries them, also between some of its ranks only. `timeout`: seconds. `bucket_nbytes`:
    what a rank may hold beyond what it keeps, the same on all of them.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None
    timeout: float = DEFAULT_TIMEOUT
    bucket_nbytes: int = BUCKET_NBYTES

    def __post_init__(self) -> None:
        if self.rank not in self.ranks:
            raise WrapperError(f"rank {self.rank} is not one of the ranks {list(self.ranks)} that make this call")

    @classmethod
    def of(
        cls,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        timeout: float | timedelta | None,
        bucket_nbytes: int = BUCKET_NBYTES,
    ) -> Callers:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        return cls(tuple(sorted(ranks)), rank, group, DEFAULT_TIMEOUT if seconds is None else seconds, bucket_nbytes)

    @property
    def position(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def wire(self) -> torch.device:
        """The device whose memory the group's messages come from: the CPU wherever the backend takes it."""
        backends = str(dist.get_backend_config(self.group))
        if "cpu:" in backends or "cuda:" not in backends:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def store(self) -> Store:
        """The rendezvous store of the group: where its ranks can meet without a collective call."""
        group = self.group if self.group is not None else dist.group.WORLD
        if group is None:
            raise WrapperError("torch.distributed is not initialized, and this model lives on several ranks")
        if hasattr(group, "get_group_store"):
            return group.get_group_store()
        return dist.distributed_c10d._get_process_group_store(group)  # torch < 2.8 has no public way
