"""Scatter: from a full dict on one rank to the shards of all ranks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_optim.adapters.known import is_sharded_value
from fsdp_optim.errors import RankError, StateError, counted_noun
from fsdp_optim.layout import whole_on
from fsdp_optim.move import End, StateValue, move
from fsdp_optim.options import CallArguments, Model, ScatterArguments
from fsdp_optim.state.dicts.dialects import given_dict
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.live.fit_check import Fit
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.state.live.local_dict import Shard, summarize
from fsdp_optim.state.live.state_memory import StateMemory
from fsdp_optim.state.merged.global_state import GlobalState
from fsdp_optim.state.values.opaque import OpaqueShards
from fsdp_optim.state.values.summary import Summary
from fsdp_optim.tensors.memory import detached_copy
from fsdp_optim.transport.agree import agree, all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.parcels import NOTHING, Parcel, send
from fsdp_optim.verbs.call import Local, agree_on_state, collective_call, read_local
from fsdp_optim.verbs.ends import DictEnd, ShardEnd
from fsdp_optim.verbs.load_plan import LoadPlan, plan_load, warn_of_uncollected


@dataclass(frozen=True)
class FullContents:
    """A full state without the elements of sharded values, known to all ranks before these elements move."""

    summaries: Mapping[str, Summary]
    groups: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]
    other_keys: Mapping[str, Any]
    opaque: Mapping[tuple[str, str], Any]
    fit: Fit
    uncollected: frozenset[str] = frozenset()
    is_own: bool = False  # whether the opaque values belong to this rank, so that they need no copies


def scatter(
    model: Model,
    optim: Optimizers,
    full: Mapping[str, Any] | None,
    options: ScatterArguments,
) -> Shard | list[Shard]:
    """Return the optimizer's own dict for this rank, from a full dict that only `source_rank` has."""
    source_rank = options.source_rank
    name = "scatter_full_optim_state_dict"
    with collective_call(name, [model], options, options.call, all_of_plain=True) as ((reader,), group):

        def read() -> Local:
            if source_rank not in group.ranks:
                raise RankError(
                    f"source_rank {source_rank} is not one of the ranks {list(group.ranks)} that share this model: "
                    "give one of them"
                )
            if group.rank == source_rank and full is None:
                raise StateError(
                    f"rank {source_rank} is the source rank, but its full is None: give the full dict there, or another "
                    "source_rank"
                )
            return read_local(reader, optim, options.call, group.ranks)

        local, global_state = agree_on_state(group, read, options, with_state=False)
        state, contents = _send_contents(group, local, global_state, full, source_rank, options.call)

        def whole(fqn: str, name: str) -> torch.Tensor | None:
            return state.state[fqn][name] if state is not None else None

        source = DictEnd(lambda value: whole_on(value.placement.shape, (source_rank,)), whole)
        return deliver(group, local, global_state, contents, source)


def deliver(
    group: RankGroup,
    local: Local,
    global_state: GlobalState,
    contents: FullContents,
    source: End,
) -> Shard | list[Shard]:
    """Move a state from `source` to the ranks of the model and optimizer of `global_state`; return this rank's own dict.

    Called by all ranks, inside `collective_call`.
    """
    begun, opaque = time.monotonic(), contents.opaque
    load_plan = plan_load(
        local, contents.summaries, contents.fit, lambda fqn, name: opaque[fqn, name], is_own=contents.is_own
    )
    failure = Failure()
    values = _values(global_state, contents.summaries)
    target = ShardEnd(local, {})
    with failure:
        target = allocate_shard(load_plan, values, group.rank)
    move(values, source, target, group, group.budget, failure)
    shard: Shard | list[Shard] = []
    with failure:
        shard = load_plan.dict_of(target.flats, contents.groups, contents.other_keys) if failure.error is None else []
        if failure.error is None and group.rank == group.ranks[0]:
            load_plan.log("delivered", target.flats, begun)
    warn_of_uncollected(local, contents.uncollected)
    agree(group, "delivered", failure.error, fatal=failure.fatal)
    return shard


def _send_contents(
    group: RankGroup,
    local: Local,
    global_state: GlobalState,
    full: Mapping[str, Any] | None,
    source_rank: int,
    options: CallArguments,
) -> tuple[FullState | None, FullContents]:
    """Check the full dict on the source rank against the model of all ranks, and send its contents to all ranks."""
    state, content = None, b""
    if group.rank == source_rank and full is not None:
        live = local.live_optimizer(global_state)
        state = given_dict(full, live.names)
        _check_whole(state, local.order, source_rank)
        state, fit = live.fit(state, strict=options.strict, groups=options.param_groups)
        try:
            content = pickle.dumps(_contents(state, summarize(state, live.shapes), fit))
        except AttributeError as error:  # of torch, which has no storage for some dtypes: float4, complex32
            raise StateError(
                "a tensor in a param group of the dict, or in a value of no parameter, has a dtype that torch cannot send to "
                f"other ranks: give its view(torch.uint8) ({error})"
            ) from error
    contents: FullContents = pickle.loads(all_gather_bytes(group, "contents", content).content_of(source_rank))
    opaque = _scatter_opaque(group, global_state, state, contents, source_rank)
    return state, replace(contents, opaque=opaque, is_own=state is None)


def _without(value: Any) -> OpaqueShards | None:
    """Return an opaque value without its content: all ranks need its list of shards."""
    return OpaqueShards(value.cuts, dict.fromkeys(value.by_shard)) if isinstance(value, OpaqueShards) else None


def _scatter_opaque(
    group: RankGroup, global_state: GlobalState, state: FullState | None, contents: FullContents, source_rank: int
) -> dict[tuple[str, str], Any]:
    """Return the opaque values that this rank needs: the value of its shard or, for an unsharded parameter, the one value."""
    keys: list[tuple[str, str, int | None]] = []
    parcels = []
    for (fqn, name), head in contents.opaque.items():
        param = global_state.params.get(fqn)
        placements = [param.placement, *(place for place, _ in param.variants)] if param is not None else []
        for shard in head.by_shard if head is not None else (None,):
            needs = {r for p in placements for r in p.ranks if shard is None or p.shard_of(r) == shard}
            keys.append((fqn, name, shard))
            parcels.append(Parcel(source_rank, tuple(sorted(needs))))

    def value_of(index: int) -> Any:
        fqn, name, shard = keys[index]
        if state is None:
            return NOTHING
        value = state.state[fqn][name]
        return value if shard is None else value.by_shard[shard]

    failure = Failure()
    if not parcels:
        return {}
    arrived = send(group, parcels, value_of, failure)
    agree(group, "opaque values", failure.error, fatal=failure.fatal)
    values = dict(contents.opaque)
    for index, value in arrived.items():
        fqn, name, shard = keys[index]
        head = values[fqn, name]
        values[fqn, name] = value if shard is None else replace(head, by_shard={**head.by_shard, shard: value})
    if state is not None:
        values.update({(fqn, name): state.state[fqn][name] for fqn, name in values})
    return values


def _check_whole(state: FullState, order: Sequence[str], source_rank: int) -> None:
    for fqn in (*order, *state.state):
        for name, value in state.state.get(fqn, {}).items():
            if is_sharded_value(value):
                raise StateError(
                    f"{fqn}: {name} is a {type(value).__name__}, of which rank {source_rank} has only its own part: give "
                    "every rank its part of this sharded dict, by reshard_optim_state_dict on all of them"
                )


def _contents(state: FullState, summaries: Mapping[str, Summary], fit: Fit) -> FullContents:
    return FullContents(
        summaries=summaries,
        groups=tuple(
            ({key: detached_copy(value) for key, value in group.items()}, fqns) for group, fqns in state.groups
        ),
        other_keys={key: detached_copy(value) for key, value in state.other_keys.items()},
        opaque={(fqn, name): _without(state.state[fqn][name]) for fqn, s in summaries.items() for name, _ in s.opaque},
        fit=fit,
        uncollected=state.uncollected,
    )


def _values(global_state: GlobalState, summaries: Mapping[str, Summary]) -> list[StateValue]:
    """Return the values that move. If groups of ranks hold variants of a parameter, each group gets its own variant."""
    return [
        StateValue(fqn, name, dtype, placement)
        for fqn, param in global_state.params.items()
        if fqn in summaries
        for name, dtype in summaries[fqn].dtypes.items()
        for placement in ([place for place, _ in param.variants] or [param.placement])
    ]


def allocate_shard(load_plan: LoadPlan, values: Sequence[StateValue], rank: int) -> ShardEnd:
    """Return uninitialised memory for the state that this rank's optimizer gets, which `values` will fill.

    Raises StateError if they would leave a part of the memory uninitialised.
    """
    memory = StateMemory(rank, load_plan.missing)
    flats = {param.local_id: memory.of(param, summary) for param, summary in load_plan.receiving}
    coming = {(value.fqn, value.name) for value in values}
    for param, summary in load_plan.receiving:
        for fqn, placement in param.named.placements.items():
            for name in summary.dtypes if fqn not in load_plan.missing else ():
                if (fqn, name) not in coming and placement.numel_on(rank):
                    raise StateError(
                        f"{fqn}: rank {rank} needs {counted_noun(placement.numel_on(rank), 'element')} of {name}, and the "
                        "full state has none for it"
                    )
    return ShardEnd(load_plan.local, flats)
