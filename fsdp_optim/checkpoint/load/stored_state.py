"""The optimizer's state in a checkpoint as a `FullState`, without the elements of the tensors that a load moves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from fsdp_optim.checkpoint.common.contents import RECORDS
from fsdp_optim.checkpoint.common.kept_fusions import KeptFusions
from fsdp_optim.checkpoint.common.trees import shown
from fsdp_optim.checkpoint.load.matching import renamed_names, renamer
from fsdp_optim.checkpoint.load.reading import read_constants
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.index import CheckpointIndex, ReadSmall, SavedOptim, mapped, stored_in
from fsdp_optim.formats.base.protocols import COMMON, Reader, StoredTensor
from fsdp_optim.formats.base.unread import unread_in
from fsdp_optim.layout import Shape
from fsdp_optim.options import Rename
from fsdp_optim.state.dicts.dialects import normalize
from fsdp_optim.state.dicts.flattened import is_flattened
from fsdp_optim.state.dicts.full import RESERVED_KEYS, FullState, following_params
from fsdp_optim.state.dicts.names import Names
from fsdp_optim.state.live.local_dict import Summaries
from fsdp_optim.state.values.kinds import Kind
from fsdp_optim.tensors.memory import dtype_named

_FEW_LEVELS = 8  # of nested dicts, which untrusted ones may have without end; a parameter's values are in the third

_Place: TypeAlias = tuple[str, str]
"""The FQN and the name of a value."""


@dataclass(frozen=True)
class StoredState:
    """The optimizer's state in a checkpoint.

    Attributes:
        full: the state by FQN. Tensors whose elements are in files are meta tensors.
        tensors: (FQN, name) -> the stored tensor of each meta tensor.
    """

    full: FullState
    tensors: Mapping[tuple[str, str], StoredTensor]

    @classmethod
    def of(
        cls,
        checkpoint: Reader,
        names: Names,
        shapes: Mapping[str, Shape],
        *,
        allow_pickle: bool = False,
        rename: Rename | None = None,
        off_mesh: Collection[str] = (),
    ) -> StoredState:
        """Return the state for a model whose parameters have these names and shapes. Reads small tensors, on this rank.

        `off_mesh`: as for `resolved`.

        Raises StateError if no optimizer was saved, or if the checkpoint cannot say whose state it has.
        """
        index = checkpoint.index
        if index.optim is None and index.facts.was_thinned:
            raise StateError(
                f"{index.where}: was thinned, so its optimizer is gone: load the weights alone, without optim=, or load a "
                "checkpoint that has its optimizer"
            )
        if index.optim is None:
            in_trees = _optims_in_trees(index)
            if in_trees:
                raise StateError(f"{index.where}: was saved without an optimizer{in_trees}")
            raise StateError(f"{index.where}: was saved without an optimizer: load it without optim=")
        saved = index.optim.decoded(allow_pickle=allow_pickle, records=RECORDS)
        names = renamed_names(names, index, rename, saved.full)
        return cls.resolved(checkpoint.index.where, saved, names, shapes, partial(read_constants, checkpoint), off_mesh)

    @classmethod
    def resolved(
        cls,
        where: str,
        saved: SavedOptim,
        names: Names,
        shapes: Mapping[str, Shape],
        read: ReadSmall,
        off_mesh: Collection[str] = (),
    ) -> StoredState:
        """Return the state by FQN. Ids become names, in any dialect, and kinds that were not recorded are inferred.

        `off_mesh`: FQNs of parameters that are no DTensors: placed values of their shape are cut like them (`following_params`).

        Raises CheckpointError where the dict contradicts itself, StateError where the parameters of ids are unknown.
        """
        where = f"{where}: the optimizer"
        with as_checkpoint_error(where):
            as_dict = _as_dict(saved, read)
        through = saved.through
        if through is not None:
            names = through.names_in(names, as_dict)
        with nullcontext() if saved.is_checked else as_checkpoint_error(where):
            full = normalize(as_dict, names)
        if through is not None:
            full = through.state(full, saved.shapes, read)
        with as_checkpoint_error(where):
            _check_read(where, full)
            state = _with_metas(full.state)
            metas = replace(full, state=state)
            if off_mesh:
                metas = following_params(metas, shapes, metas.kinds.keys() - set(off_mesh))
            tensors, others = _Moved(metas, shapes).parted(full.state)
            others, other_keys = _read_in((others, full.other_keys), read)
            for (fqn, name), value in others.items():
                state[fqn][name] = value
        return cls(replace(metas, state=state, other_keys=other_keys), tensors)


def kept_fusions_of(index: CheckpointIndex, rename: Rename | None, *, allow_pickle: bool) -> KeptFusions:
    """Return the fused parameters whose state a checkpoint has under their own names, as the model has these."""
    if not index.facts.fused_state or index.optim is None:
        return KeptFusions()
    renamed = renamer(rename if rename is not None else {})
    saved = index.optim.decoded(allow_pickle=allow_pickle, records=RECORDS).shapes
    names = {renamed(stored): stored for stored in index.facts.fused_state}
    shapes = {name: saved[stored] for name, stored in names.items() if stored in saved}
    return KeptFusions(index.where, tuple(names), index.facts.views, shapes)


def _optims_in_trees(index: CheckpointIndex) -> str:
    """Say which values of the trainer are dicts of optimizers; "" if none is."""
    from fsdp_optim.state.dicts.torch_trees import places_of_optims  # for an error alone

    values = index.extras[COMMON].as_tree(allow_pickle=False) if COMMON in index.extras else None
    places = places_of_optims(values) if isinstance(values, Mapping) else []
    if not places:
        return ""
    named = " and ".join(map(shown, places))
    return (
        f" of its model; {named} among the values of the trainer may be one: dcp.save stores one dict as the model's optimizer, "
        "with names of parameters that the model's dict has, beside it where other dicts have these names too, and without dicts "
        "of tensors as their state: load it with dcp.load"
    )


class _Moved:
    """The stored tensors whose elements are moved to the ranks that need them: those that are cut like their parameters.

    `metas`: the state with meta tensors, which are evidence for kinds that are not recorded.
    """

    def __init__(self, metas: FullState, shapes: Mapping[str, Shape]) -> None:
        self._metas, self._shapes, self._evidence = metas, shapes, metas.evidence(shapes)
        self._recorded: dict[str | None, bool] = {}  # by the word that records the kind; none for what is inferred

    def parted(self, state: Mapping[str, Mapping[str, Any]]) -> tuple[dict[_Place, StoredTensor], dict[_Place, Any]]:
        """Return the tensors that are moved, and all other values, each by FQN and name."""
        tensors: dict[_Place, StoredTensor] = {}
        others: dict[_Place, Any] = {}
        kinds, recorded = self._metas.kinds, self._recorded
        for fqn, values in state.items():
            words = kinds.get(fqn, {})
            for name, value in values.items():
                is_moved = False
                if isinstance(value, StoredTensor):
                    known = recorded.get(words.get(name))
                    is_moved = known if known is not None else self._is_moved(fqn, name, value)
                (tensors if is_moved else others)[fqn, name] = value
        return tensors, others

    def _is_moved(self, fqn: str, name: str, stored: StoredTensor) -> bool:
        word = self._metas.kinds.get(fqn, {}).get(name)
        shape = self._shapes.get(fqn, stored.shape)
        kind = self._metas.kind_of(fqn, name, self._metas.state[fqn][name], shape, self._evidence)
        if word is not None:
            self._recorded[word] = kind is Kind.SHARDED
        return kind is Kind.SHARDED


def _as_dict(saved: SavedOptim, read: ReadSmall) -> Mapping[str, Any]:
    """Return the full dict of a saved optimizer, in its dialect. Only the values of its state are still StoredTensors.

    Readers of dialects look at all other values, and into lists: fairscale gives a number once for each rank.
    """
    reserved = [key for key in saved.other_keys if key in RESERVED_KEYS]
    if reserved:
        raise ValueError(f"{reserved[0]!r} cannot be another key of an optimizer")
    full = {**saved.other_keys, **saved.full}
    in_state = {key for key in full if str(key).startswith("state.")} if is_flattened(full) else {"state"}
    state = {key: full[key] for key in in_state if key in full}
    for key, value in state.items():
        if isinstance(value, Mapping) and not isinstance(value, dict):
            # Once: a reader may make its values anew each time that they are asked for.
            full[key] = state[key] = dict(value)
    kept = in_state | ({"kinds"} if saved.is_checked else set())  # kinds are words alone
    rest = {key: value for key, value in full.items() if key not in kept}
    lists = [value for value in _values_in(state) if isinstance(value, (list, tuple))] if _may_have_lists(state) else []
    if not lists:
        return {**full, **_read_in(rest, read)}
    rest, read_lists = _read_in((rest, lists), read)
    left = iter(read_lists)
    return {**full, **rest, **{key: _with_lists(value, left) for key, value in state.items()}}


def _may_have_lists(tree: Mapping[Any, Any]) -> bool:
    """Return whether there may be lists in nested dicts. All values of one level are asked together: they are of few types."""
    level: list[Any] = [tree]
    for _ in range(_FEW_LEVELS):
        kinds = set(map(type, level))
        if any(issubclass(kind, (list, tuple)) for kind in kinds):
            return True
        dicts = {kind for kind in kinds if issubclass(kind, Mapping)}
        if not dicts:
            return False
        level = [value for inner in level if type(inner) in dicts for value in inner.values()]
    return True


def _values_in(tree: Mapping[Any, Any]) -> list[Any]:
    """Return the values in nested dicts, in their order."""
    values: list[Any] = []
    for value in tree.values():
        if type(value) is dict or (type(value) is not StoredTensor and isinstance(value, Mapping)):
            values += _values_in(value)
        else:
            values.append(value)
    return values


def _with_lists(tree: Any, lists: Any) -> Any:
    """Return nested dicts with the next of `lists` in the place of each list."""
    return next(lists) if isinstance(tree, (list, tuple)) else mapped(tree, lambda value: _with_lists(value, lists))


class _Metas(dict[tuple[Shape, str], torch.Tensor]):
    """The meta tensor of each shape and dtype."""

    def __missing__(self, kind: tuple[Shape, str]) -> torch.Tensor:
        shape, dtype = kind
        meta = self[kind] = torch.empty(shape, dtype=dtype_named(dtype), device="meta")
        return meta


def _with_metas(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the state with a meta tensor in the place of each stored one. Equal ones, which nobody writes to, are one object."""
    metas = _Metas()
    return {
        fqn: {
            name: metas[value.shape, value.dtype] if isinstance(value, StoredTensor) else value
            for name, value in values.items()
        }
        for fqn, values in state.items()
    }


def _read_in(tree: Any, read: ReadSmall) -> Any:
    """Return the same dicts and lists with the elements in the place of each StoredTensor."""
    stored = {tensor.key: tensor for tensor in stored_in(tree)}
    tensors = dict(zip(stored, read(list(stored.values())), strict=True)) if stored else {}
    used: set[str] = set()

    def made(tree: Any) -> Any:
        if isinstance(tree, StoredTensor):
            value = tensors[tree.key]  # a tensor in several places gets a value for each
            again = tree.key in used
            used.add(tree.key)
            return value.clone() if again else value
        if type(tree) is dict:
            return {key: made(item) for key, item in tree.items()}
        return mapped(tree, made)

    return made(tree) if stored else tree


def _check_read(where: str, full: FullState) -> None:
    """Raise CheckpointError for an object in the state or in the groups whose class is not known."""
    for what, values in _sections(full):
        for name, value in values.items():
            unread = unread_in(value) if not isinstance(value, StoredTensor) else None
            if unread is not None:
                raise CheckpointError(
                    f"{where}: {f'{name} of {what}' if what else name} is a {unread.what}, and making one can run any code: if "
                    "you trust the author of the file, read it with torch.load, and give its dict to "
                    "scatter_full_optim_state_dict"
                )


def _sections(full: FullState) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    yield from full.state.items()
    yield from (("a param group", hyper) for hyper, _ in full.groups)
    yield "", full.other_keys


def check_filled(full: FullState, summaries: Summaries) -> None:
    """Raise StateError for a sharded value that no file contains, because its uninitialised memory would stay so.

    Values that files contain are meta tensors in `full`.
    """
    for fqn, summary in summaries.items():
        for name, _ in summary.sharded:
            if not full.state[fqn][name].is_meta:
                raise StateError(
                    f"{fqn}: {name} would be cut like the parameter, but no file has it as a tensor of the parameter's shape"
                )
