"""The objects in `state=` during a load: their names are checked first, and they are loaded on all ranks or on none."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.common.random_states import check_random_states, set_random_states
from fsdp_optim.checkpoint.common.run_state import PerRank, RunState, is_stateful
from fsdp_optim.checkpoint.common.trees import is_unsaved
from fsdp_optim.checkpoint.load.loaded_trees import LoadedTrees, asked_of
from fsdp_optim.checkpoint.load.resharded_state import RanksHere, resharded
from fsdp_optim.checkpoint.load.saved_state import Guarded, SavedState, UnreadTree, complete, key_of
from fsdp_optim.errors import CheckpointError, StateError, shortened
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.protocols import Reader
from fsdp_optim.formats.base.tree_values import has_tensors, keys_in, with_tensors
from fsdp_optim.saying import LoadReceipt
from fsdp_optim.tensors.memory import detached_copy

log = logging.getLogger("fsdp_optim")

_MOST_READ_UNASKED = 64 << 20  # bytes of the tensors of one value
_MOST_NAMED = 20  # names in an error


class LoadedObjects:
    """The objects and names of one load.

    Attributes:
        missing_keys, unexpected_keys: the names that only one side has, after `check`; as in the result of a load.
        receipt: what the load has done, on the rank that says it; None before the end.
    """

    def __init__(self, state: RunState, *, strict: bool, cast: bool = False, allow_unexpected: bool = False) -> None:
        """`strict`: the names must equal the saved names. `cast`: floating tensors in trees may have other dtypes.

        `allow_unexpected`: the checkpoint may have more than this call; but all keys of its dicts must be there.
        """
        self._state, self._strict, self._cast, self._allows_unexpected = state, strict, cast, allow_unexpected
        self._position = 0
        self.receipt: LoadReceipt | None = None
        self._saved = SavedState()
        self._previous: dict[str, Any] = {}
        self._live: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._trees = LoadedTrees({}, cast)
        self.missing_keys: tuple[str, ...] = ()
        self.unexpected_keys: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: LoadArguments) -> LoadedObjects:
        """Return the objects and names of a load that has these arguments."""
        more = {"cast": options.cast, "allow_unexpected": options.allow_unexpected}
        return cls(options.state, strict=options.strict, **more)

    @property
    def has_names(self) -> bool:
        """Whether the call was given names; the same on all ranks."""
        return self._state.is_given

    @property
    def names_loaded(self) -> list[str]:
        """The names of the objects whose states a load replaces on this rank."""
        loaded = {name for name, _ in self._objects()}
        return [name for name in self._state.named if name in loaded]

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

    @property
    def has_trees(self) -> bool:
        """Whether tensors of the checkpoint may go into trees or objects of this call; the same on all ranks."""
        return self._state.is_given and bool(self._saved.stored)

    @property
    def targets(self) -> Mapping[str, torch.Tensor]:
        """The tensors of this rank that get elements of the checkpoint, by key, after `check`."""
        return self._trees.targets

    @property
    def in_place(self) -> Collection[str]:
        """The keys of those `targets` that are overwritten. The others only show how new tensors are to be cut."""
        return self._trees.in_place.keys()

    @property
    def of_objects(self) -> frozenset[str]:
        """The keys of saved tensors that objects get in their load_state_dict(); the same on all ranks."""
        named = (name for name, value in self._state.named.items() if is_stateful(_inner(value)))
        return frozenset(key for name in named for key in keys_in(self._saved.common.get(name)))

    def fill_small(self) -> None:
        """Fill the tensors here that the checkpoint has among its small values, once all ranks have read everything."""
        self._trees.fill_small()

    def check(self, saved: SavedState, here: RanksHere, where: str) -> SavedState:
        """Raise StateError if the values of the checkpoint do not belong to these objects. Nothing is loaded yet.

        Called by all ranks, because a state_dict() may be a collective call. `where`: the checkpoint. Returns the values for this
        number of ranks.
        """
        self._saved, self._previous, self._position = saved, {}, here.position
        self._live, self._values, self._trees = {}, {}, LoadedTrees(saved.stored, self._cast)
        self.missing_keys, self.unexpected_keys = (), ()
        if self._state.is_given:
            self._check_names(saved)
        self._saved = saved = resharded(saved, self._state, here, strict=self._strict)
        self.missing_keys += saved.missing
        if self._state.is_given:
            self._check_trees(saved, where)
        if self._state.rng and saved.random is not None:
            check_random_states(self._position, saved.random)
        return saved

    def _check_names(self, saved: SavedState) -> None:
        here, there = dict.fromkeys(self._state.named), dict.fromkeys([*saved.common, *saved.own, *saved.absent])
        missing = [name for name in here if name not in there and not self._needs_nothing(name)]
        unexpected = [name for name in there if name not in here]
        refused = [] if self._allows_unexpected else unexpected
        if self._strict and (missing or refused):
            name = min([*missing, *refused])
            has_it = "this call has it and the checkpoint does not" if name in missing else "only the checkpoint has it"
            raise StateError(
                f"state[{name!r}]: {has_it}; state has {_few(here)} here, and {_few(there)} in the checkpoint: give the same "
                "names, or strict=False to leave these as they are"
            )
        for name, value in self._state.named.items():
            is_own, was_own = isinstance(value, PerRank), name in saved.own or name in saved.absent
            if self._strict and name in there and is_own != was_own and is_stateful(_inner(value)):
                own = "each rank has saved its own: give per_rank(...)"
                common = "it was saved once for all ranks: give it without per_rank()"
                raise StateError(f"state[{name!r}]: {own if was_own else common}")
        if (missing or refused) and self._position == 0:
            log.warning(
                "state: %s is not loaded, because it is missing in the checkpoint or in this call",
                ", ".join(sorted([*missing, *unexpected])),
            )
        self.missing_keys = tuple(map(key_of, missing))
        self.unexpected_keys = tuple(map(key_of, unexpected))

    def _needs_nothing(self, name: str) -> bool:
        """Return whether a tree is one that torch's checkpoints have nothing of, in a load for which this is enough."""
        return self._allows_unexpected and is_unsaved(self._state.named[name])

    def _check_trees(self, saved: SavedState, where: str) -> None:
        for name, value in self._state.in_turn:
            tree = saved.common.get(name)
            if self._allows_unexpected and name in saved.common:
                self._trees.check_keys(tree, value, (name,))
            if isinstance(tree, Withheld) and self._strict and not is_stateful(_inner(value)) and has_tensors(value):
                raise CheckpointError(f"state[{name!r}]: cannot be filled in place: {tree.why}")
            is_lost = self._is_lost(name, value)
            if isinstance(value, PerRank) or not (has_tensors(tree) or is_lost):
                continue
            if not is_stateful(value):
                self._trees.add_tree(name, tree, value)
                continue
            with suppress(Exception):  # before its first load an object may have no state
                self._live[name] = value.state_dict()
            self._trees.add_object(name, tree, self._live.get(name))
        self._trees.check(where, strict=self._strict, allow_unexpected=self._allows_unexpected)
        self.missing_keys = (*self.missing_keys, *self._trees.missing)
        self.unexpected_keys = (*self.unexpected_keys, *self._trees.unexpected)

    def _is_lost(self, name: str, value: Any) -> bool:
        """Return whether a tree has tensors to be filled, and the checkpoint has its name but may have none of them."""
        if self._allows_unexpected or name not in self._saved.common or is_stateful(_inner(value)):
            return False
        return not isinstance(self._saved.common[name], Withheld) and has_tensors(value)

    def fill(self, checkpoint: Reader, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors of `targets` that were read, by key, and read what else the objects and the caller get.

        Tensors that nothing here has a place for are read completely: for objects at once, and for `by_name` if they are few.
        """
        saved, ready = self._saved, {**tensors, **self._trees.in_place}
        for name, tree in saved.by_name.items():
            given = self._state.named.get(name)
            if self._allows_unexpected and name not in self._state.named:
                continue
            asked = asked_of(tree, given) if self._allows_unexpected else tree
            value = with_tensors(asked, ready) if name in saved.common else tree
            if keys_in(value):
                needed = given is not None and is_stateful(_inner(given))
                if needed or saved.later is None or saved.nbytes_of(value) <= _MOST_READ_UNASKED:
                    value = complete(checkpoint, value)
                else:
                    value = UnreadTree(value, saved.later)
            self._values[name] = value

    @property
    def by_name(self) -> dict[str, Any]:
        """All values of the trainer, after `fill`. Values with large tensors that nothing was given for are read on access."""
        values = self._values
        guarded = any(isinstance(value, (Withheld, UnreadTree)) for value in values.values())
        return Guarded(values) if guarded else dict(values)

    def remember(self) -> None:
        """Copy the states that `install` replaces. All ranks call this, because a state_dict() may be a collective call.

        An object whose state_dict() fails before its first load has no state to get back.
        """
        for name, target in self._objects():
            with suppress(Exception):
                state = self._live[name] if name in self._live else target.state_dict()
                self._previous[name] = detached_copy(state)

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
        for name, target in self._objects():
            if name in self._previous:
                try:
                    target.load_state_dict(self._previous[name])
                except Exception:
                    log.exception("the previous state of state[%r] could not be restored", name)

    def install_random(self) -> None:
        """Set the random states. A rank that had none at the save keeps its own, so that no two ranks draw the same numbers."""
        if self._state.rng and self._saved.random is not None:
            set_random_states(self._saved.random)

    def _objects(self) -> Iterator[tuple[str, Any]]:
        """Yield the objects that get a saved state, with their names."""
        saved = self._saved
        for name, value in self._state.in_turn:
            if is_stateful(_inner(value)) and (name in saved.common or name in saved.own):
                yield name, _inner(value)

    def _loaded(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the objects that get a saved state: name, object, state."""
        values: Mapping[str, Any] = self.by_name
        for name, target in self._objects():
            yield name, target, values[name]


def _few(names: Iterable[str]) -> str:
    return f"[{shortened(map(repr, sorted(names)), _MOST_NAMED)}]" if names else "nothing"


def _inner(value: Any) -> Any:
    return value.value if isinstance(value, PerRank) else value
