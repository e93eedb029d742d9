"""The contents of a save: every tensor with its name, dtype and placement, equal on all ranks, and this rank's part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from msgspec import structs

from fsdp_optim.adapters import ModelReader
from fsdp_optim.adapters.buffers import StageCopiesHandle
from fsdp_optim.arguments import Arguments
from fsdp_optim.checkpoint.common import module_values
from fsdp_optim.checkpoint.common.kept_fusions import agree_on_kept, kept_at_save
from fsdp_optim.errors import StateError, WrapperError
from fsdp_optim.formats.base.bools import check_bools_of
from fsdp_optim.formats.base.protocols import Half
from fsdp_optim.layout import FlatChunks, MeshBoxes, Placement, StridedBoxes, Whole
from fsdp_optim.layout.views import PlacedPart
from fsdp_optim.move import End, StateValue
from fsdp_optim.options import CAST_DTYPES, CallArguments, FusedState, WhichWeights
from fsdp_optim.state.live.local import LocalOptim, LocalParam, Optimizers
from fsdp_optim.state.merged.global_state import GlobalState
from fsdp_optim.state.merged.replicas import ELEMENTS, elements_of
from fsdp_optim.state.values.opaque import OpaqueShards
from fsdp_optim.tensors.dtensors import is_usual_dtensor
from fsdp_optim.tensors.elements import check_weight, is_usual_weight
from fsdp_optim.tensors.memory import dtype_named
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import Local, agree_on_state, read_local
from fsdp_optim.verbs.ends import LiveEnd
from fsdp_optim.verbs.gather_opaque import OpaqueValues, gather_opaque
from fsdp_optim.verbs.replicas import compare_shards, synchronize
from fsdp_optim.verbs.seen import seen_by
from fsdp_optim.view import LocalPart, ModelView, ModuleValues, check_materialized

WEIGHT = "weight"
"""The name of a parameter's elements: weights are read like the state of an optimizer with one value per parameter."""

TREE = "tree"
"""The name of the elements of a tensor in a tree of `state=`."""

_PARAMS, _BUFFERS, LEFT_OUT = 0, 1, 2
"""The param groups of `weights_of`: the parameters and the buffers to save or load, and all others."""

RECORDS: Mapping[str, type] = {
    "OpaqueShards": OpaqueShards,
    "LocalPart": LocalPart,
    "FlatChunks": FlatChunks,
    "MeshBoxes": MeshBoxes,
    "StridedBoxes": StridedBoxes,
    "Whole": Whole,
}
"""The dataclasses that opaque values of sharded parameters contain besides plain values."""


class SavedValue(StateValue, frozen=True, eq=False, gc=False):
    """One tensor of a save. `stored_name`: its name in the checkpoint.

    `constant`: its value, if all ranks know it, as they do for scalars. `cast_from`: the dtype of the live tensor, if the value
    is saved in another dtype. `of_optim`: of a tensor of a tree that is
    stored as one of the optimizer, the FQN and the name.
    """

    stored_name: str = ""
    constant: torch.Tensor | None = None
    cast_from: torch.dtype | None = None
    of_optim: tuple[str, str] | None = None

    @property
    def half(self) -> Half:
        is_of_optim = self.is_state or self.of_optim is not None
        return "optim" if is_of_optim else "state" if self.name == TREE else "model"

    @property
    def live(self) -> SavedValue:
        """The value as it is in the live model."""
        return self if self.cast_from is None else structs.replace(self, dtype=self.cast_from)


@dataclass(frozen=True)
class SavedHalf:
    """One half of a save: the weights of the model, the state of the optimizer, or the tensors of trees.

    `tensors`: the tensors that are saved; the merged state has all. `opaque`, `module_values`: on the lowest rank, the opaque
    values and the values of modules; empty on the other ranks. `kept`: the fused parameters whose state has their names.
    """

    local: Local
    global_state: GlobalState
    tensors: tuple[SavedValue, ...]
    opaque: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    module_values: Mapping[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()

    def of(self, half: Half) -> SavedHalf:
        """Return the tensors that are stored in one half."""
        return replace(self, tensors=tuple(value for value in self.tensors if value.half == half))


@dataclass(frozen=True)
class HalvesEnd(End):
    """The source of a save: the live weights, the live state, the tensors of trees, and the scalars that all ranks know."""

    weights: LiveEnd
    state: LiveEnd | None
    trees: LiveEnd | None = None

    def memory(self, value: StateValue) -> torch.Tensor | None:
        if isinstance(value, SavedValue) and value.constant is not None:
            return value.constant
        return self._end_of(value).memory(value)

    def memories(self, values: Sequence[StateValue]) -> Sequence[torch.Tensor | None]:
        memories = [value.constant if isinstance(value, SavedValue) else None for value in values]
        by_end: dict[tuple[bool, bool], list[int]] = {}
        for number, (value, constant) in enumerate(zip(values, memories, strict=True)):
            if constant is None:
                by_end.setdefault((value.is_state, value.name == TREE), []).append(number)
        for numbers in by_end.values():
            end = self._end_of(values[numbers[0]])
            for number, memory in zip(numbers, end.memories([values[number] for number in numbers]), strict=True):
                memories[number] = memory
        return memories

    def _end_of(self, value: StateValue) -> LiveEnd:
        if value.is_state:
            return self.state if self.state is not None else self.weights
        return self.trees if self.trees is not None and value.name == TREE else self.weights


def weights_of(
    reader: ModelReader, ranks: tuple[int, ...], options: CallArguments, which: WhichWeights = "all"
) -> Local:
    """Return the parameters and buffers of this rank's model, read as the state of an optimizer.

    Parameters and buffers that `which` leaves out have no state, and are in the group `LEFT_OUT`.
    """
    view = reader.read(ranks, options.name_of)
    buffers = reader.buffers(view, options.name_of)
    check_materialized((*view.handles, *buffers.handles), view.rank)
    handles = tuple([named.with_all_collected() for named in (*view.handles, *buffers.handles)])
    order = (*view.order, *(fqn for named in buffers.handles for fqn in named.fqns))
    everything = replace(view, handles=handles, order=order, aliases={**view.aliases, **buffers.aliases})
    everything = seen_by(reader, everything, options, options.fused)
    values = ModuleValues()
    if which != "none":
        values = reader.module_values(view, options.name_of, runs_hooks=options.views == "hooks")
    optim = _as_optimizer(everything, which)
    for param in optim.params:
        live = param.named.handle.param
        if param.state is None or is_usual_weight(live) or is_usual_dtensor(live):
            continue  # nearly every parameter
        fqn = param.named.fqns[0] if param.named.fqns else "a parameter"
        check_weight(f"{fqn}: this tensor on rank {view.rank}", live, WrapperError)
    return Local(everything, optim, values)


def checked_weights_of(
    reader: ModelReader, ranks: tuple[int, ...], options: CallArguments, which: WhichWeights = "all"
) -> Local:
    """Read as `weights_of`. Raises StateError where pipeline stages of this rank have different buffers under one name."""
    local = weights_of(reader, ranks, options, which)
    for param in local.optim.params:
        if isinstance(param.handle, StageCopiesHandle) and param.state is not None:
            param.handle.check_equal(param.named.fqns[0])
    return local


def check_not_empty(global_state: GlobalState, reader: ModelReader) -> None:
    """Refuse a model without parameters and buffers on any rank, such as a module whose wrapper has flattened all of them.

    Raises WrapperError, the same on all ranks.
    """
    if not global_state.params:
        raise WrapperError(
            f"the {reader.name} that was given has no parameters and no buffers on any rank: where a wrapper has flattened "
            "them, pass the wrapped root instead of a module inside it"
        )


def _as_optimizer(view: ModelView, which: WhichWeights) -> LocalOptim:
    grouped = [(_group_of(named.handle.param, which), named) for named in view.handles]
    params = tuple(
        LocalParam(index, group, named, {WEIGHT: named.handle.as_value()} if group != LEFT_OUT else None)
        for index, (group, named) in enumerate(grouped)
        if named.fqns
    )
    groups = (_PARAMS,) if which == "all" else (_PARAMS, _BUFFERS, LEFT_OUT)
    ids = tuple(tuple(p.local_id for p in params if p.group_index == group) for group in groups)
    return LocalOptim(params, ({},) * len(groups), ids, (None,) * len(groups), {})


def _group_of(param: torch.Tensor, which: WhichWeights) -> int:
    """Return the group of a parameter or buffer of `weights_of`. Training changes buffers, also of modules that are frozen."""
    if which == "all" or (which == "trainable" and param.requires_grad):
        return _PARAMS
    return _BUFFERS if which == "trainable" and is_buffer(param) else LEFT_OUT


def read_weights(
    reader: ModelReader,
    group: RankGroup,
    asked: Arguments,
    options: CallArguments,
    about: str,
    which: WhichWeights = "all",
    saved_as: torch.dtype | None = None,
) -> SavedHalf:
    """Agree with the other ranks on the model's parameters and buffers. Called by all ranks.

    `saved_as`: the dtype in which floating tensors are saved; None: each in its own dtype.
    """
    local, global_state = agree_on_state(
        group,
        lambda: loadable(checked_weights_of(reader, group.ranks, options, which), group.rank),
        asked,
        f"the model, {about}",
        with_state=True,
        on_replica_mismatch=options.on_replica_mismatch,
        every_replica=True,
        what=ELEMENTS,
    )
    if which != "none":
        check_not_empty(global_state, reader)
    global_state = compare_shards(group, local, global_state, options.on_replica_mismatch, ELEMENTS)
    if which == "trainable":
        _check_trains(global_state)
    tensors = []
    for fqn in _by_unit(global_state):
        param = global_state.params[fqn]
        if param.group_index == LEFT_OUT:
            continue
        dtypes = param.summary.dtypes if param.summary is not None else {}
        if not dtypes:
            raise WrapperError(
                f"{fqn}: is {param.summary.everything if param.summary is not None else None}, a tensor of a subclass, which "
                "a safetensors file cannot hold"
            )
        placement = param.placement
        if fqn in global_state.buffers and placement.num_shards == 1:  # a buffer is small, so one rank writes it
            placement = _on_one_rank(placement)
        for name, dtype in dtypes.items():
            value = SavedValue(fqn, name, dtype, placement, False, fqn)
            if saved_as not in (None, dtype) and dtype in CAST_DTYPES:
                value = structs.replace(value, dtype=saved_as, cast_from=dtype)
            tensors.append(value)
    return SavedHalf(
        local,
        global_state,
        aligned(tensors),
        module_values=module_values.collect(group, local.module_values, global_state),
    )


def _on_one_rank(placement: Placement) -> Placement:
    if isinstance(placement, PlacedPart):
        return placement.on_lowest_ranks()
    return Whole(placement.shape, (placement.ranks[0],))


def _check_trains(global_state: GlobalState) -> None:
    """Refuse a model without a parameter to train, which is frozen by mistake. Raises the same error on all ranks."""
    if not any(param.group_index == _PARAMS for param in global_state.params.values()):
        raise StateError(
            'weights="trainable": no parameter of the model requires gradients: call requires_grad_(True) on those to save, or '
            'give weights="all"'
        )


def loadable(local: Local, rank: int) -> Local:
    """Return `local`. Raises CheckpointError for elements that no load would accept."""
    if not any(torch.bool in param.dtypes for param in local.optim.samples):
        return local  # nearly always
    for param in local.optim.params:
        for name, value in (param.state or {}).items():
            if isinstance(value, torch.Tensor) and value.dtype is torch.bool:
                where = (
                    param.named.fqns[0] if name in (WEIGHT, TREE) else f"{param.named.fqns[0]}: {name!r} of its state"
                )
                check_bools_of(where, elements_of(param.handle, value, rank))
    return local


def is_buffer(param: torch.Tensor) -> bool:
    """Return whether a Handle's tensor is a buffer of the model."""
    return not isinstance(param, torch.nn.Parameter)


def read_state(
    reader: ModelReader,
    optim: Optimizers,
    group: RankGroup,
    asked: Arguments,
    options: CallArguments,
    about: str,
    *,
    fused_state: FusedState = "error",
) -> SavedHalf:
    """Agree with the other ranks on the optimizer's state. Called by all ranks. `fused_state`: as for `SaveOptions`."""
    everything = replace(options, collect="all")
    synchronize(group, optim)
    keeps = fused_state == "keep" and bool(options.views)
    kept = agree_on_kept(reader, optim, group, everything) if keeps else frozenset[str]()
    local, global_state = agree_on_state(
        group,
        lambda: loadable(read_local(reader, optim, everything, group.ranks, kept_at_save(kept)), group.rank),
        asked,
        f"the optimizer, {about}",
        with_state=True,
        on_replica_mismatch=options.on_replica_mismatch,
        every_replica=True,
    )
    global_state = compare_shards(group, local, global_state, options.on_replica_mismatch)
    tensors, scalars = [], []
    of_scalars = Whole((), group.ranks[:1])  # one object, by which what depends on the placement is kept
    for fqns in _units(global_state):
        unit = [
            (fqn, global_state.params[fqn].placement, summary)
            for fqn in fqns
            if (summary := global_state.params[fqn].summary) is not None
        ]
        names = unit[0][2].names if len(unit) == 1 else dict.fromkeys([n for *_, each in unit for n in each.names])
        for name in names:
            for fqn, placement, summary in unit:
                dtype = summary.dtypes.get(name)
                if dtype is not None:
                    tensors.append(_tensor(fqn, name, dtype, placement))
        for fqn, _, summary in unit:
            for name, (code, placement) in summary.placed:
                tensors.append(_tensor(fqn, name, dtype_named(code), placement))
            for name, scalar in summary.scalars:
                if isinstance(scalar.value, torch.Tensor):
                    scalars.append(_tensor(fqn, name, scalar.value.dtype, of_scalars, scalar.value))
    opaque = _opaque(group, local, global_state)
    saved = aligned(with_distinct_keys([*tensors, *scalars]))
    return SavedHalf(local, global_state, saved, opaque, kept=tuple(sorted(kept)))


def _tensor(
    fqn: str, name: str, dtype: torch.dtype, placement: Placement, constant: torch.Tensor | None = None
) -> SavedValue:
    return SavedValue(fqn, name, dtype, placement, stored_name=f"state.{fqn}.{name}", constant=constant)


def _opaque(group: RankGroup, local: Local, global_state: GlobalState) -> Mapping[tuple[str, str], Any]:
    """Return the opaque values of all ranks, on the lowest rank."""
    parts = [
        OpaqueValues(p.fqn, tuple(name for name, _ in p.summary.opaque), p.placement, group.ranks[:1])
        for p in global_state.params.values()
        if p.summary is not None and p.summary.opaque
    ]
    if not parts:
        return {}
    failure = Failure()
    gathered = gather_opaque(group, local, parts, failure)
    agree(group, "opaque", failure.error, fatal=failure.fatal)
    return gathered


def _units(global_state: GlobalState) -> Iterator[tuple[str, ...]]:
    """Yield the FQNs of each live parameter, each FQN once, so that values that are adjacent on a rank are so in the file."""
    seen: set[str] = set()
    params = global_state.params
    for live in global_state.live:
        fqns = tuple([fqn for fqn in live.fqns if fqn in params and fqn not in seen])
        seen.update(fqns)
        if fqns:
            yield fqns


def _by_unit(global_state: GlobalState) -> Iterator[str]:
    return (fqn for fqns in _units(global_state) for fqn in fqns)


def with_distinct_keys(tensors: list[SavedValue]) -> list[SavedValue]:
    """Give different stored names to values whose names have the same text, such as 0 and "0"."""
    if len({tensor.stored_name for tensor in tensors}) == len(tensors):
        return tensors
    taken: set[str] = set()
    distinct = []
    for tensor in tensors:
        name = tensor.stored_name
        while name in taken:
            name += "'"
        taken.add(name)
        distinct.append(tensor if name == tensor.stored_name else structs.replace(tensor, stored_name=name))
    return distinct


def aligned(tensors: list[SavedValue]) -> tuple[SavedValue, ...]:
    """Sort tensors by element size, the largest first, so that every tensor begins at a multiple of its element size."""
    sizes = {tensor.dtype.itemsize for tensor in tensors}
    return tuple(sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)) if len(sizes) > 1 else tuple(tensors)
