"""The ends of a move in memory: a live optimizer or model, unsharded tensors, a full or sharded dict, memory for a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_optim.errors import RankError
from fsdp_optim.layout import Placement, Ranks, whole_on
from fsdp_optim.move import End, StateValue
from fsdp_optim.state.dicts.packed import LocalId
from fsdp_optim.state.live.local import LocalParam
from fsdp_optim.tensors.memory import flatten
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.verbs.call import Local

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class LiveEnd(End):
    """The state of a live optimizer, or the weights of a live model, in memory.

    `layout`: the placements of the values, by FQN and name, if the moved values have the placements of another model.
    """

    local: Local
    layout: Mapping[tuple[str, str], Placement] | None = None
    _held: dict[tuple[LocalId, str], torch.Tensor] = field(default_factory=dict)

    def placement(self, value: StateValue) -> Placement:
        return value.placement if self.layout is None else self.layout[value.fqn, value.name]

    def memory(self, value: StateValue) -> torch.Tensor:
        param = self.local.by_fqn[value.fqn]
        if len(param.named.fqns) == 1:
            return _elements(param, value)
        key = (param.local_id, value.name)  # read once per live parameter, not once per original
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _elements(param, value)
        return held

    def memories(self, values: Sequence[StateValue]) -> Sequence[torch.Tensor | None]:
        by_fqn, memories = self.local.by_fqn, list[torch.Tensor | None]()
        for value in values:
            param = by_fqn[value.fqn]
            state, named = param.state, param.named
            if state is None or len(named.fqns) > 1:
                memories.append(self.memory(value))
                continue
            live, handle = state[value.name], named.handle
            held = handle.held(live)
            memories.append(held if held is not None else handle.placed_local(live))
        return memories


def _elements(param: LocalParam, value: StateValue) -> torch.Tensor:
    """Return this rank's elements of a value of a live parameter: a 1-D view where they are contiguous."""
    if param.state is None:
        raise RankError(
            f"{value.fqn}: its state was removed while it was read: do not change the optimizer during the call"
        )
    live, handle = param.state[value.name], param.named.handle
    held = handle.held(live)
    if held is None:
        held = handle.placed_local(live)
    return flatten(held) if held.is_contiguous() else held


@dataclass(frozen=True)
class WholeEnd(End):
    """Unsharded values in new CPU memory of some ranks. `made`: this rank's tensors, by FQN and name."""

    group: RankGroup
    recipients: Ranks
    ranks_of: Callable[[StateValue], Ranks] | None = None
    made: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def placement(self, value: StateValue) -> Placement:
        return whole_on(value.placement.shape, self.recipients if self.ranks_of is None else self.ranks_of(value))

    def memory(self, value: StateValue) -> torch.Tensor | None:
        if self.group.rank not in (self.recipients if self.ranks_of is None else self.ranks_of(value)):
            return None
        whole = self.group.world.transport.empty(value.placement.shape, value.dtype, _CPU)
        self.made[value.fqn, value.name] = whole
        return whole.view(-1)


@dataclass(frozen=True)
class DictEnd(End):
    """The values of a dict. `elements(fqn, name)`: the elements of a value that this rank has; None for none."""

    placement_of: Callable[[StateValue], Placement]
    elements: Callable[[str, str], torch.Tensor | None]

    def placement(self, value: StateValue) -> Placement:
        return self.placement_of(value)

    def memory(self, value: StateValue) -> torch.Tensor | None:
        return self.elements(value.fqn, value.name)


@dataclass(frozen=True)
class ShardEnd(End):
    """Memory for this rank's shard: 1-D tensors by local id and name."""

    local: Local
    flats: Mapping[LocalId, Mapping[str, torch.Tensor]]

    def memory(self, value: StateValue) -> torch.Tensor | None:
        param = self.local.by_fqn.get(value.fqn)
        return self.flats.get(param.local_id, {}).get(value.name) if param is not None else None
