"""Who makes a collective call: its ranks, and what carries their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fsdp_optim.errors import WrapperError
from fsdp_optim.memory import Budget
from fsdp_optim.options import BUCKET_NBYTES, DEFAULT_TIMEOUT
from fsdp_optim.transport.turns import Turn, turns

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class RankGroup:
    """The global ranks that make a call together, sorted, and the process group that carries their messages.

    `group` None: the default group carries them, also between some of its ranks only. `timeout`: seconds. `bucket_nbytes`:
    what a rank may hold beyond what it keeps, the same on all of them. `turn`: this call among those of the process.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None
    timeout: float = DEFAULT_TIMEOUT
    bucket_nbytes: int = BUCKET_NBYTES
    turn: Turn = field(default_factory=lambda: Turn("a call", ()), compare=False)

    def __post_init__(self) -> None:
        if self.rank not in self.ranks:
            raise WrapperError(f"rank {self.rank} is not one of the ranks {list(self.ranks)} that make this call")

    @classmethod
    def of(
        cls,
        call: str,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        bucket_nbytes: int = BUCKET_NBYTES,
    ) -> RankGroup:
        """`call`: the name of the public function that they make."""
        inside = tuple(sorted(ranks))
        return cls(inside, rank, group, timeout, bucket_nbytes, Turn(call, inside, group))

    @property
    def budget(self) -> Budget:
        """What a rank may hold beyond what it keeps, while this call moves data."""
        return Budget(self.bucket_nbytes)

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

    @property
    def is_alone(self) -> bool:
        """Whether this is the only call in flight on this process."""
        return len(turns.of(dist.group.WORLD)) <= 1

    def store(self) -> Store:
        """The rendezvous store of the job: where any of its ranks can meet without a collective call.

        Not that of `group`: ranks that are given different groups, or only some of them one, have to find each other to be
        told so.
        """
        world = dist.group.WORLD
        if world is None:
            raise WrapperError("torch.distributed is not initialized, and this model lives on several ranks")
        if hasattr(world, "get_group_store"):
            return world.get_group_store()
        return dist.distributed_c10d._get_process_group_store(world)  # torch < 2.8 has no public way
