"""The transport of opaque values to their recipients, as pickled bytes, because only the owner knows their type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsdp_optim.layout import Placement, Whole
from fsdp_optim.state.values.opaque import OpaqueShards, cuts_of, holds_all
from fsdp_optim.tensors.memory import named_copy
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.parcels import NOTHING, Parcel, send
from fsdp_optim.verbs.call import Local
from fsdp_optim.view import has_local_part


@dataclass(frozen=True)
class OpaqueValues:
    """The opaque values of one parameter, and the ranks `targets` that get them.

    `needs`: by shard, the targets that need the values of that shard; a missing shard is needed by all targets.
    """

    fqn: str
    names: tuple[str, ...]
    placement: Placement
    targets: tuple[int, ...]
    needs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def gather_opaque(
    group: RankGroup, local: Local, requests: Sequence[OpaqueValues], failure: Failure
) -> dict[tuple[str, str], Any]:
    """Return the opaque values of some parameters, by (FQN, name), on the ranks that need them. Called by all ranks.

    The value of an unsharded parameter is taken from the first rank that holds it. A sharded parameter has an `OpaqueShards`,
    unless one rank holds all of the parameter, or the value does not depend on the cut.
    """
    if not requests:
        return {}
    keys = [
        (request, name, shard)
        for request in requests
        for name in request.names
        for shard in range(request.placement.num_shards)
    ]
    parcels = [
        Parcel(request.placement.holders(shard)[0], request.needs.get(shard, request.targets))
        for request, _, shard in keys
    ]

    def value_of(index: int) -> Any:
        request, name, _ = keys[index]
        return _held(request.fqn, name, local)

    def name_of(index: int) -> str:
        request, name, _ = keys[index]
        return f"{request.fqn}: {name!r} of its state"

    arrived = send(group, parcels, value_of, failure, name_of)
    by_shard: dict[tuple[str, str], dict[int, Any]] = {}
    with failure:
        for index, (request, name, shard) in enumerate(keys):
            value = arrived.get(index, NOTHING)
            if group.rank == parcels[index].source and group.rank in parcels[index].targets and failure.error is None:
                value = _held(request.fqn, name, local)
                if isinstance(value, _OfShard):
                    value = replace(value, value=named_copy(name_of(index), value.value))
                elif value is not NOTHING:
                    value = named_copy(name_of(index), value)
            if value is not NOTHING:
                by_shard.setdefault((request.fqn, name), {})[shard] = value
    return {key: _joined(values) for key, values in by_shard.items()}


@dataclass(frozen=True)
class _OfShard:
    """The value of one shard of a cut parameter.

    `is_free`: whether the value may stand for the parameter without its shard. `alone`: whether this shard is all of the
    parameter.
    """

    cuts: tuple[Placement, ...]
    value: Any
    is_free: bool
    alone: bool


def _held(fqn: str, name: str, local: Local) -> Any:
    """Return this rank's live opaque value of a parameter. The values of a flat parameter belong to its first original."""
    param = local.by_fqn.get(fqn)
    if param is None or param.state is None or param.named.fqns[0] != fqn:
        return NOTHING
    placements = tuple(original.placement for original in param.handle.originals)
    if name not in param.state:  # a rank that holds no element of the parameter may have fewer values for the parameter
        return NOTHING
    value = param.handle.unwrap(param.state[name])
    if len(placements) != 1 or not isinstance(placements[0], Whole):
        # Not free: a plain tensor of a DTensor parameter would come back as a DTensor.
        is_free = not (param.handle.marks and (isinstance(value, torch.Tensor) or has_local_part(value)))
        return _OfShard(cuts_of(placements), value, is_free, is_free and holds_all(param.handle))
    return value


def _joined(by_shard: dict[int, Any]) -> Any:
    """Return one value for a parameter, made of the values by shard."""
    first = next(iter(by_shard.values()))
    if not isinstance(first, _OfShard):
        return first
    joined = OpaqueShards(first.cuts, {shard: value.value for shard, value in sorted(by_shard.items())})
    if (first.alone and len(by_shard) == 1) or (first.is_free and joined.is_one_for_all):
        return first.value
    return joined
