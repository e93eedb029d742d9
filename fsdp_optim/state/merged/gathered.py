"""The full dict, and the state of each parameter, assembled from the gathered tensors on a recipient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_optim.options import KeyBy
from fsdp_optim.state.dicts.full import NON_PARAM_STATE, FullDict, FullState, kinds_of, write
from fsdp_optim.state.live.local import LocalOptim
from fsdp_optim.state.merged.global_state import GlobalState, Param
from fsdp_optim.tensors.memory import detached_copy, named_copy


def assemble(
    global_state: GlobalState, tensors: Mapping[tuple[str, str], Any], local: LocalOptim, rank: int, key_by: KeyBy
) -> FullDict:
    """Return the full dict of a gather on this recipient. `tensors`: gathered values by (FQN, value name), which are not copied.

    An opaque value of a flat parameter is in the state of the first original only.
    """
    visible = global_state.as_seen_by(rank)
    order = visible.ids()
    local_ids = {fqn: p.local_id for p in local.params for fqn in p.named.fqns}
    live = {fqn: place for place, p in enumerate(local.params) for fqn in p.named.fqns}
    live_first = sorted(order, key=lambda fqn: (live.get(fqn, len(live)), order[fqn]))
    other_keys = {
        name: named_copy(f"optimizer[{name!r}]", value)
        for name, value in local.other_keys.items()
        if name != NON_PARAM_STATE
    }
    non_param = named_copy("the state of no parameter", local.other_keys.get(NON_PARAM_STATE, {}))
    full = FullState(
        state={f: values_of(visible.params[f], tensors) for f in order if visible.params[f].summary is not None},
        groups=tuple(
            ({name: named_copy(f"param group {index}: {name}", value) for name, value in group.items()}, counted.fqns)
            for index, (group, counted) in enumerate(zip(local.groups, visible.counted, strict=True))
        ),
        other_keys=other_keys | ({NON_PARAM_STATE: non_param} if non_param else {}),
        uncollected=frozenset(
            fqn
            for p in local.params
            if not p.handle.collected and p.state is not None and _is_variant(global_state, p.named.fqns)
            for fqn in p.named.fqns
        ),
        # fairscale's reader counts consecutive equal values, so the originals of a flat parameter must be neighbours here
        local_ids={fqn: local_ids.get(fqn) for fqn in live_first},
        unknown_order=visible.unknown_order,
        classes=tuple(cls.name for cls in local.classes),
        kinds=kinds_of({fqn: visible.params[fqn].summary for fqn in order}),
        num_padded=_num_padded(global_state, local),
    )
    return write(full, key_by)


def _is_variant(global_state: GlobalState, fqns: Sequence[str]) -> bool:
    return any(fqn in global_state.params and global_state.params[fqn].variants for fqn in fqns)


def values_of(param: Param, tensors: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """Return the state of one parameter: its scalars and its gathered values; empty for a parameter without state."""
    summary = param.summary
    if summary is None:
        return {}
    scalars = dict(summary.scalars)
    return {
        name: detached_copy(scalars[name].value) if name in scalars else tensors[param.fqn, name]
        for name in summary.names
        if name in scalars or (param.fqn, name) in tensors
    }


def _num_padded(global_state: GlobalState, local: LocalOptim) -> list[list[int]]:
    """Return the padding of each group rank, per flat parameter: this rank's units by local id, then the units of other ranks."""
    local_units = [p.named.fqns for p in local.params]
    here = {fqns: list(p.handle.num_padded) for fqns, p in zip(local_units, local.params, strict=True)}
    others = {p.fqns: list(p.num_padded) for p in global_state.live if p.fqns not in here}
    return [*here.values(), *others.values()]
