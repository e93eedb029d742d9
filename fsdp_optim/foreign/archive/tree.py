"""Walks over values of unknown origin: dicts, lists, tuples and sets."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.torch_globals import Damaged

_MOST_DEEP = 100  # levels
_MOST_NODES = 1 << 22  # that a small pickle may mean, by naming the same values again and again
_LEAVES = (str, int, float, bool, bytes, type(None))


def check_tree(where: str, value: Any, most_nodes: int = 0) -> None:
    """Raise CheckpointError for a value that contains itself, is nested deeply, or is much larger than the pickle that made it,
    and for a damaged tensor, which is named by its place in the value. `most_nodes`: the number of values in its pickle, at most.
    """
    _Check(where, max(most_nodes, _MOST_NODES)).visit(value, ())


class _Check:
    """One walk. A value that occurs again is counted again, but not visited."""

    def __init__(self, where: str, most_nodes: int) -> None:
        self._where, self._most_nodes = where, most_nodes
        self._seen: dict[int, tuple[int, int]] = {}  # by id: the number of nodes, and the height
        self._inside: set[int] = set()

    def visit(self, value: Any, path: tuple[Any, ...]) -> tuple[int, int]:
        if isinstance(value, Damaged):
            raise CheckpointError(f"{self._where}: {_shown(path)}: {value.why}: the file was cut short or changed")
        if len(path) > _MOST_DEEP:
            raise CheckpointError(f"{self._where}: {_shown(path[:8])}: is nested more than {_MOST_DEEP} levels deep")
        if id(value) in self._inside:
            raise CheckpointError(f"{self._where}: {_shown(path)}: contains itself")
        if id(value) not in self._seen:
            self._inside.add(id(value))
            num, height = 1, 0
            for key, child in children(value):
                if type(child) in _LEAVES:
                    num += 1
                    continue
                below, deep = self.visit(child, (*path, key))
                num, height = num + below, max(height, deep + 1)
            self._inside.remove(id(value))
            self._seen[id(value)] = num, height
        num, height = self._seen[id(value)]
        if len(path) + height > _MOST_DEEP:
            raise CheckpointError(f"{self._where}: {_shown(path[:8])}: is nested more than {_MOST_DEEP} levels deep")
        if num > self._most_nodes:
            raise CheckpointError(
                f"{self._where}: {_shown(path)}: names the same values so often that it would take {num} times the memory"
            )
        return num, height


def children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a container with their keys, and the attributes of an object of a plain class."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from enumerate(value)
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type):
        yield from vars(value).items()


def mapped(value: Any, cls: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """Return the same tree with `function(item)` in the place of each item of a class, or of one of several.

    An item that occurs twice stays one object.
    """
    return _Mapped(cls, function).of(value)


class _Mapped:
    def __init__(self, cls: type | tuple[type, ...], function: Callable[[Any], Any]) -> None:
        self._cls, self._function = cls, function
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no id is used again

    def of(self, value: Any) -> Any:
        if type(value) in _LEAVES:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._new(value)
            self._kept.append(value)
        return self._made[id(value)]

    def _new(self, value: Any) -> Any:
        if isinstance(value, self._cls):
            return self._function(value)
        if type(value) in (dict, OrderedDict, Counter, defaultdict):
            made = defaultdict(value.default_factory) if type(value) is defaultdict else type(value)()
            made.update({key: self.of(item) for key, item in value.items()})
            if type(value) is OrderedDict:
                vars(made).update(vars(value))  # the versions of modules, beside a state dict
            return made
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        return value


def _shown(path: tuple[Any, ...]) -> str:
    return "the value" + "".join(f"[{key!r:.120}]" for key in path)
