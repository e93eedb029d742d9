"""The report of each rank about its model and optimizer, for the other ranks.

A report has a few hundred bytes per live parameter, and no elements. Ranks that see the same model give equal reports, so
usually the ranks exchange only digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from fsdp_optim.layout import Placement
from fsdp_optim.state.dicts.order import Counted
from fsdp_optim.state.merged.replicas import STATE
from fsdp_optim.state.values.classes import OptimizerClass
from fsdp_optim.state.values.summary import Summary


class LiveParam(Struct, frozen=True, gc=False):
    """One live parameter in a rank's report.

    Attributes:
        summary: the summary of the state; None for a parameter without state.
        fingerprint: a digest of this rank's elements of the state, if the wrapper does not keep replicas equal: it distinguishes
            replicas from different parameters of the same name.
        loose: no wrapper knows which ranks hold the parameter, so its placement names all ranks of the call.
        what: the compared content of the fingerprint, STATE or ELEMENTS.
        fused: the names of live parameters of which Views have made some of the originals.
    """

    fqns: tuple[str, ...]
    placements: tuple[Placement, ...]
    group_index: int
    num_padded: tuple[int, ...]
    collected: bool
    summary: Summary | None
    fingerprint: str = ""
    loose: bool = False
    what: str = STATE
    fused: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankReport:
    """The report of one rank about its model and optimizer.

    Attributes:
        call: the call with its options, as text.
        order: the optimizer's original parameters, in the unwrapped model's order.
        params: the live parameters.
        groups: each group's hyperparameters, as pairs of texts.
        counted: each group's original parameters, in the order of their ids.
        model_order: all original parameters, in the unwrapped model's order, where the optimizer does not have all of them; else
            empty.
        other_keys: the other keys of the optimizer's own dict, as pairs of texts.
        classes: the class of each group's optimizer.
        values: optimizer class -> names of the state values, where the call needs them.
        stateless: parameters without state, where the call needs them; without those that the wrapper skips on this rank.
        module_values: FQN -> fingerprint (where the call needs it) of the entries of state_dict() that are neither parameters
            nor buffers.
        extra_state_loaders: paths of modules that may load such entries without having them.
        unmatched: the Views that name nothing of this rank's model, as text.
        views: all Views through which this rank sees its model, as text.
        aliases: other FQN of a tied parameter -> its FQN, as pairs.
        buffers: those of the live parameters that are buffers, for a save of the weights.
    """

    call: str
    order: tuple[str, ...] = ()
    params: tuple[LiveParam, ...] = ()
    groups: tuple[tuple[tuple[str, str], ...], ...] = ()
    counted: tuple[Counted, ...] = ()
    model_order: tuple[str, ...] = ()
    other_keys: tuple[tuple[str, str], ...] = ()
    classes: tuple[OptimizerClass, ...] = ()
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    stateless: tuple[str, ...] = ()
    module_values: tuple[tuple[str, str], ...] = ()
    extra_state_loaders: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    buffers: tuple[str, ...] = ()

    def text(self) -> str:
        """Return a text that is equal only for equal reports. Placements and summaries that parameters share are written once."""
        parts: dict[str, int] = {}
        kinds: dict[tuple[object, ...], int] = {}
        numbers: dict[tuple[object, ...], int] = {}  # of kinds, by the ids of their parts, which the report keeps alive
        lines = []
        for param in self.params:
            others = param.group_index, param.collected, param.loose, param.what
            alike = (*map(id, param.placements), id(param.num_padded), id(param.summary), others)
            number = numbers.get(alike)
            if number is None:
                # The number of each part's text among the texts of all parts, in the order in which they come.
                texts = map(repr, (*param.placements, param.num_padded, param.summary))
                kind = *[parts.setdefault(text, len(parts)) for text in texts], *others
                number = numbers[alike] = kinds.setdefault(kind, len(kinds))
            lines.append(number)
        fqns, prints = [param.fqns for param in self.params], [param.fingerprint for param in self.params]
        fused = [(number, param.fused) for number, param in enumerate(self.params) if param.fused]
        return f"{replace(self, params=())!r} {fqns!r} {prints!r} {fused!r} {lines!r} {list(kinds)!r} {list(parts)!r}"


ReportsByRanks = Sequence[tuple[RankReport, tuple[int, ...]]]
"""Distinct reports, each with the ranks that gave it."""

Pairs = tuple[tuple[str, str], ...]
"""(key, text of the value) of each entry of a dict; equal texts for equal values only."""


def first_difference(sections: Iterable[tuple[str, Pairs, Pairs]]) -> tuple[str, str, str, str] | None:
    """Return (section, key, first text, other text) of the first key that differs, where `sections` are (name, first, other)."""
    for section, first, other in sections:
        a, b = dict(first), dict(other)
        for key in {**a, **b}:
            if a.get(key) != b.get(key):
                return section, key, a.get(key, "absent"), b.get(key, "absent")
    return None
