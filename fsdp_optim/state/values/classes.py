"""The class of an optimizer inside any wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from fsdp_optim.errors import StateError

READ_BY_LOADS = ("fused", "capturable")
"""The hyperparameters by which torch's `load_state_dict()` decides where step counts are."""

_INNER = ("optimizer", "_optimizer", "optim")
"""Attributes in which wrappers of Accelerate, DeepSpeed, fairseq, torch and fairscale keep the wrapped optimizer."""


def innermost(optim: Any) -> Any:
    """Return the optimizer inside all wrappers."""
    return layers(optim)[-1]


def layers(optim: Any) -> list[Any]:
    """Return the optimizer, the optimizer that it wraps, and so on to the innermost."""
    chain = [optim]
    while True:
        inner = next(_inside(chain[-1]), None)
        if inner is None or any(inner is known for known in chain):
            return chain
        chain.append(inner)


def _inside(optim: Any) -> Iterator[Any]:
    """Yield the attributes that look like a wrapped optimizer: by their name, or because they have the same groups."""
    for name, value in getattr(optim, "__dict__", {}).items():
        is_optimizer = not isinstance(value, type) and hasattr(value, "param_groups") and hasattr(value, "state_dict")
        if is_optimizer and (name in _INNER or value.param_groups is optim.param_groups):
            yield value


def has_own_form(optim: Any) -> bool:
    """Return whether an optimizer's dict has the innermost optimizer's state: no wrapper around it has state of its own."""
    chain = layers(optim)
    return all(getattr(layer, "state", None) is chain[-1].state for layer in chain[:-1]) if len(chain) > 1 else True


def is_of_torch(optim: Any) -> bool:
    """Return whether the innermost optimizer is of a class of torch.optim, whose state values are known."""
    return type(innermost(optim)).__module__.startswith("torch.optim")


class OptimizerClass(Struct, frozen=True):
    """The class of a live optimizer: the names of the class and its parents, and the names of its default hyperparameters.

    `torch_name`: the name of the class itself, or of its nearest parent, in torch.optim; "" for other classes.
    """

    names: tuple[str, ...]
    hyperparameters: tuple[str, ...] = ()
    torch_name: str = ""

    @classmethod
    def of(cls, optim: Any) -> OptimizerClass:
        inner = innermost(optim)
        classes = [base for base in type(inner).__mro__ if base not in (object, torch.optim.Optimizer)]
        defaults = getattr(inner, "defaults", None)
        return cls(
            tuple(base.__name__ for base in classes) or (type(inner).__name__,),
            tuple(sorted(map(str, defaults))) if isinstance(defaults, Mapping) else (),
            next((base.__name__ for base in classes if base.__module__.startswith("torch.optim")), ""),
        )

    @property
    def name(self) -> str:
        return self.names[0]

    def is_the_class(self, name: str) -> bool:
        """Return whether `name` is this class, or the torch.optim class that it extends, so that the state of `name` fits.

        The classes of torch.optim extend each other too (AdamW extends Adam), but their states do not fit each other.
        """
        return name in (self.name, self.torch_name)

    @property
    def is_of_torch(self) -> bool:
        """Whether this is a class of torch.optim, whose state values are known."""
        return self.name == self.torch_name


def class_names_written(names: Sequence[str]) -> str | list[str] | None:
    """Return the recorded form of each group's class name: one name, or a list for optimizers of different classes."""
    return names[0] if len(set(names)) == 1 else list(names) or None


def class_names_read(written: object, num_groups: int) -> tuple[str, ...]:
    """Return the class name of each group, the inverse of `class_names_written`; empty without a record for these groups."""
    if isinstance(written, str):
        return (written,) * num_groups
    if isinstance(written, (list, tuple)) and len(written) == num_groups:
        return tuple(map(str, written))
    return ()


def is_on(hyperparameters: Mapping[str, Any], key: str) -> bool:
    """Return whether a hyperparameter such as `fused` is there and on. Raises StateError for a tensor of several elements."""
    try:
        return bool(hyperparameters.get(key))
    except (RuntimeError, ValueError) as error:
        value = hyperparameters[key]
        shape = list(getattr(value, "shape", ()))
        raise StateError(
            f"the hyperparameter {key} of a param group is a {type(value).__name__} of the shape {shape}: it must be on or off"
        ) from error
