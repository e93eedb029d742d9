"""The dicts of optimizers: read as they are, sharded, and loaded. Nothing steps, and no live optimizer gets state from a read."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.dcp.dicts.flat import check_has_form, chunked_state, is_flat
from fsdp_optim.dcp.dicts.initial import initial_maker
from fsdp_optim.dcp.dicts.optim_dict import GROUPS, NAMES, PARAMS, STATE, GivenDict, flattened, group_for, read_given
from fsdp_optim.dcp.dicts.options import SOURCE_RANK, Given
from fsdp_optim.dcp.dicts.values import delivered
from fsdp_optim.errors import RankError, StateError
from fsdp_optim.options import CallArguments, ScatterArguments
from fsdp_optim.state.live.local import LocalOptim, LocalParam
from fsdp_optim.state.live.optimizer_reader import read_optimizer
from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import world_here
from fsdp_optim.verbs import scatter, shard
from fsdp_optim.verbs.arguments import check_model, check_optimizers
from fsdp_optim.verbs.call import collective_call
from fsdp_optim.verbs.load_state import LoadableOptimizer, load_shard
from fsdp_optim.verbs.sharded_dict import is_sharded
from fsdp_optim.view import ModelView, check_materialized

GET, SET = "get_optimizer_state_dict", "set_optimizer_state_dict"


@dataclass(frozen=True)
class _Read:
    """One optimizer of a model, read on this rank."""

    live: LoadableOptimizer
    view: ModelView
    optim: LocalOptim

    @cached_property
    def by_id(self) -> dict[Any, LocalParam]:
        return {param.local_id: param for param in self.optim.params}

    def params_of(self, group: int) -> list[LocalParam]:
        """Return the live parameters of a group, in the optimizer's order."""
        return [self.by_id[local_id] for local_id in self.optim.group_ids[group]]

    def members(self, group: int) -> list[str]:
        return [fqn for param in self.params_of(group) for fqn in param.named.fqns]

    @property
    def fqns(self) -> list[str]:
        return [fqn for param in self.optim.params for fqn in param.named.fqns]

    @property
    def has_state(self) -> bool:
        return any(param.state is not None for param in self.optim.params)


def _read(reader: ModelReader, optim: LoadableOptimizer) -> _Read:
    view = reader.read(optim=optim)
    check_materialized(view.handles, view.rank)
    return _Read(optim, view, read_optimizer(optim, view))


def get(model: nn.Module, optims: Sequence[LoadableOptimizer], given: Given) -> dict[str, Any]:
    """Return the dict of several optimizers of one model, by name."""
    check_model(model)
    check_optimizers(optims)
    reader = ModelReader(model, world_here().rank)
    check_has_form(reader, GET)
    nested: dict[str, Any] = {STATE: {}, GROUPS: []}
    for optim in optims:
        read = _read(reader, optim)
        nested[STATE].update(chunked_state(model, optim) if is_flat(reader) else _state_of(read))
        nested[GROUPS] += [_group_of(read, group) for group in range(len(read.optim.groups))]
    return delivered(GET, reader, model, flattened(nested) if given.flatten else nested, given)


def _group_of(read: _Read, group: int) -> dict[str, Any]:
    names = read.optim.group_param_names[group]
    return {
        **read.optim.groups[group],
        **({NAMES: list(names)} if names is not None else {}),
        PARAMS: read.members(group),
    }


def _state_of(read: _Read) -> dict[str, dict[str, Any]]:
    """Return FQN -> values: the live ones, or those before the first step, where the optimizer has none."""
    make = None if read.has_state else initial_maker(read.live)
    state: dict[str, dict[str, Any]] = {}
    for group, hyper in enumerate(read.optim.groups):
        for param in read.params_of(group):
            (fqn,), live = param.named.fqns, param.handle.param
            if param.state is not None:
                state[fqn] = dict(param.state)
            elif make is not None and live.requires_grad and (values := make(hyper, live)):
                state[fqn] = values
    return state


def prepare(
    model: nn.Module, optims: Sequence[LoadableOptimizer], given: Mapping[str, Any], options: Given
) -> Callable[[], None]:
    """Bring a dict into the form of live optimizers. Returns the function that loads it, on this rank.

    Called by all ranks of the model where values must move: `options.broadcast`, or a sharded dict.
    """
    check_model(model)
    check_optimizers(optims)
    reader = ModelReader(model, world_here().rank)
    check_has_form(reader, SET)
    reads = [_read(reader, optim) for optim in optims]
    if not options.broadcast and _has_ids(given):
        return _prepared_by_id(model, optims, given, options)
    read = _broadcast_groups(model, reads, given) if options.broadcast else _read_given(reads, given)
    hypers = [_hypers(each, read, options) for each in reads]
    nested = _nested(reads, hypers, read)
    call, several = CallArguments(strict=options.strict), list(optims)
    if options.broadcast:
        full = nested if world_here().rank == SOURCE_RANK else None
        shards: Any = scatter.scatter(model, several, full, ScatterArguments(call, SOURCE_RANK))
    elif is_sharded(nested):
        shards = shard.reshard(model, several, nested, call)
    else:
        shards = shard.shard(model, several, nested, call)
    return _loading(several, [_with_groups(own, groups) for own, groups in zip(shards, hypers, strict=True)])


def _loading(optims: list[LoadableOptimizer], shards: list[dict[str, Any]]) -> Callable[[], None]:
    def load() -> None:
        load_shard(optims, shards)

    return load


def _has_ids(given: Mapping[str, Any]) -> bool:
    """Return whether a dict is a plain optimizer's own, with ids in place of names."""
    groups = given.get(GROUPS, ()) if isinstance(given, Mapping) else ()
    return any(isinstance(key, int) for group in groups for key in group[PARAMS])


def _prepared_by_id(
    model: nn.Module, optims: Sequence[LoadableOptimizer], given: Mapping[str, Any], options: Given
) -> Callable[[], None]:
    if len(optims) != 1:
        raise StateError(
            f"this dict has ids in place of names, and there are {len(optims)} optimizers: ids do not say which optimizer a "
            "parameter is in: give the dict of get_optimizer_state_dict, or load the optimizers one by one"
        )
    call = CallArguments(strict=options.strict)
    own: Any = (shard.reshard if is_sharded(given) else shard.shard)(model, optims[0], given, call)
    return _loading(list(optims), [own])


def _read_given(reads: Sequence[_Read], given: Mapping[str, Any]) -> GivenDict:
    aliases = reads[0].view.aliases
    fqns = {fqn for read in reads for fqn in read.fqns}
    known = fqns | {alias for alias, fqn in aliases.items() if fqn in fqns}
    return read_given(given, known, lambda fqn: aliases.get(fqn, fqn))


def _broadcast_groups(model: nn.Module, reads: Sequence[_Read], given: Mapping[str, Any]) -> GivenDict:
    """Return the groups of rank 0's dict on all ranks, and the state there. An error on rank 0 is raised on all ranks."""
    call = CallArguments()
    with collective_call(SET, [model], call, call, all_of_plain=True) as (_, group):
        if SOURCE_RANK not in group.ranks:
            raise RankError(
                f"broadcast_from_rank0: rank 0 is not one of the ranks {list(group.ranks)} that share this model: give every "
                "rank its dict, with broadcast_from_rank0=False"
            )
        failure, read, content = Failure(), GivenDict((), {}), b""
        with failure:
            if group.rank == SOURCE_RANK:
                read = _read_given(reads, given)
                content = pickle.dumps(read.groups)
        result = all_gather_bytes(group, "groups of rank 0", content, error=failure.error)
        return read if group.rank == SOURCE_RANK else GivenDict(pickle.loads(result.content_of(SOURCE_RANK)), {})


def _hypers(read: _Read, given: GivenDict, options: Given) -> list[dict[str, Any]]:
    """Return the hyperparameters that each group of an optimizer gets."""
    hypers, num_empty = [], 0
    for group, live in enumerate(read.optim.groups):
        members = read.members(group)
        hypers.append(group_for(given.groups, num_empty, members, live, strict=options.strict))
        num_empty += not members
    return hypers


def _nested(reads: Sequence[_Read], hypers: Sequence[Sequence[Mapping[str, Any]]], given: GivenDict) -> dict[str, Any]:
    """Return the part of a dict that these optimizers need, in their groups."""
    listed = {fqn for _, fqns in given.groups for fqn in fqns}
    groups = [
        {**hyper, PARAMS: [fqn for fqn in read.members(group) if fqn in listed]}
        for read, each in zip(reads, hypers, strict=True)
        for group, hyper in enumerate(each)
    ]
    needed = {fqn for group in groups for fqn in group[PARAMS]}
    return {STATE: {fqn: values for fqn, values in given.state.items() if fqn in needed}, GROUPS: groups}


def _with_groups(own: Mapping[str, Any], hypers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's own dict with these hyperparameters."""
    groups = [
        {**{key: group[key] for key in (NAMES,) if key in group}, **hyper, PARAMS: group[PARAMS]}
        for group, hyper in zip(own[GROUPS], hypers, strict=True)
    ]
    return {**own, GROUPS: groups}
