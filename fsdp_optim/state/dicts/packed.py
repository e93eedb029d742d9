"""The local ids of parameters in an optimizer's own dict, which are numbers or names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fsdp_optim.errors import WrapperError
from fsdp_optim.state.dicts.names import WrappedNames
from fsdp_optim.view import ModelView, NamedHandle

LocalId = int | str


def packed_ids(
    optim: object, handles: Sequence[NamedHandle], packed: Sequence[LocalId], group_index: int, view: ModelView
) -> list[LocalId]:
    """Return the local id of each live parameter of a group, in the order of `handles`. `packed`: the group's ids in the dict.

    Numbers are in the order of the live group. Names can be in any order (torch's `_NamedOptimizer` sorts them), so they are
    looked up.

    Raises WrapperError for a name that no parameter of the group has.
    """
    if not any(isinstance(local_id, str) for local_id in packed):
        return list(packed)
    known = _names_of(optim, view)
    names = WrappedNames(known, view.wrapper_parts)
    by_param: dict[int, LocalId] = {}
    for name in packed:
        known_name = names.find(name) if isinstance(name, str) else None
        param = known[known_name] if known_name is not None else None
        if param is None or param in by_param or param not in {id(named.handle.param) for named in handles}:
            raise WrapperError(
                f"group {group_index} of {type(optim).__name__} lists {name!r} in its state_dict(), which is not the name of a "
                "parameter of this group in the model: give the optimizer the names of named_parameters() of the model"
            )
        by_param[param] = name
    return [by_param[id(named.handle.param)] for named in handles]


def _names_of(optim: object, view: ModelView) -> dict[str, int]:
    """Return name -> id() of the live parameter, for the names in the model and the names that the optimizer was given."""
    ids: dict[str, int] = {}
    for named in view.handles:
        if len(named.fqns) == 1:
            ids[named.fqns[0]] = id(named.handle.param)
    ids.update({alias: ids[fqn] for alias, fqn in view.aliases.items() if fqn in ids})
    ids.update({name: id(param) for name, param in given_names(optim).items()})
    return ids


def given_names(optim: object) -> dict[str, torch.Tensor]:
    """Return name -> parameter, of an optimizer that was given names."""
    params_by_name: dict[str, torch.Tensor] = {}
    for attribute in ("params", "named_parameters"):  # torchrec's KeyedOptimizer, torch's _NamedOptimizer
        params = getattr(optim, attribute, None)
        for name, param in params.items() if isinstance(params, Mapping) else ():
            if isinstance(name, str) and isinstance(param, torch.Tensor):
                params_by_name[name] = param
    return params_by_name
