"""Transfer: move state from one live optimizer to another in the same job, without a full copy anywhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import OnMesh, Placement, cut_of
from fsdp_optim.options import CallArguments, Model
from fsdp_optim.results.calls import Incompatible
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.live.fit_check import LIVE_GROUPS, Fit
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.state.merged.global_state import GlobalState, Param
from fsdp_optim.state.merged.reports import LiveParam
from fsdp_optim.state.values.opaque import cuts_of
from fsdp_optim.state.values.summary import OpaqueType, Summary
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import Local, agree_on_state, collective_call, read_local
from fsdp_optim.verbs.ends import LiveEnd
from fsdp_optim.verbs.gather import Gathering, move_unsharded
from fsdp_optim.verbs.load_state import LoadableOptimizer, load_on_all
from fsdp_optim.verbs.replicas import compare_unsharded, synchronize
from fsdp_optim.verbs.scatter import FullContents, deliver


def transfer(
    src_model: Model,
    src_optim: Optimizers,
    dst_model: Model,
    dst_optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    options: CallArguments,
) -> Incompatible:
    """Load the state of one live optimizer into another, whatever wraps their models."""
    with collective_call("transfer_optim_state", [src_model, dst_model], options, options) as ((src, dst), group):
        return _transfer(src, src_optim, dst, dst_optim, group, options)


def _transfer(
    src: ModelReader,
    src_optim: Optimizers,
    dst: ModelReader,
    dst_optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    group: RankGroup,
    options: CallArguments,
) -> Incompatible:
    everything = replace(options, collect="all")
    synchronize(group, src_optim)
    local, global_state = agree_on_state(
        group,
        lambda: read_local(src, src_optim, everything, group.ranks),
        options,
        "from",
        with_state=True,
        on_replica_mismatch=options.on_replica_mismatch,
    )
    global_state = compare_unsharded(group, local, global_state, options.on_replica_mismatch)
    dst_local, dst_state = agree_on_state(
        group,
        lambda: read_local(dst, dst_optim, everything, group.ranks),
        options,
        "to",
        with_state=False,
    )
    regroup = bool(dst_local.optim.optimizers) or options.param_groups == "live"
    _check_same(global_state, dst_state, strict=options.strict, regroup=regroup)
    live = replace(dst_local.live_optimizer(dst_state), with_state=frozenset())
    full, fit = live.fit(_described(local, global_state), strict=options.strict, groups=options.param_groups)
    source = LiveEnd(local, _places(global_state))
    contents = _contents(group, local, _following_params(global_state, dst_state), dst_state, full, fit)
    shard = deliver(group, dst_local, dst_state, contents, source)
    return load_on_all(group, dst_optim, shard)


def _places(global_state: GlobalState) -> dict[tuple[str, str], Placement]:
    """Return the placements of the source's sharded and placed values, by FQN and name."""
    places = {}
    for fqn, param in global_state.params.items():
        if param.summary is not None:
            places.update({(fqn, name): param.placement for name, _ in param.summary.sharded})
            places.update({(fqn, name): placement for name, (_, placement) in param.summary.placed})
    return places


def _following_params(src: GlobalState, dst: GlobalState) -> GlobalState:
    """Return the merged state of the source, with placed values cut like their parameters where the target has these off a mesh.

    The same rule as `following_params` of full dicts.
    """
    params = dict(src.params)
    for fqn, param in src.params.items():
        target = dst.params.get(fqn)
        if target is not None and param.summary is not None and not isinstance(target.placement, OnMesh):
            follows = {name for name, (_, where) in param.summary.placed if where.shape == target.placement.shape}
            params[fqn] = structs.replace(param, summary=param.summary.as_sharded(follows)) if follows else param
    return replace(src, params=params)


def _described(local: Local, global_state: GlobalState) -> FullState:
    """Return the state of the source without its values: the names of values, the groups, and the classes of optimizers."""
    return FullState(
        state={fqn: dict.fromkeys(p.summary.names) for fqn, p in global_state.params.items() if p.summary is not None},
        groups=tuple((group, global_state.group_fqns(index)) for index, group in enumerate(local.optim.groups)),
        other_keys=local.optim.other_keys,
        classes=tuple(known.name for known in local.optim.classes),
    )


def _check_same(src: GlobalState, dst: GlobalState, *, strict: bool, regroup: bool) -> None:
    """Raise StateError, the same on all ranks, unless both models have the same parameters, shapes and groups."""
    if src.num_groups != dst.num_groups and not regroup:
        raise StateError(
            f"the source optimizer has {counted_noun(src.num_groups, 'param group')}, the target {dst.num_groups}: {LIVE_GROUPS}"
        )
    for fqn in (*src.params, *dst.params):
        a, b = src.params.get(fqn), dst.params.get(fqn)
        if a is None or b is None:
            if not strict:
                continue
            has, lacks = ("source", "target") if b is None else ("target", "source")
            raise StateError(
                f"{fqn}: the {has} model's optimizer has this parameter, the {lacks} model's does not "
                f"({counted_noun(len(src.params), 'parameter')} in "
                f"the source, {len(dst.params)} in the target): build both for the same parameters, or give strict=False, which "
                "transfers the parameters that both have"
            )
        if a.placement.shape != b.placement.shape:
            raise StateError(
                f"{fqn}: shape {list(a.placement.shape)} in the source, {list(b.placement.shape)} in the target"
            )
        if a.group_index != b.group_index and not regroup:
            raise StateError(
                f"{fqn}: in param group {a.group_index} of the source, in group {b.group_index} of the target: {LIVE_GROUPS}"
            )


def _contents(
    group: RankGroup, local: Local, global_state: GlobalState, dst: GlobalState, full: FullState, fit: Fit
) -> FullContents:
    """Return the contents of the source, known to all ranks. Unsharded values are moved to the ranks that need them."""
    failure = Failure()
    everywhere = Gathering(group, local, global_state, group.ranks)
    sources, targets = _by_first_fqn(global_state), _by_first_fqn(dst)
    unsharded = move_unsharded(
        everywhere, lambda fqn: _needs(dst.params.get(fqn), sources.get(fqn, []), targets.get(fqn, [])), failure
    )
    agree(group, "opaque values", failure.error, fatal=failure.fatal)
    return FullContents(
        summaries={
            fqn: _as_arrived(fqn, _only(global_state.params[fqn].summary or Summary(), values), unsharded)
            for fqn, values in full.state.items()
        },
        groups=full.groups,
        other_keys=full.other_keys,
        opaque=unsharded,
        fit=fit,
        is_own=True,
    )


def _by_first_fqn(global_state: GlobalState) -> dict[str, list[LiveParam]]:
    """Return the live parameters by the FQN of their first original."""
    by_fqn: dict[str, list[LiveParam]] = {}
    for live in global_state.live:
        by_fqn.setdefault(live.fqns[0], []).append(live)
    return by_fqn


def _needs(
    param: Param | None, sources: Sequence[LiveParam], targets: Sequence[LiveParam]
) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """Return the ranks that need a parameter's unsharded values and, if both models cut it equally, the ranks by shard."""
    places = [param.placement, *(place for place, _ in param.variants)] if param is not None else []
    ranks = tuple(sorted({rank for place in places for rank in place.ranks}))
    if not sources or not targets or len({cuts_of(live.placements) for live in (*sources, *targets)}) != 1:
        return ranks, {}
    by_shard: dict[int, tuple[int, ...]] = dict.fromkeys(range(sources[0].placements[0].num_shards), ())
    for rank in ranks:
        for shard in {place.shard_of(rank) for place in places} - {None}:
            by_shard[shard] += (rank,)  # type: ignore[index]
    return ranks, by_shard


def _only(summary: Summary, names: Collection[str]) -> Summary:
    """Return the summary of some of the values."""
    kept = {
        field: tuple(entry for entry in getattr(summary, field) if entry[0] in names)
        for field in ("sharded", "scalars", "placed", "opaque")
    }
    return replace(summary, **kept, names=tuple(name for name in summary.names if name in names))


def _as_arrived(fqn: str, summary: Summary, unsharded: Mapping[tuple[str, str], Any]) -> Summary:
    """Return the summary of a parameter after its unsharded values have arrived.

    Placed values arrive unsharded, and the target cuts them. The opaque values of a flat parameter belong to its first original.
    """
    opaque = tuple(
        (name, OpaqueType.of(unsharded[fqn, name])) for name, _ in summary.opaque if (fqn, name) in unsharded
    )
    arrived = tuple(
        (name, OpaqueType("Tensor", dtype, placement.shape, cut_of(placement)))
        for name, (dtype, placement) in summary.placed
    )
    return replace(summary, placed=(), opaque=(*opaque, *arrived))
