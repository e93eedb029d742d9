"""Which part of a torch file is the model, which is the optimizer, and which are values of the trainer: decided by structure.

A model is a dict of tensors by name. An optimizer is a dict with `state` and `param_groups`, or their flattened form, or a list
of such dicts. The keys that trainers use for them decide only where several parts look alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.formats.base import StoredTensor
from fsdp_optim.formats.pickle_table import Unread

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "weights")
"""The keys under which trainers save a model."""

OPTIM_KEYS = (
    *("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state", "optimizer_states"),
    *("last_optimizer_state", "optimizers", "opt"),
)
"""The keys under which trainers save an optimizer."""

_EXTRA_STATE = "_extra_state"  # torch's last component of the names of values that modules add to a state dict
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
    """The parts of a value. Raises CheckpointError that names the keys where it has none, or several that look alike."""
    path: tuple[Any, ...] = ()
    outermost = value
    while True:
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
        found = _found(where, value, path)
        if found.model is not None or found.optims:
            return found
        inside = [key for key, item in value.items() if isinstance(item, Mapping) and item]
        if len(inside) != 1 or len(path) == _MOST_DEEP:
            raise CheckpointError(
                f"{where}: has neither a model (a dict of tensors under a key such as {', '.join(MODEL_KEYS[:3])}) nor an "
                f"optimizer (a dict with state and param_groups): its keys are {_listed(outermost)}"
            )
        path, value = (*path, inside[0]), value[inside[0]]


def is_model(value: Any) -> bool:
    """Whether a value is a dict of tensors by name, besides the values that modules add."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    within = {key.rpartition(".")[0] for key, item in value.items() if isinstance(item, StoredTensor)}
    items = [item for key, item in value.items() if not is_extra_state(key) and not _is_of_module(key, item, within)]
    is_tensor = [isinstance(item, StoredTensor) for item in items]
    return any(is_tensor) and all(
        known or (isinstance(item, Unread) and item.what.startswith("torch."))
        for known, item in zip(is_tensor, items, strict=True)
    )


def _is_of_module(name: str, value: Any, within: Collection[str]) -> bool:
    """Whether a value without tensors is one that a module adds to its own tensors. `within`: the paths that have tensors."""
    path = name.rpartition(".")[0]
    return bool(path) and path in within and (value is None or isinstance(value, (bool, int, float, str, list, tuple)))


def is_optim(value: Any) -> bool:
    """Whether a value is an optimizer's full dict, nested or flattened."""
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


def is_extra_state(name: str) -> bool:
    """Whether a name in a state dict is of a value that a module adds by `get_extra_state`."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def joined_optims(where: str, optims: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One full dict of several optimizers, as this library has it for a list of optimizers.

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


def _found(where: str, value: Mapping[Any, Any], path: tuple[Any, ...]) -> TorchParts:
    optims = {key: found for key, item in value.items() if (found := _optims_in(item))}
    optim_key = _chosen(where, "optimizers", list(optims), OPTIM_KEYS)
    models = [key for key, item in value.items() if key not in optims and is_model(item)]
    models = [key for key in models if not any(word in str(key).lower() for word in _RANDOM)]
    model_key = _chosen(where, "models", models, MODEL_KEYS)
    rest = {key: item for key, item in value.items() if key not in (model_key, optim_key)}
    return TorchParts(
        value[model_key] if model_key is not None else None,
        optims[optim_key] if optim_key is not None else (),
        path,
        rest,
        _shown(path, model_key),
        _shown(path, optim_key),
    )


def _optims_in(item: Any) -> list[Mapping[str, Any]]:
    """The optimizer that an item is, or the optimizers in a list or a dict of nothing else."""
    if is_optim(item):
        return [item]
    items = list(item.values()) if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else ()
    return list(items) if items and all(map(is_optim, items)) else []


def _chosen(where: str, what: str, keys: Sequence[Any], usual: Sequence[str]) -> Any:
    """The only key, or the only usual one; None if there is none."""
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
