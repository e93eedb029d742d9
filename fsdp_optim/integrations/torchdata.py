"""torchdata's StatefulDataLoader on any number of ranks: a sampler whose position another number of ranks can take over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from fsdp_optim import StateError
from fsdp_optim.integrations.needed import needed

__all__ = ["ReshardableLoader", "ReshardableSampler"]

TESTED = "0.11.0"
"""The version of torchdata that the tests run with."""

_Loader: Any = needed("torchdata", TESTED, {"torchdata.stateful_dataloader": ("StatefulDataLoader",)})[
    "StatefulDataLoader"
]

_POSITION = "fsdp_optim.position"
"""The key of a position in the states of samplers and of loaders."""

_OF_DATA, _OF_RANKS = ("length", "shuffle", "seed"), ("world_size", "rank")
"""What fixes the order of the samples, and which of them a rank gets, in a position."""

_BATCH_SIZE = "fsdp_optim.batch_size"
"""The key of the number of samples in a batch, beside a loader's own state."""


@dataclass(frozen=True)
class _Order:
    """What fixes the order of the samples of an epoch. `length`: of the data set."""

    length: int
    shuffle: bool
    seed: int

    def of_epoch(self, epoch: int) -> torch.Tensor:
        """Return the indices of all samples, int64, in the order of torch's DistributedSampler."""
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))


@dataclass(frozen=True)
class _Position:
    """A place in an epoch.

    Attributes:
        epoch: the number of the epoch.
        taken: for each earlier number of ranks in this epoch, in their order, how many samples each of its ranks has taken.
    """

    epoch: int = 0
    taken: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Position:
        """Return the position in a state."""
        return cls(state["epoch"], tuple(map(tuple, state["taken"])))

    def as_state(self) -> dict[str, Any]:
        """Return the part of a state that `of` reads."""
        return {"epoch": self.epoch, "taken": [list(counts) for counts in self.taken]}

    def left(self, order: _Order) -> torch.Tensor:
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
        epoch: the epoch of the next pass; a load of `ReshardableLoader` sets it to the saved one.
        rank, world_size: this rank among those that divide the samples.
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
            self._order = _Order(len(dataset), shuffle, seed)
        except TypeError as error:
            raise StateError(
                f"a {type(dataset).__name__} has no length, so its samples cannot be divided by their indices: give a "
                "map-style data set"
            ) from error
        self._drop_last, self._pad = drop_last, pad
        self._loaded: _Position | None = None
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, unless that continues a saved pass. Called on all ranks with the same number."""
        self.epoch = epoch

    def __iter__(self) -> _Pass:
        return _Pass(self)

    def __len__(self) -> int:
        """Return the number of samples of this rank in the next pass."""
        return self.num_from(self.next_position())

    def num_from(self, position: _Position) -> int:
        """Return the number of samples of this rank from a position on."""
        return self._num_of(position.num_left(self._order.length))

    def next_position(self) -> _Position:
        """Return where the next pass begins."""
        return self._loaded if self._loaded is not None else _Position(self.epoch)

    def began(self) -> None:
        """Note that a pass has begun, so that the one after it has a complete epoch."""
        self._loaded = None

    def load(self, position: _Position, *, continues: bool) -> None:
        """Take over the epoch of a position. `continues`: the next pass continues there, unless it is the begin of an epoch."""
        self.epoch, self._loaded = position.epoch, position if continues and position.taken else None

    def indices(self, position: _Position) -> torch.Tensor:
        """Return the indices of this rank's samples from a position on."""
        left = position.left(self._order)
        num = self._num_of(len(left))
        if num * self.world_size > len(left) and self._pad:
            left = left.repeat(-(-num * self.world_size // max(len(left), 1)))
        return left[self.rank :: self.world_size][:num]

    def about(self) -> dict[str, Any]:
        """Return what a state says about the sampler."""
        return {"rank": self.rank, "world_size": self.world_size, **asdict(self._order)}

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
        self._num_taken = 0
        self._indices: torch.Tensor | None = None

    def __next__(self) -> int:
        if self._indices is None:
            self._indices = self._sampler.indices(self._position)
            self._sampler.began()
        if self._num_taken >= len(self._indices):
            raise StopIteration
        self._num_taken += 1
        return int(self._indices[self._num_taken - 1])

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and how many samples were taken since."""
        place = {"num_taken": self._num_taken, "num_samples": self._sampler.num_from(self._position)}
        return {_POSITION: {**self._sampler.about(), **self._position.as_state(), **place}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position of the same rank."""
        saved = state[_POSITION]
        self._sampler.check(saved, *_OF_DATA, *_OF_RANKS)
        self._position, self._num_taken, self._indices = _Position.of(saved), saved["num_taken"], None


class ReshardableLoader:
    """The state of a StatefulDataLoader with a `ReshardableSampler`, for `per_rank(...)` in `state=`, at any number of ranks.

    At the same number of ranks the loader gets its own state, with that of its data set and of its workers. At another one it
    gets the position in the epoch: all samples that no rank has taken are divided anew. The number of workers, their prefetched
    batches and the batch size do not matter then, and random numbers of workers begin anew.

    Iterate over the loader itself. Its samples are taken when the loader has returned them, so save after the step of a batch.
    """

    def __init__(self, loader: Any) -> None:
        """Called on each rank, without communication.

        Args:
            loader: a StatefulDataLoader with a `ReshardableSampler` as its `sampler=`.

        Raises:
            StateError: it is another loader, or has another sampler, so that another number of ranks could not take over.
        """
        if not isinstance(loader, _Loader):
            raise StateError(
                f"a {type(loader).__name__} is not a StatefulDataLoader of torchdata, whose states are resharded"
            )
        if not isinstance(loader.sampler, ReshardableSampler):
            raise StateError(
                f"the loader has a {type(loader.sampler).__name__} as its sampler, whose position another number of ranks cannot "
                "take over exactly: give sampler=ReshardableSampler(dataset), or per_rank(loader) itself, which loads on the "
                "same number of ranks"
            )
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's own state, and its batch size."""
        return {**_Loader.state_dict(self._loader), _BATCH_SIZE: self._loader.batch_size or 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the loader, or one of `reshard`.

        Raises:
            StateError: it was saved by another rank, or with another order of samples.
        """
        sampler: ReshardableSampler = self._loader.sampler
        is_resharded = _POSITION in state
        saved = state[_POSITION] if is_resharded else _pass_in(state)
        sampler.check(saved, *_OF_DATA, *(() if is_resharded else _OF_RANKS))
        sampler.load(_Position.of(saved), continues=is_resharded)
        own = {} if is_resharded else {key: value for key, value in state.items() if key != _BATCH_SIZE}
        _Loader.load_state_dict(self._loader, own)

    def reshard(self, states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
        """Return the states of new ranks, as `per_rank` describes it.

        Ranks whose samplers had the same `rank`, as in tensor parallelism, count as one.

        Raises:
            StateError: the loader cannot be resharded exactly, or the states do not belong together.
        """
        if hasattr(self._loader.dataset, "state_dict"):
            raise StateError(
                f"the data set, a {type(self._loader.dataset).__name__}, has a state of its own for each rank, which cannot be "
                "divided anew"
            )
        if self._loader.num_workers and not getattr(self._loader, "in_order", True):
            raise StateError("with in_order=False it is not known which samples have been taken")
        places = [_place_in(state) for state in states]
        first = places[0]
        for rank, place in enumerate(places):
            if replace(place, rank=first.rank, num_taken=0, is_finished=first.is_finished) != replace(
                first, num_taken=0
            ):
                raise StateError(f"ranks 0 and {rank} were at different epochs, or had different samples or samplers")
        by_rank: dict[int, _Place] = {}
        for place in places:
            if by_rank.setdefault(place.rank, place) != place:
                raise StateError(f"two ranks that both had the samples of rank {place.rank} were at different batches")
        missing = next((rank for rank in range(first.world_size) if rank not in by_rank), None)
        if missing is not None:
            raise StateError(
                f"the samples were divided among {first.world_size} ranks, and no state is that of rank {missing}"
            )
        is_finished = all(place.is_finished for place in places)
        counts = tuple(by_rank[rank].num_taken for rank in range(first.world_size))
        position = _Position(first.position.epoch, () if is_finished else (*first.position.taken, counts))
        return [{_POSITION: {**asdict(first.order), **position.as_state()}}] * world_size


@dataclass(frozen=True)
class _Place:
    """The place of one rank: the beginning of its pass, and how many samples its loader has returned since.

    `is_finished`: the pass is over, and the next one has a complete epoch.
    """

    order: _Order
    position: _Position
    rank: int
    world_size: int
    num_taken: int
    is_finished: bool


def _place_in(state: Mapping[str, Any]) -> _Place:
    """Return the place of a rank in the saved state of its loader."""
    saved = _pass_in(state)
    num_since = state.get("_steps_since_snapshot", 0)  # with workers, whose states it does not get for each batch
    if num_since and _BATCH_SIZE not in state:
        raise StateError(
            "the state is that of an earlier batch, and the batch size is not known: save per_rank(ReshardableLoader(loader)), "
            "or give the loader snapshot_every_n_steps=1"
        )
    num_taken = saved["num_taken"] + num_since * state.get(_BATCH_SIZE, 0)
    return _Place(
        _Order(saved["length"], saved["shuffle"], saved["seed"]),
        _Position.of(saved),
        saved["rank"],
        saved["world_size"],
        min(num_taken, saved["num_samples"]),
        state["_iterator_finished"],
    )


def _pass_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the sampler's pass in the state of a loader."""
    try:
        of_loader = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
        of_iterator = of_loader["_sampler_iter_state"]
        saved: Mapping[str, Any] = (of_iterator if _POSITION in of_iterator else of_iterator["sampler_iter_state"])[
            _POSITION
        ]
    except (KeyError, TypeError):
        raise StateError(
            f"the state is not that of a StatefulDataLoader (torchdata {TESTED}) with a ReshardableSampler: it was saved with "
            "another sampler, by another version, or by another loader"
        ) from None
    return saved
