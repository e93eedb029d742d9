"""The full dict: one state per original parameter, as if FSDP were not there. The only file that knows its integer ids."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from fsdp_optim.errors import StateError
from fsdp_optim.layout import Shape
from fsdp_optim.state.flattened import is_flattened, unflatten
from fsdp_optim.state.local import RESERVED_KEYS, LocalOptim
from fsdp_optim.state.opaque import OpaqueShards
from fsdp_optim.state.picture import Param, Picture
from fsdp_optim.state.values import NO_EVIDENCE, Evidence, Kind, is_plain, kind_of, own

# Names that torch.compile, activation checkpointing and FSDP put into state_dict() names of others.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module"})

KeyBy = Literal["id", "name"]
FullDict = dict[str, Any]


@dataclass(frozen=True)
class FullState:
    """A full dict of any accepted kind, by FQN. Its values are those of the dict, not copies.

    `state` has no entry for a parameter without state; `groups` has each group's hyperparameters and its FQNs; `local_ids`
    the ids that the live parameters had on the rank that saved it, None where that is not known.
    """

    state: Mapping[str, Mapping[str, Any]]
    groups: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]
    extra: Mapping[str, Any]
    uncollected: frozenset[str] = frozenset()
    local_ids: Mapping[str, int | None] = field(default_factory=dict)

    def evidence(self, shapes: Mapping[str, Shape]) -> Evidence:
        """What kinds of values the parameters that have dimensions have."""
        return Evidence.of(
            (name, kind_of(name, value, shapes[fqn], NO_EVIDENCE))
            for fqn, values in self.state.items()
            if shapes.get(fqn)
            for name, value in values.items()
        )


@dataclass(frozen=True)
class Names:
    """How to read ids and names of a full dict for a given model and optimizer.

    Attributes:
        groups: the FQNs of each of the optimizer's groups, in the unwrapped model's order.
        aliases: other names of tied parameters.
        units: the FQNs of each live parameter, which can be in one group only.
        unit_order: FQNs as fairscale's own full dict counts them, None for a model without fairscale units.
    """

    groups: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, str]
    unit_order: tuple[str, ...] | None = None
    units: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def known(self) -> frozenset[str]:
        return frozenset(fqn for group in self.groups for fqn in group)

    def canonical(self, fqn: str) -> str:
        """The model's own name for a name in a full dict: without a wrapper's parts, where it is known so."""
        if fqn in self.known:
            return fqn
        clean = ".".join(part for part in fqn.split(".") if part not in _WRAPPER_PARTS)
        for name in (fqn, clean, clean.removeprefix("module.")):
            if name in self.known or name in self.aliases:
                return self.aliases.get(name, name)
        return fqn


# ---------------------------------------------------------------------------------------------------- writing


def assemble(
    picture: Picture, tensors: Mapping[tuple[str, str], Any], local: LocalOptim, rank: int, key_by: KeyBy
) -> FullDict:
    """The full dict of everything gathered on this recipient: `tensors` by (FQN, value name), taken as they are.

    An opaque value of a flat parameter is in the state of its first original only.
    """
    ids = picture.ids()
    params = {fqn: param.as_seen_by(rank) for fqn, param in picture.params.items()}
    key = {fqn: fqn if key_by == "name" else ids[fqn] for fqn in ids}
    local_ids = {fqn: p.local_id for p in local.params for fqn in p.named.fqns}
    live_first = sorted(ids, key=lambda fqn: (local_ids.get(fqn, len(ids)), ids[fqn]))
    in_group: list[list[str]] = [[] for _ in local.groups]
    for fqn in ids:
        in_group[params[fqn].group_index].append(fqn)
    return {
        **{name: own(value) for name, value in local.extra.items()},
        "state": {key[f]: values_of(params[f], tensors) for f in ids if params[f].summary is not None},
        "param_groups": [
            {
                **{name: own(value) for name, value in group.items()},
                "params": [key[fqn] for fqn in fqns],
                **({"param_names": list(fqns)} if key_by == "id" else {}),  # torch's readers by name refuse it
            }
            for group, fqns in zip(local.groups, in_group, strict=True)
        ],
        # fairscale's reader counts runs of equal values, so the ids are listed by the flat parameter they come from
        "param_id_map": {key[f]: local_ids.get(f) if params[f].summary is not None else None for f in live_first},
        "local_ids": {key[f]: local_ids.get(f) for f in live_first},
        **({"fqns": {key[f]: f for f in live_first}} if key_by == "id" else {}),
        "num_padded": _num_padded(picture, local),
        "uncollected_local_ids": [
            p.local_id
            for p in local.params
            if not p.handle.collected and p.state is not None and _is_variant(picture, p.named.fqns)
        ],
    }


def _is_variant(picture: Picture, fqns: Sequence[str]) -> bool:
    return any(fqn in picture.params and picture.params[fqn].variants for fqn in fqns)


def values_of(param: Param, tensors: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """The state of one parameter: its scalars, and what was gathered of it; empty for one without state."""
    summary = param.summary
    if summary is None:
        return {}
    scalars = dict(summary.scalars)
    return {
        name: own(scalars[name].value) if name in scalars else tensors[param.fqn, name]
        for name in summary.names
        if name in scalars or (param.fqn, name) in tensors
    }


def _num_padded(picture: Picture, local: LocalOptim) -> list[list[int]]:
    """The padding of each group rank, per flat parameter: this rank's by local id, then those of other ranks' units."""
    mine = [p.named.fqns for p in local.params]
    here = {fqns: list(p.handle.num_padded) for fqns, p in zip(mine, local.params, strict=True)}
    others = {p.fqns: list(p.num_padded) for p in picture.live if p.fqns not in here}
    return [*here.values(), *others.values()]


# ---------------------------------------------------------------------------------------------------- reading


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
        raise StateError(f"this is no optimizer state dict: it has no {' and no '.join(missing)}")
    groups = full["param_groups"]
    to_name = _naming(full, groups, names)
    twice = [fqn for fqn, number in Counter(to_name.values()).items() if number > 1]
    if twice:
        raise StateError(
            f"{twice[0]}: the full dict lists it as {[k for k, fqn in to_name.items() if fqn == twice[0]]}"
        )
    state = {}
    for key, values in _with_singletons(full).items():
        if key not in to_name:
            raise StateError(f"state has an entry {key!r} that is in none of the {len(groups)} param groups")
        if values:
            state[to_name[key]] = {name: _singleton(to_name[key], name, value) for name, value in values.items()}
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
        extra={key: value for key, value in full.items() if key not in RESERVED_KEYS},
        uncollected=frozenset(
            to_name[key] for key, local_id in local_of.items() if local_id in uncollected and key in to_name
        ),
        local_ids={to_name[key]: local_id for key, local_id in local_of.items() if key in to_name},
    )


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
        fqns = [list(group) for group in names.groups]
    if [len(group) for group in fqns] != [len(group) for group in keys]:
        raise StateError(
            f"the full dict has {_counts(keys)}, the optimizer's parameters on the unwrapped model are "
            f"{_counts(names.groups)}: it is another model's, or grouped in another way"
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
        order = tuple(fqn for group in names.groups for fqn in group)
    if len(keys) != 1:
        raise StateError(f"fairscale's own full dict has one param group, not {len(keys)}")
    return list(order)


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
        return f"{len(groups[0])} parameters"
    return f"{' + '.join(str(len(group)) for group in groups)} parameters in {len(groups)} groups"


# ---------------------------------------------------------------------------------------------------- checking


@dataclass(frozen=True)
class Fit:
    """What a model's optimizer has and a full state has not (`missing`), and the reverse (`extra`)."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


def check_fits(
    full: FullState,
    names: Names,
    shapes: Mapping[str, Shape],
    *,
    live: frozenset[str] = frozenset(),
    strict: bool = True,
    others: bool = False,
    regroup: bool = False,
) -> Fit:
    """Refuse a full state that is not one of this model and optimizer, before anything is made of it.

    Args:
        live: FQNs that have state in the live optimizer. One that the full state lists, but has no state for although it
            has for others, was frozen or unused when it was saved: its live state is not thrown away without a word, it is
            missing.
        strict: refuse parameters that are missing or extra, too.
        others: the full state may also have parameters that only other ranks hold; they are not counted as extra.
        regroup: several optimizers share the groups of the full state, so their own groups do not have to be the same.

    Raises StateError that names the parameter, both numbers and the way out.
    """
    saved = {fqn: index for index, (_, fqns) in enumerate(full.groups) for fqn in fqns}
    extra = [] if others else [fqn for fqn in saved if fqn not in names.known]
    left_out = live.difference(full.state) if full.state else frozenset()
    missing = [fqn for group in names.groups for fqn in group if fqn not in saved or fqn in left_out]
    if extra and strict:
        raise StateError(_not_found(extra, sorted(names.known), "the full dict has", "the model's optimizer has not"))
    if missing and strict and missing[0] in saved:
        raise StateError(
            f"{missing[0]}: the full dict has no state for it (it was frozen or not used when it was saved), the optimizer has; "
            "load into an optimizer without state to begin it anew, or keep what it has with strict=False"
        )
    if missing and strict:
        raise StateError(_not_found(missing, list(saved), "the model's optimizer has", "the full dict has not"))
    for fqns in names.units:
        group_of_unit([fqn for fqn in fqns if strict or fqn in saved], saved)
    if not regroup:
        _check_groups(full, names, saved)
    _check_shapes(full, shapes)
    return Fit(tuple(missing), tuple(extra))


def group_of_unit(fqns: Sequence[str], group_of: Mapping[str, int]) -> int | None:
    """The saved group of a live parameter: that of all its originals.

    Raises StateError for a flat parameter whose originals sit in two groups.
    """
    groups = [group_of.get(fqn) for fqn in fqns]
    for fqn, group in zip(fqns, groups, strict=True):
        if group != groups[0]:
            first, other = (f"group {g}" if g is not None else "no group" for g in (groups[0], group))
            raise StateError(
                f"{fqns[0]} is in {first} of the full dict and {fqn} is in {other}, and they lie in one flat parameter of this "
                "model, which can be in one group only: wrap them in different units, or without flattening"
            )
    return groups[0] if groups else None


def _check_groups(full: FullState, names: Names, saved: Mapping[str, int]) -> None:
    if len(full.groups) != len(names.groups):
        raise StateError(
            f"the full dict has {len(full.groups)} param groups, the optimizer has {len(names.groups)}: build the "
            "optimizer with the groups that it was saved with"
        )
    for index, group in enumerate(names.groups):
        for fqn in group:
            if saved.get(fqn, index) != index:
                raise StateError(
                    f"{fqn}: in param group {saved[fqn]} of the full dict, in group {index} of the optimizer: build the "
                    "optimizer with the groups that it was saved with"
                )


def _check_shapes(full: FullState, shapes: Mapping[str, Shape]) -> None:
    evidence = full.evidence(shapes)
    for fqn, values in full.state.items():
        for name, value in values.items() if fqn in shapes else ():
            kind = kind_of(name, value, shapes[fqn], evidence)
            no_moment = kind is Kind.SCALAR and isinstance(value, torch.Tensor) and evidence.says_sharded(name)
            if no_moment or (kind is Kind.OPAQUE and _is_cut_short(name, value, evidence)):
                got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise StateError(
                    f"{fqn}: {name} has shape {got} in the full dict, the parameter has {list(shapes[fqn])}: the dict is "
                    "another model's, was cut short, or its ids are in another order than the unwrapped model's parameters()"
                )


def _is_cut_short(name: str, value: object, evidence: Evidence) -> bool:
    """Whether an opaque value should be shaped like its parameter: by its name, unless it is of a class of its own."""
    return evidence.says_sharded(name) and (is_plain(value) or not isinstance(value, (torch.Tensor, OpaqueShards)))


def _not_found(fqns: list[str], candidates: list[str], has: str, has_not: str) -> str:
    close = difflib.get_close_matches(fqns[0], candidates, n=1)
    hint = f" (it has {close[0]})" if close else ""
    more = f" and {len(fqns) - 1} more" if len(fqns) > 1 else ""
    return (
        f"{fqns[0]}{more}: {has} it, {has_not}{hint}; {len(candidates)} parameters there. Is the dict of this model, and "
        "does the optimizer hold the same parameters as when it was saved?"
    )
