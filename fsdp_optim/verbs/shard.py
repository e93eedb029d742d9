"""Get this rank's shard of a full dict: from whole, here, to my part of the live wrapper. No communication."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.layout import Layout
from fsdp_optim.memory import Slabs, copy_in_memory, flatten
from fsdp_optim.plan import plan_into
from fsdp_optim.state.expected import expected_optimizer
from fsdp_optim.state.fits import check_shapes
from fsdp_optim.state.local import LocalParam, Optimizers
from fsdp_optim.state.reading import FullState, normalize
from fsdp_optim.state.shard import Shard, allocate, summarize
from fsdp_optim.state.values import Summary
from fsdp_optim.verbs.arguments import check_model, check_optimizers
from fsdp_optim.verbs.call import Local, Options, names_of_model, read_local
from fsdp_optim.verbs.resharding import is_sharded, reshard
from fsdp_optim.verbs.wanted import Wanted, decide, warn_of_uncollected
from fsdp_optim.view import ModelView, check_materialized


def shard(model: nn.Module, optim: Optimizers | None, full: Mapping[str, Any], options: Options) -> Shard | list[Shard]:
    """The optimizer's own dict for this rank; without `optim`, for one built from the model's parameters()."""
    check_model(model)
    if optim is not None:
        check_optimizers(optim)
    if optim is not None and is_sharded(full):
        return reshard(model, optim, full, options)
    options.validate()
    if optim is None:
        local, state = _without_optimizer(model, full, options)
    else:
        local = read_local(ModelReader(model), optim, options)
        state = normalize(full, local.names)
    shapes = local.shapes
    others = _of_other_ranks(local.view, state, options)
    state, fit = local.live_optimizer().fit(state, strict=options.strict, groups=options.groups, others=others)
    warn_of_uncollected(local, state.uncollected)
    wanted = decide(local, summarize(state, shapes), fit, lambda fqn, name: state.state[fqn][name])
    slabs, rank = Slabs(), local.view.rank
    tensors = {p.local_id: _cut(p, summary, state, rank, wanted, slabs) for p, summary in wanted.given}
    return wanted.dict_of(tensors, state.groups, state.extra)


def _without_optimizer(model: nn.Module, full: Mapping[str, Any], options: Options) -> tuple[Local, FullState]:
    view = ModelReader(model).read(name_of=options.name_of)
    check_materialized(view.handles, view.rank)
    state = normalize(full, names_of_model(full, view))
    check_shapes(state, {fqn: place.shape for named in view.handles for fqn, place in named.placements.items()})
    others = _of_other_ranks(view, state, options)
    return Local(view, expected_optimizer(view, state, others=bool(others))), state


def _of_other_ranks(view: ModelView, full: FullState, options: Options) -> frozenset[str]:
    """The parameters of the full state that are not in this rank's model and can be those of other ranks.

    So with `name_of`, which is for just that. And where ranks name their experts apart themselves: then what is missing
    here differs only in its numbers from something that this rank does not share with all the others.
    """
    known = set(view.order)
    missing = frozenset(fqn for _, fqns in full.groups for fqn in fqns if fqn not in known)
    if options.name_of is not None:
        return missing
    own = (n for n in view.handles if set(n.handle.originals[0].placement.ranks) != set(view.ranks))
    alike = {_without_numbers(fqn) for fqn in missing} <= {_without_numbers(fqn) for n in own for fqn in n.fqns}
    return missing if alike else frozenset()


def _without_numbers(fqn: str) -> str:
    return re.sub(r"\d+", "#", fqn)


def _cut(
    param: LocalParam, summary: Summary, full: FullState, rank: int, wanted: Wanted, slabs: Slabs
) -> dict[str, torch.Tensor]:
    """This rank's elements of the state of one live parameter, in memory of its own."""
    target = Layout(
        {f: p for f, p in param.named.placements.items() if p.shard_of(rank) is not None and f in full.state}
    )
    tensors = allocate(param, summary, rank, wanted.missing, slabs)
    for fqn in target.fqns:
        one = target.only((fqn,))
        copies = plan_into(one.whole_on((rank,)), one, rank)
        for name, flat in tensors.items():
            copy_in_memory(copies, flatten(full.state[fqn][name]), flat)
    return tensors
