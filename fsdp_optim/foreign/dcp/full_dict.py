"""The full dict of an optimizer from the values of its keys: several optimizers become one, and ids become numbers again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.dcp.keys import GROUPS, STATE, Leaf
from fsdp_optim.foreign.dcp.values import Path, classes_by_path, keys_by_path, with_classes, with_recorded
from fsdp_optim.formats.base.codec import Withheld


def keys_in(tree: Any) -> Iterator[str]:
    """Yield the keys of all leaves."""
    if isinstance(tree, Leaf):
        yield tree.key
    elif isinstance(tree, Mapping):
        for inner in tree.values():
            yield from keys_in(inner)
    elif isinstance(tree, list):
        for inner in tree:
            yield from keys_in(inner)


def filled(tree: Any, value_of: Callable[[str], Any]) -> Any:
    """Return the tree with values in the place of leaves."""
    if isinstance(tree, Leaf):
        return value_of(tree.key)
    if isinstance(tree, Mapping):
        return {name: filled(inner, value_of) for name, inner in tree.items()}
    if isinstance(tree, list):
        return [filled(inner, value_of) for inner in tree]
    return tree


class ChangedTree(Mapping[Any, Any]):
    """A tree whose parts are changed each time they are read. `change(name, part)` returns the changed part."""

    def __init__(self, tree: Mapping[Any, Any], change: Callable[[Any, Any], Any]) -> None:
        self._tree, self._change = tree, change

    def __getitem__(self, name: Any) -> Any:
        return self._change(name, self._tree[name])

    def __contains__(self, name: object) -> bool:
        return name in self._tree

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)


def full_dict(
    where: str, optims: Sequence[Mapping[str, Any]], value_of: Callable[[str], Any]
) -> Mapping[str, Any] | None:
    """Return the full dict of all optimizers of a checkpoint, whose trees these are; None if there are none.

    The state has values when they are asked for, because there may be a million; all else has them at once.

    Raises CheckpointError where they cannot be one: two have the same parameter, or one is flattened and another is not.
    """

    def fill(name: Any, part: Any) -> Any:
        return filled(part, value_of)

    if not optims:
        return None
    if all(GROUPS not in optim for optim in optims):
        return ChangedTree(_united(where, optims), fill)
    if any(GROUPS not in optim for optim in optims):
        raise CheckpointError(
            f"{where}: some of its optimizers have flattened state dicts, and others do not: save them alike"
        )
    state: dict[Any, Any] = {}
    groups: list[Mapping[str, Any]] = []
    others: dict[str, Any] = {}
    num_params = 0
    for optim in optims:
        listed = [dict(group) for group in filled(optim[GROUPS], value_of)]
        params = [param for group in listed for param in group.get("params", ())]
        shift = num_params if len(optims) > 1 else 0
        ids = {str(param): param + shift for param in params if type(param) is int}
        for group in listed:
            if "params" in group:
                group["params"] = [
                    ids.get(str(param), param) if type(param) is int else param for param in group["params"]
                ]
        of_params = optim.get(STATE, {})
        if isinstance(of_params, Leaf):  # the state is one value
            of_params = filled(of_params, value_of)
        _unite(where, state, {ids.get(str(key), key): values for key, values in of_params.items()})
        rest = {name: value for name, value in optim.items() if name not in (STATE, GROUPS)}
        _unite(where, others, filled(rest, value_of))
        groups += listed
        num_params += len(params)
    return {STATE: ChangedTree(state, fill), GROUPS: groups, **others}


def with_optimizer_keys(
    where: str, full: Mapping[str, Any] | None, listed: Any, classes: Any
) -> Mapping[str, Any] | None:
    """Return a full dict with the keys and the classes that its dicts had, as the writer has recorded them.

    `listed`, `classes`: None: they had no keys but str, and were plain dicts.
    """
    if full is None or (listed is None and classes is None):
        return full
    if isinstance(listed, Withheld):
        raise CheckpointError(f"{listed.why}; it is a key in the optimizer's state")
    by_path, of_class = keys_by_path(where, listed or []), classes_by_path(where, classes or [])

    def made(part: Any, path: Path) -> Any:
        return with_classes(where, with_recorded(where, part, by_path, path), of_class, path)

    rest = {key: value for key, value in full.items() if key not in (STATE, GROUPS)}
    return {
        STATE: ChangedTree(full[STATE], lambda name, part: made(part, (STATE, name))),
        GROUPS: made(full[GROUPS], (GROUPS,)),
        **made(rest, ()),
    }


def _united(where: str, optims: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    united: dict[str, Any] = {}
    for optim in optims:
        _unite(where, united, optim)
    return united


def _unite(where: str, into: dict[Any, Any], more: Mapping[Any, Any]) -> None:
    twice = next((key for key in more if key in into), None)
    if twice is not None:
        raise CheckpointError(f"{where}: {twice} is in two of its optimizers")
    into.update(more)
