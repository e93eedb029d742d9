"""Optimizers that step a parameter as one: what a View means for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache

from fsdp_optim.layout.views import PlacedPart
from fsdp_optim.state.live.local import LocalOptim
from fsdp_optim.state.merged.reports import LiveParam
from fsdp_optim.state.values.classes import OptimizerClass

_STEPS_AS_ONE = frozenset(
    {"Muon", "NorMuon", "Dion", "Lamb", "LAMB", "FusedLAMB", "LARS", "AdamMini", "Adam_mini", "Shampoo", "SOAP"}
)
"""The names of optimizers whose step of an element depends on the other elements of its parameter."""

log = logging.getLogger("fsdp_optim")


def joint_steps(classes: Sequence[OptimizerClass], live: Iterable[LiveParam]) -> tuple[str, ...]:
    """Return the names of optimizers that step parameters as one, which Views take apart. `classes`: of each param group."""
    groups = dict.fromkeys(param.group_index for param in live if param.fused)
    stepping = [classes[group] for group in groups if group < len(classes)]
    return tuple(dict.fromkeys(of.names[0] for of in stepping if _steps_as_one(of)))


def _steps_as_one(of: OptimizerClass) -> bool:
    return not _STEPS_AS_ONE.isdisjoint(of.names)


def warn_of_joint_steps(optim: LocalOptim, *, leads: bool) -> None:
    """Warn of parameters that a View takes apart, and that their optimizer steps as one. `leads`: whether this rank warns."""
    for param in optim.params if leads else ():
        of = optim.classes[param.group_index] if optim.classes else None
        if (
            of is not None
            and _steps_as_one(of)
            and any(isinstance(p, PlacedPart) for p in param.named.placements.values())
        ):
            _warn_once(of.names[0], param.named.fqns[0])
            return


@lru_cache(maxsize=64)
def _warn_once(optimizer: str, fqn: str) -> None:
    log.warning(
        "%s: %s steps the fused parameter as one matrix, so its state is cut exactly, but a run without the fusion takes other "
        "steps than this one (docs/names.md)",
        fqn,
        optimizer,
    )
