"""Opaque values on their way to the recipients: pickled, one message per rank, because only their owner knows them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_optim.layout import Placement, Whole
from fsdp_optim.state.opaque import OpaqueShards, cuts_of
from fsdp_optim.state.values import own
from fsdp_optim.transport.bytes import collect_bytes
from fsdp_optim.transport.callers import Callers
from fsdp_optim.transport.collective import Failure
from fsdp_optim.verbs.call import Local

if TYPE_CHECKING:
    from fsdp_optim.verbs.gather import Part


def gather_opaque(
    callers: Callers, local: Local, parts: Sequence[Part], recipients: tuple[int, ...], failure: Failure
) -> dict[tuple[str, str], Any]:
    """The opaque values of some parts, by (FQN, name), on recipients. Called by all ranks.

    A parameter that is whole has one value, and a recipient that holds it keeps its own. That of a sharded one comes as
    `OpaqueShards`.
    """
    mine: dict[tuple[str, str], tuple[int, Any]] = {}
    try:
        for part in parts:
            mine.update(_held(part, local, callers.rank))
        content = pickle.dumps(mine)
    except Exception as error:
        failure.note(error)
        content = pickle.dumps({})
    collected = collect_bytes(callers, content, recipients, failure)
    if callers.rank not in recipients or failure.error is not None:
        return {}
    by_rank: dict[int, dict[tuple[str, str], tuple[int, Any]]] = {
        rank: pickle.loads(content.numpy().data) for rank, content in collected.items()
    }
    found: dict[tuple[str, str], Any] = {}
    for part in parts:
        if callers.rank in part.targets:
            for name in part.opaque:
                said = dict(by_rank[r][part.fqn, name] for r in part.placement.ranks if (part.fqn, name) in by_rank[r])
                if said:
                    found[part.fqn, name] = _joined(said)
    return found


@dataclass(frozen=True)
class _OfShard:
    """The value of one shard of a parameter that is cut."""

    cuts: tuple[Placement, ...]
    value: Any


def _held(part: Part, local: Local, rank: int) -> dict[tuple[str, str], tuple[int, Any]]:
    """This rank's opaque values of a part, each with the number of its shard; those of flat parameters once."""
    param, shard = local.by_fqn.get(part.fqn), part.placement.shard_of(rank)
    if param is None or param.state is None or shard is None or param.named.fqns[0] != part.fqn:
        return {}
    if part.placement.holders(shard)[0] != rank:  # replicas have the same
        return {}
    placements = tuple(original.placement for original in param.handle.originals)
    values = {name: own(param.handle.unwrap(param.state[name])) for name in part.opaque}
    if len(placements) != 1 or not isinstance(placements[0], Whole):
        values = {name: _OfShard(cuts_of(placements), value) for name, value in values.items()}
    return {(part.fqn, name): (shard, value) for name, value in values.items()}


def _joined(said: dict[int, Any]) -> Any:
    first = next(iter(said.values()))
    if isinstance(first, _OfShard):
        return OpaqueShards(first.cuts, {shard: value.value for shard, value in sorted(said.items())})
    return first
