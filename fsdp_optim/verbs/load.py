"""Load a shard into the live optimizer, every value in the dtype that it was saved in."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from fsdp_optim.errors import StateError
from fsdp_optim.state.local import OptimizerLike

log = logging.getLogger("fsdp_optim")


class LoadableOptimizer(OptimizerLike, Protocol):
    """An optimizer that can be loaded into."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def load(optim: LoadableOptimizer, shard: Mapping[str, Any]) -> None:
    """As `optim.load_state_dict(shard)`, but nothing is cast: torch's own casts floating state to the parameter's dtype."""
    params = _params_by_id(optim, shard)
    cast = {
        (local_id, name): value
        for local_id, values in shard["state"].items()
        for name, value in values.items()
        if local_id in params and name != "step" and _would_change(params[local_id], value)
    }
    if cast and not isinstance(getattr(optim, "state", None), Mapping):
        (local_id, name), value = next(iter(cast.items()))
        raise StateError(
            f"{name} of local parameter {local_id} is a {getattr(value, 'dtype', type(value).__name__)}, its parameter "
            f"{params[local_id].dtype}: load_state_dict() would change it, and {type(optim).__name__} has no `state` to put "
            "it into as it is"
        )
    # torch never sees the values that it would change; they are put in afterwards, in the saved order.
    uncast = {
        local_id: {name: value for name, value in values.items() if (local_id, name) not in cast}
        for local_id, values in shard["state"].items()
    }
    optim.load_state_dict({**shard, "state": uncast})
    for local_id in dict.fromkeys(local_id for local_id, _ in cast):
        param = params[local_id]
        live: dict[str, Any] = optim.state[param]  # type: ignore[attr-defined]
        loaded = dict(live)
        live.clear()
        for name in shard["state"][local_id]:
            if (local_id, name) in cast:
                value = cast[local_id, name]
                live[name] = value.to(param.device) if isinstance(value, torch.Tensor) else value
            else:
                live[name] = loaded[name]


def _params_by_id(optim: LoadableOptimizer, shard: Mapping[str, Any]) -> dict[Any, torch.Tensor]:
    groups, live = shard["param_groups"], optim.param_groups
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in live]:
        raise StateError(
            f"this shard has {[len(g['params']) for g in groups]} parameters in its groups, the optimizer has "
            f"{[len(g['params']) for g in live]}: a full dict has to go through get_shard_from_optim_state_dict first"
        )
    return {
        local_id: param
        for group, live_group in zip(groups, live, strict=True)
        for local_id, param in zip(group["params"], live_group["params"], strict=True)
    }


def _would_change(param: torch.Tensor, value: object) -> bool:
    """torch casts tensors to a floating parameter's dtype, and rebuilds whatever can be iterated over, a str too."""
    if isinstance(value, torch.Tensor):
        return param.is_floating_point() and value.dtype != param.dtype
    return isinstance(value, Iterable) and not isinstance(value, (list, tuple, dict))
