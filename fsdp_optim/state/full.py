"""The full dict, written: one state per original parameter, as if FSDP were not there, under torch's integer ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdp_optim.memory import own
from fsdp_optim.options import KeyBy
from fsdp_optim.state.classes import class_said
from fsdp_optim.state.kinds import LOOSE_KIND
from fsdp_optim.state.local import LOOSE, LocalOptim
from fsdp_optim.state.picture import Param, Picture
from fsdp_optim.state.values import Summary

FullDict = dict[str, Any]


def assemble(
    picture: Picture, tensors: Mapping[tuple[str, str], Any], local: LocalOptim, rank: int, key_by: KeyBy
) -> FullDict:
    """The full dict of everything gathered on this recipient: `tensors` by (FQN, value name), taken as they are.

    An opaque value of a flat parameter is in the state of its first original only.
    """
    seen = picture.as_seen_by(rank)
    ids, params = seen.ids(), seen.params
    key = {fqn: fqn if key_by == "name" else ids[fqn] for fqn in ids}
    local_ids = {fqn: p.local_id for p in local.params for fqn in p.named.fqns}
    live = {fqn: place for place, p in enumerate(local.params) for fqn in p.named.fqns}
    live_first = sorted(ids, key=lambda fqn: (live.get(fqn, len(live)), ids[fqn]))
    return {
        **{name: own(value) for name, value in local.extra.items() if name != LOOSE},
        **({"optimizer_class": class_said(local.classes)} if local.classes else {}),
        "state": {
            **{key[f]: values_of(params[f], tensors) for f in ids if params[f].summary is not None},
            **own(local.extra.get(LOOSE, {})),
        },
        "param_groups": [
            {
                **{name: own(value) for name, value in group.items()},
                "params": [key[fqn] for fqn in fqns],
                **({"param_names": list(fqns)} if key_by == "id" else {}),  # torch's readers by name refuse it
            }
            for group, fqns in zip(local.groups, (one.fqns for one in seen.counted), strict=True)
        ],
        # fairscale's reader counts runs of equal values, so the ids are listed by the flat parameter they come from
        "param_id_map": {key[f]: local_ids.get(f) if params[f].summary is not None else None for f in live_first},
        "local_ids": {key[f]: local_ids.get(f) for f in live_first},
        **({"fqns": {key[f]: f for f in live_first}} if key_by == "id" else {}),
        **({"unknown_order": seen.unknown_order} if seen.unknown_order else {}),
        "num_padded": _num_padded(picture, local),
        "kinds": kinds_of({key[f]: params[f].summary for f in ids}, local.extra.get(LOOSE, ())),
        "uncollected_local_ids": [
            p.local_id
            for p in local.params
            if not p.handle.collected and p.state is not None and _is_variant(picture, p.named.fqns)
        ],
    }


def kinds_of(summaries: Mapping[Any, Summary | None], loose: Iterable[Any] = ()) -> dict[Any, Any]:
    """What a full dict records of its values: their kinds, by key and name. Parameters with the same ones share one dict.

    `loose`: keys of its state that are no parameters.
    """
    shared: dict[tuple[tuple[str, str], ...], dict[Any, str]] = {}
    found: dict[Any, Any] = dict.fromkeys(loose, LOOSE_KIND)
    for key, summary in summaries.items():
        if summary is not None:
            kinds = summary.kinds
            found[key] = shared.setdefault(kinds, dict(kinds))
    return found


def _is_variant(picture: Picture, fqns: Sequence[str]) -> bool:
    return any(fqn in picture.params and picture.params[fqn].variants for fqn in fqns)


def values_of(param: Param, tensors: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """The state of one parameter: its scalars, and what was gathered of it; empty for one without state."""
    summary = param.summary
    if summary is None:
        return {}
    scalars = dict(summary.scalars)
    return {
        name: own(scalars[name].value) if name in scalars else tensors[param.fqn, name]
        for name in summary.names
        if name in scalars or (param.fqn, name) in tensors
    }


def _num_padded(picture: Picture, local: LocalOptim) -> list[list[int]]:
    """The padding of each group rank, per flat parameter: this rank's by local id, then those of other ranks' units."""
    mine = [p.named.fqns for p in local.params]
    here = {fqns: list(p.handle.num_padded) for fqns, p in zip(mine, local.params, strict=True)}
    others = {p.fqns: list(p.num_padded) for p in picture.live if p.fqns not in here}
    return [*here.values(), *others.values()]
