"""Comparisons of fairscale's full dicts and shards of a `Wrapped` model with the optimizer of the `Plain` model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kit import wrapping
from kit.compare import check_own_memory, check_value
from kit.setups import Full, Plain, Wrapped
from kit.units import padding


def check_full(full: Full | None, wrapped: Wrapped, plain: Plain) -> None:
    """Raise unless a full dict by id equals the unwrapped optimizer's dict, with fairscale's records of its origin."""
    what = f"the full dict on rank {wrapped.rank}"
    wrapping.check_full(what, full, plain.own_dict(), in_order=False, same_mappings=True)
    assert full is not None
    home = {fqn: local_id for live, local_id in wrapped.ids.items() for fqn in live.fqns}
    id_map = {i: home[fqn] if i in full["state"] else None for fqn, i in plain.ids.items()}
    check_value("param_id_map", full["param_id_map"], id_map)
    check_value("num_padded", full["num_padded"], num_padded(wrapped))
    check_value("uncollected_local_ids", full["uncollected_local_ids"], [])
    check_own_memory(full, wrapped.optim.state_dict(), wrapped.params)


def num_padded(wrapped: Wrapped) -> list[list[int]]:
    """Per live parameter in the order of local ids, the padding of every rank."""
    numels = {live: sum(wrapped.numbers.numel[fqn] for fqn in live.fqns) for live in wrapped.ids}
    return [padding(live, numel, wrapped.world_size) for live, numel in numels.items()]


def local_state(wrapped: Wrapped, plain: Plain) -> dict[int, dict[str, Any]]:
    """The state that this rank's optimizer must have after a load, cut out of the unwrapped optimizer's state."""
    whole = plain.by_name()
    return {i: wrapped.cut_state(live, whole) for live, i in wrapped.ids.items() if live.fqns[0] in whole}


def check_shard(
    where: str,
    shard: Mapping[str, Any],
    wrapped: Wrapped,
    plain: Plain,
    with_padding: bool = True,
    with_names: bool = True,
) -> None:
    """Raise unless a shard equals this rank's cut of the unwrapped state, with zeros in the padding.

    `with_padding=False` after training: some optimizers write into it. `with_names=False` for a shard that was made
    without the optimizer: it cannot have the optimizer's own `param_names`.
    """
    got, want = shard["state"], local_state(wrapped, plain)
    if not with_padding:
        got, want = without_padding(got, wrapped), without_padding(want, wrapped)
    check_value(f"{where}: state", got, want)
    named = with_names and wrapped.setup.named
    groups = [
        {**group, "params": ids, **({"param_names": live["param_names"]} if named else {})}
        for group, ids, live in zip(
            plain.optim.state_dict()["param_groups"], wrapped.group_ids, wrapped.optim.param_groups, strict=True
        )
    ]
    check_value(f"{where}: param_groups", shard["param_groups"], groups)


def without_padding(state: Mapping[int, Mapping[str, Any]], wrapped: Wrapped) -> dict[int, dict[str, Any]]:
    result = {}
    for local_id, padded in enumerate(num_padded(wrapped)):
        own_padding = padded[wrapped.rank] if padded else 0
        if local_id in state:
            result[local_id] = {
                name: value[: len(value) - own_padding]
                if isinstance(value, Tensor) and value.dim() and own_padding
                else value
                for name, value in state[local_id].items()
            }
    return result
