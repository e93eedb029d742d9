"""The globals that a pickle may name, and the stand-ins for all others."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_optim.formats.base.unread import Unread

_KEYS = (str, int, float, bool, bytes, complex, type(None), torch.dtype, torch.device)
_MOST_IN_KEY = 64  # items of a tuple that is a key


@dataclass(frozen=True, eq=False)
class Global(Unread):
    """A class or function that a pickle names. Where it is a value by itself, it is none that is read."""

    def imported(self) -> Any:
        """Return the class or function itself."""
        module, _, name = self.what.rpartition(".")
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, eq=False)
class Known(Global):
    """A function or a class that a pickle may call.

    `call`: the function that is called. `of`: the real class, which another one may take, as in defaultdict(list).
    `is_stand_in`: whether a format gave it.
    """

    call: Callable[..., Any]
    of: type | None = None
    is_stand_in: bool = False


@dataclass(frozen=True)
class Table:
    """The globals that a pickle may name, each by `module.name`: a `Known`, or a value such as a dtype.

    `build`: by class, the function that gives an object its state. `stand_ins`: the classes of a format.
    """

    globals: Mapping[str, Any]
    build: Mapping[type, Callable[[Any, Any], None]] = field(default_factory=dict)
    stand_ins: frozenset[type] = frozenset()

    def with_stand_ins(self, stand_ins: Mapping[str, Callable[..., Any]]) -> Table:
        """Return the same table with classes and functions of a format."""
        classes = frozenset(call for call in stand_ins.values() if isinstance(call, type))
        added = {name: Known(name, call, is_stand_in=True) for name, call in stand_ins.items()}
        return Table({**self.globals, **added}, self.build, classes)


def is_left(value: object) -> bool:
    """Return whether a value stands for an object that was not made, to which nothing is added."""
    return isinstance(value, Unread) and not isinstance(value, Global)


def checked_keys(keys: Any) -> list[Any]:
    """Return the same keys. Raises TypeError for a key that is not a small plain value, because hashing it could take forever."""
    if not isinstance(keys, (list, tuple, set, frozenset, dict)):
        raise TypeError(f"keys in a {type(keys).__name__}")
    for key in keys:
        if type(key) not in _KEYS and not isinstance(key, Unread) and not _is_small_tuple(key):
            raise TypeError(f"a {type(key).__name__} as a key")
    return list(keys)


def _is_small_tuple(key: Any, depth: int = 3) -> bool:
    return (
        isinstance(key, (tuple, torch.Size))
        and depth > 0
        and len(key) <= _MOST_IN_KEY
        and all(type(item) in _KEYS or isinstance(item, Unread) or _is_small_tuple(item, depth - 1) for item in key)
    )


def set_state(target: Any, state: Any) -> None:
    """Give a real object its state, as pickle does."""
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return
    slots: Any = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        target.__dict__.update(state)
    for name, value in (slots or {}).items():
        setattr(target, name, value)
