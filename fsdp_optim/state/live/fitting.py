"""A full state fitted to the class, groups and parameters of a live optimizer, or refused."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace

from fsdp_optim.errors import StateError, counted_noun, shortened
from fsdp_optim.layout import Shape
from fsdp_optim.options import ParamGroups
from fsdp_optim.state.dicts.full import FullState, following_params
from fsdp_optim.state.dicts.names import Names
from fsdp_optim.state.live.class_fit import fit_class, lacking_values, live_groups
from fsdp_optim.state.live.fit_check import Fit, begun_anew, check_fits
from fsdp_optim.state.live.local import LocalOptim

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class LiveOptimizer:
    """The live optimizer that a full state must fit.

    Attributes:
        optim: the optimizer on this rank.
        names: how full dicts count its parameters, including the parameters of other ranks.
        shapes: FQN -> shape of the parameter.
        with_state: FQNs that have state in the live optimizer.
        values: optimizer class -> names of its state values (on all ranks, if they have agreed on the state).
        on_mesh: FQNs of the parameters that are DTensors, whose wrapper can place a value with a cut of its own.
        fused: the FQNs of each live parameter of which Views have made some.
    """

    optim: LocalOptim
    names: Names
    shapes: Mapping[str, Shape]
    with_state: frozenset[str]
    values: Mapping[str, frozenset[str]]
    on_mesh: frozenset[str] = frozenset()
    fused: tuple[tuple[str, ...], ...] = ()

    @property
    def off_mesh(self) -> frozenset[str]:
        return frozenset(self.shapes) - self.on_mesh

    def with_params(self, kept: Set[str]) -> LiveOptimizer:
        """Return the optimizer with some of the parameters alone; the parameters of a flat one stay together."""

        def only(fqns: Iterable[str]) -> tuple[str, ...]:
            return tuple(filter(kept.__contains__, fqns))

        names = replace(
            self.names,
            groups=tuple(map(only, self.names.groups)),
            units=tuple([fqns for fqns in self.names.units if not kept.isdisjoint(fqns)]),
            model_order=only(self.names.model_order),
        )
        shapes = {fqn: shape for fqn, shape in self.shapes.items() if fqn in kept}
        with_state, on_mesh = self.with_state & kept, self.on_mesh & kept
        fused = tuple([fqns for fqns in self.fused if not kept.isdisjoint(fqns)])
        return replace(self, names=names, shapes=shapes, with_state=with_state, on_mesh=on_mesh, fused=fused)

    def fit(
        self, full: FullState, *, strict: bool, groups: ParamGroups = "saved", others: Collection[str] = ()
    ) -> tuple[FullState, Fit]:
        """Return the part of a full state that this optimizer can load. `strict`, `others`: as in `check_fits`.

        Raises StateError for a state that does not fit, before any shard is made.
        """
        full, unmatched = fit_class(full, live_groups(self.optim, self.names.groups, self.values), strict=strict)
        if groups == "live":
            full = _in_live_groups(full, self.optim, self.names)
            self._check_needed_values(full, unmatched.kept)
        else:
            _check_hyperparameters(full, self.optim)
        fit = check_fits(
            full,
            self.names,
            self.shapes,
            live=self.with_state,
            strict=strict,
            others=others,
            regroup=bool(self.optim.optimizers),
        )
        if not strict:
            full, fit = begun_anew(full, fit, self.fused, self.with_state)
        full = self._with_followers(full)
        if unmatched.text:
            log.warning("%s; strict=False loads what both have", unmatched.text)
        return full, replace(
            fit,
            unmatched_hyperparameters=unmatched.hyperparameters,
            unmatched_values=unmatched.values,
            kept=unmatched.kept,
        )

    def _with_followers(self, full: FullState) -> FullState:
        """Apply `following_params`; warn where the optimizer may expect DTensors, and has none yet that shows the mesh."""
        followed = following_params(full, self.shapes, self.on_mesh)
        if followed is full:
            return full
        is_same_class = full.classes == tuple(known.name for known in self.optim.classes)
        changed = [
            fqn
            for fqn, words in full.kinds.items()
            if is_same_class and fqn not in self.with_state and words != followed.kinds[fqn]
        ]
        if changed:
            log.warning(
                "the state of %s was saved as DTensors with a cut of their own, and this optimizer has no state yet that shows "
                "a mesh, so it gets ordinary tensors: %s: if it keeps DTensors, let it make its state before the load (one step)",
                counted_noun(len(changed), "parameter"),
                shortened(changed),
            )
        return followed

    def _check_needed_values(self, full: FullState, kept: Mapping[str, frozenset[str]]) -> None:
        """Refuse state without the values that the live hyperparameters need (amsgrad, centered, momentum)."""
        for of, (hyper, fqns) in zip(self.optim.classes, full.groups, strict=False):
            for fqn in fqns:
                values = frozenset(map(str, full.state.get(fqn, {}))) | kept.get(fqn, frozenset())
                if why := lacking_values(of, hyper, values):
                    raise StateError(f"{fqn}: {why}")


def _check_hyperparameters(full: FullState, optim: LocalOptim) -> None:
    """Refuse groups without any hyperparameter, with which the optimizer could not step."""
    for index, (hyper, fqns) in enumerate(full.groups):
        lacking = sorted(map(str, optim.groups[index])) if index < len(optim.groups) else []
        if fqns and lacking and not hyper:
            raise StateError(
                f"param group {index}, of {fqns[0]}: the saved state has no hyperparameters, the optimizer has "
                f"{', '.join(lacking)}: give param_groups='live', which leaves the optimizer's groups and "
                "hyperparameters as they are"
            )


def _in_live_groups(full: FullState, optim: LocalOptim, names: Names) -> FullState:
    """Return the same state in the live optimizer's groups, by name. Parameters that only the state has go to the last group."""
    saved = [fqn for _, fqns in full.groups for fqn in fqns]
    known = set(saved)
    group_members = [tuple(fqn for fqn in fqns if fqn in known) for fqns in names.groups]
    unknown = tuple(fqn for fqn in saved if fqn not in names.known)
    groups = [(hyper, fqns) for hyper, fqns in zip(optim.groups, group_members, strict=True)]
    if groups and unknown:
        groups[-1] = (groups[-1][0], groups[-1][1] + unknown)
    return replace(full, groups=tuple(groups), classes=())
