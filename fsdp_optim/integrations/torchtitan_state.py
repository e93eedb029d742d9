"""What torchtitan's trainer has for each rank, as objects that another number of ranks loads exactly, or refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_optim import StateError
from fsdp_optim.integrations.torchdata import ReshardableLoader, ReshardableSampler

_DEGREE = "world_size"
"""The key of the data-parallel degree in the state of torchtitan's ParallelAwareDataloader; the others are `dp_rank_3`."""


def loader_state(loader: Any) -> Any:
    """Return an object that has the state of a torchtitan loader, for `per_rank`."""
    is_divided = isinstance(getattr(loader, "sampler", None), ReshardableSampler)
    return ReshardableLoader(loader) if is_divided else TitanLoader(loader)


class TitanLoader:
    """The state of a loader of torchtitan, which fits ranks of the same data-parallel degree, whatever their number.

    A loader with a `reshard(states, world_size)` of its own is asked instead.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's own state."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Raises StateError for one of another degree, which torchtitan's loader would pass over in part."""
        if _is_by_degree(state) and hasattr(self._loader, "dp_world_size"):
            self._check_degree(state)
            if self._key not in state:
                saved = ", ".join(sorted(state.keys() - {_DEGREE}))
                raise StateError(f"the saved state is that of {saved}, not of {self._key}")
        self._loader.load_state_dict(state)

    def fits(self, state: Any) -> bool:
        """Return whether a state is that of this data-parallel rank at this degree; true of loaders that have none."""
        own = getattr(self._loader, "fits", None)
        if callable(own):
            return bool(own(state))
        if not _is_by_degree(state) or not hasattr(self._loader, "dp_world_size"):
            return True
        return state[_DEGREE] == self._loader.dp_world_size and self._key in state

    def reshard(self, states: list[Any], world_size: int) -> list[Any]:
        """Return, for each new rank, the states of all data-parallel ranks, of which its loader takes its own.

        Raises StateError for another degree: a data set of torchtitan is cut by the degree, and what a rank has left of its part
        (and of the text that it has not packed yet) cannot be cut anew.
        """
        own = getattr(self._loader, "reshard", None)
        if callable(own):
            new: list[Any] = own(states, world_size)
            return new
        if not all(map(_is_by_degree, states)) or not hasattr(self._loader, "dp_world_size"):
            raise StateError(
                f"a {type(self._loader).__name__} does not have reshard(states, world_size): give it this method, or "
                'exclude_from_loading=["dataloader"] to begin anew with its data'
            )
        for state in states:
            self._check_degree(state)
        joined = {key: value for state in states for key, value in state.items()}
        return [joined] * world_size

    @property
    def _key(self) -> str:
        return f"dp_rank_{self._loader.dp_rank}"

    def _check_degree(self, state: Mapping[str, Any]) -> None:
        saved, here = state[_DEGREE], self._loader.dp_world_size
        if saved != here:
            data = type(getattr(self._loader, "dataset", None)).__name__
            raise StateError(
                f"a {type(self._loader).__name__} with a {data} was saved at data-parallel degree {saved}, and this is degree "
                f"{here}: its data set is cut by the degree and cannot be divided anew exactly; give the same degree, a loader "
                'with a ReshardableSampler of fsdp_optim.integrations.torchdata, or exclude_from_loading=["dataloader"] to begin '
                "anew with its data"
            )


class TrainState:
    """torchtitan's `train_state`: the step, which all ranks have in common, and the tokens that each rank has seen."""

    def __init__(self, trainer: Any) -> None:
        self.state_dict, self.load_state_dict = trainer.state_dict, trainer.load_state_dict

    def reshard(self, states: list[Any], world_size: int) -> list[Any]:
        """Return the first rank's state for each new rank, with an equal part of the tokens: their sum over the ranks stays."""
        total, new = sum(state.get("ntokens_seen", 0) for state in states), dict(states[0])
        if "ntokens_seen" not in new:
            return [new] * world_size
        parts = [total // world_size + (rank < total % world_size) for rank in range(world_size)]
        return [{**new, "ntokens_seen": part} for part in parts]


class Unloaded:
    """An object that is saved and not loaded (`exclude_from_loading`)."""

    def __init__(self, part: Any) -> None:
        self.state_dict = part.state_dict

    def load_state_dict(self, state: Any) -> None:
        """Leave the object as it is."""

    def reshard(self, states: list[Any], world_size: int) -> list[Any]:
        """Leave the object as it is on all ranks."""
        return states[:1] * world_size


def _is_by_degree(state: Any) -> bool:
    """Return whether this is a state of torchtitan's ParallelAwareDataloader."""
    return isinstance(state, Mapping) and _DEGREE in state and any(str(key).startswith("dp_rank_") for key in state)
