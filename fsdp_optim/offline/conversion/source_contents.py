"""What a conversion writes: the source's contents in the form a save produces, without tensor elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from msgspec import structs

from fsdp_optim.adapters import ModelReader
from fsdp_optim.adapters.known import wrapper_parts
from fsdp_optim.checkpoint.common.contents import RECORDS, TREE, SavedValue
from fsdp_optim.checkpoint.load.reading import read_constants
from fsdp_optim.checkpoint.load.stored_state import StoredState
from fsdp_optim.errors import CheckpointError, StateError, counted_noun
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.index import (
    CheckpointIndex,
    ReadSmall,
    SavedOptim,
    StoredExtra,
    StoredOptim,
    stored_in,
)
from fsdp_optim.formats.base.protocols import COMMON, Prepared, Reader, StoredTensor, Writer
from fsdp_optim.formats.base.records import PLANNED
from fsdp_optim.formats.base.tree_values import keys_in
from fsdp_optim.layout import Shape, whole_on
from fsdp_optim.move import Key
from fsdp_optim.offline.conversion.group_order import by_group
from fsdp_optim.offline.conversion.seen_index import index_of
from fsdp_optim.options import Model, WhichWeights
from fsdp_optim.state.dicts.full import FullState, names_in, num_listed
from fsdp_optim.state.dicts.names import Names, cut
from fsdp_optim.state.live.fit_check import check_shapes
from fsdp_optim.state.values.classes import class_names_written
from fsdp_optim.state.values.kinds import Kind
from fsdp_optim.tensors.memory import dtype_name, dtype_named

_IN_DDP = "module."
"""The beginning of all names in the state dict of a model in DistributedDataParallel."""


@dataclass(frozen=True)
class SourceContents:
    """The contents of a conversion.

    Attributes:
        model, optim, trees: the tensors of the halves in the order in which they are written.
        stored: the place of each tensor in the source, except tensors that have a `constant`.
        prepared: the result of the target's writer before anything is written, with all small files.
        weights: which of the model's weights the source has.
        left_out: why values of the trainer are not in the new checkpoint.
    """

    model: tuple[SavedValue, ...]
    optim: tuple[SavedValue, ...]
    stored: Mapping[Key, StoredTensor]
    prepared: Prepared
    has_optim: bool
    weights: WhichWeights
    left_out: tuple[str, ...] = ()
    trees: tuple[SavedValue, ...] = ()


@dataclass(frozen=True)
class SourceNaming:
    """The names that a caller has given for a checkpoint without names.

    `names`: FQNs in the order of the optimizer's ids. `model`: a model whose parameters have this order.
    """

    names: Sequence[str] | None = None
    model: Model | None = field(default=None, repr=False)


@dataclass(frozen=True)
class NamedSource:
    """An open checkpoint with FQNs for all its names.

    Attributes:
        index: the index of a checkpoint with the same contents, as a writer takes it.
        optim: the tensors of the optimizer to save.
        stored: the place of each tensor, except tensors that have a `constant`.
        left_out: why values of the trainer are not in `index`; complete when the values were decoded.
    """

    index: CheckpointIndex
    optim: tuple[SavedValue, ...]
    stored: Mapping[Key, StoredTensor]
    left_out: list[str]

    def contents(self, writer: Writer, *, allow_pickle: bool) -> SourceContents:
        """Return the contents of a conversion by a writer. Raises CheckpointError for a value that it cannot write."""
        index = self.index
        with as_checkpoint_error(index.where):
            prepared = writer.prepare(index, allow_pickle=allow_pickle, records=RECORDS)
        return SourceContents(
            model=_values(index.weights, is_state=False),
            trees=_values(index.trees, is_state=False, name=TREE) if writer.writes_trees else (),
            optim=self.optim,
            stored=self.stored,
            prepared=prepared,
            has_optim=index.optim is not None,
            weights=_which_weights(index),
            left_out=tuple(self.left_out),
        )


def describe_source(checkpoint: Reader, writer: Writer, naming: SourceNaming, *, allow_pickle: bool) -> SourceContents:
    """Describe the contents of an open checkpoint for a writer. Reads small values only.

    Raises StateError if the checkpoint has ids without names, and no names were given.
    """
    return name_source(checkpoint, naming, allow_pickle=allow_pickle).contents(writer, allow_pickle=allow_pickle)


def name_source(
    checkpoint: Reader, naming: SourceNaming, *, allow_pickle: bool, with_optim: bool = True
) -> NamedSource:
    """Name the contents of an open checkpoint. Reads small values only. `with_optim` False: as if it had no optimizer.

    Raises as `describe_source`.
    """
    index = index_of(checkpoint, allow_pickle=allow_pickle) if with_optim else replace(checkpoint.index, optim=None)
    if not index.weights and index.optim is None and not index.trees:
        raise CheckpointError(f"{index.where}: has neither weights nor an optimizer: there is nothing to convert")
    parts = None if index.facts.names_are_fqns else wrapper_parts()
    weights = index.weights if parts is None else renamed_weights(index, parts)
    aliases = index.aliases if parts is None else renamed_aliases(index, weights, parts)
    optim = _Optim.of(checkpoint, index, naming, weights, parts or frozenset(), allow_pickle=allow_pickle)
    left_out: list[str] = []
    trees = index.trees
    if trees and not index.facts.names_are_fqns:  # those of values that are left out are left out too
        trees = {key: trees[key] for key in keys_in(index.extras[COMMON].as_tree(allow_pickle=allow_pickle))}
    new = replace(
        index,
        weights=weights,
        facts=replace(index.facts, weights=replace(index.facts.weights, which=_which_weights(index))),
        aliases=aliases,
        optim=optim.stored_optim,
        extras={name: _SourceExtra(index, name, left_out) for name in index.extras if name != PLANNED},
        trees=trees,
        source=checkpoint,
    )
    stored = {
        **_stored(weights, {}),
        **optim.stored,
        **{(False, key, TREE): tensor for key, tensor in trees.items()},
    }
    return NamedSource(new, optim.values, stored, left_out)


@dataclass(frozen=True)
class _SourceExtra(StoredExtra):
    """An extra of the source. A pickle of another library that is not read is left out, with a reason in `left_out`.

    A pickle in this library's own checkpoints is not left out, because the caller of the save has allowed it.
    """

    index: CheckpointIndex
    name: str
    left_out: list[str]

    def decoded(self, *, allow_pickle: bool) -> Any:
        return self._readable(self.index.extras[self.name].decoded_each(allow_pickle=allow_pickle))

    def _readable(self, value: Any) -> Any:
        """Return a value without the items that are left out. Raises CheckpointError for others that are not read."""
        items = value if isinstance(value, Mapping) else {"": value}
        withheld = {key: item for key, item in items.items() if isinstance(item, Withheld)}
        for item in withheld.values():
            if not item.is_unsafe or self.index.facts.names_are_fqns:
                raise CheckpointError(item.why)
            self.left_out.append(item.why)
        if not withheld:
            return value
        return {key: item for key, item in items.items() if key not in withheld} if items is value else None

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        return self.decoded(allow_pickle=allow_pickle)

    def as_tree(self, *, allow_pickle: bool) -> Any:
        return self._readable(self.index.extras[self.name].as_tree(allow_pickle=allow_pickle))


def _which_weights(index: CheckpointIndex) -> WhichWeights:
    """Return which weights a checkpoint has. Another library's checkpoint is taken to have all weights."""
    which = index.facts.weights.which
    if which == "trainable":
        return "trainable"
    return "none" if which == "none" or index.has_optim_only else "all"


def _values(stored: Mapping[str, StoredTensor], *, is_state: bool, name: str = "") -> tuple[SavedValue, ...]:
    """Return stored tensors as values to save, whose keys stand for FQNs; large elements first, as a save writes them."""
    values = [
        SavedValue(key, name, dtype_named(tensor.dtype), whole_on(tensor.shape, (0,)), is_state, key)
        for key, tensor in stored.items()
    ]
    return tuple(sorted(values, key=lambda value: -value.dtype.itemsize))


def _stored(weights: Mapping[str, StoredTensor], state: Mapping[str, StoredTensor]) -> dict[Key, StoredTensor]:
    return {
        **{(False, key, ""): tensor for key, tensor in weights.items()},
        **{(True, key, ""): tensor for key, tensor in state.items()},
    }


# ------------------------------------------------------------------------------------------- names


def renamed_weights(index: CheckpointIndex, parts: frozenset[str]) -> dict[str, StoredTensor]:
    """Return the weights by FQN. Raises CheckpointError if two of them have the same FQN."""
    named = {key: cut(key, parts) for key in index.weights}
    if all(name.startswith(_IN_DDP) for name in named.values()):
        named = {key: name.removeprefix(_IN_DDP) for key, name in named.items()}
    renamed: dict[str, StoredTensor] = {}
    for key, fqn in named.items():
        if fqn in renamed:
            raise _both_called(index, key, renamed[fqn].key, fqn)
        renamed[fqn] = index.weights[key]
    return renamed


def _both_called(index: CheckpointIndex, name: str, other: str, fqn: str) -> CheckpointError:
    return CheckpointError(
        f"{index.where}: {name} and {other} are both called {fqn} without the parts that wrappers insert: rename one of them"
    )


def renamed_aliases(
    index: CheckpointIndex, weights: Mapping[str, StoredTensor], parts: frozenset[str]
) -> dict[str, str]:
    """Return the other names of tied weights. Raises CheckpointError where one becomes the name of another weight."""
    aliases = {}
    for alias, fqn in index.aliases.items():
        name = cut(alias, parts)
        if name in weights and name != cut(fqn, parts):
            raise _both_called(index, alias, weights[name].key, name)
        aliases[name] = cut(fqn, parts)
    return aliases


def _names(
    index: CheckpointIndex,
    full: Mapping[str, Any],
    naming: SourceNaming,
    weights: Mapping[str, StoredTensor],
    parts: frozenset[str],
) -> Names:
    """Return the names of the optimizer's parameters: from its dict, or as the caller gives them for its ids."""
    where = index.where
    groups = full.get("param_groups")
    view = ModelReader(naming.model).read() if naming.model is not None else None
    aliases = {} if view is None else dict(view.aliases)
    aliases.update(index.aliases)
    order: Sequence[str] | None = naming.names if naming.names is not None else view.order if view is not None else None
    if groups is None or names_in(full) is not None:
        known = tuple(order) if order is not None else tuple(weights)
        return Names((known,), aliases, wrapper_parts=parts, model_order=known)
    nums = num_listed(groups)
    if full.get("unknown_order"):
        raise StateError(str(full["unknown_order"]))
    if order is None:
        raise StateError(
            f"{where}: the optimizer has {counted_noun(sum(nums), 'parameter')} by ids without names: give "
            "param_names=[...], their FQNs in the order of the ids, or model=, a model with these parameters (it may be on the "
            "meta device)"
        )
    if len(order) != sum(nums):
        given = "names" if naming.names is not None else "the model"
        raise StateError(
            f"{where}: the optimizer has {counted_noun(sum(nums), 'parameter')}, and {given} has {len(order)}: give "
            "param_names= with one FQN for each id"
        )
    units = tuple(order) if naming.names is not None or view is None else view.unit_order
    if units is None and len(set(full.get("param_id_map", {}).values())) > 1:
        raise StateError(
            f"{where}: the optimizer's dict is fairscale's own, whose ids count the parameters by FSDP unit, and the model has "
            "no such units: give param_names=[...], the FQNs in the order of the ids, or the model wrapped as it was"
        )
    if naming.names is None and len(nums) > 1:
        shapes = {fqn: tensor.shape for fqn, tensor in weights.items()}
        groups_of = by_group(
            where, full, order, {**shapes, **{name: shapes[fqn] for name, fqn in aliases.items() if fqn in shapes}}
        )
        return Names(
            tuple(map(tuple, groups_of)), aliases, unit_order=units, wrapper_parts=parts, model_order=tuple(order)
        )
    left = iter(order)
    listed = tuple(tuple(next(left) for _ in range(num)) for num in nums)
    return Names(listed, aliases, unit_order=units, wrapper_parts=parts, model_order=tuple(order))


# ------------------------------------------------------------------------------------------- the optimizer


@dataclass(frozen=True)
class _Optim:
    """The optimizer of a conversion: for the new index, its tensors to save, and the places of tensors that are in files."""

    stored_optim: StoredOptim | None = None
    values: tuple[SavedValue, ...] = ()
    stored: Mapping[Key, StoredTensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checkpoint: Reader,
        index: CheckpointIndex,
        naming: SourceNaming,
        weights: Mapping[str, StoredTensor],
        parts: frozenset[str],
        *,
        allow_pickle: bool,
    ) -> _Optim:
        """Return the optimizer of a checkpoint: as it was recorded, or with names for ids and kinds that are inferred."""
        read = partial(read_constants, checkpoint)
        if index.optim is None:
            return cls()
        if index.facts.names_are_fqns:
            values = _values(index.optim.tensors, is_state=True)
            return cls(replace(index.optim, read=read), values, _stored({}, index.optim.tensors))
        shapes = {fqn: tensor.shape for fqn, tensor in weights.items()}
        with as_checkpoint_error(index.where):
            saved = index.optim.decoded(allow_pickle=allow_pickle, records=RECORDS)
            names = _names(index, saved.full, naming, weights, parts)
            stored_state = StoredState.resolved(index.where, saved, names, shapes, read)
            check_shapes(stored_state.full, shapes)
            return cls._inferred(stored_state, shapes, read)

    @classmethod
    def _inferred(cls, stored_state: StoredState, shapes: Mapping[str, Shape], read: ReadSmall) -> _Optim:
        """Infer the kinds of a state that did not record them."""
        full, values, stored = stored_state.full, list[SavedValue](), dict[Key, StoredTensor]()
        evidence = full.evidence(shapes)
        state: dict[str, dict[Any, Any]] = {}
        kinds: dict[str, dict[Any, str]] = {}
        all_shapes: dict[str, Shape] = {}
        for fqn in (fqn for _, fqns in full.groups for fqn in fqns):
            shape = all_shapes[fqn] = shapes.get(fqn) or _shape_in(full, stored_state, fqn)
            entries, words = dict[Any, Any](), dict[Any, str]()
            for name, value in full.state.get(fqn, {}).items():
                key = f"state.{fqn}.{name}"
                if (fqn, name) in stored_state.tensors:
                    tensor = stored[True, fqn, name] = stored_state.tensors[fqn, name]
                    entries[name], words[name] = structs.replace(tensor, key=key), Kind.SHARDED.value
                    values.append(
                        SavedValue(fqn, name, dtype_named(tensor.dtype), whole_on(tensor.shape, (0,)), True, key)
                    )
                elif isinstance(value, torch.Tensor) and not value.dim():
                    is_sharded = full.kind_of(fqn, name, value, shape, evidence) is Kind.SHARDED
                    words[name] = (Kind.SHARDED if is_sharded else Kind.SCALAR).value
                    entries[name] = StoredTensor(key, dtype_name(value.dtype), (), "", 0)
                    values.append(SavedValue(fqn, name, value.dtype, whole_on((), (0,)), True, key, constant=value))
                else:
                    kind = full.kind_of(fqn, name, value, shape, evidence)
                    entries[name] = value
                    words[name] = (Kind.SCALAR if kind is Kind.SCALAR else Kind.OPAQUE).value
            state[fqn] = entries
            if fqn in full.state:
                kinds[fqn] = words
        groups = [{**hyper, "params": list(fqns)} for hyper, fqns in full.groups]
        classes = class_names_written(full.classes)
        full_dict: dict[str, Any] = {"state": state, "param_groups": groups, "kinds": kinds}
        if classes is not None:
            full_dict["optimizer_class"] = classes
        saved = SavedOptim(full_dict, full.other_keys, all_shapes)
        constants = {value.stored_name: value.constant for value in values}

        def read_known(tensors: Sequence[StoredTensor]) -> list[torch.Tensor]:
            in_files = iter(read([tensor for tensor in tensors if constants[tensor.key] is None]))
            return [next(in_files) if (known := constants[tensor.key]) is None else known for tensor in tensors]

        optim = StoredOptim({tensor.key: tensor for tensor in stored_in(state)}, lambda *_: saved, read=read_known)
        return cls(optim, tuple(sorted(values, key=lambda value: -value.dtype.itemsize)), stored)


def _shape_in(full: FullState, stored_state: StoredState, fqn: str) -> Shape:
    """Return the shape of a parameter whose weights are not in the checkpoint: the shape of a value that is cut like it."""
    return next(
        (
            stored_state.tensors[fqn, name].shape
            for name in full.state.get(fqn, {})
            if (fqn, name) in stored_state.tensors
        ),
        (),
    )
