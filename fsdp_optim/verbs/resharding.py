"""A sharded optimizer dict, of which every rank has its part, to where a live model needs it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters.sharded_values import is_sharded_value, read_sharded_value
from fsdp_optim.errors import StateError
from fsdp_optim.layout import Layout, Placement, Whole
from fsdp_optim.memory import dtype_name, dtype_named, empty, flatten, is_plain
from fsdp_optim.plan import plan
from fsdp_optim.state.local import Optimizers
from fsdp_optim.state.parts import WHOLE_HERE, DictPart, Told, ValuePart, join
from fsdp_optim.state.reading import FullState, normalize
from fsdp_optim.state.same import Incomparable, fingerprint_of, key_of
from fsdp_optim.state.shard import Shard, Summaries, summarize
from fsdp_optim.transport.agree import agree, compare
from fsdp_optim.transport.callers import Callers
from fsdp_optim.transport.collective import Failure, Item, exchange
from fsdp_optim.transport.reports import exchange_reports
from fsdp_optim.verbs.call import Options, calling, meet, read_local
from fsdp_optim.verbs.scatter import Contents, deliver

_CPU = torch.device("cpu")

_Here = dict[tuple[str, str], torch.Tensor]
"""This rank's elements of each value, 1-D, by FQN and name."""

_State = Mapping[str, Mapping[str, ValuePart]]


def is_sharded(full: Any) -> bool:
    """Whether the values of a dict's state are spread over ranks (DTensor, ShardedTensor): then all ranks have to meet."""

    def any_sharded(value: Any) -> bool:
        return any(map(any_sharded, value.values())) if isinstance(value, Mapping) else is_sharded_value(value)

    return isinstance(full, Mapping) and any_sharded(full.get("state", full))


def reshard(model: nn.Module, optim: Optimizers, given: Mapping[str, Any], options: Options) -> Shard | list[Shard]:
    """The optimizer's own dict for this rank. Called by all ranks, each with its part of the same state."""
    with calling("get_shard_from_optim_state_dict", [model], options, options) as ((reader,), callers):
        local, picture = meet(
            callers, lambda: read_local(reader, optim, options), options, "of a sharded dict", with_state=False
        )
        live = local.live_optimizer(picture)
        mine, here = normalize(given, replace(live.names, given=local.view.given_names)), _Here()
        state, members = join(_tell(callers, _part(mine, callers, here)))
        described = replace(
            mine,
            state={fqn: {name: _stand_in(part) for name, part in values.items()} for fqn, values in state.items()},
            groups=tuple((hyper, fqns) for (hyper, _), fqns in zip(mine.groups, members, strict=True)),
        )
        described, fit = live.fit(described, strict=options.strict, groups=options.groups)
        summaries = summarize(described, live.shapes)
        odd = _odd_values(callers, state, summaries, here)
        contents = Contents(summaries, described.groups, described.extra, odd, fit)
        source, apart = _sources(state, summaries)
        return deliver(callers, local, picture, contents, source, lambda fqn, name: here[fqn, name], apart)


def _tell(callers: Callers, part: DictPart) -> Told:
    """The parts of all ranks; only where they differ do they travel."""
    if compare(callers, "sharded dict", repr(part).encode()):
        return [(part, callers.ranks)]
    told: dict[bytes, list[int]] = {}
    for rank, one in zip(callers.ranks, exchange_reports(callers, pickle.dumps(part)), strict=True):
        told.setdefault(one, []).append(rank)
    return [(pickle.loads(one), tuple(ranks)) for one, ranks in told.items()]


def _part(mine: FullState, callers: Callers, here: _Here) -> DictPart:
    """What this rank tells; fills in its elements."""
    return DictPart(
        state=tuple(
            (fqn, tuple((name, _value_part(fqn, name, value, callers, here)) for name, value in values.items()))
            for fqn, values in mine.state.items()
        ),
        groups=tuple((_keys(hyper), fqns) for hyper, fqns in mine.groups),
        extra=_keys(mine.extra),
    )


def _keys(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    try:
        return tuple((str(key), key_of(value)) for key, value in values.items())
    except Incomparable as error:
        raise StateError(f"{error}, and nobody can say whether all ranks have the same") from None


def _value_part(fqn: str, name: str, value: Any, callers: Callers, here: _Here) -> ValuePart:
    where = f"{fqn}: {name}"
    if is_sharded_value(value):
        placement, flat = read_sharded_value(where, value)
        if placement.shape:
            here[fqn, name] = flat
            alike = placement.ranks == callers.ranks  # torch keeps the replicas of one mesh equal, not those of several
            return ValuePart(dtype_name(value.dtype), placement, "" if alike else fingerprint_of(flat))
        value = flat.view(())
    if isinstance(value, torch.Tensor) and value.dim():
        if not is_plain(value):
            raise StateError(
                f"{where} is a {type(value).__name__}, which cannot be moved between ranks as a part of a sharded dict: gather "
                "the state with gather_full_optim_state_dict instead"
            )
        here[fqn, name] = flatten(value)
        return ValuePart(dtype_name(value.dtype), Whole(tuple(value.shape), WHOLE_HERE), fingerprint_of(value))
    try:
        return ValuePart(fingerprint=key_of(value), value=value)
    except Incomparable as error:
        raise StateError(f"{where}: {error}, and nobody can say whether all ranks have the same") from None


def _stand_in(part: ValuePart) -> Any:
    """A value as it is, or a tensor without memory."""
    if part.placement is None:
        return part.value
    return torch.empty(part.placement.shape, dtype=dtype_named(part.dtype), device="meta")


def _sources(state: _State, summaries: Summaries) -> tuple[Layout, dict[tuple[str, str], Placement]]:
    """Where values lie that are shaped like their parameter: most values of one alike, and those that lie in another way."""
    source: dict[str, Placement] = {}
    apart: dict[tuple[str, str], Placement] = {}
    for fqn, summary in summaries.items():
        for name in summary.dtypes:
            placement = state[fqn][name].placement
            if placement is not None and source.setdefault(fqn, placement) != placement:
                apart[fqn, name] = placement
    return Layout(source), apart


def _odd_values(callers: Callers, state: _State, summaries: Summaries, here: _Here) -> dict[tuple[str, str], Any]:
    """The values that are not shaped like their parameter, whole on every rank, which cuts them as it needs."""
    found: dict[tuple[str, str], Any] = {}
    items, failure = [], Failure()
    for fqn, summary in summaries.items():
        for name, _ in summary.opaque:
            part = state[fqn][name]
            if part.placement is None:
                found[fqn, name] = part.value
                continue
            source = Layout({fqn: part.placement})
            copies = plan(source, source.whole_on(callers.ranks), rank=callers.rank)
            target = None
            try:
                found[fqn, name] = empty(part.placement.shape, dtype_named(part.dtype), _CPU)
                target = found[fqn, name].view(-1)
            except Exception as error:
                failure.note(error)
            items.append(Item(copies, dtype_named(part.dtype), here.get((fqn, name)), target))
    if items:
        exchange(callers, items, failure)
        agree(callers, "odd values", failure.error, fatal=failure.fatal)
    return found
