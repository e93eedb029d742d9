"""A full state made to fit a live optimizer: of its class, in its groups, with its parameters; or refused."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from fsdp_optim.layout import Shape
from fsdp_optim.options import GroupsFrom
from fsdp_optim.state.class_fit import fit_class, live_groups
from fsdp_optim.state.fits import Fit, check_fits
from fsdp_optim.state.full import FullState
from fsdp_optim.state.local import LocalOptim
from fsdp_optim.state.names import Names

"""Whose param groups and hyperparameters count after a load."""

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class LiveOptimizer:
    """What a full state has to fit.

    Attributes:
        optim, names: the optimizer on this rank, and how full dicts count its parameters, those of other ranks included.
        shapes: of the parameters.
        with_state: FQNs that have state in the live optimizer.
        values: the names of the state values that it has, by class (on all ranks, where ranks have met).
    """

    optim: LocalOptim
    names: Names
    shapes: Mapping[str, Shape]
    with_state: frozenset[str]
    values: Mapping[str, frozenset[str]]

    def fit(
        self, full: FullState, *, strict: bool, groups: GroupsFrom = "saved", others: Collection[str] = ()
    ) -> tuple[FullState, Fit]:
        """The part of a full state that this optimizer takes. `strict`, `others`: as in `check_fits`.

        Raises StateError where it does not fit, before anything is made of it.
        """
        full, left = fit_class(full, live_groups(self.optim, self.names.groups, self.values), strict=strict)
        if groups == "live":
            full = _in_live_groups(full, self.optim, self.names)
        fit = check_fits(
            full,
            self.names,
            self.shapes,
            live=self.with_state,
            strict=strict,
            others=others,
            regroup=bool(self.optim.parts),
        )
        if left.text:
            log.warning("%s; strict=False: what both have is loaded", left.text)
        return full, replace(
            fit,
            unmatched_hyperparameters=left.hyperparameters,
            unmatched_values=left.values,
            kept=left.kept,
        )


def _in_live_groups(full: FullState, optim: LocalOptim, names: Names) -> FullState:
    """The same state in the live optimizer's groups, by name. Parameters that it does not have stay listed, in the last one."""
    saved = [fqn for _, fqns in full.groups for fqn in fqns]
    known = set(saved)
    mine = [tuple(fqn for fqn in fqns if fqn in known) for fqns in names.groups]
    unknown = tuple(fqn for fqn in saved if fqn not in names.known)
    groups = [(hyper, fqns) for hyper, fqns in zip(optim.groups, mine, strict=True)]
    if groups and unknown:
        groups[-1] = (groups[-1][0], groups[-1][1] + unknown)
    return replace(full, groups=tuple(groups), classes=())
