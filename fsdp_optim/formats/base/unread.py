"""Objects of a checkpoint that are not made when it is read, because making them could run any code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})  # nearly all values


@dataclass(frozen=True, eq=False)
class Unread:
    """Stands for an object whose class or function is not in the table of classes that are read, or for a class by itself.

    `what`: its name, `module.Class`.
    """

    what: str

    def __repr__(self) -> str:
        return f"<{self.what}, not read>"


def unread_in(value: Any) -> Unread | None:
    """Return the first Unread in a value, also among the keys and items of containers and the attributes of objects.

    None if there is none.
    """
    if isinstance(value, Unread):
        return value
    children: Iterable[Any] = ()
    if isinstance(value, Mapping):
        children = chain(value, value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = value
    elif isinstance(attributes := getattr(value, "__dict__", None), dict) and not isinstance(value, type):
        children = attributes.values()
    for child in children:
        if type(child) not in _LEAVES and (unread := unread_in(child)) is not None:
            return unread
    return None
