"""The full dict, read: ours, fairscale's, torch's, a plain optimizer's; by id or by name; made a state by FQN."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import Shape, cut_named
from fsdp_optim.state.flattened import is_flattened, unflatten
from fsdp_optim.state.kinds import LOOSE_KIND, Evidence, Kind, kind_of, sight_of
from fsdp_optim.state.local import LOOSE, RESERVED_KEYS
from fsdp_optim.state.order import Counted
from fsdp_optim.state.packed import LocalId
from fsdp_optim.view import ModelView

Listing = Literal["ids", "units", "other"]


@dataclass(frozen=True)
class FullState:
    """A full dict of any accepted kind, by FQN. Its values are those of the dict, not copies.

    Attributes:
        state: by FQN; no entry for a parameter without state.
        groups: each group's hyperparameters and its FQNs.
        local_ids: the ids that the live parameters had on the rank that saved it, None where that is not known.
        listing: what the order of the FQNs in a group is. "ids": that of the ids. "units": fairscale's, unit after unit. "other":
            that of another tool, which can be any.
        unknown_order: why ids cannot count its parameters, where the dict says so.
        fqn_of: the FQN of each of the dict's own keys.
        classes: the name of the class of each group's optimizer, empty where that is not known.
        kinds: what the dict records of its values.
    """

    state: Mapping[str, Mapping[str, Any]]
    groups: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]
    extra: Mapping[str, Any]
    uncollected: frozenset[str] = frozenset()
    local_ids: Mapping[str, LocalId | None] = field(default_factory=dict)
    listing: Listing = "ids"
    unknown_order: str = ""
    fqn_of: Mapping[LocalId, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    kinds: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)

    def class_of(self, group_index: int) -> str:
        """The name of the class of a group's optimizer; "" where that is not known."""
        return self.classes[group_index] if self.classes else ""

    def evidence(self, shapes: Mapping[str, Shape]) -> Evidence:
        """What the values of the parameters that have dimensions are, where the dict does not record it."""
        return Evidence.of(
            sight_of(name, value, shapes[fqn])
            for fqn, values in self.state.items()
            if shapes.get(fqn) and fqn not in self.kinds
            for name, value in values.items()
        )

    def recorded(self, fqn: str, name: object) -> Kind | None:
        """The kind of a value as the dict records it; None where it does not."""
        word = self.kinds.get(fqn, {}).get(name)
        return Kind(word.partition(" ")[0]) if word is not None else None

    def kind_of(self, fqn: str, name: str, value: object, shape: Shape, evidence: Evidence) -> Kind:
        """What a value is. One that was placed by itself is opaque: it is whole now."""
        recorded = self.recorded(fqn, name)
        if recorded is None:
            return kind_of(name, value, shape, evidence)
        return Kind.OPAQUE if recorded is Kind.PLACED else recorded

    def cut_of(self, fqn: str, name: object) -> str:
        """How a value was cut that was placed by itself."""
        word, _, cut = self.kinds.get(fqn, {}).get(name, "").partition(" ")
        return cut if word == Kind.PLACED.value else ""


@dataclass(frozen=True)
class Names:
    """How to read ids and names of a full dict for a given model and optimizer.

    Attributes:
        groups: the FQNs of each of the optimizer's groups, in the order in which ids count them.
        aliases: other names of tied parameters.
        units: the FQNs of each live parameter, which can be in one group only.
        wrapper_parts: what wrappers put into names, which is no part of an FQN.
        unit_order: FQNs as fairscale's own full dict counts them, None for a model without fairscale units.
        model_order: all FQNs of the groups, in the unwrapped model's order.
        unknown_order: why ids without names cannot count these parameters; empty where they can.
        given: names that were given with `name_of`, by the names in a dict that was written without them.
    """

    groups: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, str]
    unit_order: tuple[str, ...] | None = None
    units: tuple[tuple[str, ...], ...] = ()
    wrapper_parts: frozenset[str] = frozenset()
    model_order: tuple[str, ...] = ()
    unknown_order: str = ""
    given: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        counted: Sequence[Counted],
        view: ModelView,
        units: tuple[tuple[str, ...], ...],
        model_order: tuple[str, ...],
    ) -> Names:
        return cls(
            groups=tuple(group.fqns for group in counted),
            aliases=view.aliases,
            unit_order=view.unit_order,
            units=units,
            wrapper_parts=view.wrapper_parts,
            model_order=model_order,
            unknown_order=next((group.unknown for group in counted if group.unknown), ""),
        )

    @cached_property
    def known(self) -> frozenset[str]:
        return frozenset(fqn for group in self.groups for fqn in group)

    def canonical(self, fqn: str) -> str:
        """The model's own name for a name in a full dict: without a wrapper's parts, where it is known so."""
        clean = ".".join(part for part in fqn.split(".") if part not in self.wrapper_parts)
        if clean in self.given:
            return self.aliases.get(self.given[clean], self.given[clean])
        if fqn in self.known:
            return fqn
        for name in (fqn, clean, clean.removeprefix("module.")):
            if name in self.known or name in self.aliases:
                return self.aliases.get(name, name)
        alike = self._without_module.get(_without_module(clean), ())
        return self.aliases.get(alike[0], alike[0]) if len(alike) == 1 else fqn

    @cached_property
    def _without_module(self) -> dict[str, list[str]]:
        """The names by what is left of them without `module`, which DistributedDataParallel inside another wrapper leaves."""
        found: dict[str, list[str]] = {}
        for name in sorted({*self.known, *self.aliases}):
            found.setdefault(_without_module(name), []).append(name)
        return found


def _without_module(fqn: str) -> str:
    return ".".join(part for part in fqn.split(".") if part != "module")


def normalize(full: Mapping[str, Any], names: Names) -> FullState:
    """Read a full dict of any accepted kind: ours, fairscale's, a plain optimizer's; keyed by id or by name.

    Raises StateError where the ids cannot be told apart, or the dict is not a full dict.
    """
    if not isinstance(full, Mapping):
        raise StateError(
            f"a full optimizer state dict is needed here, not {type(full).__name__}: is this rank a recipient?"
        )
    if is_flattened(full):
        full = unflatten(full, names.groups)
    missing = [key for key in ("state", "param_groups") if key not in full]
    if missing:
        raise StateError(
            f"this is no optimizer state dict: it has no {' and no '.join(missing)}; give what gather_full_optim_state_dict "
            "returned, or an optimizer's state_dict()"
        )
    groups = full["param_groups"]
    to_name = _naming(full, groups, names)
    twice = [fqn for fqn, number in Counter(to_name.values()).items() if number > 1]
    if twice:
        raise StateError(
            f"{twice[0]}: the full dict lists it twice or more, as {[k for k, fqn in to_name.items() if fqn == twice[0]]}: "
            "gather it again, or give names that differ"
        )
    state: dict[str, Mapping[str, Any]] = {}
    loose: dict[Any, Any] = dict(full.get(LOOSE, {}))
    theirs, kinds = _has_singletons(full), _recorded_kinds(full)
    for key, values in (_with_singletons(full) if theirs else full["state"]).items():
        if key not in to_name and _is_loose(key, kinds, to_name, names):
            loose[key] = values
            continue
        if key not in to_name:
            raise StateError(
                f"state has an entry {key!r} that is in none of the {counted_noun(len(groups), 'param group')}: gather it again"
            )
        if values or key in kinds:  # what stands for a whole flat parameter is in the state of its first original only
            state[to_name[key]] = (
                {name: _singleton(to_name[key], name, value) for name, value in values.items()} if theirs else values
            )
    local_of = full.get("local_ids") or full.get("param_id_map") or {}
    uncollected = set(full.get("uncollected_local_ids") or ())
    return FullState(
        state=state,
        groups=tuple(
            (
                {k: v for k, v in group.items() if k not in ("params", "param_names")},
                tuple(to_name[key] for key in group["params"]),
            )
            for group in groups
        ),
        extra={
            **{key: value for key, value in full.items() if key not in RESERVED_KEYS},
            **({LOOSE: loose} if loose else {}),
        },
        uncollected=frozenset(
            to_name[key] for key, local_id in local_of.items() if local_id in uncollected and key in to_name
        ),
        local_ids={to_name[key]: local_id for key, local_id in local_of.items() if key in to_name},
        listing=_listing(full),
        unknown_order=str(full.get("unknown_order", "")),
        fqn_of=to_name,
        classes=_classes(full.get("optimizer_class"), len(groups)),
        kinds={to_name[key]: words for key, words in kinds.items() if key in to_name},
    )


def _listing(full: Mapping[str, Any]) -> Listing:
    if "local_ids" in full:
        return "ids"
    if any(isinstance(key, str) for group in full["param_groups"] for key in group["params"]):
        return "other"
    return "units" if _is_fairscales(full) else "ids"


def _is_fairscales(full: Mapping[str, Any]) -> bool:
    named = all(group.get("param_names") is not None for group in full["param_groups"] if group["params"])
    return "param_id_map" in full and "fqns" not in full and not named


def _classes(said: object, num_groups: int) -> tuple[str, ...]:
    """The class of each group, as `class_said` wrote it."""
    if isinstance(said, str):
        return (said,) * num_groups
    if isinstance(said, (list, tuple)) and len(said) == num_groups:
        return tuple(map(str, said))
    return ()


def _is_loose(key: object, kinds: Mapping[Any, Any], to_name: Mapping[Any, str], names: Names) -> bool:
    """Whether an entry of the state is one that torch keeps as it is, under a key that is no parameter."""
    if kinds:
        return bool(kinds.get(key) == LOOSE_KIND)
    is_name = isinstance(key, str) and (key.isdigit() or names.canonical(key) in names.known)
    return not isinstance(key, int) and not is_name and all(isinstance(known, int) for known in to_name)


def _recorded_kinds(full: Mapping[str, Any]) -> Mapping[Any, Mapping[Any, str]]:
    """What the dict says of the kinds of its values. Raises StateError for what gather does not write."""
    kinds = full.get("kinds")
    if kinds is None:
        return {}
    try:
        for words in {id(words): words for words in kinds.values() if words != LOOSE_KIND}.values():
            for word in words.values():
                kind, _, cut = word.partition(" ")
                Kind(kind)
                cut_named(cut)
    except (AttributeError, TypeError, ValueError) as error:
        raise StateError(
            f"kinds of this full dict is not what gather_full_optim_state_dict writes ({error}): give the dict as it was "
            "gathered, or without kinds"
        ) from error
    return kinds  # type: ignore[no-any-return]


def _naming(full: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Names) -> dict[Any, str]:
    """Every key that the param groups list, with the FQN that it stands for."""
    keys = [[*group["params"]] for group in groups]
    if any(isinstance(key, str) for group in keys for key in group):
        fqns: list[list[str]] = keys
    elif "fqns" in full and all(key in full["fqns"] for group in keys for key in group):
        fqns = [[full["fqns"][key] for key in group] for group in keys]
    elif all(group.get("param_names") is not None for group in groups if group["params"]):
        fqns = [list(group.get("param_names") or ()) for group in groups]
    elif "param_id_map" in full:
        fqns = [_fairscale_names(full["param_id_map"], keys, names)]
    else:
        if names.unknown_order:
            raise StateError(
                f"{names.unknown_order}: the ids of a dict without names cannot be told; gather it with key_by='name', or make a "
                "plain optimizer's dict one by name with rekey_optim_state_dict(full, model, key_by='name', optim=optim)"
            )
        fqns = [list(group) for group in names.groups]
    if [len(group) for group in fqns] != [len(group) for group in keys]:
        raise StateError(
            f"the full dict has {_counts(keys)}, the optimizer's parameters on the unwrapped model are "
            f"{_counts(names.groups)}: it is another model's, or grouped in another way: build the optimizer as it was when saved"
        )
    return {
        key: names.canonical(fqn)
        for key_group, fqn_group in zip(keys, fqns, strict=True)
        for key, fqn in zip(key_group, fqn_group, strict=True)
    }


def _fairscale_names(id_map: Mapping[int, Any], keys: list[list[int]], names: Names) -> list[str]:
    """fairscale counts ids unit after unit, not in the unwrapped model's order; and has one group."""
    order = names.unit_order
    if order is None:
        if len(set(id_map.values())) > 1:
            raise StateError(
                "this full dict is fairscale's own and counts its ids by FSDP unit, which only a model wrapped in the same "
                "way can tell: read it there once, with rekey_optim_state_dict(full, wrapped_model, key_by='name')"
            )
        order = names.model_order
    if len(keys) != 1:
        raise StateError(f"fairscale's own full dict has one param group, not {len(keys)}")
    return list(order)


def _has_singletons(full: Mapping[str, Any]) -> bool:
    """Whether fairscale wrote the dict, or it is made for fairscale: gather's own have more keys."""
    return "param_id_map" in full and "local_ids" not in full and "kinds" not in full


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


def _singleton(fqn: str, name: str, value: Any) -> Any:
    """fairscale lists a tensor without dimensions once per rank; any other value stays what it is."""
    if _is_singleton_list(value):
        if any(v.item() != value[0].item() for v in value[1:]):
            raise StateError(f"{fqn}: {name} differs between the ranks that saved it: {[v.item() for v in value]}")
        return value[0]
    return value


def _counts(groups: Sequence[Sequence[object]]) -> str:
    if len(groups) == 1:
        return counted_noun(len(groups[0]), "parameter")
    return f"{' + '.join(str(len(group)) for group in groups)} parameters in {len(groups)} groups"
