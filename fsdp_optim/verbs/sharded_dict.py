"""Redistribute: move a sharded dict to the shards of a live optimizer. Every rank has its own part of the dict."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fsdp_optim.adapters.known import is_sharded_value, read_sharded_values
from fsdp_optim.errors import StateError
from fsdp_optim.layout import Placement, Ranks, Whole
from fsdp_optim.move import StateValue, move
from fsdp_optim.options import CallArguments, Model
from fsdp_optim.state.dicts.dialects import given_dict
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.state.live.local_dict import Shard, Summaries, summarize
from fsdp_optim.state.merged.sharded_dict import WHOLE_HERE, DictPart, PartsByRanks, ValuePart, join
from fsdp_optim.state.values.same import Incomparable, fingerprint_of, key_of
from fsdp_optim.tensors.elements import MOST_DEEP
from fsdp_optim.tensors.memory import dtype_name, dtype_named, flatten, is_plain
from fsdp_optim.transport.agree import agree, all_equal, exchange_reports
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import agree_on_state, collective_call, read_local
from fsdp_optim.verbs.ends import DictEnd, WholeEnd
from fsdp_optim.verbs.scatter import FullContents, deliver

_Here = dict[tuple[str, str], torch.Tensor]
"""This rank's elements of each value, 1-D, by FQN and name."""

_State = Mapping[str, Mapping[str, ValuePart]]


def is_sharded(full: Any) -> bool:
    """Return whether a dict has values that are spread over ranks (DTensor, ShardedTensor), so that all ranks must call."""

    def any_sharded(value: Any, depth: int = 0) -> bool:
        if isinstance(value, Mapping):  # deeper values are refused later, on all ranks
            return depth < MOST_DEEP and any(any_sharded(item, depth + 1) for item in value.values())
        return is_sharded_value(value)

    return isinstance(full, Mapping) and any_sharded(full.get("state", full))


def redistribute(
    model: Model, optim: Optimizers, sharded: Mapping[str, Any], options: CallArguments
) -> Shard | list[Shard]:
    """Return the optimizer's own dict for this rank. Called by all ranks, each with its part of the same state."""
    with collective_call("reshard_optim_state_dict", [model], options, options) as ((reader,), group):
        local, global_state = agree_on_state(
            group, lambda: read_local(reader, optim, options), options, "of a sharded dict", with_state=False
        )
        live = local.live_optimizer(global_state)
        own_part, here = given_dict(sharded, replace(live.names, given=local.view.given_names)), _Here()
        state, members = join(_all_gather_parts(group, _describe(own_part, group, here)))
        described = replace(
            own_part,
            state={fqn: {name: _stand_in(part) for name, part in values.items()} for fqn, values in state.items()},
            groups=tuple((hyper, fqns) for (hyper, _), fqns in zip(own_part.groups, members, strict=True)),
        )
        described, fit = live.fit(described, strict=options.strict, groups=options.param_groups)
        summaries = summarize(described, live.shapes)
        source = DictEnd(
            lambda value: _placement_of(state, value, group.ranks),
            lambda fqn, name: here[fqn, name] if (fqn, name) in here else flatten(state[fqn][name].value),
        )
        opaque = _opaque_values(group, state, summaries, source)
        contents = FullContents(summaries, described.groups, described.other_keys, opaque, fit)
        return deliver(group, local, global_state, contents, source)


def _all_gather_parts(group: RankGroup, part: DictPart) -> PartsByRanks:
    """All-gather the descriptions of the ranks' parts. Equal ones are not sent."""
    if all_equal(group, "sharded dict", repr(part).encode()):
        return [(part, group.ranks)]
    ranks_of: dict[bytes, list[int]] = {}
    for rank, pickled in zip(group.ranks, exchange_reports(group, pickle.dumps(part)), strict=True):
        ranks_of.setdefault(pickled, []).append(rank)
    return [(pickle.loads(pickled), tuple(ranks)) for pickled, ranks in ranks_of.items()]


def _describe(part: FullState, group: RankGroup, here: _Here) -> DictPart:
    """Describe this rank's part for the other ranks, and add its elements to `here`."""
    cut = read_sharded_values(
        ((fqn, name), f"{fqn}: {name}", value) for fqn, values in part.state.items() for name, value in values.items()
    )
    return DictPart(
        state=tuple(
            (
                fqn,
                tuple(
                    (name, _value_part((fqn, name), value, cut.get((fqn, name)), group, here))
                    for name, value in values.items()
                ),
            )
            for fqn, values in part.state.items()
        ),
        groups=tuple((_keys(hyper), fqns) for hyper, fqns in part.groups),
        other_keys=_keys(part.other_keys),
    )


def _keys(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    try:
        return tuple((str(key), key_of(value)) for key, value in values.items())
    except Incomparable as error:
        raise StateError(f"{error}, so ranks cannot check that all have the same value") from None


def _value_part(
    key: tuple[str, str], value: Any, cut: tuple[Placement, torch.Tensor] | None, group: RankGroup, here: _Here
) -> ValuePart:
    """Describe one value, by FQN and name. `cut`: of a sharded value, its placement and this rank's elements."""
    where = f"{key[0]}: {key[1]}"
    if cut is not None:
        placement, flat = cut
        if placement.shape:
            here[key] = flat
            on_one_mesh = placement.ranks == group.ranks  # torch keeps replicas equal in one mesh, not in several
            return ValuePart(dtype_name(value.dtype), placement, "" if on_one_mesh else fingerprint_of(flat))
        value = flat.view(())
    if isinstance(value, torch.Tensor) and value.dim():
        if not is_plain(value):
            raise StateError(
                f"{where} is a {type(value).__name__}, which cannot be moved between ranks as a part of a sharded dict: gather "
                "the state with gather_full_optim_state_dict instead"
            )
        here[key] = flatten(value)
        return ValuePart(dtype_name(value.dtype), Whole(tuple(value.shape), WHOLE_HERE), fingerprint_of(value))
    try:
        return ValuePart(fingerprint=key_of(value), value=value)
    except Incomparable as error:
        raise StateError(f"{where}: {error}, so ranks cannot check that all have the same value") from None


def _stand_in(part: ValuePart) -> Any:
    """Return the value of a part, or a meta tensor for a part with elements."""
    if part.placement is None:
        return part.value
    return torch.empty(part.placement.shape, dtype=dtype_named(part.dtype), device="meta")


def _placement_of(state: _State, value: StateValue, ranks: Ranks) -> Placement:
    """Return the placement of a value in the sharded dict. `ranks`: all that make the call."""
    part = state[value.fqn][value.name]
    if part.placement is not None:
        return part.placement
    if isinstance(part.value, torch.Tensor):  # without dimensions, so that each rank got it with the description
        return Whole((), ranks)
    raise StateError(f"{value.fqn}: {value.name} is {part.value!r}, and has no elements to move")


def _opaque_values(
    group: RankGroup, state: _State, summaries: Summaries, source: DictEnd
) -> dict[tuple[str, str], Any]:
    """Return the values that lack the shape of their parameter, unsharded on every rank, which cuts them as needed."""
    opaque = [(fqn, name, state[fqn][name]) for fqn, summary in summaries.items() for name, _ in summary.opaque]
    values = [
        StateValue(fqn, name, dtype_named(part.dtype), part.placement)
        for fqn, name, part in opaque
        if part.placement is not None
    ]
    whole, failure = WholeEnd(group, group.ranks), Failure()
    if values:
        move(values, source, whole, group, group.budget, failure)
        agree(group, "opaque values", failure.error, fatal=failure.fatal)
    return {**{(fqn, name): part.value for fqn, name, part in opaque if part.placement is None}, **whole.made}
