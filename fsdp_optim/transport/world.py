"""The world of this rank: torch.distributed's, a world that a program has entered, or this process alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_optim.errors import WrapperError
from fsdp_optim.plan import Plans
from fsdp_optim.transport.base import RankGroup, World
from fsdp_optim.transport.collective import CollectiveTransport
from fsdp_optim.transport.job.job_store import JobStore, rendezvous_store
from fsdp_optim.transport.job.leaving import Leaving
from fsdp_optim.transport.job.pulse import Pulse
from fsdp_optim.transport.store_control import StoreControl
from fsdp_optim.transport.turns import Turns

_entered: ContextVar[World | None] = ContextVar("entered", default=None)


class _LastingState:
    """The objects that a rank keeps from call to call. It connects to the store of the job when it is first used."""

    def __init__(self, rank: int, size: int) -> None:
        self.turns, self.plans = Turns(), Plans()
        leaving = Leaving()
        self.calls, self.board = JobStore(rendezvous_store, leaving), JobStore(rendezvous_store, leaving)
        self.pulse = Pulse(self.board, rank, size)


_lasting_states: WeakKeyDictionary[dist.ProcessGroup, _LastingState] = WeakKeyDictionary()
"""By torch.distributed's default group, with which the state is dropped."""


def world_here() -> World:
    """Return the world that this thread has entered; else torch.distributed's world, which may have a single rank."""
    return _entered.get() or TorchWorld()


@contextlib.contextmanager
def entered(world: World) -> Iterator[None]:
    """Make this thread's calls inside the context calls of a rank of `world`."""
    token = _entered.set(world)
    try:
        yield
    finally:
        _entered.reset(token)


class TorchWorld(World):
    """The ranks of torch.distributed, or one rank where it is not initialized."""

    def __init__(self) -> None:
        self.is_initialized = dist.is_initialized()
        self.rank = dist.get_rank() if self.is_initialized else 0
        self.size = dist.get_world_size() if self.is_initialized else 1
        self.process_group = dist.group.WORLD if self.is_initialized else None
        kept = _lasting_states.get(self.process_group) if self.process_group is not None else None
        if kept is None:
            kept = _LastingState(self.rank, self.size)
            if self.process_group is not None:
                kept = _lasting_states.setdefault(self.process_group, kept)
        self.turns, self.plans, self.board, self.pulse = kept.turns, kept.plans, kept.board, kept.pulse
        self.control = StoreControl(kept.calls, kept.board)
        self.transport = CollectiveTransport()

    def ranks_of(self, process_group: Any) -> tuple[int, ...]:
        """Return the ranks as `World.ranks_of` says."""
        if not isinstance(process_group, dist.ProcessGroup):
            name = "GroupMember.NON_GROUP_MEMBER" if isinstance(process_group, int) else repr(process_group)
            raise WrapperError(
                f"process_group must be a process group that rank {self.rank} is in, or None, not {name} (new_group() gives "
                "GroupMember.NON_GROUP_MEMBER to ranks that are not in the new group: these do not make the call)"
            )
        return tuple(dist.get_process_group_ranks(process_group))

    def group_rank(self, process_group: Any) -> int:
        """Return the group rank as `World.group_rank` says."""
        return dist.get_rank(process_group) if self.is_initialized else 0


class _SingleRankWorld(TorchWorld):
    """A world with the single rank 0, whatever torch.distributed says."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = 0, 1


def alone(call: str) -> RankGroup:
    """Return a group of this process alone, for calls that do not concern other ranks."""
    return _SingleRankWorld().group(call, (0,))
