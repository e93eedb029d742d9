"""Scatter: from whole, on one rank, to the live wrapper on all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import RankError, StateError
from fsdp_optim.layout import Layout
from fsdp_optim.plan import Copy, plan
from fsdp_optim.state.full import FullState, Names, check_fits, normalize
from fsdp_optim.state.local import LocalParam, OptimizerLike
from fsdp_optim.state.picture import Picture
from fsdp_optim.state.shard import allocate, local_values, opaque_values, shard_dict, summarize, summary_for
from fsdp_optim.state.values import Summary, own
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.callers import Callers
from fsdp_optim.transport.collective import BUCKET_NBYTES, Failure, Item, exchange
from fsdp_optim.transport.reports import broadcast_report
from fsdp_optim.verbs.call import Local, Options, callers_of, meet, read_local
from fsdp_optim.verbs.shard import warn_of_uncollected


@dataclass(frozen=True)
class _Contents:
    """What the source rank tells of its full dict: everything but the elements of sharded values."""

    summaries: Mapping[str, Summary]
    groups: tuple[Mapping[str, Any], ...]
    extra: Mapping[str, Any]
    opaque: Mapping[tuple[str, str], Any]
    uncollected: frozenset[str]


def scatter(
    model: nn.Module,
    optim: OptimizerLike,
    full: Mapping[str, Any] | None,
    source_rank: int,
    options: Options,
    bucket_nbytes: int = BUCKET_NBYTES,
) -> dict[str, Any]:
    """The optimizer's own dict for this rank, from a full dict that only `source_rank` has."""
    reader = ModelReader(model)
    callers = callers_of(reader, options)

    def read() -> Local:
        if source_rank not in callers.ranks:
            raise RankError(
                f"source_rank {source_rank} is not one of the ranks {list(callers.ranks)} that share this model"
            )
        if callers.rank == source_rank and full is None:
            raise StateError(f"rank {source_rank} is the source rank and has no full dict to give: full is None")
        return read_local(reader, optim, options, callers.ranks)

    local, picture = meet(callers, read, f"scatter_full_optim_state_dict(source_rank={source_rank})", with_state=False)
    state, contents = _tell_contents(callers, local, picture, full, source_rank)
    wanted, opaque = _wanted(callers, local, contents)
    failure = Failure()
    tensors = _move(callers, local, picture, state, contents, wanted, source_rank, failure, bucket_nbytes)
    agree(callers, b"scattered", failure.error, fatal=failure.fatal)
    warn_of_uncollected(local, contents.uncollected)
    values = {
        param.local_id: local_values(param, summary, tensors[param.local_id], opaque[param.local_id])
        for param in local.optim.params
        if (summary := wanted[param.local_id]) is not None
    }
    return shard_dict(local.optim, contents.groups, contents.extra, values)


def _tell_contents(
    callers: Callers, local: Local, picture: Picture, full: Mapping[str, Any] | None, source_rank: int
) -> tuple[FullState | None, _Contents]:
    """The source checks its dict against everyone's model and tells what is in it; all ranks return the same contents."""
    state, content, error = None, b"", None
    if callers.rank == source_rank and full is not None:
        try:
            groups = tuple(picture.group_fqns(index) for index in range(picture.num_groups))
            names = Names(groups, local.view.aliases, local.view.unit_order)
            state = normalize(full, names)
            shapes = {fqn: param.placement.shape for fqn, param in picture.params.items()}
            check_fits(state, names, shapes)
            content = pickle.dumps(_contents(state, summarize(state, shapes)))
        except Exception as reason:
            error = reason
    agree(callers, b"contents", error)
    contents: _Contents = pickle.loads(broadcast_report(callers, content, source_rank))
    return state, contents


def _contents(state: FullState, summaries: Mapping[str, Summary]) -> _Contents:
    return _Contents(
        summaries=summaries,
        groups=tuple({key: own(value) for key, value in group.items()} for group, _ in state.groups),
        extra={key: own(value) for key, value in state.extra.items()},
        opaque={(fqn, name): own(state.state[fqn][name]) for fqn, s in summaries.items() for name, _ in s.opaque},
        uncollected=state.uncollected,
    )


def _wanted(
    callers: Callers, local: Local, contents: _Contents
) -> tuple[dict[int, Summary | None], dict[int, dict[str, Any]]]:
    """What each live parameter of this rank gets, and its opaque values. Whatever one rank refuses, no data moves."""
    wanted: dict[int, Summary | None] = {}
    opaque: dict[int, dict[str, Any]] = {}
    error = None
    try:
        for param in local.optim.params:
            wanted[param.local_id] = summary = summary_for(param, contents.summaries)
            opaque[param.local_id] = opaque_values(
                param, summary, lambda fqn, name: contents.opaque[fqn, name], callers.rank
            )
    except Exception as reason:
        error = reason
    agree(callers, b"wanted", error)
    return wanted, opaque


def _copies(picture: Picture, source_rank: int, rank: int) -> dict[str, list[Copy]]:
    """This rank's copies, by FQN. Where ranks hold variants of a parameter, all of them get what was saved of it."""
    whole = picture.layout.whole_on((source_rank,))
    copies: dict[str, list[Copy]] = {}
    for fqn, param in picture.params.items():
        for placement in (p for p, _ in param.variants) if param.variants else (param.placement,):
            for copy in plan(whole.only((fqn,)), Layout({fqn: placement}), rank=rank):
                copies.setdefault(fqn, []).append(copy)
    return copies


def _move(
    callers: Callers,
    local: Local,
    picture: Picture,
    state: FullState | None,
    contents: _Contents,
    wanted: Mapping[int, Summary | None],
    source_rank: int,
    failure: Failure,
    bucket_nbytes: int,
) -> dict[int, dict[str, torch.Tensor]]:
    """Local tensors by local id and value name, filled from the source's."""
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    try:
        for param in local.optim.params:
            tensors[param.local_id] = allocate(param, wanted[param.local_id], callers.rank)
    except Exception as error:
        failure.note(error)
    copies = _copies(picture, source_rank, callers.rank)
    for param in local.optim.params if failure.error is None else ():
        for fqn, placement in param.named.placements.items():
            filled = sum(copy.numel for copy in copies.get(fqn, ()) if copy.target_rank == callers.rank)
            if filled != placement.numel_on(callers.rank):
                failure.note(StateError(f"{fqn}: {filled} of {placement.numel_on(callers.rank)} elements were planned"))
    items = []
    for fqn in picture.params:
        summary = contents.summaries.get(fqn)
        mine: LocalParam | None = local.by_fqn.get(fqn)
        for name, dtype in summary.dtypes.items() if summary is not None else ():
            source = state.state[fqn][name].detach().reshape(-1) if state is not None else None
            target = tensors.get(mine.local_id, {}).get(name) if mine is not None else None
            items.append(Item(copies.get(fqn, ()), dtype, source, target))
    exchange(callers, items, failure, bucket_nbytes)
    return tensors
