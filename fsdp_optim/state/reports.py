"""What each rank tells the others about its model and optimizer.

No rank tells more than a few hundred bytes per live parameter, and no elements. Ranks that see the same say the same to
the letter, so that usually nothing but a digest travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_optim.layout import Placement
from fsdp_optim.state.classes import OptimizerClass
from fsdp_optim.state.order import Counted
from fsdp_optim.state.replicas import STATE
from fsdp_optim.state.values import Summary


@dataclass(frozen=True)
class LiveParam:
    """One live parameter as its rank tells it. `summary` None: it has no state.

    `fingerprint` stands for the elements of the state on this rank, given where the wrapper does not keep replicas
    equal, so that replicas can be told from different parameters of the same name.

    `loose`: no wrapper tells which ranks have it, and its placement names all that make the call.

    `what`: how errors call the elements that the fingerprint stands for.
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


@dataclass(frozen=True)
class RankReport:
    """All that a rank tells of its model and optimizer.

    Attributes:
        call: what it was asked to do.
        order: its original parameters, in the unwrapped model's order.
        params: its live parameters.
        groups: each group's hyperparameters.
        counted: each group's original parameters, as ids count them.
        not_held: the model's other original parameters, which the optimizer does not have.
        extra: the other keys of the optimizer's own dict.
        classes: the class of each group's optimizer.
        values: the names of the state values of each class, where they are needed.
        stateless: where they are needed, the parameters that have no state, of an optimizer that has some; but for those that
            an optimizer leaves out on this rank.
        module_values: what state_dict() has besides parameters and buffers, by FQN; what stands for it, where it is needed.
        module_takers: paths of modules that may take such values without having them.
    """

    call: str
    order: tuple[str, ...] = ()
    params: tuple[LiveParam, ...] = ()
    groups: tuple[tuple[tuple[str, str], ...], ...] = ()
    counted: tuple[Counted, ...] = ()
    not_held: tuple[str, ...] = ()
    extra: tuple[tuple[str, str], ...] = ()
    classes: tuple[OptimizerClass, ...] = ()
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    stateless: tuple[str, ...] = ()
    module_values: tuple[tuple[str, str], ...] = ()
    module_takers: tuple[str, ...] = ()


Told = Sequence[tuple[RankReport, tuple[int, ...]]]
"""Distinct reports, each with the ranks that gave it."""
