"""Readers of full dicts of all libraries: each dialect is one class, and `DIALECTS` lists them in the order of recognition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.state.dicts.flattened import is_flattened, unflatten
from fsdp_optim.state.dicts.full import FullState, Listing, is_by_name, is_ours, names_in, num_listed, read
from fsdp_optim.state.dicts.names import Names
from fsdp_optim.tensors.elements import check_elements


class Dialect(Protocol):
    """The full dicts of one library. The first dialect in `DIALECTS` whose `recognises` returns True reads the dict."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        """Return whether a dict that no earlier dialect has recognised is written in this dialect."""

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        """Return the state in a dict. Raises StateError for a dict of another model, and for ids whose parameters are unknown."""


def given_dict(full: Mapping[str, Any], names: Names) -> FullState:
    """Normalize a dict that a user gives. Raises StateError as `normalize`, and for a value that cannot be copied."""
    for section, values in full.items() if isinstance(full, Mapping) else ():
        if section == "state" and isinstance(values, Mapping):
            for key, entry in values.items():
                for name, value in entry.items() if isinstance(entry, Mapping) else ((None, entry),):
                    check_elements(f"{key}: {name} of the dict" if name is not None else f"{key} of the dict", value)
        else:
            check_elements(f"{section} of the dict", values)
    return normalize(full, names)


def normalize(full: Mapping[str, Any], names: Names) -> FullState:
    """Read a full dict in any dialect: this library's, fairscale's, torch's, a plain optimizer's; keyed by id or by name.

    Raises StateError where the parameters of ids are unknown, or the dict is not a full dict.
    """
    if not isinstance(full, Mapping):
        raise StateError(
            f"a full optimizer state dict is needed here, not {type(full).__name__}: is this rank a recipient?"
        )
    return next(dialect for dialect in DIALECTS if dialect.recognises(full)).read(full, names)


class Flattened:
    """torch.distributed.checkpoint's flattened dict: one level of keys, which contain the names."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        return is_flattened(full)

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        return Named().read(unflatten(full, names.groups, names.canonical), names)


class NoFullDict:
    """A dict without the keys that every full dict has, which is refused."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        return bool(self._missing(full))

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        raise StateError(
            f"this is not an optimizer state dict: it has no {' and no '.join(self._missing(full))}; give the result of "
            "gather_full_optim_state_dict, or an optimizer's state_dict()"
        )

    def _missing(self, full: Mapping[str, Any]) -> list[str]:
        return [key for key in ("state", "param_groups") if key not in full]


class OwnDialect:
    """A dict that this library gathered, or read from a checkpoint."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        return is_ours(full)

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        to_name = _to_name(full, _names_or_ids(full, names), names)
        listing: Listing = "ids" if "local_ids" in full or not is_by_name(full) else "other"
        return read(full, to_name, lambda key: _is_non_param(key, to_name, names), listing=listing)


class Fairscale:
    """A dict that fairscale gathered, or that was made for fairscale's reader: its ids count unit after unit."""

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
        return read(full, to_name, lambda key: _is_non_param(key, to_name, names), entries=entries, listing=listing)


class Named:
    """A dict of torch's gather, or of an optimizer with named parameters: names in place of ids, or beside the ids."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        return names_in(full) is not None

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        to_name = _to_name(full, names_in(full) or [], names)
        listing: Listing = "other" if is_by_name(full) else "ids"
        return read(full, to_name, lambda key: _is_non_param(key, to_name, names), listing=listing)


class Plain:
    """A plain optimizer's state_dict(): ids without names, which count the parameters like the live optimizer's groups."""

    def recognises(self, full: Mapping[str, Any]) -> bool:
        return True

    def read(self, full: Mapping[str, Any], names: Names) -> FullState:
        to_name = _to_name(full, _names_or_ids(full, names), names)
        return read(full, to_name, lambda key: _is_non_param(key, to_name, names))


DIALECTS: tuple[Dialect, ...] = (Flattened(), NoFullDict(), OwnDialect(), Fairscale(), Named(), Plain())


# ------------------------------------------------------------------------------------------- names


def _to_name(full: Mapping[str, Any], fqns: Sequence[Sequence[str]], names: Names) -> dict[Any, str]:
    """Return key -> FQN, for every key that the groups of a dict list. `fqns`: the FQNs of each group, in the group's order."""
    groups = full["param_groups"]
    if [len(group) for group in fqns] != num_listed(groups):
        raise StateError(
            f"the full dict has {_counts(num_listed(groups))}, the optimizer on the unwrapped model has "
            f"{_counts([len(group) for group in names.groups])}: the dict is of another model, or has other groups: build the "
            "model and the optimizer's groups as they were when saved"
        )
    to_name = {
        key: names.canonical(fqn)
        for group, fqns_of_group in zip(groups, fqns, strict=True)
        for key, fqn in zip(group["params"], fqns_of_group, strict=True)
    }
    twice = [fqn for fqn, number in Counter(to_name.values()).items() if number > 1]
    if twice:
        keys = [key for key, fqn in to_name.items() if fqn == twice[0]]
        raise StateError(
            f"{twice[0]}: the full dict lists this parameter under several keys, {keys}: "
            "gather the dict again, or give parameters different names"
        )
    return to_name


def _names_or_ids(full: Mapping[str, Any], names: Names) -> Sequence[Sequence[str]]:
    """Return the names in a dict, or the names of its ids as the live optimizer counts them, group by group."""
    named = names_in(full)
    if named is not None:
        return named
    if full.get("unknown_order"):
        raise StateError(str(full["unknown_order"]))
    if names.unknown_order:
        raise StateError(
            f"{names.unknown_order}: the dict has ids without names, and which parameters they are is not known; gather the "
            "dict with key_by='name', or convert a plain optimizer's dict with rekey_optim_state_dict(full, model, "
            "key_by='name', optim=optim)"
        )
    return names.groups


def _in_units(full: Mapping[str, Any], names: Names) -> list[list[str]]:
    """Return the names of a fairscale dict's ids: one group, which counts unit after unit, not in the unwrapped order."""
    order = names.unit_order
    if order is None:
        if len(set(full["param_id_map"].values())) > 1:
            raise StateError(
                "this full dict is fairscale's own and counts its ids by FSDP unit, and only a model wrapped in the same way "
                "has that order: convert the dict with rekey_optim_state_dict(full, wrapped_model, key_by='name')"
            )
        order = names.model_order
    if len(full["param_groups"]) != 1:
        raise StateError(f"fairscale's own full dict has one param group, not {len(full['param_groups'])}")
    return [list(order)]


def _is_non_param(key: object, to_name: Mapping[Any, str], names: Names) -> bool:
    """Return whether a key of the state is not a parameter's, so that the entry is kept unchanged, as torch does."""
    is_name = isinstance(key, str) and (key.isdigit() or names.canonical(key) in names.known)
    return not isinstance(key, int) and not is_name and all(isinstance(known, int) for known in to_name)


def _counts(nums: Sequence[int]) -> str:
    if len(nums) == 1:
        return counted_noun(nums[0], "parameter")
    return f"{' + '.join(map(str, nums))} parameters in {len(nums)} groups"


# ------------------------------------------------------------------------------------------- fairscale's lists of numbers


def _with_singletons(full: Mapping[str, Any]) -> Mapping[Any, Mapping[str, Any]]:
    """Return the state with fairscale's lists of 0-dimensional tensors copied from a unit's last original to all of them."""
    state: Mapping[Any, Mapping[str, Any]] = full["state"]
    local_of = full.get("param_id_map") or {}
    shared: dict[Any, dict[str, Any]] = {}
    for key, values in state.items():
        if local_of.get(key) is not None:
            singletons = {name: value for name, value in values.items() if _is_singleton_list(value)}
            shared.setdefault(local_of[key], {}).update(singletons)
    return {key: {**shared.get(local_of.get(key), {}), **values} if values else values for key, values in state.items()}


def _is_singleton_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, torch.Tensor) and v.dim() == 0 for v in value)


def _of_all_ranks(fqn: object, name: str, value: Any) -> Any:
    """Return the tensor in a list of 0-dimensional tensors, which fairscale fills by rank; any other value unchanged."""
    if _is_singleton_list(value):
        if any(v.item() != value[0].item() for v in value[1:]):
            raise StateError(
                f"{fqn}: {name} differs between the ranks that saved the dict: {[v.item() for v in value]}; a full dict "
                "needs one value: set it alike on all ranks before gathering"
            )
        return value[0]
    return value
