"""Other keys, and other readers, for the same full dict. No communication, no copies of tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import StateError
from fsdp_optim.state.fits import check_fits
from fsdp_optim.state.full import FullDict, KeyBy
from fsdp_optim.state.reading import Names, normalize
from fsdp_optim.verbs.call import names_of_model


def rekey(full: Mapping[str, Any], model: nn.Module, key_by: KeyBy) -> FullDict:
    """The same state under the other keys."""
    view = ModelReader(model).read()
    state = normalize(full, names_of_model(full, view))
    place = {fqn: index for index, fqn in enumerate(view.order)}
    unknown = [fqn for _, fqns in state.groups for fqn in fqns if fqn not in place]
    if unknown:
        raise StateError(
            f"{unknown[0]}: the full dict has it, the model has not ({len(unknown)} such parameters): give the "
            "model that it was gathered from"
        )
    # Ids count in the unwrapped model's order, whatever order the dict lists its parameters in.
    groups = tuple((hyper, tuple(sorted(fqns, key=place.__getitem__))) for hyper, fqns in state.groups)
    saved = [fqn for _, fqns in groups for fqn in fqns]
    shapes = {fqn: placement.shape for named in view.handles for fqn, placement in named.placements.items()}
    check_fits(state, Names(tuple(fqns for _, fqns in groups), {}), shapes)
    key = {fqn: fqn if key_by == "name" else index for index, fqn in enumerate(saved)}
    ours = {
        "local_ids": {key[fqn]: local_id for fqn, local_id in state.local_ids.items()},
        "param_id_map": {key[fqn]: i if fqn in state.state else None for fqn, i in state.local_ids.items()},
        **({"fqns": {key[fqn]: fqn for fqn in saved}} if key_by == "id" else {}),
    }
    return {
        **state.extra,
        "state": {key[fqn]: dict(state.state[fqn]) for fqn in saved if fqn in state.state},
        "param_groups": [
            {
                **hyper,
                "params": [key[fqn] for fqn in fqns],
                **({"param_names": list(fqns)} if key_by == "id" else {}),
            }
            for hyper, fqns in groups
        ],
        **{name: full[name] for name in ("num_padded", "uncollected_local_ids") if name in full},
        **(ours if state.local_ids else {}),
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
    kept = {key: value for key, value in full.items() if key not in ("num_padded", "local_ids")}
    return {**kept, "state": state, "param_groups": groups, "param_id_map": dict(full["param_id_map"])}
