"""The content that a conversion writes: that of an open checkpoint as a save would have it, without elements of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsdp_optim.adapters import ModelReader
from fsdp_optim.adapters.registry import wrapper_parts
from fsdp_optim.checkpoint.common.contents import RECORDS, SavedValue
from fsdp_optim.checkpoint.load.reading import read_constants
from fsdp_optim.checkpoint.load.stored_state import StoredState
from fsdp_optim.checkpoint.load.targets import has_optim_only
from fsdp_optim.errors import CheckpointError, StateError, counted_noun
from fsdp_optim.foreign.reader import ForeignReader
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.description import (
    OPAQUE,
    SCALAR,
    SCALAR_TENSOR,
    TENSOR,
    GroupDescription,
    OptimDescription,
    ParamDescription,
)
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import (
    CheckpointContents,
    FormatReader,
    FormatWriter,
    Prepared,
    StoredTensor,
    weights_in,
)
from fsdp_optim.layout import Shape, Whole
from fsdp_optim.memory import dtype_named
from fsdp_optim.move import Key
from fsdp_optim.offline.group_order import by_group
from fsdp_optim.options import Model, WhichWeights
from fsdp_optim.state.dicts.full import FullState, names_in, num_listed
from fsdp_optim.state.dicts.names import Names
from fsdp_optim.state.dicts.wrapped_names import cut
from fsdp_optim.state.live.fits import check_shapes
from fsdp_optim.state.values.classes import class_names_written
from fsdp_optim.state.values.kinds import Kind

_IN_DDP = "module."
"""The beginning of all names in the state dict of a model in DistributedDataParallel."""


@dataclass(frozen=True)
class SourceContents:
    """The contents of a conversion.

    Attributes:
        model, optim: the tensors of the two halves in the order in which they are written.
        stored: the place of each tensor in the source, without those that have a `constant`.
        prepared: the result of the target's writer before anything is written; its small files are in `files`.
        files: all small files.
        weights: which of the model's weights the source has.
        left_out: why values of the trainer are not in the new checkpoint.
    """

    model: tuple[SavedValue, ...]
    optim: tuple[SavedValue, ...]
    stored: Mapping[Key, StoredTensor]
    prepared: Prepared
    files: Mapping[str, bytes]
    has_optim: bool
    weights: WhichWeights
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceNaming:
    """The names that a caller has given for a checkpoint without names.

    `names`: FQNs in the order of the optimizer's ids. `model`: a model whose parameters have this order.
    """

    names: Sequence[str] | None = None
    model: Model | None = field(default=None, repr=False)


def describe_source(
    checkpoint: FormatReader, writer: FormatWriter, naming: SourceNaming, *, allow_pickle: bool
) -> SourceContents:
    """The contents of an open checkpoint for a writer. Reads small values only.

    Raises StateError if the checkpoint has ids without names, and no names were given.
    """
    if not checkpoint.model and not checkpoint.has_optim:
        raise CheckpointError(f"{checkpoint.where}: has neither weights nor an optimizer: there is nothing to convert")
    which = _which_weights(checkpoint)
    copied = writer.copied(checkpoint)
    if copied is not None:
        model, optim = _values(checkpoint.model, is_state=False), _values(checkpoint.optim, is_state=True)
        stored = _stored(checkpoint.model, checkpoint.optim)
        return SourceContents(model, optim, stored, copied, dict(copied.files), checkpoint.has_optim, which)
    weights, aliases = checkpoint.model, checkpoint.aliases
    state, description = _values(checkpoint.optim, is_state=True), None
    stored = _stored(weights, checkpoint.optim)
    if checkpoint.full_dict is not None:
        parts = wrapper_parts()
        weights = _renamed(checkpoint, parts)
        aliases = _renamed_aliases(checkpoint, weights, parts)
        shapes = {fqn: one.shape for fqn, one in weights.items()}
        with as_checkpoint_error(checkpoint.where):
            names = _names(checkpoint, naming, weights, parts)
            found = StoredState.of(checkpoint, names, shapes, allow_pickle=allow_pickle)
            check_shapes(found.full, shapes)
            description, state, tensors = _described(checkpoint, found, shapes)
        stored = {**_stored(weights, {}), **tensors}
    elif checkpoint.has_optim:
        description = checkpoint.description(allow_pickle=allow_pickle, records=RECORDS)
    elif isinstance(checkpoint, ForeignReader):
        weights = _renamed(checkpoint, wrapper_parts())
        stored = _stored(weights, {})
    if writer.needs_scalars and description is not None:
        description, state = _with_scalars(checkpoint, description, state, stored)
    contents = CheckpointContents(
        world_size=max(checkpoint.world_size, 1),
        params={key: one.shape for key, one in weights.items()},
        aliases=aliases,
        optim=description,
        weights=which,
        weights_dtype=weights_in(checkpoint).dtype,
        units=checkpoint.units if isinstance(checkpoint, ForeignReader) else None,
        flattens=checkpoint.flattens if isinstance(checkpoint, ForeignReader) else True,
    )
    left_out: list[str] = []
    with as_checkpoint_error(checkpoint.where):
        prepared = writer.prepare(contents, allow_pickle=allow_pickle, records=RECORDS)
        files = dict(prepared.files)
        for name in sorted(checkpoint.extras):
            value = _decoded(checkpoint, name, left_out, allow_pickle=allow_pickle)
            if value is not None and not writer.keeps_extra(name, value, allow_pickle=allow_pickle):
                files.update([writer.extra(name, value, allow_pickle=allow_pickle)])
    has_optim = description is not None
    its = _values(weights, is_state=False)
    return SourceContents(its, state, stored, prepared, files, has_optim, which, tuple(left_out))


def _decoded(checkpoint: FormatReader, name: str, left_out: list[str], *, allow_pickle: bool) -> Any:
    """An extra of the source. What another library has pickled, and is not read, is left out: the reasons go to `left_out`.

    In this library's own checkpoints a pickle is there because the caller of the save has allowed it: that is not left out.
    """
    stored = checkpoint.extra(name, verify=True)
    if not isinstance(checkpoint, ForeignReader):
        return stored.decoded(allow_pickle=allow_pickle)
    value = stored.decoded_each(allow_pickle=allow_pickle)
    items = value if isinstance(value, Mapping) else {"": value}
    withheld = {key: item for key, item in items.items() if isinstance(item, Withheld)}
    for one in withheld.values():
        if not one.is_unsafe:
            raise CheckpointError(one.why)
        left_out.append(one.why)
    if not withheld:
        return value
    return {key: item for key, item in items.items() if key not in withheld} if items is value else None


def _which_weights(checkpoint: FormatReader) -> WhichWeights:
    """Which weights a checkpoint has: of another library's, those that it has are all."""
    which = weights_in(checkpoint).which
    if which == "trainable":
        return "trainable"
    return "none" if which == "none" or has_optim_only(checkpoint) else "all"


def _values(stored: Mapping[str, StoredTensor], *, is_state: bool) -> tuple[SavedValue, ...]:
    """Stored tensors as values to save, whose keys stand for FQNs; those of large elements first, as a save writes them."""
    values = [
        SavedValue(key, "", dtype_named(one.dtype), Whole(one.shape, (0,)), is_state, key)
        for key, one in stored.items()
    ]
    return tuple(sorted(values, key=lambda value: -value.dtype.itemsize))


def _stored(weights: Mapping[str, StoredTensor], state: Mapping[str, StoredTensor]) -> dict[Key, StoredTensor]:
    return {
        **{(False, key, ""): one for key, one in weights.items()},
        **{(True, key, ""): one for key, one in state.items()},
    }


# ------------------------------------------------------------------------------------------- other libraries


def _renamed(checkpoint: FormatReader, parts: frozenset[str]) -> dict[str, StoredTensor]:
    """The weights by FQN. Raises CheckpointError if two of them have the same."""
    named = {key: cut(key, parts) for key in checkpoint.model}
    if all(name.startswith(_IN_DDP) for name in named.values()):
        named = {key: name.removeprefix(_IN_DDP) for key, name in named.items()}
    found: dict[str, StoredTensor] = {}
    for key, fqn in named.items():
        if fqn in found:
            raise _both_called(checkpoint, key, found[fqn].key, fqn)
        found[fqn] = checkpoint.model[key]
    return found


def _both_called(checkpoint: FormatReader, name: str, other: str, fqn: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.where}: {name} and {other} are both called {fqn} without the parts that wrappers insert: rename one of them"
    )


def _renamed_aliases(
    checkpoint: FormatReader, weights: Mapping[str, StoredTensor], parts: frozenset[str]
) -> dict[str, str]:
    """The other names of tied weights. Raises CheckpointError where one becomes the name of another weight."""
    found = {}
    for alias, fqn in checkpoint.aliases.items():
        name = cut(alias, parts)
        if name in weights and name != cut(fqn, parts):
            raise _both_called(checkpoint, alias, weights[name].key, name)
        found[name] = cut(fqn, parts)
    return found


def _names(
    checkpoint: FormatReader, naming: SourceNaming, weights: Mapping[str, StoredTensor], parts: frozenset[str]
) -> Names:
    """The names of the optimizer's parameters: those in its dict, or those that the caller gives for its ids."""
    full, where = checkpoint.full_dict or {}, checkpoint.where
    groups = full.get("param_groups")
    view = ModelReader(naming.model).read() if naming.model is not None else None
    aliases = {} if view is None else dict(view.aliases)
    aliases.update(checkpoint.aliases)
    order: Sequence[str] | None = naming.names if naming.names is not None else view.order if view is not None else None
    if groups is None or names_in(full) is not None:
        known = tuple(order) if order is not None else tuple(weights)
        return Names((known,), aliases, wrapper_parts=parts, model_order=known)
    nums = num_listed(groups)
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
        shapes = {fqn: one.shape for fqn, one in weights.items()}
        groups_of = by_group(
            where, full, order, {**shapes, **{name: shapes[fqn] for name, fqn in aliases.items() if fqn in shapes}}
        )
        return Names(
            tuple(map(tuple, groups_of)), aliases, unit_order=units, wrapper_parts=parts, model_order=tuple(order)
        )
    left = iter(order)
    listed = tuple(tuple(next(left) for _ in range(num)) for num in nums)
    return Names(listed, aliases, unit_order=units, wrapper_parts=parts, model_order=tuple(order))


def _described(
    checkpoint: FormatReader, found: StoredState, shapes: Mapping[str, Shape]
) -> tuple[OptimDescription, tuple[SavedValue, ...], dict[Key, StoredTensor]]:
    """The description of the state, its tensors to save, and the places of those that are in files."""
    full, values, stored = found.full, list[SavedValue](), dict[Key, StoredTensor]()
    evidence = full.evidence(shapes)
    params = {}
    for fqn in (fqn for _, fqns in full.groups for fqn in fqns):
        listed: list[tuple[Any, str, Any]] = []
        shape = shapes.get(fqn) or _shape_in(full, found, fqn)
        for name, value in full.state.get(fqn, {}).items():
            key = f"state.{fqn}.{name}"
            if (fqn, name) in found.tensors:
                one = found.tensors[fqn, name]
                listed.append((name, TENSOR, key))
                values.append(SavedValue(fqn, name, dtype_named(one.dtype), Whole(one.shape, (0,)), True, key))
                stored[True, fqn, name] = one
            elif isinstance(value, torch.Tensor) and not value.dim():
                kind = full.kind_of(fqn, name, value, shape, evidence)
                listed.append((name, TENSOR if kind is Kind.SHARDED else SCALAR_TENSOR, key))
                values.append(SavedValue(fqn, name, value.dtype, Whole((), (0,)), True, key, constant=value))
            elif full.kind_of(fqn, name, value, shape, evidence) is Kind.SCALAR:
                listed.append((name, SCALAR, value))
            else:
                listed.append((name, OPAQUE, value))
        params[fqn] = ParamDescription(shape, tuple(listed), fqn in full.state)
    description = OptimDescription(
        groups=tuple(GroupDescription(tuple(hyper.items()), fqns) for hyper, fqns in full.groups),
        other_keys=dict(full.other_keys),
        params=params,
        optimizer_class=class_names_written(full.classes),
    )
    return description, tuple(sorted(values, key=lambda value: -value.dtype.itemsize)), stored


def _with_scalars(
    checkpoint: FormatReader,
    description: OptimDescription,
    state: Sequence[SavedValue],
    stored: Mapping[Key, StoredTensor],
) -> tuple[OptimDescription, tuple[SavedValue, ...]]:
    """The description with the 0-dim tensors themselves in it, and the other values."""
    scalars = [value for value in state if not value.placement.shape]
    in_files = [value for value in scalars if value.constant is None]
    read = read_constants(checkpoint, [stored[value.key] for value in in_files])
    tensors = {value.stored_name: value.constant for value in scalars}
    tensors.update((value.stored_name, tensor) for value, tensor in zip(in_files, read, strict=True))

    def described(param: ParamDescription) -> ParamDescription:
        values = (
            (name, SCALAR, tensors[value])
            if kind in (TENSOR, SCALAR_TENSOR) and value in tensors
            else (name, kind, value)
            for name, kind, value in param.values
        )
        return replace(param, values=tuple(values))

    params = {fqn: described(param) for fqn, param in description.params.items()}
    return replace(description, params=params), tuple(value for value in state if value.placement.shape)


def _shape_in(full: FullState, found: StoredState, fqn: str) -> Shape:
    """The shape of a parameter whose weights are not in the checkpoint: that of a value which is cut like it."""
    return next(
        (found.tensors[fqn, name].shape for name in full.state.get(fqn, {}) if (fqn, name) in found.tensors), ()
    )
