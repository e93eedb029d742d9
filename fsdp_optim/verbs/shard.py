"""Shard: cut this rank's part out of a full dict, without communication. Reshard: the same where other ranks are needed."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import Whole, whole_on
from fsdp_optim.move import StateValue, move
from fsdp_optim.options import CallArguments, Model
from fsdp_optim.state.dicts.dialects import given_dict
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.live.expected import expected_optimizer
from fsdp_optim.state.live.fit_check import check_shapes
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.state.live.local_dict import Shard, summarize
from fsdp_optim.tensors.elements import check_no_fake_mode
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import world_here
from fsdp_optim.verbs.arguments import check_model, check_optimizers
from fsdp_optim.verbs.call import Local, agree_on_state, collective_call, read_local
from fsdp_optim.verbs.ends import DictEnd
from fsdp_optim.verbs.load_plan import plan_load, warn_of_uncollected
from fsdp_optim.verbs.rekey import names_of_model
from fsdp_optim.verbs.scatter import FullContents, allocate_shard, deliver
from fsdp_optim.verbs.sharded_dict import is_sharded, redistribute
from fsdp_optim.view import ModelView, check_materialized


def shard(
    model: Model, optim: Optimizers | None, full: Mapping[str, Any], options: CallArguments
) -> Shard | list[Shard]:
    """Return the optimizer's own dict for this rank. No `optim`: for an optimizer built from the model's parameters()."""
    check_no_fake_mode()
    check_model(model)
    if optim is not None:
        check_optimizers(optim)
    _check_needs_no_rank(model, full)
    begun = time.monotonic()
    options.validate()
    if optim is None:
        local, state = _without_optimizer(model, full, options)
    else:
        local = read_local(ModelReader(model, world_here().rank), optim, options)
        state = given_dict(full, local.names)
    shapes = local.shapes
    if options.strict and optim is not None:
        _check_shared_out(local, state)
    others = _of_other_ranks(local.view, state, options)
    state, fit = local.live_optimizer().fit(state, strict=options.strict, groups=options.param_groups, others=others)
    warn_of_uncollected(local, state.uncollected)
    load_plan = plan_load(local, summarize(state, shapes), fit, lambda fqn, name: state.state[fqn][name])
    rank = local.view.rank
    values = [
        StateValue(fqn, name, dtype, placement)
        for param, summary in load_plan.receiving
        for fqn, placement in param.named.placements.items()
        if fqn in state.state
        for name, dtype in summary.dtypes.items()
    ]
    here = world_here().group("get_shard_from_optim_state_dict", (rank,))
    source = DictEnd(lambda value: whole_on(value.placement.shape, (rank,)), lambda fqn, name: state.state[fqn][name])
    target, failure = allocate_shard(load_plan, values, rank), Failure()
    move(values, source, target, here, here.budget, failure)
    agree(here, "cut", failure.error)
    if rank == local.view.ranks[0]:
        load_plan.log("cut", target.flats, begun)
    return load_plan.dict_of(target.flats, state.groups, state.other_keys)


def _check_needs_no_rank(model: Model, full: Mapping[str, Any]) -> None:
    """Refuse a dict or a model that needs the other ranks. Raises StateError that names the call for it."""
    why = ""
    if isinstance(model, (list, tuple)):
        why = "model is a list of pipeline stages, and only all ranks together can tell whether a full dict fits them"
    elif is_sharded(full):
        why = "this dict is sharded: its values are spread over ranks (DTensor, ShardedTensor)"
    if why:
        raise StateError(
            f"{why}: call reshard_optim_state_dict(model, optim, sharded) on all ranks; get_shard_from_optim_state_dict "
            "calls no other rank"
        )


def reshard(model: Model, optim: Optimizers, sharded: Mapping[str, Any], options: CallArguments) -> Shard | list[Shard]:
    """Return the optimizer's own dict for this rank.

    Called by all ranks, each with its part of a dict, or with the same full dict.
    """
    if is_sharded(sharded):
        return redistribute(model, optim, sharded, options)
    return _cut_on_all(model, optim, sharded, options)


def _cut_on_all(
    model: Model, optim: Optimizers, full: Mapping[str, Any], options: CallArguments
) -> Shard | list[Shard]:
    """Return the same from a full dict that every rank has. Only all pipeline stages together can check that it fits."""
    with collective_call("reshard_optim_state_dict", [model], options, options) as ((reader,), group):
        local, global_state = agree_on_state(
            group,
            lambda: read_local(reader, optim, options, group.ranks),
            options,
            "of a full dict",
            with_state=False,
        )
        live, failure = local.live_optimizer(global_state), Failure()
        with failure:
            state = given_dict(full, live.names)
            state, fit = live.fit(state, strict=options.strict, groups=options.param_groups)
            summaries = summarize(state, live.shapes)
            opaque = {(fqn, name): state.state[fqn][name] for fqn, s in summaries.items() for name, _ in s.opaque}
            contents = FullContents(summaries, state.groups, state.other_keys, opaque, fit, state.uncollected)
        agree(group, "a full dict on each rank", failure.error)
        source = DictEnd(
            lambda value: whole_on(value.placement.shape, group.ranks), lambda fqn, name: state.state[fqn][name]
        )
        return deliver(group, local, global_state, contents, source)


def _check_shared_out(local: Local, full: FullState) -> None:
    """Refuse a full dict with parameters that only the optimizers of other ranks may have, as in ZeRO-1 by hand.

    Raises StateError: this rank alone cannot tell such a parameter from a parameter that no optimizer has.
    """
    saved = {fqn for _, fqns in full.groups for fqn in fqns} - set(local.by_fqn)
    absent = [
        fqn
        for named in local.view.handles
        for fqn, placement in named.placements.items()
        if fqn in saved and isinstance(placement, Whole) and len(placement.ranks) > 1
    ]
    if absent:
        raise StateError(
            f"{absent[0]}: the full dict has state for this parameter, this rank's optimizer does not have it "
            f"({counted_noun(len(absent), 'such parameter')}): if the ranks share out the parameters among their optimizers, "
            "call scatter_full_optim_state_dict on all of them, where the ranks tell each other who has which; else build the "
            "optimizer with the parameters of the saved one, or give strict=False, which passes over the rest"
        )


def _without_optimizer(model: Model, full: Mapping[str, Any], options: CallArguments) -> tuple[Local, FullState]:
    view = ModelReader(model, world_here().rank).read(name_of=options.name_of)
    check_materialized(view.handles, view.rank)
    state = given_dict(full, names_of_model(full, view))
    check_shapes(state, {fqn: place.shape for named in view.handles for fqn, place in named.placements.items()})
    others = _of_other_ranks(view, state, options)
    return Local(view, expected_optimizer(view, state, others=bool(others))), state


def _of_other_ranks(view: ModelView, full: FullState, options: CallArguments) -> frozenset[str]:
    """Return the parameters of the full state that this rank's model lacks, if they may belong to other ranks; else none.

    With `name_of`, they may, because that argument exists for such models. They also may if ranks give their experts different
    names: then each missing name has, but for its numbers, the name of a parameter that this rank does not share with all others.
    """
    known = set(view.order)
    missing = frozenset(fqn for _, fqns in full.groups for fqn in fqns if fqn not in known)
    if options.name_of is not None:
        return missing
    own = (n for n in view.handles if set(n.handle.originals[0].placement.ranks) != set(view.ranks))
    own_names = {_without_numbers(fqn) for named in own for fqn in named.fqns}
    return missing if {_without_numbers(fqn) for fqn in missing} <= own_names else frozenset()


def _without_numbers(fqn: str) -> str:
    return re.sub(r"\d+", "#", fqn)
