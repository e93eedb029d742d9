"""The optimizer of a model, read and checked: its parameters are those of the model, by identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs

from fsdp_optim.errors import WrapperError, counted_noun, shortened
from fsdp_optim.state.dicts.full import NON_PARAM_STATE, RESERVED_KEYS
from fsdp_optim.state.dicts.packed import LocalId, packed_ids
from fsdp_optim.state.live.local import (
    LocalOptim,
    LocalParam,
    OptimizerLike,
    Optimizers,
    OptimizersOfModels,
    is_on_cpu,
    says_on_cpu,
)
from fsdp_optim.state.values.classes import OptimizerClass
from fsdp_optim.state.values.same import Incomparable, key_of, same
from fsdp_optim.state.values.supported import check_supported, check_values, copyable
from fsdp_optim.view import ModelView, NamedHandle


def read_optimizer(optim: Optimizers, view: ModelView) -> LocalOptim:
    """Match the parameters of an optimizer, by identity, with the live parameters of a model.

    Several optimizers over one model (for example one per parameter, stepped in the backward pass) are read as one
    optimizer, in which groups of equal hyperparameters are one group.

    Raises WrapperError when the optimizer has parameters that are not in the model.
    """
    if isinstance(optim, (list, tuple)):
        if not optim:
            raise WrapperError(
                "optim is an empty list, which has no state: give the optimizers, or None for a call without optimizer"
            )
        models = optim.models if isinstance(optim, OptimizersOfModels) else [""] * len(optim)
        return _as_one([replace(_read(each, view), model=model) for each, model in zip(optim, models, strict=True)])
    return _read(optim, view)  # type: ignore[arg-type]


def _as_one(optimizers: list[LocalOptim]) -> LocalOptim:
    groups: dict[tuple[str, str, str], tuple[OptimizerClass, Mapping[str, Any], list[LocalParam]]] = {}
    fqns: set[str] = set()
    joined: list[list[int]] = [[] for _ in optimizers]
    numbers: dict[tuple[str, str, str], int] = {}
    for index, optimizer in enumerate(optimizers):
        for group_index, hyper in enumerate(optimizer.groups):
            of = optimizer.classes[group_index]
            kind = optimizer.model, of.name, _key_of_group(hyper, len(groups))
            *_, members = groups.setdefault(kind, (of, hyper, []))
            joined[index].append(numbers.setdefault(kind, len(numbers)))
            for param in optimizer.params:
                if param.group_index == group_index:
                    _check_model(optimizer, param)
                    if param.named.fqns[0] in fqns:
                        raise WrapperError(
                            f"{param.named.fqns[0]} is in two of the {len(optimizers)} optimizers: give each parameter to one"
                        )
                    fqns.add(param.named.fqns[0])
                    members.append(structs.replace(param, owner=(index, param.local_id)))
    params: list[LocalParam] = []
    ids = []
    for group_index, (*_, members) in enumerate(groups.values()):
        first = len(params)
        params += [structs.replace(p, local_id=first + i, group_index=group_index) for i, p in enumerate(members)]
        ids.append(tuple(range(first, len(params))))
    other_keys: dict[str, Any] = {}
    for optimizer in optimizers:
        for own_key, value in optimizer.other_keys.items():
            key = optimizer.joined_key(own_key)
            if key in other_keys and not same(other_keys[key], value):
                raise WrapperError(
                    f"{key} is {other_keys[key]!r} in one of the {len(optimizers)} optimizers and {value!r} in another: "
                    "a full dict has one value for all of them; gather the optimizers one by one"
                )
            other_keys[key] = value
    hypers, classes = tuple(hyper for _, hyper, _ in groups.values()), tuple(of for of, *_ in groups.values())
    unnamed = (None,) * len(hypers)
    places = tuple(map(tuple, joined))
    return LocalOptim(
        tuple(params), hypers, tuple(ids), unnamed, other_keys, tuple(optimizers), classes=classes, joined_groups=places
    )


def _check_model(optimizer: LocalOptim, param: LocalParam) -> None:
    """Raise WrapperError for a parameter of another model than the one whose optimizer has it."""
    name = param.named.fqns[0] if param.named.fqns else ""
    if optimizer.model and name and not name.startswith(f"{optimizer.model}."):
        raise WrapperError(
            f"{name}: the optimizer of {optimizer.model!r} has this parameter of another model: give each model its own "
            "optimizer, or one list of optimizers for all models"
        )


def _key_of_group(hyper: Mapping[str, Any], number: int) -> str:
    """Return a key that is equal for groups that can be merged; groups with an incomparable hyperparameter stay separate."""
    try:
        return key_of(hyper)
    except Incomparable:
        return f"group {number}"


def _read(optim: OptimizerLike, view: ModelView) -> LocalOptim:
    check_supported(optim)
    saved = optim.state_dict()
    missing = {"state", "param_groups"} - set(saved)
    if missing:
        raise WrapperError(f"state_dict() of {type(optim).__name__} has no {' and no '.join(sorted(missing))}")
    _check_names_of_keys(optim, saved)
    live, packed = optim.param_groups, saved["param_groups"]
    if len(live) != len(packed):
        raise WrapperError(
            f"{type(optim).__name__} has {counted_noun(len(live), 'param group')}, its state_dict() has {len(packed)}"
        )
    params: list[LocalParam] = []
    for index, (live_group, packed_group) in enumerate(zip(live, packed, strict=True)):
        if len(live_group["params"]) != len(packed_group["params"]):
            raise WrapperError(
                f"group {index} of {type(optim).__name__} has {counted_noun(len(live_group['params']), 'parameter')}, "
                f"in its state_dict() {len(packed_group['params'])}"
            )
        handles = [_handle_of(param, index, place, view) for place, param in enumerate(live_group["params"])]
        ids = packed_ids(optim, handles, packed_group["params"], index, view)
        for place, (named, local_id) in enumerate(zip(handles, ids, strict=True)):
            state = _state_of(saved["state"], local_id)
            if state is not None:
                name = named.fqns[0] if named.fqns else f"parameter {place} of group {index}"
                check_values(name, state, inner=not named.handle.marks)
            _check_master(named, state, optim)
            params.append(LocalParam(local_id, index, named, state, (0, local_id)))
    if all(isinstance(param.local_id, int) for param in params):
        params.sort(key=lambda p: p.local_id)
    if says_on_cpu(optim) or any(
        param.handle.device.type != "cpu" and any(map(is_on_cpu, (param.state or {}).values())) for param in params
    ):
        params = [structs.replace(param, offloaded=True) for param in params]
    non_param = _non_param_state(saved["state"], [p.local_id for p in params], view)
    return LocalOptim(
        params=tuple(params),
        groups=tuple(_hyperparameters(index, group) for index, group in enumerate(packed)),
        group_ids=tuple(tuple(group["params"]) for group in packed),
        group_param_names=tuple(group.get("param_names") for group in packed),
        other_keys={
            **{key: copyable(f"{key} of state_dict()", saved[key]) for key in saved if key not in RESERVED_KEYS},
            **({NON_PARAM_STATE: copyable("the state of no parameter", non_param)} if non_param else {}),
        },
        classes=(OptimizerClass.of(optim),) * len(packed),
    )


def _check_names_of_keys(optim: OptimizerLike, saved: Mapping[str, Any]) -> None:
    """Raise WrapperError for other keys whose names have a meaning in a full dict, in which they could not be told apart."""
    taken = (RESERVED_KEYS - {"state", "param_groups"}) | {NON_PARAM_STATE}
    wrong = [key for key in saved if key in taken]
    if wrong:
        raise WrapperError(
            f"state_dict() of {type(optim).__name__} has {shortened(map(repr, wrong))}, and a full optimizer state dict has "
            "keys of this library by these names, so that the optimizer's own would be lost: give them other names in "
            f"state_dict() and load_state_dict(), none of {', '.join(sorted(taken))}"
        )


def _hyperparameters(index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    kept = (item for item in group.items() if item[0] not in ("params", "param_names"))
    return {key: copyable(f"{key} of param group {index}", value) for key, value in kept}


def _check_master(named: NamedHandle, state: Mapping[str, Any] | None, optim: OptimizerLike) -> None:
    """Refuse a master that is neither in the model nor in the optimizer's own dict, because a load would not restore it."""
    master = named.handle.master
    if master is not None and master not in (state or {}):
        raise WrapperError(
            f"{named.fqns[0]}: {type(optim).__name__} holds a master of this parameter, and its state_dict() has no {master!r} "
            "in the state of this parameter, so the master would be neither saved nor loaded: state_dict() must contain the "
            "master, also before the first step"
        )


def _handle_of(param: torch.Tensor, group_index: int, place: int, view: ModelView) -> NamedHandle:
    named = view.handle_of(param)
    if named is None:
        raise WrapperError(
            f"parameter {place} of group {group_index} (shape {list(param.shape)}) is not in the model: build the "
            "optimizer from the wrapped model's parameters(), and pass that same model"
        )
    return named


def _non_param_state(state: Mapping[Any, Any], ids: Sequence[LocalId], view: ModelView) -> dict[Any, Any]:
    """Return the state that belongs to no parameter, such as MADGRAD's `k`, which torch keeps unchanged.

    Raises WrapperError for a key that looks like the key of a parameter.
    """
    known = set(ids)
    non_param = {key: value for key, value in state.items() if key not in known}
    wrong = [
        key for key in non_param if isinstance(key, int) or key in view.order or any(isinstance(i, str) for i in ids)
    ]
    if wrong:
        raise WrapperError(
            f"the optimizer's state has the ids {sorted(map(str, wrong))}, which are in none of its param groups: remove this "
            "state, or add its parameters to a group"
        )
    return non_param


def _state_of(state: Mapping[LocalId, Mapping[str, Any]], local_id: LocalId) -> Mapping[str, Any] | None:
    values = state.get(local_id)
    return values if values else None
