"""Full dicts of all libraries, read: each dialect is one class, and the list of them says which is asked first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.state.flattened import is_flattened, unflatten
from fsdp_optim.state.full import FullState, Listing, is_by_name, is_ours, names_in, num_listed, read
from fsdp_optim.state.names import Names


class Dialect(Protocol):
    """How one library writes full dicts. Asked in this order: `recognises`, and of the first that does, `read`."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        """Whether a dict is one of these. Those that come later in the list are not asked then."""

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        """Its state. Raises StateError where it is of another model, or its ids cannot be told apart."""


def normalize(full: Mapping[str, Any], names: Names) -> FullState:
    """Read a full dict of any accepted kind: ours, fairscale's, torch's, a plain optimizer's; keyed by id or by name.

    Raises StateError where the ids cannot be told apart, or the dict is not a full dict.
    """
    if not isinstance(full, Mapping):
        raise StateError(
            f"a full optimizer state dict is needed here, not {type(full).__name__}: is this rank a recipient?"
        )
    return next(dialect for dialect in DIALECTS if dialect.recognises(full)).read(full, names)


class Flattened:
    """torch.distributed.checkpoint's flattened dict: one level of keys, and names in them."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        return is_flattened(full)

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        return Named().read(unflatten(full, names.groups), names)


class NoFullDict:
    """A dict that lacks what all others have."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        return bool(self._missing(full))

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        raise StateError(
            f"this is no optimizer state dict: it has no {' and no '.join(self._missing(full))}; give what "
            "gather_full_optim_state_dict returned, or an optimizer's state_dict()"
        )

    def _missing(self, full: Mapping[str, Any]) -> list[str]:
        return [key for key in ("state", "param_groups") if key not in full]


class Ours:
    """What this library gathers, and what it reads from a checkpoint."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        return is_ours(full)

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        to_name = _to_name(full, _names_or_ids(full, names), names)
        listing: Listing = "ids" if "local_ids" in full or not is_by_name(full) else "other"
        return read(full, to_name, lambda key: _looks_loose(key, to_name, names), listing=listing)


class Fairscale:
    """What fairscale gathers, or what is made for its reader: it counts ids unit after unit, and lists numbers."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        return "param_id_map" in full

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        named = names_in(full)
        to_name = _to_name(full, named if named is not None else _in_units(full, names), names)
        entries = {
            key: {name: _of_all_ranks(to_name.get(key, key), name, value) for name, value in values.items()}
            for key, values in _with_singletons(full).items()
        }
        listing: Listing = "units" if named is None else "other" if is_by_name(full) else "ids"
        return read(full, to_name, lambda key: _looks_loose(key, to_name, names), entries=entries, listing=listing)


class Named:
    """What torch gathers, or an optimizer with named parameters has: names in place of ids, or beside them."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        return names_in(full) is not None

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        to_name = _to_name(full, names_in(full) or [], names)
        listing: Listing = "other" if is_by_name(full) else "ids"
        return read(full, to_name, lambda key: _looks_loose(key, to_name, names), listing=listing)


class Plain:
    """A plain optimizer's state_dict(): ids alone, which count the parameters as the live optimizer's groups do."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        return True

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        to_name = _to_name(full, _names_or_ids(full, names), names)
        return read(full, to_name, lambda key: _looks_loose(key, to_name, names))


DIALECTS: tuple[Dialect, ...] = (Flattened(), NoFullDict(), Ours(), Fairscale(), Named(), Plain())


# ------------------------------------------------------------------------------------------- names


def _to_name(full: Mapping[str, Any], fqns: Sequence[Sequence[str]], names: Names) -> dict[Any, str]:
    """Every key that the groups of a dict list, with the FQN that it stands for. `fqns`: those of each group, in its order."""
    groups = full["param_groups"]
    if [len(group) for group in fqns] != num_listed(groups):
        raise StateError(
            f"the full dict has {_counts(num_listed(groups))}, the optimizer's parameters on the unwrapped model are "
            f"{_counts([len(group) for group in names.groups])}: it is another model's, or grouped in another way: build the "
            "optimizer as it was when saved"
        )
    to_name = {
        key: names.canonical(fqn)
        for group, its in zip(groups, fqns, strict=True)
        for key, fqn in zip(group["params"], its, strict=True)
    }
    twice = [fqn for fqn, number in Counter(to_name.values()).items() if number > 1]
    if twice:
        raise StateError(
            f"{twice[0]}: the full dict lists it twice or more, as {[k for k, fqn in to_name.items() if fqn == twice[0]]}: "
            "gather it again, or give names that differ"
        )
    return to_name


def _names_or_ids(full: Mapping[str, Any], names: Names) -> Sequence[Sequence[str]]:
    """The names that a dict has, or those for which its ids stand, as the live optimizer counts."""
    named = names_in(full)
    if named is not None:
        return named
    if names.unknown_order:
        raise StateError(
            f"{names.unknown_order}: the ids of a dict without names cannot be told; gather it with key_by='name', or make a "
            "plain optimizer's dict one by name with rekey_optim_state_dict(full, model, key_by='name', optim=optim)"
        )
    return names.groups


def _in_units(full: Mapping[str, Any], names: Names) -> list[list[str]]:
    """fairscale counts ids unit after unit, not in the unwrapped model's order; and has one group."""
    order = names.unit_order
    if order is None:
        if len(set(full["param_id_map"].values())) > 1:
            raise StateError(
                "this full dict is fairscale's own and counts its ids by FSDP unit, which only a model wrapped in the same "
                "way can tell: read it there once, with rekey_optim_state_dict(full, wrapped_model, key_by='name')"
            )
        order = names.model_order
    if len(full["param_groups"]) != 1:
        raise StateError(f"fairscale's own full dict has one param group, not {len(full['param_groups'])}")
    return [list(order)]


def _looks_loose(key: object, to_name: Mapping[Any, str], names: Names) -> bool:
    """Whether an entry of the state is one that torch keeps as it is, under a key that is no parameter."""
    is_name = isinstance(key, str) and (key.isdigit() or names.canonical(key) in names.known)
    return not isinstance(key, int) and not is_name and all(isinstance(known, int) for known in to_name)


def _counts(nums: Sequence[int]) -> str:
    if len(nums) == 1:
        return counted_noun(nums[0], "parameter")
    return f"{' + '.join(map(str, nums))} parameters in {len(nums)} groups"


# ------------------------------------------------------------------------------------------- fairscale's lists of numbers


def _with_singletons(full: Mapping[str, Any]) -> Mapping[Any, Mapping[str, Any]]:
    """fairscale keeps tensors without dimensions as lists, with the last original of a unit only: they are every one's."""
    state: Mapping[Any, Mapping[str, Any]] = full["state"]
    local_of = full.get("param_id_map") or {}
    shared: dict[Any, dict[str, Any]] = {}
    for key, values in state.items():
        if local_of.get(key) is not None:
            found = {name: value for name, value in values.items() if _is_singleton_list(value)}
            shared.setdefault(local_of[key], {}).update(found)
    return {key: {**shared.get(local_of.get(key), {}), **values} if values else values for key, values in state.items()}


def _is_singleton_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, torch.Tensor) and v.dim() == 0 for v in value)


def _of_all_ranks(fqn: object, name: str, value: Any) -> Any:
    """fairscale lists a tensor without dimensions once per rank; any other value stays what it is."""
    if _is_singleton_list(value):
        if any(v.item() != value[0].item() for v in value[1:]):
            raise StateError(f"{fqn}: {name} differs between the ranks that saved it: {[v.item() for v in value]}")
        return value[0]
    return value
