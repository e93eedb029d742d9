"""The global state: the model and the optimizer of all ranks together, an equal value on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from msgspec import Struct, structs

from fsdp_optim.layout import Placement
from fsdp_optim.state.dicts.order import Counted, merge
from fsdp_optim.state.merged.reports import LiveParam
from fsdp_optim.state.values.summary import Summary


class Param(Struct, frozen=True, gc=False):
    """One original parameter in the global state.

    `variants`: the placement and summary on each group of ranks, for a parameter whose wrapper forbids to collect the state:
    the groups may differ, and a recipient gets the state of its own group. Empty for all other parameters.
    """

    fqn: str
    placement: Placement
    group_index: int
    summary: Summary | None
    variants: tuple[tuple[Placement, Summary | None], ...] = ()

    def placed(self, where: Callable[[Placement], Placement]) -> Param:
        """Return the parameter with other objects for its placements."""
        variants = tuple([(where(placement), summary) for placement, summary in self.variants])
        return structs.replace(self, placement=where(self.placement), variants=variants)

    def as_seen_by(self, rank: int) -> Param | None:
        """Return the parameter for one recipient; None for an uncollected parameter that the recipient does not hold."""
        if not self.variants:
            return self
        for placement, summary in self.variants:
            if rank in placement.ranks:
                return structs.replace(self, placement=placement, summary=summary, variants=())
        return None


@dataclass(frozen=True)
class GlobalState:
    """The model and the optimizer state of all ranks together, an equal value on all ranks.

    Attributes:
        params: every original parameter, in the unwrapped model's order.
        live: every live parameter.
        num_groups: the number of param groups.
        counts: the order of ids in each distinct report, group by group.
        models: the order of the parameters in the model of each distinct report, also of parameters without this optimizer.
        mismatched: FQNs whose replicas differ, so that only the replicas of the lowest rank count.
        values: optimizer class -> names of the state values on any rank.
        stateless: parameters without state on ranks that could have state for them.
        module_values: FQN of an entry of state_dict() that is neither a parameter nor a buffer -> ranks that have the entry.
        extra_state_loaders: paths of modules that may load such entries without having them.
        views: the Views through which any rank sees the model, as text.
        aliases: other FQN of a tied parameter on any rank -> its FQN on the lowest rank that has it.
        buffers: those of `params` that are buffers of any rank's model, for a save of the weights.
    """

    params: Mapping[str, Param] = field(default_factory=dict)
    live: tuple[LiveParam, ...] = ()
    num_groups: int = 0
    counts: tuple[tuple[Counted, ...], ...] = ()
    models: tuple[tuple[str, ...], ...] = ()
    mismatched: tuple[str, ...] = ()
    values: Mapping[str, frozenset[str]] = field(default_factory=dict)
    stateless: frozenset[str] = frozenset()
    module_values: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    extra_state_loaders: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()

    @property
    def with_state(self) -> frozenset[str]:
        """The parameters that have state on any rank; empty if the reports do not contain that."""
        return frozenset(self.params) - self.stateless if self.values else frozenset()

    @cached_property
    def counted(self) -> tuple[Counted, ...]:
        """Each group's parameters on all ranks together, in the order of their ids."""
        order = tuple(self.params)
        return tuple(
            merge([counts[index].only(self.params) for counts in self.counts], order, self.models)
            for index in range(self.num_groups)
        )

    @property
    def unknown_order(self) -> str:
        """Why ids cannot count these parameters; empty where they can."""
        return next((group.unknown for group in self.counted if group.unknown), "")

    def group_fqns(self, group_index: int) -> tuple[str, ...]:
        return self.counted[group_index].fqns

    def as_seen_by(self, rank: int) -> GlobalState:
        """Return the global state for one recipient, without the variants of other ranks."""
        if not any(param.variants for param in self.params.values()):
            return self
        seen = {fqn: param.as_seen_by(rank) for fqn, param in self.params.items()}
        return replace(self, params={fqn: param for fqn, param in seen.items() if param is not None})

    def one_of_each_kind(self, units: Iterable[tuple[str, ...]], on_mesh: Set[str]) -> frozenset[str]:
        """Return the FQNs of one live parameter of each kind: the same shapes, groups, and summaries of the state.

        Opaque values have contents that summaries do not describe: parameters with such values are all returned.

        Args:
            units: the FQNs of each live parameter.
            on_mesh: the parameters that are DTensors.
        """
        summaries: dict[Summary | None, int] = {}
        numbers: dict[int, int] = {}  # by id: equal parameters mostly share their summary, which takes long to compare
        kept, known = set[str](), set[tuple[object, ...]]()
        for fqns in units:
            held = [self.params[fqn] for fqn in fqns if fqn in self.params]
            kind: list[object] = []
            for param in held:
                number = numbers.get(id(param.summary))
                if number is None:
                    number = numbers[id(param.summary)] = summaries.setdefault(param.summary, len(summaries))
                kind += (param.placement.shape, param.group_index, number, param.fqn in on_mesh)
            if tuple(kind) not in known or any(param.summary is not None and param.summary.opaque for param in held):
                known.add(tuple(kind))
                kept.update(fqns)
        return frozenset(kept)

    def ids(self) -> dict[str, int]:
        """Return FQN -> id, as torch.optim counts: group after group, and inside a group in the optimizer's order."""
        return {fqn: index for index, fqn in enumerate(fqn for group in self.counted for fqn in group.fqns)}
