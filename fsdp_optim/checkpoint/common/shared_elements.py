"""Weights whose elements share memory (expand): a save takes them, and no load can write to them."""

from __future__ import annotations

import logging

from fsdp_optim.checkpoint.common.contents import SavedHalf
from fsdp_optim.errors import shortened
from fsdp_optim.tensors.elements import shares_elements
from fsdp_optim.tensors.memory import is_plain

OF_ITS_OWN = "register its .contiguous() in the model"
"""What a model needs in its place."""

log = logging.getLogger("fsdp_optim")


def warn_of_shared_elements(weights: SavedHalf, rank: int) -> None:
    """Name the weights that the model which is saved could not load, on the lowest rank that has each."""
    params = weights.global_state.params
    named = [
        fqn
        for param in weights.local.optim.params
        if any(is_plain(value) and shares_elements(value) for value in (param.state or {}).values())
        for fqn in param.named.fqns
        if params[fqn].placement.ranks[0] == rank
    ]
    if named:
        log.warning(
            "saved, though this model cannot load them, because their elements share memory (expand): %s: %s",
            shortened(named),
            OF_ITS_OWN,
        )
