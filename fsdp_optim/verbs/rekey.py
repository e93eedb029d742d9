"""Other keys, and other readers, for the same full dict. No communication, no copies of tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import StateError
from fsdp_optim.state.full import FullDict, KeyBy, Names, check_fits, keys_to_fqns, normalize
from fsdp_optim.verbs.call import names_of_model


def rekey(full: Mapping[str, Any], model: nn.Module, key_by: KeyBy) -> FullDict:
    """The same state under the other keys."""
    view = ModelReader(model).read()
    state = normalize(full, names_of_model(full, view))
    saved = [fqn for _, fqns in state.groups for fqn in fqns]
    shapes = {fqn: placement.shape for named in view.handles for fqn, placement in named.placements.items()}
    names = Names(tuple(fqns for _, fqns in state.groups), {})
    unknown = [fqn for fqn in saved if fqn not in shapes]
    if unknown:
        raise StateError(f"{unknown[0]}: the full dict has it, the model has not ({len(unknown)} such parameters)")
    check_fits(state, names, shapes)
    keys = {fqn: fqn if key_by == "name" else index for index, fqn in enumerate(saved)}
    old_map = dict(full.get("param_id_map") or {})
    fqn_of = keys_to_fqns(full, state.groups)
    return {
        **{key: value for key, value in full.items() if key not in ("state", "param_groups", "param_id_map")},
        "state": {keys[fqn]: dict(values) for fqn, values in state.state.items()},
        "param_groups": [
            {**group, "params": [keys[fqn] for fqn in fqns], "param_names": list(fqns)} for group, fqns in state.groups
        ],
        **({"param_id_map": {keys[fqn_of[key]]: local for key, local in old_map.items()}} if old_map else {}),
    }


def for_fairscale(full: Mapping[str, Any]) -> FullDict:
    """A full dict as fairscale 0.4.13's own `get_shard_from_optim_state_dict` reads it.

    That reader cuts every tensor into shards, those without dimensions too, unless they come in a list; so `step` and
    its like are given as lists of one. It changes the dict that it reads: this one shares only tensors with `full`.
    """
    if any(isinstance(key, str) for key in full["state"]):
        raise StateError("fairscale reads a full dict by id: gather it with key_by='id', or rekey it")
    state = {
        key: {
            name: [value] if isinstance(value, torch.Tensor) and value.dim() == 0 else value
            for name, value in values.items()
        }
        for key, values in full["state"].items()
    }
    groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "param_names"}
        for group in full["param_groups"]
    ]
    kept = {key: value for key, value in full.items() if key != "num_padded"}
    return {**kept, "state": state, "param_groups": groups, "param_id_map": dict(full["param_id_map"])}
