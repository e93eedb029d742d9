"""The meaning of the keys of a DCP checkpoint: which are the model's, which are the optimizer's, and which are the trainer's.

A writer of this library has recorded it (`recorded_meaning`). Trainers nest and name these in many ways, so in other checkpoints
their structure decides (`meaning_of`). The optimizer is where `param_groups` is. The model is the
dict that has the optimizer's parameters, or the only dict of tensors. All other keys are the trainer's own values.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.foreign.dcp.metadata import Path
from fsdp_optim.foreign.dcp.values import KEYS, OF_RANKS
from fsdp_optim.formats.base.summary import SavedRoles

GROUPS, STATE = "param_groups", "state"
_OF_A_MODEL = ("model", "state_dict", "module", "model_state_dict", "model_state")
_NUMBERED = re.compile(r"(.*?)(\d+)/?")
_DOTTED = re.compile(rf"{GROUPS}\.\d+\.params")
_EXTRA_STATE = "._extra_state"  # the end of the name of a result of get_extra_state(), after a dot
_MOST_NAMED = 6
_WRITERS_OWN = (KEYS, OF_RANKS)  # keys of the top level under which this library keeps values


class Leaf(Struct, frozen=True, gc=False):
    """The place of one value in a tree of dicts and lists: the key whose value belongs there."""

    key: str


@dataclass(frozen=True)
class Meaning:
    """The meaning of all keys.

    Attributes:
        model: FQN -> key of a tensor.
        module_values: FQN -> tree of other values that modules keep.
        optimizers: for each optimizer its full dict, as a tree.
        optimizer_keys: the keys in these trees.
        extra: all other values, as a tree.
    """

    model: Mapping[str, str]
    module_values: Mapping[str, Any]
    optimizers: Sequence[Mapping[str, Any]]
    extra: Mapping[str, Any]
    optimizer_keys: Sequence[str] = ()


@dataclass(frozen=True)
class _Root:
    """The place of a dict: a path, and the beginning that the next part of the path has, where that is not a path yet."""

    path: Path
    head: str = ""

    def rest_of(self, path: Path) -> Path | None:
        """Return the rest of a longer path; None for a path that is somewhere else."""
        depth = len(self.path)
        if path[:depth] != self.path or len(path) == depth:
            return None
        if not self.head:
            return path[depth:]
        part = path[depth]
        if not isinstance(part, str) or not part.startswith(f"{self.head}."):
            return None
        return part[len(self.head) + 1 :], *path[depth + 1 :]

    def inside(self, paths: Mapping[str, Path]) -> dict[str, Path]:
        """Return `rest_of` of the paths that lie here, by key."""
        path, depth = self.path, len(self.path)
        if self.head:
            rests = ((key, self.rest_of(other)) for key, other in paths.items())
            return {key: rest for key, rest in rests if rest is not None}
        # There may be very many.
        return {key: other[depth:] for key, other in paths.items() if other[:depth] == path and len(other) > depth}

    def is_above(self, other: _Root) -> bool:
        return self != other and self.rest_of((*other.path, *([other.head] if other.head else []), GROUPS)) is not None

    def __str__(self) -> str:
        return ".".join(map(str, (*self.path, *([self.head] if self.head else [])))) or "the top level"


_TOP = _Root(())


def meaning_of(where: str, paths: Mapping[str, Path], tensors: Mapping[str, int]) -> Meaning:
    """Return the meaning of keys. `paths`: the place of each key; `tensors`: the number of dimensions of each key that is a
    tensor.

    Raises CheckpointError that names the candidates, where the structure leaves open which one is the model or the optimizer.
    """
    members, rest = dict[_Root, dict[str, Path]](), paths
    for root in _optimizer_roots(paths.values()):
        if root == _TOP:
            members[root] = {key: path for key, path in rest.items() if _is_of_optimizer(path[0])}
        else:
            members[root] = root.inside(rest)
        rest = _without(rest, members[root])
    roots = _in_order(where, [*members])
    optimizers = [_optimizer_tree(f"{where}: {root}", members[root]) for root in roots]
    fqns = {fqn for root in roots for fqn in _fqns(members[root].values())}
    model = _model_root(where, {key: rest[key] for key in rest if key in tensors}, fqns, roots, tensors)
    is_above = model is not None and model != _TOP
    inside_model = model.inside(rest) if model is not None else {}
    weights: dict[str, str] = {}
    module_values: dict[str, Any] = {}
    extra: dict[Any, Any] = {}
    for key, path in rest.items():
        inside = inside_model.get(key)
        is_of_module = inside is not None and f".{inside[0]}".endswith(_EXTRA_STATE)
        if inside is not None and len(inside) == 1 and key in tensors and not is_of_module:
            weights[str(inside[0])] = key
        elif inside is not None and (is_above or is_of_module):
            _put(where, module_values, inside, Leaf(key))
        else:
            _put(where, extra, path, Leaf(key))
    keys = [key for root in roots for key in members[root]]
    return Meaning(weights, _listed(where, module_values), optimizers, _listed(where, extra), keys)


def recorded_meaning(where: str, paths: Mapping[str, Path], tensors: Container[str], roles: SavedRoles) -> Meaning:
    """Return the meaning of keys as the writer has recorded it. `tensors`: the keys of tensors."""
    optim, model, trainers = _recorded_root(roles.optim), _recorded_root(roles.model), frozenset(roles.state)
    members = optim.inside(paths) if optim is not None else {}
    rest = _without(paths, members)
    inside_model = model.inside(rest) if model is not None else {}
    weights: dict[str, str] = {}
    module_values: dict[str, Any] = {}
    extra: dict[Any, Any] = {}
    for key, path in rest.items():
        is_trainers = path[0] in _WRITERS_OWN or (bool(trainers) and ascii(path[0]) in trainers)
        inside = inside_model.get(key) if not is_trainers else None
        if inside is None:
            _put(where, extra, path, Leaf(key))
        elif len(inside) == 1 and key in tensors and not f".{inside[0]}".endswith(_EXTRA_STATE):
            weights[str(inside[0])] = key
        else:
            _put(where, module_values, inside, Leaf(key))
    optimizers = [_optimizer_tree(f"{where}: {optim}", members)] if members else []
    return Meaning(weights, _listed(where, module_values), optimizers, _listed(where, extra), [*members])


def _recorded_root(keys: Sequence[str] | None) -> _Root | None:
    return _Root(tuple(keys)) if keys is not None else None


def as_trees(where: str, paths: Mapping[str, Path]) -> Meaning:
    """Return the meaning of keys of which none is the model's or the optimizer's: all are values of the trainer."""
    extra: dict[Any, Any] = {}
    for key, path in paths.items():
        _put(where, extra, path, Leaf(key))
    return Meaning({}, {}, (), _listed(where, extra))


# ------------------------------------------------------------------------------------------- the optimizer


def _without(paths: Mapping[str, Path], members: Mapping[str, Path]) -> Mapping[str, Path]:
    return {key: path for key, path in paths.items() if key not in members} if members else paths


def _is_of_optimizer(part: str | int) -> bool:
    return isinstance(part, str) and part.partition(".")[0] in (STATE, GROUPS)


def _optimizer_roots(paths: Iterable[Path]) -> list[_Root]:
    """Return the places that have param groups, without those inside of another one."""
    roots: dict[_Root, None] = {}
    for path in paths:
        for depth, part in enumerate(path):
            if not isinstance(part, str) or GROUPS not in part:
                continue
            parts = part.split(".")
            if GROUPS in parts:
                roots[_Root(path[:depth], ".".join(parts[: parts.index(GROUPS)]))] = None
                break
    return [root for root in roots if not any(other.is_above(root) for other in roots)]


def _in_order(where: str, roots: Sequence[_Root]) -> list[_Root]:
    """Return several optimizers in the order of their numbers. Raises CheckpointError where they have no numbers."""
    if len(roots) < 2:
        return list(roots)
    numbered: dict[tuple[Any, ...], dict[int, _Root]] = {}
    for root in roots:
        parts = (*root.path, *([root.head] if root.head else []))
        for depth, part in enumerate(parts):
            matched = None if isinstance(part, int) else _NUMBERED.fullmatch(part)
            if isinstance(part, int) or matched is not None:
                number = part if isinstance(part, int) else int(matched[2]) if matched is not None else 0
                stem = matched[1] if matched is not None else 0
                numbered.setdefault((*parts[:depth], stem, *parts[depth + 1 :]), {})[number] = root
                break
    if len(numbered) == 1 and len(series := next(iter(numbered.values()))) == len(roots):
        return [series[number] for number in sorted(series)]
    raise CheckpointError(
        f"{where}: has several optimizers, and nothing says how they belong together: {_named(roots)}: save them as one list, or "
        "load a folder that has one of them"
    )


def _optimizer_tree(where: str, members: Mapping[str, Path]) -> Mapping[str, Any]:
    """Return the full dict of one optimizer, nested or flattened as it was saved."""
    if any(map(_is_dotted, {path[0] for path in members.values()})):
        members = {key: _undotted(path) for key, path in members.items()}
    firsts = {path[0] for path in members.values()}
    flat = {first for first in firsts if isinstance(first, str) and first.startswith(f"{GROUPS}.")}
    if flat and GROUPS in firsts:  # this library writes both forms, and this one says more
        members = {key: path for key, path in members.items() if path[0] not in flat}
    tree: dict[Any, Any] = {}
    inners: dict[Path, dict[Any, Any]] = {}  # those that the paths before led to
    for key, path in members.items():
        inner, last = inners.get(path[:-1]), path[-1]
        if inner is None:
            inner = inners[path[:-1]] = _inner(where, tree, path)
        if last in inner:
            raise CheckpointError(f"{where}: {'.'.join(map(str, path))} is listed twice")
        inner[last] = Leaf(key)
    listed: Mapping[str, Any] = _listed(where, tree)
    return listed


def _is_dotted(part: str | int) -> bool:
    """Return whether a part of a path joins keys of nested dicts, as writers do that record no paths: `param_groups.0.params`."""
    return isinstance(part, str) and part.startswith(GROUPS) and _DOTTED.fullmatch(part) is not None


def _undotted(path: Path) -> Path:
    part = str(path[0])
    if part.startswith(f"{GROUPS}."):
        _, number, name = part.split(".", 2)
        return (GROUPS, int(number), name, *path[1:]) if number.isdecimal() else path
    if part.startswith(f"{STATE}."):
        fqn, _, name = part.removeprefix(f"{STATE}.").rpartition(".")
        return STATE, fqn, name, *path[1:]
    return path


def _fqns(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the names of parameters in an optimizer's keys; none for ids."""
    for part, fqn in {path[:2] if len(path) > 2 else (path[0], None) for path in paths}:
        if part == STATE and fqn is not None:
            name = str(fqn)
        elif isinstance(part, str) and part.startswith((f"{GROUPS}.", f"{STATE}.")):
            name = part.partition(".")[2].rpartition(".")[0]
        else:
            continue
        if not name.isdecimal():
            yield name


# ------------------------------------------------------------------------------------------- the model


def _model_root(
    where: str, tensors: Mapping[str, Path], fqns: set[str], roots: Sequence[_Root], dims: Mapping[str, int]
) -> _Root | None:
    """Return the place of the model's dict. `tensors`: the paths of tensors that are no optimizer's. None: there is no model."""
    names: dict[Path, dict[str, str]] = {}
    for key, path in tensors.items():
        names.setdefault(path[:-1], {})[str(path[-1])] = key
    candidates = [_Root(path, head) for path in names for head in _heads(names[path], fqns)] if fqns else []
    if not candidates:
        if not names or (
            fqns and roots and len(names) == 1 and not _looks_like_a_model(next(iter(names.values())), dims)
        ):
            return None
        candidates = [_Root(path) for path in names]
    for is_better in (_is_called_a_model, lambda candidate: candidate.path[:-1] in [root.path[:-1] for root in roots]):
        better = [candidate for candidate in candidates if is_better(candidate)]
        candidates = better if len(candidates) > 1 and better else candidates
    if len(candidates) > 1:
        likely = [candidate for candidate in candidates if _looks_like_a_model(names[candidate.path], dims)]
        candidates = likely or candidates
    if len(candidates) > 1:
        raise CheckpointError(
            f"{where}: nothing says which of these is the model: {_named(candidates)}: save the model under the key 'model', or "
            "beside its optimizer"
        )
    return candidates[0]


def _heads(names: Mapping[str, str], fqns: set[str]) -> list[str]:
    """Return the beginnings after which all of an optimizer's parameters are among some names: "", or one such as "model"."""
    if fqns <= names.keys():
        return [""]
    first = max(fqns, key=len)
    heads = [name[: -len(first) - 1] for name in names if name.endswith(f".{first}")]
    return [head for head in heads if all(f"{head}.{fqn}" in names for fqn in fqns)]


def _is_called_a_model(root: _Root) -> bool:
    last = root.head or (root.path[-1] if root.path else "")
    return last in _OF_A_MODEL


def _looks_like_a_model(names: Mapping[str, str], dims: Mapping[str, int]) -> bool:
    """Return whether tensors may be a model's: some have dimensions, as counters and the like do not."""
    return any(dims[key] > 0 for key in names.values())


# ------------------------------------------------------------------------------------------- trees


def _put(where: str, tree: dict[Any, Any], path: Path, leaf: Leaf) -> None:
    inner = _inner(where, tree, path)
    if path[-1] in inner:
        raise CheckpointError(f"{where}: {'.'.join(map(str, path))} is listed twice")
    inner[path[-1]] = leaf


def _inner(where: str, tree: dict[Any, Any], path: Path) -> dict[Any, Any]:
    """Return the dict that a path leads to, which may be new."""
    for part in path[:-1]:
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            raise CheckpointError(f"{where}: {'.'.join(map(str, path))} lies below a value that is no dict")
        tree = inner
    return tree


def _listed(where: str, tree: Any) -> Any:
    """Return the tree with lists in the place of dicts whose keys are numbers."""
    if not isinstance(tree, dict):
        return tree
    made = tree
    if dict in {*map(type, tree.values())}:
        made = {part: _listed(where, inner) if type(inner) is dict else inner for part, inner in tree.items()}
    if int not in {*map(type, made)}:
        return made
    if sorted(map(str, made)) != sorted(map(str, range(len(made)))) or not all(isinstance(part, int) for part in made):
        missing = next(number for number in range(len(made) + 1) if number not in made)
        raise CheckpointError(f"{where}: has a list of which the number {missing} is missing")
    return [made[number] for number in range(len(made))]


def _named(roots: Sequence[_Root]) -> str:
    return shortened(roots, _MOST_NAMED)


__all__ = ["GROUPS", "STATE", "Leaf", "Meaning", "meaning_of"]
