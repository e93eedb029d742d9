"""The state dicts of an optimizer of flat shards, one of each rank, as one full dict by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from msgspec import structs

from fsdp_optim.errors import LayoutError
from fsdp_optim.foreign.per_rank.rank_files import RankFile, RankFiles, UnreadableOptimError, in_runs
from fsdp_optim.formats.base.index import in_class_of
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.unread import unread_in
from fsdp_optim.layout import Shape

_RESERVED = frozenset({"state", "param_groups"})


@dataclass(frozen=True)
class RankOriginal:
    """An original parameter inside a live parameter. `runs`: (rank, start, stop, offset in the rank's local tensor)."""

    fqn: str
    shape: Shape
    runs: tuple[tuple[int, int, int, int], ...] = field(repr=False)


@dataclass(frozen=True)
class RankParam:
    """One parameter of the optimizers that saved, which each rank had a shard of.

    Attributes:
        name: its name in the files.
        originals: the original parameters in it.
        local_shapes: by rank, the shape of the rank's shard; a state value with another number of elements is not cut like it.
    """

    name: str
    originals: tuple[RankOriginal, ...]
    local_shapes: Mapping[int, Shape] = field(repr=False)

    def stored(self, keys: Sequence[str], tensors: Mapping[int, StoredTensor]) -> Iterator[StoredTensor]:
        """Yield the originals of one value, each under its key.

        `tensors`: by rank. Raises LayoutError with the name of an original.
        """
        like = next(iter(tensors.values()))
        for key, original in zip(keys, self.originals, strict=True):
            lacking = sorted({rank for rank, *_ in original.runs} - set(tensors))
            try:
                if lacking:
                    raise LayoutError(f"rank {lacking[0]} does not have it")
                parts = [RankFile(start, stop, tensors[rank], offset) for rank, start, stop, offset in original.runs]
                yield in_runs(key, original.shape, parts, like)
            except LayoutError as error:
                raise LayoutError(f"{original.fqn}: {error}") from error


def joined(files: RankFiles, dicts: Sequence[Any], live: Mapping[Any, RankParam], what: str) -> dict[str, Any]:
    """Return the full dict by name. `live`: the live parameter of each id that the groups list; `what`: the dicts, for errors.

    Raises CheckpointError for files that contradict each other, and UnreadableOptimError for values of unknown classes.
    """
    checked = files.dicts(dicts, what)
    states = files.dicts([of_rank.get("state") for of_rank in checked], f"state of {what}")
    unread = unread_in([dict(of_rank) for of_rank in checked])
    if unread is not None:
        raise UnreadableOptimError(
            f"{files.opened.named(files.names[0])}: {what} has an object of the class {unread.what}, which is not read"
        )
    state: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for of_rank in states for key in of_rank):
        if key not in live:
            raise files.damaged(0, f"the state of {what} has an entry {key!r}, which no param group lists")
        by_rank = {rank: of_rank[key] for rank, of_rank in enumerate(states) if key in of_rank}
        for rank, values in by_rank.items():
            if not isinstance(values, Mapping):
                raise files.damaged(rank, f"the state of {key!r} is a {type(values).__name__}, not a dict")
        for fqn, values in _state_of(files, live[key], key, by_rank):
            state.setdefault(fqn, {}).update(values)
    others = {
        name: files.agreed({rank: of_rank.get(name) for rank, of_rank in enumerate(checked)}, f"{name} of {what}")
        for name in checked[0]
        if name not in _RESERVED
    }
    return {**_numbered(others, ""), "state": state, "param_groups": _groups(files, checked, live, what)}


def groups_of(files: RankFiles, dicts: Sequence[Mapping[Any, Any]], what: str) -> list[Mapping[str, Any]]:
    """Return the param groups, which are the same on all ranks."""
    groups = files.agreed(
        {rank: optim.get("param_groups") for rank, optim in enumerate(dicts)}, f"param_groups of {what}"
    )
    if not isinstance(groups, list) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    ):
        raise files.damaged(0, f"param_groups of {what} is not a list of groups")
    return groups


def _groups(
    files: RankFiles, dicts: Sequence[Mapping[Any, Any]], live: Mapping[Any, RankParam], what: str
) -> list[dict[str, Any]]:
    made = []
    for index, group in enumerate(groups_of(files, dicts, what)):
        hyper = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for name, value in hyper.items():
            if isinstance(value, StoredTensor):
                tensors = {rank: optim["param_groups"][index][name] for rank, optim in enumerate(dicts)}
                hyper[name] = files.scalar(tensors, f"{name} of param group {index}", f"param_groups.{index}.{name}")
        names = [original.fqn for key in group["params"] for original in live[key].originals]
        made.append({**_numbered(hyper, f"param_groups.{index}."), "params": names})
    return made


def _numbered(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the same values, with a name for each tensor inside a value."""
    return {name: with_keys(value, f"{prefix}{name}") for name, value in values.items()}


def with_keys(tree: Any, key: str) -> Any:
    """Return the same dicts and lists; each tensor without a key gets one by its place."""
    if isinstance(tree, StoredTensor):
        return tree if tree.key else structs.replace(tree, key=key)
    if isinstance(tree, Mapping):
        return in_class_of(tree, {name: with_keys(value, f"{key}.{name}") for name, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return type(tree)(with_keys(value, f"{key}.{index}") for index, value in enumerate(tree))
    return tree


def _state_of(
    files: RankFiles, live: RankParam, key: Any, by_rank: Mapping[int, Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the values of one live parameter, for each of its originals."""
    values: dict[str, dict[str, Any]] = {original.fqn: {} for original in live.originals}
    for name in dict.fromkeys(name for of_rank in by_rank.values() for name in of_rank):
        value_on = {rank: of_rank[name] for rank, of_rank in by_rank.items() if name in of_rank}
        what = f"{name} of {live.name}"
        if all(_is_cut(value, live.local_shapes.get(rank)) for rank, value in value_on.items()):
            keys = [f"state.{fqn}.{name}" for fqn in values]
            try:
                for fqn, stored in zip(values, live.stored(keys, value_on), strict=True):
                    values[fqn][name] = stored
            except LayoutError as error:
                raise files.damaged(min(value_on), f"{name}: {error}") from error
            continue
        if all(isinstance(value, StoredTensor) and not value.shape for value in value_on.values()):
            common: Any = files.scalar(value_on, what, f"state.{key}.{name}")
        elif any(isinstance(value, StoredTensor) for value in value_on.values()):
            rank, uncut = next((r, v) for r, v in value_on.items() if not _is_cut(v, live.local_shapes.get(r)))
            raise UnreadableOptimError(
                f"{files.opened.named(files.names[rank])}: {what} has the shape {list(getattr(uncut, 'shape', ()))}, the rank's "
                f"part of the parameter {list(live.local_shapes.get(rank, ()))}: it is not cut like the parameter, and the "
                "files do not say how it is cut"
            )
        else:
            common = files.agreed(value_on, what)
        for of_original in values.values():
            of_original[name] = common
    yield from values.items()


def _is_cut(value: Any, local_shape: Shape | None) -> bool:
    """Return whether a value has the shape of the rank's shard; a value without dimensions is no shard of a flat parameter."""
    if not isinstance(value, StoredTensor) or not value.shape or local_shape is None:
        return False
    return value.shape in (local_shape, (prod(local_shape),))
