"""The comparison of replicas of shards, as HSDP has them, before a save, which writes a part of each replica.

Fingerprints differ from shard to shard, so the reports of ranks do not contain them. Instead the lowest rank that holds a shard
sends a digest of each of its parameters, and the other ranks that hold the shard read only that digest.

Optimizers whose replicas differ between steps make them equal first (`synchronize`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

from msgspec import Struct, structs

from fsdp_optim.errors import StateError
from fsdp_optim.layout import Placement
from fsdp_optim.layout.once import once_each
from fsdp_optim.options import OnReplicaMismatch
from fsdp_optim.state.live.local import LocalParam, Optimizers
from fsdp_optim.state.merged.global_state import GlobalState, Param
from fsdp_optim.state.merged.prints import prints_of_states
from fsdp_optim.state.merged.replicas import STATE, not_replicas, print_of_value
from fsdp_optim.state.values.classes import innermost
from fsdp_optim.state.values.summary import Summary
from fsdp_optim.transport.agree import MeetingResult, agree, all_equal, all_gather_bytes, exchange_reports
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import Local, warn_of_mismatch

_NBYTES = 16  # in a digest
_NONE = bytes(_NBYTES)  # the digest of a rank that holds nothing
_METHOD = "synchronize_for_checkpoint"


class _Shared(Struct, frozen=True):
    """A live parameter, or a value of its state that is cut differently. Several ranks hold replicas of it.

    `fqns`: its original parameters. `value`: the name of the value; None for the parameter.
    """

    fqns: tuple[str, ...]
    value: str | None
    placement: Placement

    def leader(self, rank: int) -> int | None:
        """Return the lowest rank that holds the same shard as `rank`; None if `rank` holds none."""
        shard = self.placement.shard_of(rank)
        return min(self.placement.holders(shard)) if shard is not None else None

    def held_by(self, local: Local, rank: int) -> LocalParam | None:
        """Return the live parameter on this rank; None if this rank holds none of its elements, or not the value."""
        param = local.by_fqn.get(self.fqns[0])
        if param is None or self.placement.shard_of(rank) is None:
            return None
        if self.value is not None and (param.state is None or self.value not in param.state):
            return None
        return param


def _digests(shared: Sequence[_Shared], local: Local, rank: int) -> list[bytes]:
    """Return the digest of the elements that this rank holds of each."""
    held = [entry.held_by(local, rank) for entry in shared]
    states = [param for entry, param in zip(shared, held, strict=True) if param is not None and entry.value is None]
    prints = prints_of_states(states, rank)  # together: their bytes are digested from memory that many share
    digests = list[bytes]()
    for entry, param in zip(shared, held, strict=True):
        if param is None:
            digests.append(_NONE)
        else:
            digests.append(
                bytes.fromhex(next(prints) if entry.value is None else print_of_value(param, entry.value, rank))
            )
    return digests


def compare_shards(
    group: RankGroup, local: Local, global_state: GlobalState, on_replica_mismatch: OnReplicaMismatch, what: str = STATE
) -> GlobalState:
    """Compare the replicas that the reports of ranks have not compared. Called by all ranks.

    Returns the same merged state on all ranks; with "lowest_rank", replicas that differ are taken from the lowest ranks.
    Otherwise raises StateError on all ranks if replicas differ.
    """
    return _compared(group, local, global_state, on_replica_mismatch, what, _shared_in(global_state))


def compare_unsharded(
    group: RankGroup, local: Local, global_state: GlobalState, on_replica_mismatch: OnReplicaMismatch
) -> GlobalState:
    """As `compare_shards`, but only for values that are not cut like their parameter.

    Wrappers keep gradients equal, and so what an optimizer computes from them element by element. Other values can be anything,
    and a gather takes them from one rank. Without such values nothing is compared.
    """
    shared = []
    for fqn, param in global_state.params.items():
        summary = param.summary
        if summary is not None and not param.variants:
            if summary.opaque and param.placement.has_replicas:
                shared += [_Shared((fqn,), name, param.placement) for name, _ in summary.opaque]
            if summary.placed:
                shared += _placed_in(fqn, summary)
    return _compared(group, local, global_state, on_replica_mismatch, STATE, shared)


def _compared(
    group: RankGroup,
    local: Local,
    global_state: GlobalState,
    on_replica_mismatch: OnReplicaMismatch,
    what: str,
    shared: Sequence[_Shared],
) -> GlobalState:
    if not shared:
        return global_state
    leaders = [entry.leader(group.rank) for entry in shared]
    digests, failure = list[bytes](), Failure()
    with failure:
        digests = _digests(shared, local, group.rank)
    result = all_gather_bytes(group, "shards", b"".join(digests) if group.rank in leaders else b"", error=failure.error)
    # A rank sees only the differences of its own shards, so the ranks exchange them before any rank raises.
    differing = _differing(result, digests, leaders, group.rank)
    content = json.dumps(differing).encode() if differing else b""
    if all_equal(group, "shards compared", content) and not differing:
        return global_state
    by_shared: dict[int, list[int]] = {}
    for rank, report in zip(group.ranks, exchange_reports(group, content), strict=True):
        for index in json.loads(report) if report else ():
            by_shared.setdefault(index, []).append(rank)
    mismatches = [shared[index] for index in sorted(by_shared)]
    if on_replica_mismatch == "error":
        raise _error(global_state, mismatches, by_shared[min(by_shared)], what)
    fqns = tuple(dict.fromkeys(fqn for entry in mismatches for fqn in entry.fqns))
    warn_of_mismatch(group, fqns)
    return _with_lowest(global_state, mismatches)


def _shared_in(global_state: GlobalState) -> list[_Shared]:
    """Return the replicated parameters and values without a fingerprint in the reports, in the order of the model."""
    unprinted = {live.fqns[0]: live.fqns for live in global_state.live if live.fqns and not live.fingerprint}
    shared = []
    has_replicas: Callable[[Placement], bool] = once_each(attrgetter("has_replicas"))
    for fqn, param in global_state.params.items():
        if param.summary is None:
            continue
        if has_replicas(param.placement) and fqn in unprinted:
            shared.append(_Shared(unprinted[fqn], None, param.placement))
        if param.summary.placed:
            shared += _placed_in(fqn, param.summary)
    return shared


def _placed_in(fqn: str, summary: Summary) -> list[_Shared]:
    return [_Shared((fqn,), name, placement) for name, (_, placement) in summary.placed if placement.has_replicas]


def _differing(result: MeetingResult, digests: Sequence[bytes], leaders: Sequence[int | None], rank: int) -> list[int]:
    """Return the indices of the replicas whose digest on this rank differs from the digest of their leader."""
    other_leaders = {leader for leader in leaders if leader is not None} - {rank}
    leader_digests = {leader: result.content_of(leader) for leader in sorted(other_leaders)}
    return [
        index
        for index, (digest, leader) in enumerate(zip(digests, leaders, strict=True))
        if leader in leader_digests and digest != leader_digests[leader][index * _NBYTES : (index + 1) * _NBYTES]
    ]


def _error(global_state: GlobalState, differing: Sequence[_Shared], ranks: Sequence[int], what: str) -> StateError:
    """Return the error about the first difference. It names the ranks that hold the same shard as the first of `ranks`."""
    first = differing[0]
    leader = first.leader(ranks[0])
    others = tuple(rank for rank in ranks if first.leader(rank) == leader)
    names = first.value or (str(global_state.params[first.fqns[0]].summary) if what == STATE else what)
    more = list(dict.fromkeys(entry.fqns[0] for entry in differing[1:] if entry.fqns[0] != first.fqns[0]))
    return not_replicas(first.fqns[0], names, (leader,) if leader is not None else (), others, more)


def _with_lowest(global_state: GlobalState, differing: Sequence[_Shared]) -> GlobalState:
    """Return the merged state, with each differing replica assigned to its lowest rank."""
    params: dict[str, Param] = dict(global_state.params)
    for entry in differing:
        for fqn in entry.fqns:
            if fqn in params:
                params[fqn] = _on_lowest(params[fqn], entry.value)
    return replace(global_state, params=params)


def _on_lowest(param: Param, value: str | None) -> Param:
    if value is None:
        return structs.replace(param, placement=param.placement.on_lowest_ranks())
    if param.summary is None:
        return param
    placed = tuple(
        (name, (dtype, where.on_lowest_ranks() if name == value else where))
        for name, (dtype, where) in param.summary.placed
    )
    return structs.replace(param, summary=replace(param.summary, placed=placed))


def synchronize(group: RankGroup, optim: Optimizers) -> None:
    """Call `synchronize_for_checkpoint()` of the optimizers that have this method, as Dion does. Called by all ranks.

    The method may communicate, so all ranks first agree to call it.
    """
    listed = optim if isinstance(optim, (list, tuple)) else [optim]
    methods = [method for optimizer in listed if callable(method := getattr(innermost(optimizer), _METHOD, None))]
    if methods:
        agree(group, f"before {_METHOD}")
        for method in methods:
            method()
