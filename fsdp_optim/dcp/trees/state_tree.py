"""A state dict as torch.distributed.checkpoint takes it: the weights of a model in it, and everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters import module_of
from fsdp_optim.checkpoint.common.trees import is_tree_tensor
from fsdp_optim.errors import StateError
from fsdp_optim.state.dicts.torch_trees import MODEL, MODEL_KEYS, OptimFace, Place, ReadFace, dicts_in
from fsdp_optim.tensors.model_dict import is_extra_state


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
        extra: the extra state of its modules, by FQN, which is saved with them.
        place: the keys that lead to the model's dict; empty where it is the state dict itself.
        rest: all other values by name.
    """

    weights: Mapping[str, torch.Tensor]
    place: Place
    rest: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> StateTree:
        """Find the model: the likeliest of `models_in`."""
        models = models_in(tree)
        place = next(iter(models), ())
        weights = models.get(place, {})
        if place:
            extra = {fqn: other for fqn, other in _dict_at(tree, place).items() if fqn not in weights}
            return cls(weights, place, _without(tree, place), extra)
        extra = {fqn: other for fqn, other in tree.items() if weights and is_extra_state(fqn)}
        rest = {name: value for name, value in tree.items() if name not in weights and name not in extra}
        return cls(weights, (), rest, extra)

    @property
    def module(self) -> nn.Module:
        """A module that has the weights, sharing their memory, and the extra state."""
        return module_of(self.weights, self.extra)


def models_in(tree: Mapping[str, Any]) -> dict[Place, Mapping[str, torch.Tensor]]:
    """Return the tensors of all that may be a state dict's model, by place, the likeliest first.

    These are the dicts of tensors that are called as trainers call a model's, and the tensors at the top, whose place is ().
    The likeliest is beside the dict of an optimizer whose parameters it has: an average of the weights has the same names.
    """
    models: dict[Place, Mapping[str, torch.Tensor]] = {
        place: {fqn: tensor for fqn, tensor in value.items() if not is_extra_state(fqn)}
        for place, value in dicts_in(tree)
        if place[-1] in MODEL_KEYS and _is_of_model(value)
    }
    at_top = {name: tensor for name, tensor in tree.items() if _is_weight(tensor) and not is_extra_state(name)}
    models |= {(): at_top} if at_top else {}
    if len(models) < 2:
        return models
    optims = [(face, face.dict_in(tree)) for face in OptimFace.all_in(tree)]

    def order(place: Place) -> tuple[bool, bool, int, bool]:
        beside = [(face, values) for face, values in optims if face.place[:-1] == place[:-1]]
        is_of_optim = any(ReadFace.of(face, values, models[place]) is not None for face, values in beside)
        return not is_of_optim, not place, len(place), place[-1:] != (MODEL,)

    return {place: models[place] for place in sorted(models, key=order)}


def _dict_at(tree: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    value: Any = tree
    for key in place:
        value = value[key]
    result: Mapping[str, Any] = value
    return result


def _is_weight(value: object) -> bool:
    """Return whether a value can be a weight. One on the meta device is refused as a weight is, on all ranks."""
    return is_tree_tensor(value) or (isinstance(value, torch.Tensor) and value.is_meta)


def _is_of_model(value: Mapping[Any, Any]) -> bool:
    """Return whether a dict is the state dict of a model: tensors by name, and what modules add."""
    named = all(isinstance(key, str) for key in value)
    own = [item for key, item in value.items() if named and not is_extra_state(key)]
    return bool(own) and all(map(_is_weight, own))


def _without(tree: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return a tree without the dict at a place."""
    key, *inner = place
    if inner:
        return {**tree, key: _without(tree[key], tuple(inner))}
    return {name: item for name, item in tree.items() if name != key}
