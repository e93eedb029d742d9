"""Opaque values on their way to the recipients, as bytes: only their owner knows what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsdp_optim.layout import Placement, Whole
from fsdp_optim.memory import own
from fsdp_optim.state.opaque import OpaqueShards, cuts_of, holds_all
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.parcels import NOTHING, Parcel, send
from fsdp_optim.verbs.call import Local
from fsdp_optim.view import has_local_part


@dataclass(frozen=True)
class OpaqueValues:
    """The opaque values of one parameter on their way to the ranks `targets`.

    `needs`: by shard, those of the targets that need the values of that shard, where not all do.
    """

    fqn: str
    names: tuple[str, ...]
    placement: Placement
    targets: tuple[int, ...]
    needs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def gather_opaque(
    callers: RankGroup, local: Local, moved: Sequence[OpaqueValues], failure: Failure
) -> dict[tuple[str, str], Any]:
    """The opaque values of some parameters, by (FQN, name), on the ranks that need them. Called by all ranks.

    A parameter that is whole has one value, that of the first rank that holds it. That of a sharded one comes as
    `OpaqueShards`, unless one rank holds all of the parameter, or the value does not depend on how it is cut.
    """
    if not moved:
        return {}
    keys = [(one, name, shard) for one in moved for name in one.names for shard in range(one.placement.num_shards)]
    parcels = [Parcel(one.placement.holders(shard)[0], one.needs.get(shard, one.targets)) for one, _, shard in keys]

    def value_of(index: int) -> Any:
        one, name, _ = keys[index]
        return _held(one.fqn, name, local)

    arrived = send(callers, parcels, value_of, failure)
    found: dict[tuple[str, str], dict[int, Any]] = {}
    with failure:
        for index, (one, name, shard) in enumerate(keys):
            value = arrived.get(index, NOTHING)
            if (
                callers.rank == parcels[index].source
                and callers.rank in parcels[index].targets
                and failure.error is None
            ):
                value = _held(one.fqn, name, local)
                if isinstance(value, _OfShard):
                    value = replace(value, value=own(value.value))
                elif value is not NOTHING:
                    value = own(value)
            if value is not NOTHING:
                found.setdefault((one.fqn, name), {})[shard] = value
    return {key: _joined(said) for key, said in found.items()}


@dataclass(frozen=True)
class _OfShard:
    """The value of one shard of a parameter that is cut.

    `is_free`: it could stand for itself; `alone`: it does, as this shard is all of the parameter, in its own shape.
    """

    cuts: tuple[Placement, ...]
    value: Any
    is_free: bool
    alone: bool


def _held(fqn: str, name: str, local: Local) -> Any:
    """This rank's opaque value of a parameter, as it is in memory; those of flat parameters are the first original's."""
    param = local.by_fqn.get(fqn)
    if param is None or param.state is None or param.named.fqns[0] != fqn:
        return NOTHING
    placements = tuple(original.placement for original in param.handle.originals)
    if name not in param.state:  # a rank that holds no element of the parameter may have fewer values of it
        return NOTHING
    value = param.handle.unwrap(param.state[name])
    if len(placements) != 1 or not isinstance(placements[0], Whole):
        # A tensor beside DTensors would come back as one of them.
        is_free = not (param.handle.marks and (isinstance(value, torch.Tensor) or has_local_part(value)))
        return _OfShard(cuts_of(placements), value, is_free, is_free and holds_all(param.handle))
    return value


def _joined(said: dict[int, Any]) -> Any:
    first = next(iter(said.values()))
    if not isinstance(first, _OfShard):
        return first
    joined = OpaqueShards(first.cuts, {shard: value.value for shard, value in sorted(said.items())})
    if (first.alone and len(said) == 1) or (first.is_free and joined.is_one_for_all):
        return first.value
    return joined
