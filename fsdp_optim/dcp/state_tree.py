"""A state dict as torch.distributed.checkpoint takes it: the weights of a model in it, and everything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters import module_of
from fsdp_optim.checkpoint.common.trees import is_tree_tensor
from fsdp_optim.errors import StateError

_OF_A_MODEL = ("model", "state_dict", "model_state_dict", "module")
_EXTRA_STATE = "._extra_state"  # the end of the names of what modules add to their state dicts, after a dot

Place = tuple[str, ...]


def called(state_dict: Any) -> dict[str, Any]:
    """Return a state dict with the states of its Stateful objects in their places. Called by all ranks.

    A state_dict() may be a collective call, so the objects are asked in the order of their names, which all ranks have.

    Raises StateError for anything but a dict of names.
    """
    if not isinstance(state_dict, Mapping) or not all(isinstance(key, str) for key in state_dict):
        raise StateError(f"state_dict must be a dict with str as keys, not {_shown(state_dict)}")
    states = {
        key: value.state_dict() for key, value in sorted(state_dict.items(), key=itemgetter(0)) if is_stateful(value)
    }
    return {key: states.get(key, value) for key, value in state_dict.items()}


def is_stateful(value: object) -> bool:
    """Return whether a value is Stateful in torch's sense: it has state_dict() and load_state_dict()."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dict with the key {next(key for key in value if not isinstance(key, str))!r}"
    return f"a {type(value).__name__}"


@dataclass(frozen=True)
class StateTree:
    """The two parts of a state dict.

    Attributes:
        weights: the tensors of the model by FQN. They are saved as a model's, so that other tools open them.
        place: the keys that lead to the model's dict; empty where it is the state dict itself.
        rest: all other values by name.
    """

    weights: Mapping[str, torch.Tensor]
    place: Place
    rest: Mapping[str, Any]

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> StateTree:
        """Find the model: the dict of tensors that is called as trainers call it, else the tensors at the top level."""
        for place, value in _dicts(tree):
            if place[-1] in _OF_A_MODEL and _is_of_model(value):
                weights = {fqn: tensor for fqn, tensor in value.items() if _is_weight(tensor)}
                others = {fqn: other for fqn, other in value.items() if fqn not in weights}
                return cls(weights, place, _with(tree, place, others))
        weights = {fqn: tensor for fqn, tensor in tree.items() if _is_weight(tensor)}
        return cls(weights, (), {name: value for name, value in tree.items() if name not in weights})

    @property
    def module(self) -> nn.Module:
        """A module that has the weights, sharing their memory."""
        return module_of(self.weights)

    def joined(self, rest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dict again, with the weights and another `rest`: the inverse of `of`."""
        if not self.place:
            return {**self.weights, **rest}
        others: Any = rest
        for key in self.place:
            others = others.get(key, {}) if isinstance(others, Mapping) else {}
        return _with(rest, self.place, {**self.weights, **others}, keep=True)


def _dicts(tree: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield the dicts of the two upper levels: of `{"app": {"model": ...}}` first that of "app", then that of "model"."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield (key,), value
    for key, value in tree.items():
        if type(value) is dict:
            for inner, item in value.items():
                if isinstance(inner, str) and isinstance(item, Mapping):
                    yield (key, inner), item


def _is_weight(value: object) -> bool:
    """Return whether a value can be a weight. One on the meta device is refused as a weight is, on all ranks."""
    return is_tree_tensor(value) or (isinstance(value, torch.Tensor) and value.is_meta)


def _is_of_model(value: Mapping[Any, Any]) -> bool:
    """Return whether a dict is the state dict of a model: tensors by name, and what modules add."""
    named = all(isinstance(key, str) for key in value)
    others = [key for key, item in value.items() if not _is_weight(item)]
    return named and len(others) < len(value) and all(f".{key}".endswith(_EXTRA_STATE) for key in others)


def _with(tree: Mapping[str, Any], place: Place, value: Mapping[str, Any], *, keep: bool = False) -> dict[str, Any]:
    """Return a tree with another dict at a place; without the place where the dict is empty, unless `keep`."""
    key, *inner = place
    if inner:
        below = tree.get(key, {})
        return {**tree, key: _with(below, tuple(inner), value, keep=keep)}
    if value or keep:
        return {**tree, key: value}
    return {name: item for name, item in tree.items() if name != key}
