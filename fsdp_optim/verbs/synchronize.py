"""Make replicas equal before a checkpoint, for optimizers whose replicas differ between steps and that have a method for it."""

from __future__ import annotations

from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.state.values.classes import innermost
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup

_METHOD = "synchronize_for_checkpoint"


def synchronize(group: RankGroup, optim: Optimizers) -> None:
    """Call `synchronize_for_checkpoint()` of the optimizers that have this method, as Dion does. Called by all ranks.

    The method may communicate, so all ranks first agree to call it.
    """
    listed = optim if isinstance(optim, (list, tuple)) else [optim]
    methods = [method for optimizer in listed if callable(method := getattr(innermost(optimizer), _METHOD, None))]
    if methods:
        agree(group, f"before {_METHOD}")
        for method in methods:
            method()
