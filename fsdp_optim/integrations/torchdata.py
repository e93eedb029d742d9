"""torchdata's StatefulDataLoader on any number of ranks: a sampler whose position another number of ranks can take over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_optim import StateError
from fsdp_optim.integrations.common.needed import needed
from fsdp_optim.integrations.torchdata_sampler import OF_DATA, OF_RANKS, POSITION, Order, Position, ReshardableSampler

__all__ = ["ReshardableLoader", "ReshardableSampler"]

TESTED = "0.11.0"
"""The version of torchdata that the tests run with."""

_Loader: Any = needed("torchdata", TESTED, {"torchdata.stateful_dataloader": ("StatefulDataLoader",)})[
    "StatefulDataLoader"
]

_BATCH_SIZE = "fsdp_optim.batch_size"
"""The key of the number of samples in a batch, beside a loader's own state."""


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
        """Return the loader's own state, and its batch size; the position alone, as `reshard` gives it, before the first batch.

        There torchdata would start workers for it.
        """
        has_begun = self._loader._iterator is not None or self._loader.next_iter_state is not None
        if not has_begun and not hasattr(self._loader.dataset, "state_dict"):
            sampler: ReshardableSampler = self._loader.sampler
            return {POSITION: {**sampler.order.as_state(), **sampler.next_position().as_state()}}
        return {**_Loader.state_dict(self._loader), _BATCH_SIZE: self._loader.batch_size or 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the loader, or one of `reshard`.

        Raises:
            StateError: it was saved by another rank, or with another order of samples.
        """
        sampler: ReshardableSampler = self._loader.sampler
        is_resharded = POSITION in state
        saved = state[POSITION] if is_resharded else _pass_in(state)
        sampler.check(saved, *OF_DATA, *(() if is_resharded else OF_RANKS))
        position = Position.of(saved)
        sampler.load(position if is_resharded else _next_epoch(position, state), continues=is_resharded)
        own = {} if is_resharded else {key: value for key, value in state.items() if key != _BATCH_SIZE}
        _Loader.load_state_dict(self._loader, own)

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state was saved where as many ranks divided the samples as here."""
        sampler: ReshardableSampler = self._loader.sampler
        return POSITION in state or _pass_in(state)["world_size"] == sampler.world_size

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
        return [_joined(states)] * world_size


@dataclass(frozen=True)
class _Place:
    """The place of one rank: the beginning of its pass, and how many samples its loader has returned since.

    `is_finished`: the pass is over, and the next one has a complete epoch.
    """

    order: Order
    position: Position
    rank: int
    world_size: int
    num_taken: int
    is_finished: bool


def _joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the position of all ranks together, which each new rank gets. Raises StateError where they do not fit."""
    at_begin = [POSITION in state for state in states]
    if all(at_begin) and all(state == states[0] for state in states):
        return dict(states[0])
    if any(at_begin):
        raise StateError("the ranks were at different epochs or batches, or had different samples")
    places = [_place_in(state) for state in states]
    first = replace(places[0], rank=0, num_taken=0, is_finished=False)
    by_rank: dict[int, _Place] = {}
    for index, place in enumerate(places):
        if replace(place, rank=0, num_taken=0, is_finished=False) != first:
            raise StateError(f"ranks 0 and {index} were at different epochs, or had different samples")
        if by_rank.setdefault(place.rank, place) != place:
            raise StateError(f"two ranks that both had the samples of rank {place.rank} were at different batches")
    missing = next((rank for rank in range(first.world_size) if rank not in by_rank), None)
    if missing is not None:
        raise StateError(
            f"the samples were divided among {first.world_size} ranks, and no state is that of rank {missing}"
        )
    counts = tuple(by_rank[rank].num_taken for rank in range(first.world_size))
    position = replace(first.position, taken=(*first.position.taken, counts))
    if all(place.is_finished for place in places):
        position = Position(position.epoch + 1)
    return {POSITION: {**first.order.as_state(), **position.as_state()}}


def _next_epoch(position: Position, state: Mapping[str, Any]) -> Position:
    """Return a position, or the next epoch where the loader's pass is over."""
    return Position(position.epoch + 1) if state["_iterator_finished"] else position


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
        Order(saved["length"], saved["shuffle"], saved["seed"]),
        Position.of(saved),
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
        saved: Mapping[str, Any] = (of_iterator if POSITION in of_iterator else of_iterator["sampler_iter_state"])[
            POSITION
        ]
    except (KeyError, TypeError):
        raise StateError(
            f"the state is not that of a StatefulDataLoader (torchdata {TESTED}) with a ReshardableSampler: it was saved with "
            "another sampler, by another version, or by another loader"
        ) from None
    return saved
