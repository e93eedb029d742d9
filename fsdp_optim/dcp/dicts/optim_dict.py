"""An optimizer's dict by name, as torch.distributed.checkpoint nests or flattens it, and the part that an optimizer needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_optim.errors import StateError, StateKeysError, shortened
from fsdp_optim.state.values.same import same
from fsdp_optim.tensors.memory import detached_copy

STATE, GROUPS, PARAMS, NAMES = "state", "param_groups", "params", "param_names"
_Group = tuple[dict[str, Any], tuple[str, ...]]


def flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return one level of keys, `state.<fqn>.<name>` and `param_groups.<fqn>.<hyperparameter>`; deeper dicts get longer keys."""
    flat: dict[str, Any] = {}
    _flatten(STATE, nested[STATE], flat)
    for group in nested[GROUPS]:
        for fqn in group[PARAMS]:
            flat |= {f"{GROUPS}.{fqn}.{key}": value for key, value in group.items() if key not in (PARAMS, NAMES)}
    return flat


def _flatten(prefix: str, values: Mapping[Any, Any], flat: dict[str, Any]) -> None:
    for key, value in values.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            _flatten(name, value, flat)
        else:
            flat[name] = value


@dataclass(frozen=True)
class GivenDict:
    """A dict that a user gives, by name.

    Attributes:
        groups: the hyperparameters and FQNs of each group.
        state: FQN -> values; empty on the ranks that have no dict.
    """

    groups: tuple[_Group, ...]
    state: Mapping[str, Mapping[str, Any]] = field(repr=False)


def read_given(given: Mapping[str, Any], known: Collection[str], canonical: Callable[[str], str]) -> GivenDict:
    """Read a nested or flattened dict by name. `known`: the FQNs of the optimizers; `canonical`: the FQN for a tied name.

    Raises StateKeysError for an empty dict, StateError for a dict with ids in place of names, or without groups.
    """
    if not isinstance(given, Mapping) or not given:
        raise StateKeysError(
            "the optimizer's dict to load is empty on this rank: give the dict that get_optimizer_state_dict returned, or, with "
            "only the dict of rank 0, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)"
        )
    if GROUPS not in given:
        return _unflattened(given, {canonical(fqn) for fqn in known} | set(known), canonical)
    groups = tuple(
        (
            {key: value for key, value in group.items() if key not in (PARAMS, NAMES)},
            tuple(canonical(fqn) for fqn in group[PARAMS]),
        )
        for group in given[GROUPS]
    )
    return GivenDict(groups, {canonical(fqn): values for fqn, values in given.get(STATE, {}).items()})


def _unflattened(flat: Mapping[str, Any], known: Collection[str], canonical: Callable[[str], str]) -> GivenDict:
    """Read a flattened dict. Keys of parameters that the optimizers do not have belong to others, and are passed over."""
    state: dict[str, dict[str, Any]] = {}
    hypers: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        section, _, rest = str(key).partition(".")
        fqn = _longest(rest, known)
        if fqn is None:
            continue
        path = rest[len(fqn) + 1 :].split(".")
        if section == GROUPS:
            hypers.setdefault(canonical(fqn), {})[".".join(path)] = value
        elif section == STATE:
            at = state.setdefault(canonical(fqn), {})
            for part in path[:-1]:
                at = at.setdefault(part, {})
            at[path[-1]] = value
        else:
            raise StateError(
                f"{key!r}: this is neither a nested nor a flattened dict of get_optimizer_state_dict, whose keys begin with "
                "'state.' and 'param_groups.': give its result"
            )
    return GivenDict(tuple((hyper, (fqn,)) for fqn, hyper in hypers.items()), state)


def _longest(rest: str, known: Collection[str]) -> str | None:
    """Return the longest FQN with which a key begins."""
    parts = rest.split(".")
    for length in range(len(parts) - 1, 0, -1):
        fqn = ".".join(parts[:length])
        if fqn in known:
            return fqn
    return None


def group_for(
    groups: Sequence[_Group], place: int, members: Sequence[str], live: Mapping[str, Any], *, strict: bool
) -> dict[str, Any]:
    """Return the hyperparameters that a live group gets: those of the given groups that have its parameters.

    Args:
        place: the number of the live group among the live groups without parameters, where it has none.
        members, live: the FQNs and the hyperparameters of the live group.

    Raises StateError where the parameters of the live group have different hyperparameters; StateKeysError, if `strict`, where
    no given group has some of the parameters.
    """
    if not members:
        empty = [hyper for hyper, fqns in groups if not fqns]
        if place < len(empty):
            return dict(detached_copy(empty[place]))
        return dict(live)
    group_of = {fqn: number for number, (_, fqns) in enumerate(groups) for fqn in fqns}
    missing = [fqn for fqn in members if fqn not in group_of]
    if missing and strict:
        raise StateKeysError(
            f"Missing key(s) in the optimizer's dict: {shortened(missing)}: no param group there lists them; give the dict of "
            "this model, or StateDictOptions(strict=False), which leaves the state of these parameters as it is"
        )
    first: int | None = None
    for fqn in members:
        number = group_of.get(fqn)
        if number is None or number == first:
            continue
        if first is None:
            first = number
        elif not same(groups[number][0], groups[first][0]):
            raise StateError(
                f"{fqn}: its hyperparameters in the dict are {groups[number][0]}, those of {groups[first][1][0]}, which is in "
                f"the same param group of the optimizer, are {groups[first][0]}: build the optimizer with the saved groups"
            )
    return dict(detached_copy(groups[first][0])) if first is not None else dict(live)
