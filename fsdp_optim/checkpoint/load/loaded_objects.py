"""The objects in `state=` during a load: their names are checked first, and they are loaded on all ranks or on none."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from fsdp_optim.checkpoint.common.random_states import check_random_states, set_random_states
from fsdp_optim.checkpoint.common.run_state import PerRank, RunState, is_stateful
from fsdp_optim.checkpoint.load.resharded_state import RanksHere, resharded
from fsdp_optim.checkpoint.load.saved_state import SavedState, key_of
from fsdp_optim.errors import StateError
from fsdp_optim.memory import detached_copy
from fsdp_optim.saying import LoadReceipt

log = logging.getLogger("fsdp_optim")


class LoadedObjects:
    """The objects and names of one load.

    Attributes:
        missing_keys, unexpected_keys: the names that only one side has, after `check`; as in the result of a load.
        receipt: what the load has done, on the rank that says it; None before the end.
    """

    def __init__(self, state: RunState, *, strict: bool) -> None:
        """`strict`: the names must equal the saved names."""
        self._state, self._strict = state, strict
        self._position = 0
        self.receipt: LoadReceipt | None = None
        self._saved = SavedState()
        self._previous: dict[str, Any] = {}
        self.missing_keys: tuple[str, ...] = ()
        self.unexpected_keys: tuple[str, ...] = ()

    @property
    def has_names(self) -> bool:
        """Whether the call was given names; the same on all ranks."""
        return self._state.is_given

    @property
    def names_loaded(self) -> list[str]:
        """The names of the objects whose states a load replaces on this rank."""
        return [name for name, _, _ in self._loaded()]

    @property
    def own_names(self) -> list[str]:
        """The names of those values of the checkpoint that new ranks lack."""
        without = {*self._saved.resharded, *self._saved.kept}
        return [name for name in (*self._saved.own, *self._saved.absent) if name not in without]

    @property
    def sets_random(self) -> bool:
        """Whether `install_random` sets the random states of ranks that the checkpoint has; the same on all ranks."""
        return self._state.rng and self._saved.has_random

    @property
    def lacks_random(self) -> bool:
        """Whether random states are asked for, and the checkpoint has none; the same on all ranks."""
        return self._state.rng and not self._saved.has_random

    def check(self, saved: SavedState, here: RanksHere) -> SavedState:
        """Raise StateError if the values of the checkpoint do not belong to these objects. Nothing is loaded yet.

        Returns the values for this number of ranks.
        """
        self._saved, self._previous, self._position = saved, {}, here.position
        self.missing_keys, self.unexpected_keys = (), ()
        if self._state.is_given:
            self._check_names(saved)
        self._saved = saved = resharded(saved, self._state, here, strict=self._strict)
        self.missing_keys += saved.missing
        if self._state.rng and saved.random is not None:
            check_random_states(self._position, saved.random)
        return saved

    def _check_names(self, saved: SavedState) -> None:
        here, there = [*self._state.named], [*saved.common, *saved.own, *saved.absent]
        missing = [name for name in here if name not in there]
        unexpected = [name for name in there if name not in here]
        if self._strict and (missing or unexpected):
            name = min([*missing, *unexpected])
            has_it = "this call has it and the checkpoint does not" if name in missing else "only the checkpoint has it"
            raise StateError(
                f"state[{name!r}]: {has_it}; state has {sorted(here) or 'nothing'} here, and {sorted(there) or 'nothing'} in the "
                "checkpoint: give the same names, or strict=False to leave these as they are"
            )
        for name, value in self._state.named.items():
            is_own, was_own = isinstance(value, PerRank), name in saved.own or name in saved.absent
            if self._strict and name in there and is_own != was_own and is_stateful(_inner(value)):
                own = "each rank has saved its own: give per_rank(...)"
                common = "it was saved once for all ranks: give it without per_rank()"
                raise StateError(f"state[{name!r}]: {own if was_own else common}")
        if (missing or unexpected) and self._position == 0:
            log.warning(
                "state: %s is not loaded, because it is missing in the checkpoint or in this call",
                ", ".join(sorted([*missing, *unexpected])),
            )
        self.missing_keys = tuple(map(key_of, missing))
        self.unexpected_keys = tuple(map(key_of, unexpected))

    def remember(self) -> None:
        """Copy the states that `install` replaces. All ranks call this, because a state_dict() may be a collective call.

        An object whose state_dict() fails before its first load has no state to get back.
        """
        for name, target, _ in self._loaded():
            with suppress(Exception):
                self._previous[name] = detached_copy(target.state_dict())

    def install(self) -> None:
        """Load the objects, after all ranks have read the model and the optimizer, and before these are changed."""
        for name, target, state in self._loaded():
            try:
                target.load_state_dict(state)
            except Exception as error:
                raise StateError(
                    f"state[{name!r}]: its load_state_dict() refused the saved state: {type(error).__name__}: {error}"
                ) from error

    def put_back(self) -> None:
        """Restore the states of `remember`, because a rank has failed. Raises no error."""
        for name, target, _ in self._loaded():
            if name in self._previous:
                try:
                    target.load_state_dict(self._previous[name])
                except Exception:
                    log.exception("the previous state of state[%r] could not be restored", name)

    def install_random(self) -> None:
        """Set the random states. A rank that had none at the save keeps its own, so that no two ranks draw the same numbers."""
        if self._state.rng and self._saved.random is not None:
            set_random_states(self._saved.random)

    def _loaded(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the objects that get a saved state: name, object, state."""
        values: Mapping[str, Any] = self._saved.by_name
        for name, value in self._state.named.items():
            target = _inner(value)
            if name in values and is_stateful(target):
                yield name, target, values[name]


def _inner(value: Any) -> Any:
    return value.value if isinstance(value, PerRank) else value
