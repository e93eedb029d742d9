"""Objects of a checkpoint that are not made when it is read, because making them could run any code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Unread:
    """Stands for an object whose class or function is not in the table of classes that are read.

    `what`: its name, `module.Class`.
    """

    what: str

    def __repr__(self) -> str:
        return f"<{self.what}, not read>"


def unread_in(value: Any) -> Unread | None:
    """Return the first Unread in a value, also inside containers; None if there is none."""
    if isinstance(value, Unread):
        return value
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set, frozenset)):
        return None
    return next((unread for child in value if (unread := unread_in(child)) is not None), None)
