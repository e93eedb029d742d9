"""The trees of values that a reader gives: dicts and lists with StoredTensors, and with objects that were not made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_optim.formats.base.records import StoredTensor


@dataclass(frozen=True, eq=False)
class Unread:
    """Stands for an object of a file that was not made, because its class is not known. `what`: its name, `module.Class`."""

    what: str

    def __repr__(self) -> str:
        return f"<{self.what}, not read>"


def tensors_in(tree: Any) -> Iterator[StoredTensor]:
    """Yield all StoredTensors in dicts and lists."""
    if isinstance(tree, StoredTensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)


def unread_in(value: Any) -> Unread | None:
    """Return the first object in a value that was not made; None if there is none."""
    if isinstance(value, Unread):
        return value
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        children = value.values() if isinstance(value, dict) else value
        return next((unread for child in children if (unread := unread_in(child)) is not None), None)
    return None
