"""The load plan: the state that this rank's optimizer gets, decided before anything moves, and the dict made from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fsdp_optim.state.dicts.packed import LocalId
from fsdp_optim.state.live.fit_check import Fit
from fsdp_optim.state.live.local import LocalParam
from fsdp_optim.state.live.local_dict import (
    Numbers,
    Shard,
    Summaries,
    local_values,
    opaque_values,
    shard_dicts,
    summary_for,
)
from fsdp_optim.state.values.summary import Summary
from fsdp_optim.verbs.call import Local, log_summary
from fsdp_optim.verbs.load_state import ordinary

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class LoadPlan:
    """The load plan of this rank. `summaries`, `opaque`: by local id, the state that each live parameter gets (None: none)."""

    local: Local
    fit: Fit
    summaries: Mapping[LocalId, Summary | None]
    opaque: Mapping[LocalId, Mapping[str, Any]]

    @cached_property
    def missing(self) -> frozenset[str]:
        return frozenset(self.fit.missing)

    @cached_property
    def receiving(self) -> list[tuple[LocalParam, Summary]]:
        """The live parameters that get state, each with the summary of that state."""
        pairs = ((param, self.summaries.get(param.local_id)) for param in self.local.optim.params)
        return [(param, summary) for param, summary in pairs if summary is not None]

    def dict_of(
        self,
        tensors: Mapping[LocalId, Mapping[str, torch.Tensor]],
        groups: Sequence[tuple[Mapping[str, Any], tuple[str, ...]]],
        other_keys: Mapping[str, Any],
    ) -> Shard | list[Shard]:
        """Return the optimizer's own dict. `tensors`: the filled local tensors, by local id and value name."""
        rank, numbers = self.local.view.rank, Numbers(summary for _, summary in self.receiving)
        state: dict[LocalId, Mapping[str, Any]] = {
            param.local_id: local_values(
                param, summary, tensors[param.local_id], self.opaque[param.local_id], numbers, rank
            )
            for param, summary in self.receiving
        }
        for param in self.local.optim.params if self.missing else ():
            if param.state is not None and self.missing.issuperset(param.named.fqns):
                state[param.local_id] = ordinary(dict(param.state))
        self._keep_values(state)
        in_order = {p.local_id: state[p.local_id] for p in self.local.optim.params if p.local_id in state}
        return shard_dicts(self.local.optim, groups, other_keys, in_order, self.fit)

    def log(self, done: str, tensors: Mapping[LocalId, Mapping[str, torch.Tensor]], begun: float) -> None:
        """Log one line about a call, as `log_summary` does. `tensors`: as for `dict_of`."""
        loaded = (param for param in self.local.optim.params if not param.handle.skipped)
        by_fqn = {fqn: self.summaries.get(param.local_id) for param in loaded for fqn in param.named.fqns}
        values = {(i, name): flat for i, flats in tensors.items() for name, flat in flats.items()}
        log_summary(done, by_fqn, values, begun, self.local.view.rank)

    def _keep_values(self, state: dict[LocalId, Mapping[str, Any]]) -> None:
        """Keep the live values that a state of another class lacks; drop the loaded state of parameters without live values."""
        for param in self.local.optim.params if self.fit.kept else ():
            names = self.fit.kept.get(param.named.fqns[0])
            if names and param.state is not None:
                own = {name: value for name, value in param.state.items() if str(name) in names}
                state[param.local_id] = {**state.get(param.local_id, {}), **ordinary(own)}
            elif names:
                state.pop(param.local_id, None)


def plan_load(
    local: Local, summaries: Summaries, fit: Fit, saved: Callable[[str, str], Any], *, is_own: bool = False
) -> LoadPlan:
    """Plan a load on this rank. Raises StateError for state that cannot be loaded.

    `saved(fqn, name)`: an opaque value of the full state. `is_own`: whether this rank may keep that object without a copy.
    """
    missing = frozenset(fit.missing)
    planned: dict[LocalId, Summary | None] = {}
    opaque: dict[LocalId, Mapping[str, Any]] = {}
    for param in local.optim.params:
        if (missing and missing.issuperset(param.named.fqns)) or (param.handle.skipped and not param.state):
            continue  # keeps its live state, or has no elements on this rank, for which most optimizers make no state
        summary = summary_for(param, summaries, missing, local.optim)
        planned[param.local_id] = summary
        opaque[param.local_id] = opaque_values(param, summary, saved, local.view.rank, is_own=is_own)
    return LoadPlan(local, fit, planned, opaque)


def warn_of_uncollected(local: Local, uncollected: frozenset[str]) -> None:
    """Warn of state that fairscale's no_broadcast_optim_state saved on one rank only, and that now goes to every rank."""
    for param in local.optim.params:
        named = [fqn for fqn in param.named.fqns if fqn in uncollected]
        if named and len(param.handle.originals[0].placement.ranks) < len(local.view.ranks):
            log.warning(
                "rank %d: %s was saved with no_broadcast_optim_state, so its state is that of the rank that saved it; gather by "
                "fsdp_optim.fairscale.gather_full_optim_state_dict with collect='all' (and name_of=) to keep every rank's own",
                local.view.rank,
                named[0],
            )
