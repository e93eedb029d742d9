"""The one picture of the model and the optimizer that all ranks have: the same value on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fsdp_optim.layout import Placement
from fsdp_optim.state.order import Counted, merge
from fsdp_optim.state.reports import LiveParam
from fsdp_optim.state.values import Summary


@dataclass(frozen=True)
class Param:
    """One original parameter in the common picture.

    `variants`: what each group of ranks has of it, where the wrapper says that it must not be collected: then they may
    differ, and a recipient gets that of its own group. Empty for all other parameters.
    """

    fqn: str
    placement: Placement
    group_index: int
    summary: Summary | None
    variants: tuple[tuple[Placement, Summary | None], ...] = ()

    def as_seen_by(self, rank: int) -> Param | None:
        """The parameter as it is for one recipient; None for one that is not collected and that the recipient has not."""
        if not self.variants:
            return self
        for placement, summary in self.variants:
            if rank in placement.ranks:
                return replace(self, placement=placement, summary=summary, variants=())
        return None


@dataclass(frozen=True)
class Picture:
    """The model and the optimizer state of all ranks together, the same value on all of them.

    Attributes:
        params: every original parameter, in the unwrapped model's order.
        live: every live parameter.
        num_groups: the number of param groups.
        counts: what each distinct report says of the order of ids, group by group.
        values: the names of the state values that any rank's optimizer has, by its class.
        stateless: parameters that have no state on the ranks that would have it.
        module_values: what state_dict() has besides parameters and buffers, by FQN, with the ranks that have it.
        module_takers: paths of modules that may take such values without having them.
    """

    params: Mapping[str, Param] = field(default_factory=dict)
    live: tuple[LiveParam, ...] = ()
    num_groups: int = 0
    counts: tuple[tuple[Counted, ...], ...] = ()
    mismatched: tuple[str, ...] = ()  # of which replicas differ, so that only those of the lowest rank count
    values: Mapping[str, frozenset[str]] = field(default_factory=dict)
    stateless: frozenset[str] = frozenset()
    module_values: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    module_takers: tuple[str, ...] = ()

    @property
    def with_state(self) -> frozenset[str]:
        """The parameters that have state on any rank, where the ranks have told."""
        return frozenset(self.params) - self.stateless if self.values else frozenset()

    @cached_property
    def counted(self) -> tuple[Counted, ...]:
        """Each group's parameters, as ids count them on all ranks together."""
        order = tuple(self.params)
        return tuple(
            merge([counts[index].only(self.params) for counts in self.counts], order)
            for index in range(self.num_groups)
        )

    @property
    def unknown_order(self) -> str:
        """Why ids cannot count these parameters; empty where they can."""
        return next((one.unknown for one in self.counted if one.unknown), "")

    def group_fqns(self, group_index: int) -> tuple[str, ...]:
        return self.counted[group_index].fqns

    def as_seen_by(self, rank: int) -> Picture:
        """What one recipient gets."""
        if not any(param.variants for param in self.params.values()):
            return self
        seen = {fqn: param.as_seen_by(rank) for fqn, param in self.params.items()}
        return replace(self, params={fqn: param for fqn, param in seen.items() if param is not None})

    def ids(self) -> dict[str, int]:
        """FQN -> id, as torch.optim counts: group after group, inside a group as the optimizer lists it."""
        return {fqn: index for index, fqn in enumerate(fqn for group in self.counted for fqn in group.fqns)}
