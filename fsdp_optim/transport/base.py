"""The protocols between ranks: a `Control` lets ranks agree, a `Transport` moves their bytes, a `World` has one of each.

All other rooms use a `RankGroup`: the ranks of one call, with their World.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from fsdp_optim.errors import WrapperError
from fsdp_optim.options import BUCKET_NBYTES, DEFAULT_TIMEOUT
from fsdp_optim.plan import Copy, Plans
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.job.job_store import JobStore
from fsdp_optim.transport.job.pulse import Pulse
from fsdp_optim.transport.turns import Turn, Turns
from fsdp_optim.transport.verdict import Statement, Verdict


class Control(Protocol):
    """How the ranks of a job agree; the basis of `agree`, `all_equal` and `all_gather_bytes` (`agree.py`).

    The order of calls, on every rank of a group: `meet`, equally often on each, by one thread at a time. A meeting
    never hangs: it ends when the last rank has come, when a rank has come with a fatal error, or when the timeout of the
    group is over. Then all ranks that came get the same verdict, even if other ranks are missing. `claim` and `release` are
    called at any time, by any rank. `kit.control_conformance` of the tests proves a control.
    """

    def meet(self, group: RankGroup, statement: Statement) -> Verdict:
        """Come to the next meeting of these ranks, and wait until it ends.

        The other ranks learn of a rank's error when all ranks have come, or at once where the error is fatal. A rank that comes
        at another step than the first rank counts as a rank with an error. A waiting rank looks for missing ranks that wait
        for this rank in another meeting, and logs a warning after half a minute. The resources of a meeting are freed when the
        next meeting of the same ranks has ended. A rank that comes too late finds itself among `missing`; where the others
        are in a later meeting already, the late rank joins that meeting. A KeyboardInterrupt or SystemExit of this rank during
        the meeting becomes its error, or the `interrupt` of its verdict where the others can no longer learn of it.
        """

    def claim(self, who: str, place: str) -> str:
        """Claim a place for `who`, and release the place that `who` had before. Returns the owner of the place."""

    def release(self, who: str, place: str) -> None:
        """Release a place, so that others can claim the place."""


class Item(NamedTuple):
    """One tensor to move: the copies of one state value of one parameter that this rank takes part in.

    Two ranks list the items in which both take part in the same order. `source` and `target` are this rank's 1-D local tensors,
    or None where the rank is not on that side; with copies to this rank, a `target` of None drops the elements.
    """

    copies: Sequence[Copy]
    dtype: torch.dtype
    source: torch.Tensor | None = None
    target: torch.Tensor | None = None


Send = Callable[[Failure], None]
"""The second half of an exchange, which sends and receives when all ranks are ready."""


class Transport(Protocol):
    """How bytes move between the ranks of a group.

    The order of calls, on every rank of a group: `empty` for memory that receives elements, then `prepare`; the ranks then
    agree that all of them are ready, and only then every rank calls the `Send` that `prepare` returned. `exchange` (`agree.py`)
    does the last three. The ranks agree again afterwards, before any rank reads the targets or changes the sources.
    `kit.transport_conformance` of the tests proves a transport.
    """

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised contiguous memory that peers may fill. Items may have targets from elsewhere too."""

    def prepare(self, group: RankGroup, items: Iterable[Item], failure: Failure, budget: Budget) -> Send:
        """Do everything that could fail, copy the elements that this rank sends to itself, and return the `Send` for the rest.

        An error is noted in `failure`; nothing is copied once `failure` has an error. Holds at most `budget`, which is equal on
        all ranks, beyond the items' own tensors. This method waits for no other rank.

        All ranks must call the returned `Send`, or none. `Send` raises nothing: an error is noted in its `failure`, and the rank
        continues, so that its peers finish. A peer that does not answer within the timeout of the group is named in a fatal
        RankError.
        """


class World(ABC):
    """The ranks of one job, seen from one rank, with the Control and the Transport that the ranks use.

    Kept from call to call: `turns`, the calls in flight; `plans`, this rank's plans of earlier calls; `board`, keys and
    values that the ranks share, for work in the background; `pulse`, the signs of life of this rank, on the board.
    """

    rank: int
    size: int
    control: Control
    transport: Transport
    turns: Turns
    plans: Plans
    board: JobStore
    pulse: Pulse
    is_initialized: bool = True
    process_group: Any = None
    """The process group of all ranks, which carries the messages of calls without `process_group`."""

    @abstractmethod
    def ranks_of(self, process_group: Any) -> tuple[int, ...]:
        """Return the ranks of a user's process group. Raises WrapperError for other values, and for groups without this rank."""

    @abstractmethod
    def group_rank(self, process_group: Any) -> int:
        """Return this rank's group rank in a process group (None: in the world); negative where this rank is not in the group."""

    def group(
        self,
        call: str,
        ranks: Sequence[int],
        process_group: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
        bucket_nbytes: int = BUCKET_NBYTES,
    ) -> RankGroup:
        """Return the group of the ranks that make a call. `call`: the name of the public function."""
        in_order = tuple(sorted(ranks))
        carrier = process_group if process_group is not None else self.process_group
        return RankGroup(self, in_order, process_group, timeout, bucket_nbytes, Turn(call, in_order, carrier))


@dataclass(frozen=True)
class RankGroup:
    """The global ranks that make a call together, sorted, and the process group that carries their messages.

    `process_group` None: the process group of the world carries the messages, even if only some of its ranks make the call.
    `timeout`: seconds. `bucket_nbytes`: the bytes that each rank may hold for temporary buffers. `turn`: this call among the
    calls of the process.
    """

    world: World
    ranks: tuple[int, ...]
    process_group: Any = None
    timeout: float = DEFAULT_TIMEOUT
    bucket_nbytes: int = BUCKET_NBYTES
    turn: Turn = field(default_factory=lambda: Turn("a call", ()), compare=False)

    def __post_init__(self) -> None:
        if self.rank not in self.ranks:
            raise WrapperError(f"rank {self.rank} is not one of the ranks {list(self.ranks)} that make this call")

    @property
    def rank(self) -> int:
        """This rank."""
        return self.world.rank

    @property
    def budget(self) -> Budget:
        """The memory that a rank may hold for temporary buffers while this call moves data."""
        return Budget(self.bucket_nbytes)

    @property
    def position(self) -> int:
        """The index of this rank among the ranks of the call."""
        return self.ranks.index(self.rank)

    @property
    def is_alone(self) -> bool:
        """Whether this is the only call in flight on this rank."""
        return len(self.world.turns.in_flight) <= 1
