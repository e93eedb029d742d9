"""The seams between ranks: a `Control` lets them agree, a `Transport` moves their bytes, and a `World` says which are used.

Everything above this room uses a `RankGroup`: the ranks of one call, with what they agree and move by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from fsdp_optim.errors import WrapperError
from fsdp_optim.memory import Budget
from fsdp_optim.options import BUCKET_NBYTES, DEFAULT_TIMEOUT
from fsdp_optim.plan import Copy
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.turns import Turn, Turns
from fsdp_optim.transport.verdict import Statement, Verdict


class Control(Protocol):
    """How the ranks of a job agree. `agree`, `compare` and `tell` (`agree.py`) are made of it.

    The order of calls, on every rank of a group: `meet`, the same number of times on each, by one thread at a time. A meeting
    never hangs: it ends when the last rank has come, when a rank has come with a fatal error, or when the timeout of the
    group is over. Then all ranks that came get the same verdict, whatever came of the others. `claim` and `release` are
    called at any time, by any rank. `fsdp_optim.testing.ControlConformance` proves a control.
    """

    def meet(self, group: RankGroup, statement: Statement) -> Verdict:
        """Come to the next meeting of these ranks, and wait until it ends.

        A rank that comes with an error does not keep the others waiting: they hear of it when all have come, or at once where
        it is fatal. Ranks that come at another step than the first one come with an error. Who waits looks for missing ranks
        that wait for it in another meeting, and is warned after half a minute. What a meeting needs goes when the next one of
        the same ranks has ended. A rank that comes too late finds itself among `missing`; where the others have gone on to a
        later meeting, it goes there.
        """

    def claim(self, who: str, place: str) -> str:
        """Who has a place: `who`, unless others have it. Gives back the place that `who` had before; others may have it then."""

    def release(self, who: str, place: str) -> None:
        """Let others have a place."""


class Item(NamedTuple):
    """One tensor to move: the copies of one state value of one parameter that this rank takes part in.

    Ranks list the items that they share in the same order. `source` and `target` are this rank's local tensors, 1-D;
    None where it has no part on that side, and a `target` of None where its elements are to be dropped.
    """

    copies: Sequence[Copy]
    dtype: torch.dtype
    source: torch.Tensor | None = None
    target: torch.Tensor | None = None


Send = Callable[[Failure], None]
"""The second half of an exchange: what is left to do when all ranks are ready."""


class Transport(Protocol):
    """How bytes move between the ranks of a group.

    The order of calls, on every rank of a group: `empty` for memory that elements arrive in, then `prepare`; the ranks then
    agree that all of them are ready, and only if they are, each calls what `prepare` gave it. `exchange` (`agree.py`) does the
    last three. The ranks agree again afterwards, before anybody reads what has arrived or changes what was sent.
    `fsdp_optim.testing.TransportConformance` proves a transport.
    """

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised contiguous memory that peers may fill. Targets may be other memory too."""

    def prepare(self, group: RankGroup, items: Iterable[Item], failure: Failure, budget: Budget) -> Send:
        """Do everything that could fail, copy what this rank sends to itself, and give what moves the rest.

        What goes wrong is put into `failure`, where it may be already: then nothing is copied. Holds at most `budget`, which is
        the same on all ranks, beyond the items' own tensors. Nobody waits here.

        What is given must be called by all ranks or none. It raises nothing: what goes wrong is put into its `failure`, and the
        rank goes on, so that its peers finish. A peer that does not answer within the timeout of the group is named, by a
        RankError that is fatal.
        """


class World(ABC):
    """The ranks that run together, seen from one of them, and what they agree and move by."""

    rank: int
    size: int
    control: Control
    transport: Transport
    turns: Turns
    is_initialized: bool = True
    process_group: Any = None
    """That of all ranks, which a call without one uses."""

    @abstractmethod
    def ranks_of(self, process_group: Any) -> tuple[int, ...]:
        """The ranks of a process group that a user gave. Raises WrapperError for what is none that this rank is in."""

    @abstractmethod
    def group_rank(self, process_group: Any) -> int:
        """This rank's place in a process group (None: in the world); negative where it is not in it."""

    def group(
        self,
        call: str,
        ranks: Sequence[int],
        process_group: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
        bucket_nbytes: int = BUCKET_NBYTES,
    ) -> RankGroup:
        """This rank and others that make a call. `call`: the name of the public function."""
        inside = tuple(sorted(ranks))
        wire = process_group if process_group is not None else self.process_group
        return RankGroup(self, inside, process_group, timeout, bucket_nbytes, Turn(call, inside, wire))


@dataclass(frozen=True)
class RankGroup:
    """The global ranks that make a call together, sorted, and the process group that carries their messages.

    `process_group` None: that of the world carries them, also between some of its ranks only. `timeout`: seconds.
    `bucket_nbytes`: what a rank may hold beyond what it keeps, the same on all of them. `turn`: this call among those of the
    process.
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
        """What a rank may hold beyond what it keeps, while this call moves data."""
        return Budget(self.bucket_nbytes)

    @property
    def position(self) -> int:
        """This rank's place among the ranks."""
        return self.ranks.index(self.rank)

    @property
    def is_alone(self) -> bool:
        """Whether this is the only call in flight on this rank."""
        return len(self.world.turns.in_flight) <= 1
