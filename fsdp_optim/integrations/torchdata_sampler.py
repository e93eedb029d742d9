"""A sampler whose position in an epoch another number of ranks can take over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from fsdp_optim import StateError

POSITION = "fsdp_optim.position"
"""The key of a position in the states of samplers and of loaders."""

OF_DATA, OF_RANKS = ("length", "shuffle", "seed"), ("world_size", "rank")
"""What fixes the order of the samples, and which of them a rank gets, in a position."""


@dataclass(frozen=True)
class Order:
    """What fixes the order of the samples of an epoch. `length`: of the data set."""

    length: int
    shuffle: bool
    seed: int

    def as_state(self) -> dict[str, Any]:
        """Return the part of a state that says it."""
        return asdict(self)

    def of_epoch(self, epoch: int) -> torch.Tensor:
        """Return the indices of all samples, int64, in the order of torch's DistributedSampler."""
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))


@dataclass(frozen=True)
class Position:
    """A place in an epoch.

    Attributes:
        epoch: the number of the epoch.
        taken: for each earlier number of ranks in this epoch, in their order, how many samples each of its ranks has taken.
    """

    epoch: int = 0
    taken: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Position:
        """Return the position in a state."""
        return cls(state["epoch"], tuple(map(tuple, state["taken"])))

    def as_state(self) -> dict[str, Any]:
        """Return the part of a state that `of` reads."""
        return {"epoch": self.epoch, "taken": [list(counts) for counts in self.taken]}

    def left(self, order: Order) -> torch.Tensor:
        """Return the indices of the samples that no rank has taken yet, in the order of the epoch."""
        indices = order.of_epoch(self.epoch)
        for counts in self.taken:
            turns = torch.arange(len(indices)) // len(counts)
            taken = torch.tensor(counts).repeat(-(-len(indices) // len(counts)))[: len(indices)]
            indices = indices[turns >= taken]
        return indices

    def num_left(self, length: int) -> int:
        """Return the number of samples in `left`, of a data set of this length."""
        for counts in self.taken:
            of_ranks = [-(-max(length - rank, 0) // len(counts)) for rank in range(len(counts))]
            length = sum(max(num - taken, 0) for num, taken in zip(of_ranks, counts, strict=True))
        return length


class ReshardableSampler(Sampler[int]):
    """A distributed sampler with a state, whose epoch another number of ranks can continue at any step.

    From the beginning of an epoch it gives each rank the samples of `torch.utils.data.DistributedSampler`. In the middle of an
    epoch a new number of ranks divides the samples that are left in the same way: in the order of the epoch, in turns. So every
    sample comes exactly once in an epoch, whatever the numbers of ranks; with `drop_last`, or with a loader's, at most once.

        sampler = ReshardableSampler(dataset, shuffle=True)
        loader = StatefulDataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2)
        state = {"loader": per_rank(ReshardableLoader(loader))}
        for epoch in range(sampler.epoch, num_epochs):  # after the load
            sampler.set_epoch(epoch)
            for batch in loader: ...

    The pass over the samples that follows a load continues the saved one, in the saved epoch.

    Attributes:
        epoch: the epoch of the next pass. The end of a pass adds one, and a load of `ReshardableLoader` sets the saved one.
        rank, world_size: this rank among those that divide the samples.
        order: what fixes the order of the samples.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
    ) -> None:
        """Called on each rank, without communication.

        Args:
            dataset: the data set, or anything with its length.
            rank, world_size: this rank among the ranks with different samples: those of the data-parallel group, where
                other ranks have the same samples. None: those of torch.distributed's world, or the only rank.
            shuffle: shuffle the samples of each epoch, in an order that `seed` and the epoch fix.
            seed: the same on all ranks and in all runs.
            drop_last: leave out the last samples of an epoch, fewer than `world_size`, that are not enough for all ranks.
            pad: without `drop_last`, repeat samples, fewer than `world_size`, so that all ranks have equally many; otherwise the
                last ranks may have one sample less.

        Raises:
            StateError: there are no such ranks, or the data set has no length.
        """
        super().__init__()
        is_job = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if is_job else 0
        self.world_size = world_size if world_size is not None else dist.get_world_size() if is_job else 1
        if not 0 <= self.rank < self.world_size:
            raise StateError(
                f"rank={self.rank} is not one of world_size={self.world_size} ranks: give 0 to world_size - 1"
            )
        try:
            self.order = Order(len(dataset), shuffle, seed)
        except TypeError as error:
            raise StateError(
                f"a {type(dataset).__name__} has no length, so its samples cannot be divided by their indices: give a "
                "map-style data set"
            ) from error
        self._drop_last, self._pad = drop_last, pad
        self._loaded: Position | None = None
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, unless that continues a saved pass. Called on all ranks with the same number."""
        self.epoch = epoch

    def __iter__(self) -> _Pass:
        return _Pass(self)

    def __len__(self) -> int:
        """Return the number of samples of this rank in the next pass."""
        return self.num_from(self.next_position())

    def num_from(self, position: Position) -> int:
        """Return the number of samples of this rank from a position on."""
        return self._num_of(position.num_left(self.order.length))

    def next_position(self) -> Position:
        """Return where the next pass begins."""
        return self._loaded if self._loaded is not None else Position(self.epoch)

    def began(self) -> None:
        """Note that a pass has begun, so that the one after it has a complete epoch."""
        self._loaded = None

    def ended(self, epoch: int) -> None:
        """Note that a pass of an epoch has ended; another epoch that was set since counts more."""
        if self.epoch == epoch:
            self.epoch += 1

    def load(self, position: Position, *, continues: bool) -> None:
        """Take over the epoch of a position. `continues`: the next pass continues there, unless it is the begin of the epoch."""
        self.epoch, self._loaded = position.epoch, position if continues and position.taken else None

    def indices(self, position: Position) -> torch.Tensor:
        """Return the indices of this rank's samples from a position on."""
        left = position.left(self.order)
        num = self._num_of(len(left))
        if num * self.world_size > len(left) and self._pad:
            left = left.repeat(-(-num * self.world_size // max(len(left), 1)))
        return left[self.rank :: self.world_size][:num]

    def about(self) -> dict[str, Any]:
        """Return what the state of a pass says about the sampler."""
        return {"rank": self.rank, "world_size": self.world_size, **self.order.as_state()}

    def check(self, about: Mapping[str, Any], *names: str) -> None:
        """Raise StateError if a state is one of another sampler. `names`: what must be the same."""
        here = self.about()
        for name in names:
            if about.get(name) != here[name]:
                raise StateError(
                    f"the saved sampler has {name}={about.get(name)}, and the sampler here {name}={here[name]}: give the values "
                    "of the save"
                )

    def _num_of(self, num_left: int) -> int:
        """Return how many samples this rank has of those that are left."""
        if self._drop_last:
            return num_left // self.world_size
        first = 0 if self._pad else self.rank
        return -(-max(num_left - first, 0) // self.world_size)


class _Pass(Iterator[int]):
    """One pass over the samples of a rank, with a state, which torchdata saves and loads."""

    def __init__(self, sampler: ReshardableSampler) -> None:
        self._sampler, self._position = sampler, sampler.next_position()
        self._num_taken, self._num_samples = 0, sampler.num_from(self._position)
        self._indices: torch.Tensor | None = None

    def __next__(self) -> int:
        if self._indices is None:
            self._indices = self._sampler.indices(self._position)
            self._sampler.began()
        if self._num_taken >= self._num_samples:
            self._sampler.ended(self._position.epoch)
            raise StopIteration
        self._num_taken += 1
        return int(self._indices[self._num_taken - 1])

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and how many samples were taken since."""
        place = {"num_taken": self._num_taken, "num_samples": self._num_samples}
        return {POSITION: {**self._sampler.about(), **self._position.as_state(), **place}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position of the same rank."""
        saved = state[POSITION]
        self._sampler.check(saved, *OF_DATA, *OF_RANKS)
        self._position, self._num_taken, self._indices = Position.of(saved), saved["num_taken"], None
        self._num_samples = self._sampler.num_from(self._position)
