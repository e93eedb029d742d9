"""Objects of `per_rank` at another number of ranks: each is asked for the states of the new ranks, or it keeps its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import Struct

from fsdp_optim.checkpoint.common.run_state import PerRank, RunState, is_stateful
from fsdp_optim.checkpoint.load.saved_state import SavedState, checked, key_of
from fsdp_optim.errors import StateError
from fsdp_optim.saying import counted

log = logging.getLogger("fsdp_optim")


class RanksHere(Struct, frozen=True):
    """The ranks that load. `position`: the index of this rank."""

    position: int
    num_ranks: int


def resharded(saved: SavedState, state: RunState, here: RanksHere, *, strict: bool) -> SavedState:
    """Return the values for a rank of another number of ranks than those that saved.

    For the same number these are the same values, but for objects that say that theirs does not fit.

    No rank waits for another: each reads the states of all ranks, and computes all new ones.

    Raises:
        StateError: an object failed in `reshard` or, if `strict`, has no states for this number of ranks.
        CheckpointError: a state cannot be read.
    """
    is_same = saved.num_ranks == here.num_ranks
    objects = [entry for entry in _own_objects(saved, state) if not (is_same and _fits(*entry, saved.own))]
    if not objects:
        return saved
    own, absent, kept, given = dict(saved.own), list(saved.absent), list[str](), list[str]()
    of_ranks = saved.read_each()
    for name, target in objects:
        try:
            states = _states_of(name, target, of_ranks, here.num_ranks)
        except _CannotReshardError as error:
            if strict:
                fix = f"load on {counted(len(of_ranks), 'rank')}, or give strict=False to leave it as it is"
                raise StateError(f"{error}: {error.fix}{fix}") from error.__cause__
            if here.position == 0:
                log.warning("%s; it stays as it is", error)
            states = [None] * here.num_ranks
        new, was_absent = states[here.position], name in absent
        if new is not None:
            own[name] = new
            absent = [other for other in absent if other != name]
        elif not was_absent:
            del own[name]
            kept.append(name)
        given += [name] if all(state is not None for state in states) else []
    return replace(saved, own=own, absent=tuple(absent), kept=tuple(kept), resharded=tuple(given))


class _CannotReshardError(Exception):
    """An object that has no states for another number of ranks. `fix`: what to do about it; empty if that is not known."""

    fix = ""


class _WithoutReshardError(_CannotReshardError):
    """An object without the method."""

    fix = "give per_rank() an object that has it, "


def _own_objects(saved: SavedState, state: RunState) -> Iterator[tuple[str, Any]]:
    """Yield the objects of `per_rank` that the checkpoint has states of each rank for: name, object."""
    for name, value in state.in_turn:
        if isinstance(value, PerRank) and is_stateful(value.value) and (name in saved.own or name in saved.absent):
            yield name, value.value


def _fits(name: str, target: Any, own: Mapping[str, Any]) -> bool:
    """Return whether an object takes the state of this rank at the same number of ranks."""
    fits = getattr(target, "fits", None)
    if not callable(fits) or name not in own:
        return True
    state = checked(own[name])
    try:
        return bool(fits(state))
    except Exception as error:
        raise StateError(f"{key_of(name)}: its fits(state) failed: {type(error).__name__}: {error}") from error


def _states_of(name: str, target: Any, of_ranks: Sequence[Mapping[str, Any]], num_ranks: int) -> Sequence[Any]:
    """Return the state of each new rank."""
    kind, num_saved = type(target).__name__, len(of_ranks)
    change = f"was saved by {counted(num_saved, 'rank')}, and {counted(num_ranks, 'rank')} {_load(num_ranks)} it"
    lacking = next((rank for rank, values in enumerate(of_ranks) if name not in values), None)
    if lacking is not None:
        raise _CannotReshardError(f"{key_of(name)}: {change}, but rank {lacking} has saved none")
    reshard = getattr(target, "reshard", None)
    if not callable(reshard):
        raise _WithoutReshardError(f"{key_of(name)}: {change}, but a {kind} does not have reshard(states, world_size)")
    states = [checked(values[name]) for values in of_ranks]
    call = f"reshard(states, world_size={num_ranks})"
    try:
        new = reshard(states, num_ranks)
    except StateError as error:  # the object's own refusal, which says why
        raise _CannotReshardError(f"{key_of(name)}: {change}, but a {kind} refused {call}: {error}") from error
    except Exception as error:
        raise StateError(f"{key_of(name)}: {change}, but its {call} failed: {type(error).__name__}: {error}") from error
    if not isinstance(new, (list, tuple)) or len(new) != num_ranks:
        shown = f"{len(new)} values" if isinstance(new, (list, tuple)) else f"a {type(new).__name__}"
        raise StateError(
            f"{key_of(name)}: {change}, but its {call} returned {shown}, not a list of {counted(num_ranks, 'state')}"
        )
    return new


def _load(num: int) -> str:
    return "loads" if num == 1 else "load"
