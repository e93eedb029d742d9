"""Rekey: change the keys of a full dict, or its form for another reader. No communication, no copies of tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fsdp_optim.adapters import ModelReader
from fsdp_optim.arguments import check_one_of
from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import Shape
from fsdp_optim.options import KeyBy, Model
from fsdp_optim.state.dicts.dialects import given_dict
from fsdp_optim.state.dicts.full import FullDict, FullState, kinds_of, records_kinds, write
from fsdp_optim.state.dicts.names import Names
from fsdp_optim.state.dicts.order import OrderedParam, as_ids_count, count
from fsdp_optim.state.live.fit_check import check_fits
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.state.live.local_dict import summarize
from fsdp_optim.state.live.optimizer_reader import read_optimizer
from fsdp_optim.tensors.dtensors import as_local
from fsdp_optim.verbs.arguments import check_full, check_model, check_optimizers
from fsdp_optim.verbs.call import Local
from fsdp_optim.verbs.sharded_dict import is_sharded
from fsdp_optim.view import ModelView

_KEPT = frozenset({"num_padded", "uncollected_local_ids", "optimizer_class"})
"""The keys of a full dict whose values `rekey` keeps, under new ids or names of parameters."""


def rekey(full: Mapping[str, Any], model: Model, key_by: KeyBy, optim: Optimizers | None = None) -> FullDict:
    """Return the state under other keys. `optim`: shows the groups and the order of ids, if the dict and the model do not."""
    check_model(model)
    check_full(full)
    check_one_of("key_by", key_by, ("id", "name"))
    if optim is not None:
        check_optimizers(optim)
    view = ModelReader(model).read(optim=optim)
    local = Local(view, read_optimizer(optim, view)) if optim is not None else None
    state = given_dict(full, local.names if local is not None else names_of_model(full, view))
    unknown = [fqn for _, fqns in state.groups for fqn in fqns if fqn not in view.place_of]
    if unknown:
        raise StateError(
            f"{unknown[0]}: the full dict has it, but the model does not ({counted_noun(len(unknown), 'such parameter')}): "
            "give the model that it was gathered from"
        )
    shapes = {fqn: placement.shape for named in view.handles for fqn, placement in named.placements.items()}
    check_fits(state, local.names if local is not None else _as_saved(state), shapes)
    if local is not None:
        groups, reason = local.names.groups, local.names.unknown_order
    else:
        groups, reason = _in_order(state, view)
    if reason and key_by == "id":
        raise StateError(
            f"{reason}, and ids would name other parameters' state: keep key_by='name', or give optim=, the optimizer that the "
            "ids are for, with its model"
        )
    return _keyed(full, state, shapes, groups, key_by, reason)


def _as_saved(state: FullState) -> Names:
    return Names(tuple(fqns for _, fqns in state.groups), {})


def _in_order(state: FullState, view: ModelView) -> tuple[tuple[tuple[str, ...], ...], str]:
    """Return each group of a full dict in the order of ids, and the reason if this order is unknown."""
    saved = tuple(fqns for _, fqns in state.groups)
    if state.listing == "ids":
        return saved, state.unknown_order
    place = view.place_of
    everything = count([OrderedParam(i, named.fqns) for i, named in enumerate(view.handles)], place, view.mixed)
    if state.listing == "units":
        return tuple(tuple(sorted(fqns, key=place.__getitem__)) for fqns in saved), everything.unknown
    wrapped = [fqn for named in view.handles for fqn in named.fqns]
    counted = [as_ids_count(fqns, wrapped, place) for fqns in saved]
    reason = everything.unknown
    if None in counted:
        fqns = saved[counted.index(None)]
        reason = (
            f"the full dict lists the {counted_noun(len(fqns), 'parameter')} of group "
            f"{counted.index(None)} neither as the unwrapped model does "
            "nor as this one, so the order in which its optimizer counted them is unknown"
        )
    return tuple(tuple(a) if a is not None else b for a, b in zip(counted, saved, strict=True)), reason


def _keyed(
    full: Mapping[str, Any],
    state: FullState,
    shapes: Mapping[str, Shape],
    groups: Sequence[tuple[str, ...]],
    key_by: KeyBy,
    unknown_order: str,
) -> FullDict:
    is_whole_of_ours = bool(state.local_ids) and not is_sharded(state)
    ordered = replace(
        state,
        groups=tuple((hyper, fqns) for (hyper, _), fqns in zip(state.groups, groups, strict=True)),
        unknown_order=unknown_order,
        kinds=kinds_of(summarize(state, shapes)),
    )
    # a dict of another library gets no kinds and keys that it did not record
    made = write(ordered, key_by, as_ours=bool(state.local_ids), with_kinds=records_kinds(full) or is_whole_of_ours)
    saved = [fqn for fqns in groups for fqn in fqns]
    key = {fqn: fqn if key_by == "name" else index for index, fqn in enumerate(saved)}
    return {**{name: value for name, value in made.items() if name not in _KEPT}, **_kept(full, state, key)}


def _kept(full: Mapping[str, Any], state: FullState, key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that stay. Dicts whose keys are all ids or names of parameters get the new keys."""
    kept = {}
    for name in full:
        if name in _KEPT:
            value = full[name]
            if isinstance(value, Mapping) and value and all(param in state.fqn_of for param in value):
                value = {key[state.fqn_of[param]]: item for param, item in value.items()}
            kept[name] = value
    return kept


def for_fairscale(full: Mapping[str, Any]) -> FullDict:
    """Return a full dict as fairscale 0.4.13's own `get_shard_from_optim_state_dict` reads it.

    That reader cuts every tensor into shards, even a 0-dim one, unless it is in a list. So `step` and other 0-dim tensors become
    lists of one. The reader changes its argument, so the result shares only tensors with `full`.
    """
    check_full(full)
    if any(isinstance(key, str) for group in full["param_groups"] for key in group["params"]):
        raise StateError("fairscale reads a full dict by id: gather it with key_by='id', or rekey it")
    state = {
        key: {
            name: [value] if isinstance(value, torch.Tensor) and value.dim() == 0 else value
            for name, value in values.items()
        }
        if isinstance(values, Mapping)
        else values
        for key, values in full["state"].items()
    }
    groups = [
        {
            key: copy.deepcopy(as_local(f"{key} of param group {index}", value))
            for key, value in group.items()
            if key != "param_names"
        }
        for index, group in enumerate(full["param_groups"])
    ]
    dropped = ("num_padded", "local_ids", "optimizer_class", "kinds")
    kept = {key: value for key, value in full.items() if key not in dropped}
    return {**kept, "state": state, "param_groups": groups, "param_id_map": dict(full["param_id_map"])}


def names_of_model(full: Mapping[str, Any], view: ModelView) -> Names:
    """Return the names and ids in a full dict without an optimizer: it has names, or its ids count the model's parameters."""
    groups = full.get("param_groups") or () if isinstance(full, Mapping) else ()
    named = any(group.get("param_names") or any(isinstance(p, str) for p in group["params"]) for group in groups)
    if len(groups) > 1 and not named:
        raise StateError(
            f"this full dict has {counted_noun(len(groups), 'param group')} and no names, and a model does "
            "not tell the group of a parameter: give optim=, an optimizer of this model with the same groups"
        )
    everything = count([OrderedParam(i, named.fqns) for i, named in enumerate(view.handles)], view.place_of, view.mixed)
    return Names.of((everything,), view, (), view.order)
