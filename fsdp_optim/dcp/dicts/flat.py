"""Flat parameters (FSDP1): their originals in the chunks in which torch's sharded dicts have them, and back."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.adapters.fsdp1 import Chunks, chunks_of
from fsdp_optim.adapters.known import read_sharded_values
from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.load.reading import FlatsEnd, stored_value
from fsdp_optim.checkpoint.load.targets import Weights
from fsdp_optim.dcp.dicts.initial import initial_maker
from fsdp_optim.dcp.dicts.options import SOURCE_RANK, Given
from fsdp_optim.dcp.dicts.values import Described, check_names, of_all_ranks
from fsdp_optim.errors import RankError, StateError, WrapperError
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.index import CheckpointIndex, Facts, KnownExtra
from fsdp_optim.formats.base.protocols import MODULES, StoredTensor
from fsdp_optim.layout import Placement, Shape, whole_on
from fsdp_optim.move import End, StateValue, move
from fsdp_optim.options import CallArguments
from fsdp_optim.state.merged.global_state import Param
from fsdp_optim.tensors.memory import detached_copy, dtype_name, dtype_named, flatten
from fsdp_optim.tensors.model_dict import is_extra_state, module_path, versions_beside
from fsdp_optim.transport.agree import agree, all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import Local, agree_on_state, collective_call, read_local
from fsdp_optim.verbs.ends import DictEnd, LiveEnd
from fsdp_optim.verbs.load_state import LoadableOptimizer
from fsdp_optim.view import ModelView, check_materialized

_CALL = CallArguments()


def is_flat(reader: ModelReader) -> bool:
    """Return whether a model has parameters of FSDP1, which `state_dict()` of the model does not show as they are."""
    return "FSDP1" in reader.wrappers


def check_has_form(reader: ModelReader, call: str) -> None:
    """Raise WrapperError for a model of fairscale, whose parameters, and their state, have no form in torch's dicts."""
    if "fairscale" in reader.wrappers:
        raise WrapperError(
            f"{call}: the model is wrapped by fairscale's FSDP, for which torch's dicts have no form: use fsdp_optim.save and "
            "load, or gather_full_model_state_dict and gather_full_optim_state_dict with their scatter_full_..."
        )


def _chunks_by_fqn(model: nn.Module, view: ModelView) -> dict[str, tuple[Chunks, Shape, torch.device]]:
    """Return how each original parameter of FSDP1 is cut in torch's dicts, its shape, and the device of its elements."""
    chunks = chunks_of(model)
    return {
        fqn: (chunks[place], original.placement.shape, named.handle.device)
        for named in view.handles
        for fqn, original in zip(named.fqns, named.handle.originals, strict=True)
        if (place := (original.module, original.attribute)) in chunks
    }


def _flat(memory: torch.Tensor | None) -> torch.Tensor | None:
    return memory.view(-1) if memory is not None else None


def _moved(
    group: RankGroup,
    wanted: Mapping[tuple[str, str], torch.dtype],
    chunks: Mapping[str, tuple[Chunks, Shape, torch.device]],
    source: End,
) -> dict[tuple[str, str], torch.Tensor]:
    """Return values in torch's cut, by FQN and name. Called by all ranks of `group`."""
    values, flats, failure = list[StateValue](), dict[tuple[str, str], torch.Tensor](), Failure()
    with failure:
        for (fqn, name), dtype in wanted.items():
            cut, shape, device = chunks[fqn]
            values.append(StateValue(fqn, name, dtype, cut.placement(shape)))
            if group.rank in values[-1].placement.ranks:
                flats[fqn, name] = torch.empty(cut.local_shape(shape), dtype=dtype, device=device)
    target = DictEnd(lambda value: value.placement, lambda fqn, name: _flat(flats.get((fqn, name))))
    move(values, source, target, group, group.budget, failure)
    agree(group, "in chunks", failure.error, fatal=failure.fatal)
    return {(fqn, name): chunks[fqn][0].value(flat, chunks[fqn][1]) for (fqn, name), flat in flats.items()}


def chunked_weights(model: nn.Module) -> dict[str, Any]:
    """Return the model's dict by clean name. Called by all ranks of the model."""
    with collective_call("get_model_state_dict", [model], _CALL, _CALL) as ((reader,), group):
        view = reader.read(group.ranks)
        check_materialized(view.handles, view.rank)
        chunks = _chunks_by_fqn(model, view)
        by_fqn = {
            fqn: (named.handle, original)
            for named in view.handles
            for fqn, original in zip(named.fqns, named.handle.originals, strict=True)
        }
        source = DictEnd(lambda value: by_fqn[value.fqn][1].placement, lambda fqn, _: flatten(by_fqn[fqn][0].weights()))
        wanted = {(fqn, ""): by_fqn[fqn][0].weights_dtype for fqn in view.order if fqn in chunks}
        moved = _moved(group, wanted, chunks, source)
        weights = {fqn: moved[fqn, ""] if (fqn, "") in moved else by_fqn[fqn][0].weights() for fqn in view.order}
        buffers = reader.buffers(view)
        weights |= {named.fqns[0]: named.handle.param.detach() for named in buffers.handles}
        values = reader.module_values(view)
        weights |= {fqn: entry.value for fqn, entry in values.values.items()}
        aliases = {**view.aliases, **buffers.aliases, **values.aliases}
        return weights | {alias: weights[fqn] for alias, fqn in aliases.items() if fqn in weights}


def chunked_state(model: nn.Module, optim: LoadableOptimizer) -> dict[str, dict[str, Any]]:
    """Return FQN -> values of an optimizer. Called by all ranks of the model."""
    with collective_call("get_optimizer_state_dict", [model], _CALL, _CALL) as ((reader,), group):
        local, merged = agree_on_state(
            group, lambda: read_local(reader, optim, _CALL, group.ranks), _CALL, with_state=True
        )
        chunks = _chunks_by_fqn(model, local.view)
        if all(param.summary is None for param in merged.params.values()):
            return _initial(optim, local, chunks)
        wanted: dict[tuple[str, str], torch.dtype] = {}
        for fqn, param in merged.params.items():
            if fqn in chunks and param.summary is not None:
                _check_can_be_cut(param)
                wanted |= {(fqn, name): dtype_named(dtype) for name, dtype in param.summary.sharded}
        layout = {(fqn, name): merged.params[fqn].placement for fqn, name in wanted}
        moved = _moved(group, wanted, chunks, LiveEnd(local, layout))
        return {
            fqn: values
            for fqn, param in merged.params.items()
            if (values := _values_of(fqn, param, moved) if fqn in chunks else _own_values(local, fqn))
        }


def _check_can_be_cut(param: Param) -> None:
    if param.summary is not None and (param.summary.opaque or param.summary.placed):
        name = next(iter((*param.summary.opaque, *param.summary.placed)))[0]
        raise StateError(
            f"{param.fqn}: {name} has neither the shape of the parameter nor one number, so it has no place in a dict of "
            "torch's FSDP1: take fsdp_optim.gather_full_optim_state_dict, or fsdp_optim.save, which keep such values"
        )


def _values_of(fqn: str, param: Param, moved: Mapping[tuple[str, str], torch.Tensor]) -> dict[str, Any]:
    if param.summary is None:
        return {}
    scalars = dict(param.summary.scalars)
    return {
        name: detached_copy(scalars[name].value) if name in scalars else moved[fqn, name]
        for name in param.summary.names
        if name in scalars or (fqn, name) in moved
    }


def _own_values(local: Local, fqn: str) -> dict[str, Any]:
    """Return the values of a parameter that FSDP1 does not have, as they are."""
    param = local.by_fqn.get(fqn)
    return dict(param.state) if param is not None and param.state is not None else {}


def _initial(
    optim: LoadableOptimizer, local: Local, chunks: Mapping[str, tuple[Chunks, Shape, torch.device]]
) -> dict[str, dict[str, Any]]:
    """Return the values before the first step."""
    make, state = initial_maker(optim), dict[str, dict[str, Any]]()
    for param in local.optim.params:
        live, hyper = param.handle.param, local.optim.groups[param.group_index]
        for fqn in param.named.fqns if live.requires_grad else ():
            if fqn not in chunks:
                values = make(hyper, live)
            else:
                cut, shape, device = chunks[fqn]
                like = torch.empty(cut.local_shape(shape), dtype=live.dtype, device=device)
                values = {
                    name: cut.value(value, shape) if value.shape == like.shape and name not in _NUMBERS else value
                    for name, value in make(hyper, like).items()
                }
            if values:
                state[fqn] = values
    return state


_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""The values in `initial.py` that are one number for each parameter."""


# ------------------------------------------------------------------------------------------- load


def flat_names(reader: ModelReader) -> dict[str, str]:
    """Return every name of the model's dict, and for a tied entry the FQN that it is tied to."""
    view = reader.read()
    buffers, values = reader.buffers(view), reader.module_values(view)
    own = [*view.order, *(fqn for named in buffers.handles for fqn in named.fqns), *values.values]
    return {**{fqn: fqn for fqn in own}, **view.aliases, **buffers.aliases, **values.aliases}


@dataclass(frozen=True)
class _GivenWeights(End):
    """The tensors of a dict that is loaded: full on some ranks, or cut over them."""

    index: CheckpointIndex
    placements: Mapping[str, Placement]
    flats: Mapping[str, torch.Tensor] = field(repr=False)

    def placement(self, value: StateValue) -> Placement:
        return self.placements[stored_value(value).stored.key]

    def memory(self, value: StateValue) -> torch.Tensor | None:
        return self.flats.get(stored_value(value).stored.key)

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Do nothing: tied tensors, which a load would compare, are given under one name."""


def prepare_flat(
    model: nn.Module, names: Mapping[str, str], given: Mapping[str, Any], options: Given
) -> Callable[[], tuple[list[str], list[str]]]:
    """Bring a dict to the ranks that need its elements. Returns the function that writes them into the flat parameters.

    Called by all ranks of the model. `names`: `flat_names`.
    """
    arguments = LoadArguments(strict=options.strict)
    with collective_call("set_model_state_dict", [model], arguments, arguments.call, all_of_plain=True) as (
        (reader,),
        group,
    ):
        source = _described(group, names, given, options)
        weights = Weights.agree_on_state(
            reader, group, source, arguments, "a dict of torch.distributed.checkpoint", readers=group.ranks[:1]
        )
        failure = Failure()
        move(list(weights.stored_values()), source, FlatsEnd(), group, group.budget, failure)
        agree(group, "received", failure.error, fatal=failure.fatal)

    def load() -> tuple[list[str], list[str]]:
        weights.module_values.install()
        weights.install()
        reader.reshard()
        return list(weights.missing), list(weights.unexpected)

    return load


def _described(group: RankGroup, names: Mapping[str, str], given: Mapping[str, Any], options: Given) -> _GivenWeights:
    """Return the dict of all ranks, or of rank 0, each tied entry once. Called by all ranks."""
    if options.broadcast and SOURCE_RANK not in group.ranks:
        raise RankError(
            f"broadcast_from_rank0: rank 0 is not one of the ranks {list(group.ranks)} that share this model: give every rank "
            "its dict, with broadcast_from_rank0=False"
        )
    ranks = (SOURCE_RANK,) if options.broadcast else group.ranks
    versions = versions_beside(given)
    flats, described, others = dict[str, torch.Tensor](), list[tuple[str, str, Placement]](), dict[str, Any]()
    here = given if group.rank in ranks else {}
    cut = read_sharded_values(
        (name, name, value) for name, value in here.items() if not is_extra_state(names.get(name, name))
    )
    for name, value in here.items():
        fqn = names.get(name, name)
        if not isinstance(value, torch.Tensor) or is_extra_state(fqn):
            others[fqn] = [versions.get(module_path(name)), value]
        elif fqn not in flats:
            placement, flats[fqn] = cut.get(name) or (whole_on(tuple(value.shape), ranks), flatten(value.detach()))
            described.append((fqn, dtype_name(value.dtype), placement))
    everything: Described = tuple(described)
    if options.broadcast:
        content = pickle.dumps((everything, others)) if group.rank == SOURCE_RANK else b""
        everything, others = pickle.loads(all_gather_bytes(group, "described", content).content_of(SOURCE_RANK))
    else:
        everything = of_all_ranks(group, everything)
    if options.strict:
        loaded = {*others, *(name for name, _, _ in everything)}
        missing = [name for name, fqn in names.items() if name == fqn and fqn not in loaded]
        check_names(missing, [name for name in loaded if name not in names])
    stored = {name: StoredTensor(name, dtype, placement.shape, name, 0) for name, dtype, placement in everything}
    extras = {MODULES: KnownExtra(others)} if others else {}
    index = CheckpointIndex("the model's dict", stored, Facts("a dict"), extras=extras)
    return _GivenWeights(index, {name: placement for name, _, placement in everything}, flats)
