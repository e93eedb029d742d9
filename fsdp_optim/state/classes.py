"""Which class an optimizer is of, under whatever wraps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_INNER = ("optimizer", "_optimizer", "optim")
"""Where wrappers of optimizers keep the one that steps: Accelerate, DeepSpeed, fairseq, torch, fairscale."""


def innermost(optim: Any) -> Any:
    """The optimizer inside all wrappers that there are around one."""
    seen = {id(optim)}
    while True:
        inner = next(_inside(optim), None)
        if inner is None or id(inner) in seen:
            return optim
        seen.add(id(inner))
        optim = inner


def _inside(optim: Any) -> Iterator[Any]:
    """What looks like the optimizer that one wraps: by its name, or because it has the same groups."""
    for name, one in getattr(optim, "__dict__", {}).items():
        is_one = not isinstance(one, type) and hasattr(one, "param_groups") and hasattr(one, "state_dict")
        if is_one and (name in _INNER or one.param_groups is optim.param_groups):
            yield one


def is_of_torch(optim: Any) -> bool:
    """Whether the optimizer that steps is one of torch.optim's own, whose state values are known."""
    return type(innermost(optim)).__module__.startswith("torch.optim")


@dataclass(frozen=True)
class OptimizerClass:
    """The class of a live optimizer: its name and those of its parents, and the hyperparameters that it has by itself.

    `torch_name`: the name of the class of torch.optim that it is, or that it comes from; "" for others.
    """

    names: tuple[str, ...]
    hyperparameters: tuple[str, ...] = ()
    torch_name: str = ""

    @classmethod
    def of(cls, optim: Any) -> OptimizerClass:
        inner = innermost(optim)
        kinds = [kind for kind in type(inner).__mro__ if kind not in (object, torch.optim.Optimizer)]
        defaults = getattr(inner, "defaults", None)
        return cls(
            tuple(kind.__name__ for kind in kinds) or (type(inner).__name__,),
            tuple(sorted(map(str, defaults))) if isinstance(defaults, Mapping) else (),
            next((kind.__name__ for kind in kinds if kind.__module__.startswith("torch.optim")), ""),
        )

    @property
    def name(self) -> str:
        return self.names[0]

    def is_the_class(self, name: str) -> bool:
        """Whether state of the class `name` can be this optimizer's: its own, or that of the torch.optim class it extends.

        The classes of torch.optim extend each other too (AdamW extends Adam), and do not take each other's state.
        """
        return name in (self.name, self.torch_name)

    @property
    def is_of_torch(self) -> bool:
        """Whether it is one of torch.optim's own, whose state values are known."""
        return self.name == self.torch_name


def class_names_written(names: Sequence[str]) -> str | list[str] | None:
    """The class of each group as it is recorded: one name, or a list where several optimizers of different classes were given."""
    return names[0] if len(set(names)) == 1 else list(names) or None


def class_names_read(written: object, num_groups: int) -> tuple[str, ...]:
    """The inverse: the class of each of so many groups; none where it is not recorded, or not for these groups."""
    if isinstance(written, str):
        return (written,) * num_groups
    if isinstance(written, (list, tuple)) and len(written) == num_groups:
        return tuple(map(str, written))
    return ()
