"""Which part of a torch file is the model, which is the optimizer, and which are values of the trainer: a writer of this library
has recorded it (`recorded_parts`); in other files the structure decides (`parts_of`).

A model is a dict of tensors by name. An optimizer is a dict with `state` and `param_groups`, or their flattened form, or a list
of such dicts. The keys that trainers use for them decide only between several candidates. A dict of weights with other values
among them is a model too, if it is under such a key, if most of them are weights, or if a weight has the name of a submodule's
parameter, such as "layer.weight": no weights are passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.foreign.archive.torch_zip import TensorStub
from fsdp_optim.foreign.archive.tree import mapped
from fsdp_optim.foreign.torch.folder import PARTS, ROLES
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.summary import SavedRoles
from fsdp_optim.formats.base.unread import Unread
from fsdp_optim.tensors.model_dict import is_extra_state

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "weights")
"""The keys under which trainers save a model."""

OPTIM_KEYS = (
    *("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state", "optimizer_states"),
    *("last_optimizer_state", "optimizers", "opt"),
)
"""The keys under which trainers save an optimizer."""

_RANDOM = ("rng", "random", "seed")
_MOST_DEEP = 3


@dataclass(frozen=True)
class TorchParts:
    """The parts of the value of one file.

    Attributes:
        model: the weights by name; None if the value has none.
        optims: the optimizers' full dicts.
        path: the keys that lead to the dict with these parts.
        rest: the other values of that dict.
        where_model, where_optim: the keys of the two parts, for errors; "" for a file that is the part itself.
    """

    model: Mapping[str, Any] | None = None
    optims: Sequence[Mapping[str, Any]] = ()
    path: tuple[Any, ...] = ()
    rest: Mapping[Any, Any] = field(default_factory=dict)
    where_model: str = ""
    where_optim: str = ""


def parts_of(where: str, value: Any) -> TorchParts:
    """Return the parts of a value. Raises CheckpointError that names the keys where it has none, or several candidates."""
    path: tuple[Any, ...] = ()
    levels: list[Any] = []
    while True:
        levels.append(value)
        if isinstance(value, Unread):
            raise CheckpointError(
                f"{where}: is a pickled object of the class {value.what}, which is not read: save its state_dict()"
            )
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{where}: has a {type(value).__name__} and no dict of a model or an optimizer")
        if is_optim(value):
            return TorchParts(optims=[value], path=path)
        if is_model(value):
            return TorchParts(model=value, path=path)
        parts = _parts_in(where, value, path)
        if parts.model is not None or parts.optims:
            return parts
        inside = [key for key, item in value.items() if isinstance(item, Mapping) and item]
        if len(inside) != 1 or len(path) == _MOST_DEEP:
            for depth, level in enumerate(levels):
                if is_mixed_model(level):
                    return _without_others(level, path[:depth])
            raise CheckpointError(
                f"{where}: has neither a model (a dict of tensors under a key such as {', '.join(MODEL_KEYS[:3])}) nor an "
                f"optimizer (a dict with state and param_groups): its keys are {_listed(levels[0])}"
            )
        path, value = (*path, inside[0]), value[inside[0]]


def recorded_parts(where: str, value: Any, roles: SavedRoles) -> TorchParts:
    """Return the parts of the value of a file, as its writer has recorded them.

    Raises CheckpointError where they are not there.
    """
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: has a {type(value).__name__} and no dict of a model or an optimizer")
    model, optim = _recorded(where, value, roles.model), _recorded(where, value, roles.optim)
    if optim is not None and not is_optim(optim):
        raise CheckpointError(f"{where}: its optimizer has no state and param_groups")
    is_part = [] in (roles.model, roles.optim)
    rest = {key: item for key, item in value.items() if not is_part and key not in (*PARTS.values(), ROLES)}
    return TorchParts(
        model,
        [optim] if optim is not None else (),
        rest=rest,
        where_model=_shown((), *roles.model) if roles.model else "",
        where_optim=_shown((), *roles.optim) if roles.optim else "",
    )


def tells_roles(halves: Mapping[str, Any], rest: Mapping[Any, Any]) -> bool:
    """Return whether the structure of a file that is written shows its halves, which are under their keys, as what they are."""

    def stored(tensor: Any) -> StoredTensor:
        return StoredTensor("", str(tensor.dtype), tuple(tensor.shape), "", 0)

    if not rest:
        return True
    file: Any = {**halves, **rest}
    for kind in (TensorStub, torch.Tensor):
        file = mapped(file, kind, stored)
    try:
        parts = parts_of("", file)
    except CheckpointError:
        return False
    optim = parts.optims[0] if len(parts.optims) == 1 else None
    shown = dict(zip(PARTS.values(), (parts.model, optim), strict=True))
    return not parts.path and all(shown[key] is file.get(key) for key in shown)


def recorded_in(value: Any) -> SavedRoles | None:
    """Return the roles that a file with everything records itself; None if it does not."""
    keys = value.get(ROLES) if isinstance(value, Mapping) else None
    if not isinstance(keys, list) or not all(key in PARTS.values() for key in keys):
        return None
    model, optim = ([key] if key in keys else None for key in PARTS.values())
    return SavedRoles(model, optim)


def _recorded(where: str, value: Mapping[Any, Any], keys: Sequence[str] | None) -> Mapping[Any, Any] | None:
    """Return the dict to which recorded keys lead; None where none is recorded."""
    if keys is None:
        return None
    for key in keys:
        inner = value.get(key)
        if not isinstance(inner, Mapping):
            raise CheckpointError(f"{where}: has no dict under the key {key!r}, which was saved")
        value = inner
    return value


def is_model(value: Any) -> bool:
    """Return whether a value is a dict of tensors by name, besides the values that modules add."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    is_tensor = [isinstance(item, StoredTensor) for key, item in value.items() if not is_extra_state(key)]
    return any(is_tensor) and all(
        isinstance(item, Unread) and item.what.startswith("torch.") for item in _others_in(value).values()
    )


def is_mixed_model(value: Any) -> bool:
    """Return whether a value is a dict with weights by name and with other values among them, which are no weights."""
    return isinstance(value, Mapping) and any(_are_weights(value)) and _has_names(value)


def _looks_like_model(value: Any) -> bool:
    """Return whether a dict with weights and other values is a model by itself, whatever its key; metrics may be tensors too."""
    if not is_mixed_model(value):
        return False
    weights = [key for key, is_weight in zip(value, _are_weights(value), strict=True) if is_weight]
    return 2 * len(weights) > len(value) or any("." in key.strip(".") for key in weights)


def _others_in(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the items of a dict of weights that are neither tensors nor values which a module has added to its own tensors."""
    named = {key: item for key, item in value.items() if isinstance(key, str)}
    within = {key.rpartition(".")[0] for key, item in named.items() if isinstance(item, StoredTensor)}
    return {
        key: item
        for key, item in value.items()
        if not isinstance(item, StoredTensor)
        and not (key in named and (is_extra_state(key) or _is_of_module(key, item, within)))
    }


def _without_others(value: Any, path: tuple[Any, ...]) -> TorchParts:
    """Return the parts of a file whose own dict has weights, with other values of the trainer among them."""
    rest, model = _others_in(value), copy(value)  # which keeps the _metadata of a state dict
    for key in rest:
        del model[key]
    return TorchParts(model=model, path=path, rest=rest)


def _are_weights(value: Mapping[Any, Any]) -> list[bool]:
    """For each item of a dict, whether it is a tensor with dimensions that is no random state; metrics have no dimensions."""
    return [isinstance(item, StoredTensor) and bool(item.shape) and not _is_random(key) for key, item in value.items()]


def _has_names(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key, item in value.items() if isinstance(item, StoredTensor))


def _is_random(key: Any) -> bool:
    return any(word in str(key).lower() for word in _RANDOM)


def _is_of_module(name: str, value: Any, within: Collection[str]) -> bool:
    """Return whether a value without tensors is one that a module adds to its own tensors.

    `within`: the paths that have tensors.
    """
    path = name.rpartition(".")[0]
    return bool(path) and path in within and (value is None or isinstance(value, (bool, int, float, str, list, tuple)))


def is_optim(value: Any) -> bool:
    """Return whether a value is an optimizer's full dict, nested or flattened."""
    if not isinstance(value, Mapping):
        return False
    if "param_groups" not in value:
        return any(isinstance(key, str) and key.startswith("param_groups.") for key in value)
    state, groups = value.get("state"), value["param_groups"]
    return (
        isinstance(state, Mapping)
        and isinstance(groups, (list, tuple))
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
        and all(isinstance(values, Mapping) for values in state.values())
    )


def is_no_tensor(value: Any) -> bool:
    """Return whether a value is an object of a class that is no tensor class of torch or its companions."""
    return isinstance(value, Unread) and not value.what.startswith("torch")


def joined_optims(where: str, optims: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return one full dict of several optimizers, as this library has it for a list of optimizers.

    Raises CheckpointError where the dicts cannot be joined.
    """
    if len(optims) == 1:
        return optims[0]
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    num = 0
    for index, optim in enumerate(optims):
        more = [key for key in optim if key not in ("state", "param_groups")]
        if more or "param_groups" not in optim:
            raise CheckpointError(
                f"{where}: has {len(optims)} optimizers, and number {index} has the keys {_listed(optim)}, which cannot be "
                "joined with others: save one optimizer to a file"
            )
        listed = [key for group in optim["param_groups"] for key in group["params"]]
        new = {key: key if isinstance(key, str) else num + position for position, key in enumerate(listed)}
        for key, values in optim["state"].items():
            if new.get(key, key) in state:
                raise CheckpointError(f"{where}: two of its {len(optims)} optimizers have state of {key!r:.120}")
            state[new.get(key, key)] = values
        groups += [{**group, "params": [new[key] for key in group["params"]]} for group in optim["param_groups"]]
        num += len(listed)
    return {"state": state, "param_groups": groups}


def _parts_in(where: str, value: Mapping[Any, Any], path: tuple[Any, ...]) -> TorchParts:
    optims = {key: dicts for key, item in value.items() if (dicts := _optims_in(item))}
    optim_key = _chosen(where, "optimizers", list(optims), OPTIM_KEYS)
    others = {key: item for key, item in value.items() if key not in optims and not _is_random(key)}
    models = [key for key, item in others.items() if is_model(item) or _looks_like_model(item) or _is_known(key, item)]
    model_key = _chosen(where, "models", models, MODEL_KEYS)
    if model_key is None and optim_key is not None and _looks_like_model(value):
        bare = _without_others(value, path)
        rest = {key: item for key, item in bare.rest.items() if key != optim_key}
        return replace(bare, optims=optims[optim_key], rest=rest, where_optim=_shown(path, optim_key))
    rest = {key: item for key, item in value.items() if key not in (model_key, optim_key)}
    return TorchParts(
        value[model_key] if model_key is not None else None,
        optims[optim_key] if optim_key is not None else (),
        path,
        rest,
        _shown(path, model_key),
        _shown(path, optim_key),
    )


def _is_known(key: Any, item: Any) -> bool:
    """Return whether an item has weights, and the usual key of a model."""
    return key in MODEL_KEYS and is_mixed_model(item)


def _optims_in(item: Any) -> list[Mapping[str, Any]]:
    """Return the optimizer that an item is, or the optimizers in a list or a dict of nothing else."""
    if is_optim(item):
        return [item]
    items = list(item.values()) if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else ()
    return list(items) if items and all(map(is_optim, items)) else []


def _chosen(where: str, what: str, keys: Sequence[Any], usual: Sequence[str]) -> Any:
    """Return the only key, or the only usual one; None if there is none."""
    known = [key for key in keys if key in usual]
    if len(keys) > 1 and len(known) != 1:
        raise CheckpointError(
            f"{where}: has several {what}, under the keys {', '.join(f'{key!r:.60}' for key in (known or keys))}: save the one "
            "that you want to a file by itself"
        )
    return (known or keys or [None])[0]


def _shown(path: tuple[Any, ...], key: Any) -> str:
    return "" if key is None else "".join(f"[{part!r:.60}]" for part in (*path, key))


def _listed(value: Mapping[Any, Any]) -> str:
    return shortened((f"{key!r:.60}" for key in value), 12) or "none"
