"""The beginning of every call: read this rank's model and optimizer, and agree with the other ranks on the merged state."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fsdp_optim.adapters import ModelReader
from fsdp_optim.arguments import Arguments
from fsdp_optim.canonical import IsWhole
from fsdp_optim.errors import StateError, counted_noun, shortened
from fsdp_optim.layout import OnMesh, Placement, Shape
from fsdp_optim.layout.views import live_placement
from fsdp_optim.options import CallArguments, Model, OnReplicaMismatch
from fsdp_optim.saying import speed_of
from fsdp_optim.state.dicts.names import Names
from fsdp_optim.state.dicts.order import Counted, OrderedParam, count
from fsdp_optim.state.live.fitting import LiveOptimizer
from fsdp_optim.state.live.fused import check_follows
from fsdp_optim.state.live.local import LocalOptim, LocalParam, Optimizers
from fsdp_optim.state.live.optimizer_reader import read_optimizer
from fsdp_optim.state.merged.global_state import GlobalState
from fsdp_optim.state.merged.merge_reports import merge_reports
from fsdp_optim.state.merged.prints import Placements, ReplicaPrints
from fsdp_optim.state.merged.replicas import ELEMENTS, STATE
from fsdp_optim.state.merged.reports import LiveParam, RankReport
from fsdp_optim.state.values.same import Incomparable, fingerprint_of, key_of, same
from fsdp_optim.state.values.summary import Summary
from fsdp_optim.tensors.elements import check_no_fake_mode
from fsdp_optim.transport.agree import agree, all_equal, all_hear, exchange_reports, in_turn
from fsdp_optim.transport.base import RankGroup, World
from fsdp_optim.transport.failure import RANK_ERRORS, Failure, is_interrupt
from fsdp_optim.transport.world import world_here
from fsdp_optim.verbs.arguments import check_model, check_optimizers
from fsdp_optim.verbs.joint_steps import warn_of_joint_steps
from fsdp_optim.verbs.known_to_all import with_all_listed, with_all_names
from fsdp_optim.verbs.seen import seen_by
from fsdp_optim.view import Handle, ModelView, ModuleValues, check_materialized

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class Local:
    """This rank's model and optimizer."""

    view: ModelView
    optim: LocalOptim
    module_values: ModuleValues = field(default_factory=ModuleValues)

    @cached_property
    def by_fqn(self) -> dict[str, LocalParam]:
        return {fqn: param for param in self.optim.params for fqn in param.named.fqns}

    @property
    def with_state(self) -> frozenset[str]:
        """The original parameters that have state in the live optimizer."""
        return frozenset(fqn for fqn, param in self.by_fqn.items() if param.state is not None)

    @property
    def stateless(self) -> tuple[str, ...]:
        """The original parameters without state, except parameters that the wrapper skips on this rank.

        Also where this rank has no state at all: other ranks may have state of other parameters (pipeline stages).
        """
        without = [p.named for p in self.optim.params if p.state is None and not p.named.handle.skipped]
        return tuple([fqn for named in without for fqn in named.fqns])

    @property
    def shapes(self) -> dict[str, Shape]:
        return {fqn: p.shape for param in self.optim.params for fqn, p in param.named.placements.items()}

    @property
    def order(self) -> tuple[str, ...]:
        """The optimizer's original parameters in the order of the unwrapped model."""
        return tuple(fqn for fqn in self.view.order if fqn in self.by_fqn)

    @cached_property
    def counted(self) -> tuple[Counted, ...]:
        """The original parameters of each group, in the order of ids."""
        in_groups: list[list[OrderedParam]] = [[] for _ in self.optim.groups]
        for param in self.optim.params:
            in_groups[param.group_index].append(OrderedParam(self.view.position_of(param.named), param.named.fqns))
        return tuple(count(listed, self.view.place_of, self.view.mixed) for listed in in_groups)

    @property
    def names(self) -> Names:
        """The names and ids of this model's and optimizer's parameters in full dicts."""
        units = tuple(param.named.fqns for param in self.optim.params)
        return Names.of(self.counted, self.view, units, self.order)

    def live_optimizer(self, global_state: GlobalState | None = None) -> LiveOptimizer:
        """Return the optimizer that a full state must fit: as this rank sees it or, given the merged state, as all ranks do."""
        if global_state is None:
            places = {fqn: place for param in self.optim.params for fqn, place in param.named.placements.items()}
            live = self.with_state, self.optim.values_by_class, _on_mesh(places)
            fused = tuple(param.named.fqns for param in self.optim.params if param.handle.fused)
            return LiveOptimizer(self.optim, self.names, self.shapes, *live, fused=fused)
        shapes = {fqn: param.placement.shape for fqn, param in global_state.params.items()}
        names = names_of_global_state(global_state, self.view)
        on_mesh = _on_mesh({fqn: param.placement for fqn, param in global_state.params.items()})
        fused = tuple(live.fqns for live in global_state.live if live.fused)
        of_all = global_state.with_state, global_state.values, on_mesh
        return LiveOptimizer(self.optim, names, shapes, *of_all, fused=fused)


def _on_mesh(places: Mapping[str, Placement]) -> frozenset[str]:
    return frozenset(fqn for fqn, place in places.items() if isinstance(live_placement(place), OnMesh))


def read_local(
    reader: ModelReader,
    optim: Optimizers,
    options: CallArguments,
    ranks: tuple[int, ...] | None = None,
    is_whole: IsWhole | None = None,
) -> Local:
    """Read the model and the optimizer on this rank. No communication. `is_whole`: as for `seen_through`."""
    check_optimizers(optim)
    view = reader.read(ranks, options.name_of, optim)
    check_materialized(view.handles, view.rank)
    view = seen_by(reader, view, options, (*reader.buffer_fqns, *options.fused) if options.views else (), is_whole)
    if options.collect == "all":
        view = replace(view, handles=tuple([named.with_all_collected() for named in view.handles]))
    local = Local(view, read_optimizer(optim, view))
    warn_of_joint_steps(local.optim, leads=bool(options.views) and view.rank == view.ranks[0])
    return local


def log_summary(
    done: str, summaries: Mapping[str, Summary | None], values: Mapping[Any, object], begun: float, rank: int
) -> None:
    """Log one line about a call that began at `begun` of `time.monotonic`: parameters, tensors, bytes on this rank, the speed."""
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    absent = [fqn for fqn, summary in summaries.items() if summary is None]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    log.info(
        "%s the optimizer state of %s: %s, %d bytes on rank %d, in %s; without state: %s",
        done,
        counted_noun(len(summaries), "parameter"),
        counted_noun(len(tensors), "tensor"),
        nbytes,
        rank,
        speed_of(nbytes, begun),
        shortened(absent) or "none",
    )


def names_of_global_state(global_state: GlobalState, view: ModelView) -> Names:
    """Return the names and ids of the parameters of all ranks together in full dicts."""
    units = tuple(live.fqns for live in global_state.live)
    return Names.of(global_state.counted, view, units, tuple(global_state.params))


@contextmanager
def collective_call(
    call: str, models: Sequence[Model], asked: Arguments, options: CallArguments, *, all_of_plain: bool = False
) -> Iterator[tuple[list[ModelReader], RankGroup]]:
    """Run a public call about some models. Yields readers of the models, and the ranks that make the call.

    An error in the arguments, and every error raised inside the block, is raised on all ranks when they next agree.

    Args:
        call: the name of the public function.
        asked: the arguments of the call, which ranks compare.
        options: the options of `asked` that say which ranks make the call.
        all_of_plain: for a model without a wrapper, all ranks of the job make the call. False: this rank makes it alone.
    """
    readers, group = _read_callers(call, models, options, all_of_plain=all_of_plain)
    with in_turn(group), all_hear(group):
        asked.validate()
        yield readers, group


def _read_callers(
    call: str, models: Sequence[Model], options: CallArguments, *, all_of_plain: bool
) -> tuple[list[ModelReader], RankGroup]:
    world = world_here()
    try:
        check_no_fake_mode()
        for model in models:
            check_model(model)
        readers = [ModelReader(model, world.rank) for model in models]
        if options.process_group is not None:
            ranks: Iterable[int] = world.ranks_of(options.process_group)
        elif any(reader.is_staged for reader in readers):
            ranks = range(world.size)  # nothing in a stage shows the ranks of the other stages
        elif all_of_plain and not any(reader.is_wrapped for reader in readers):
            ranks = range(world.size)
        else:
            ranks = {rank for reader in readers for rank in reader.ranks}
        return readers, _group(world, options, call, tuple(ranks))
    except RANK_ERRORS as error:
        if world.is_initialized:  # the ranks of the call are unknown, so the error goes to all ranks of the job
            agree(
                _group(world, replace(options, process_group=None), call, range(world.size)),
                "failed",
                error,
                fatal=is_interrupt(error),
            )
        raise


def _group(world: World, options: CallArguments, call: str, ranks: Sequence[int]) -> RankGroup:
    return world.group(call, ranks, options.process_group, options.seconds, options.bucket_nbytes)


def agree_on_state(
    group: RankGroup,
    read: Callable[[], Local],
    asked: Arguments,
    more: str = "",
    *,
    with_state: bool,
    on_replica_mismatch: OnReplicaMismatch = "error",
    every_replica: bool = False,
    what: str = STATE,
) -> tuple[Local, GlobalState]:
    """Read this rank's part, exchange reports, and merge them. An error on any rank is raised on all ranks.

    Args:
        more: a description of the call besides its arguments, which ranks compare.
        every_replica: also compare replicas that a wrapper keeps equal, because a save writes a part of each.
        what: the name of the compared values in errors.
    """
    local, failure, report = None, Failure(), RankReport("")
    with failure:
        local = read()
        call = ", ".join(part for part in (more, asked.compared_text()) if part)
        report = _report(
            local,
            f"{group.turn.call}({call})",
            group,
            with_state=with_state,
            every_replica=every_replica,
            what=what,
        )
    is_equal = all_equal(group, "read", report.text().encode(), failure.error)
    if local is None:  # compare() has raised
        raise RuntimeError("unreachable: a rank without a model cannot agree")
    if is_equal:
        global_state = merge_reports([(report, group.ranks)])
        return _known_to_all(local, global_state), global_state
    content = b""
    with failure:
        content = pickle.dumps(report)
    ranks_of: dict[bytes, list[int]] = {}
    for rank, pickled in zip(group.ranks, exchange_reports(group, content, failure.error), strict=True):
        ranks_of.setdefault(pickled, []).append(rank)
    by_ranks = [(pickle.loads(pickled), tuple(ranks)) for pickled, ranks in ranks_of.items()]
    global_state = merge_reports(by_ranks, take_lowest_rank=on_replica_mismatch == "lowest_rank")
    warn_of_mismatch(group, global_state.mismatched)
    return _known_to_all(local, global_state), global_state


def _known_to_all(local: Local, global_state: GlobalState) -> Local:
    """Return `local` with what only other ranks have known of the model."""
    view, optim = with_all_listed(with_all_names(local.view, global_state), local.optim, global_state)
    return local if view is local.view else replace(local, view=view, optim=optim)


def warn_of_mismatch(group: RankGroup, fqns: Sequence[str]) -> None:
    """Log, on the lowest rank, the parameters whose replicas differ and are taken from the lowest rank."""
    if fqns and group.rank == group.ranks[0]:
        log.warning(
            "the replicas of %s differ between ranks; the replica of the lowest rank is used: %s",
            counted_noun(len(fqns), "parameter"),
            shortened(fqns),
        )


def _report(
    local: Local, call: str, group: RankGroup, *, with_state: bool, every_replica: bool, what: str
) -> RankReport:
    optim = local.optim
    summaries = optim.summaries if with_state else (None,) * len(optim.params)
    for param, summary in zip(optim.params, summaries, strict=True):
        if param.named.handle.fused:
            check_follows(param, summary)
    placements = [_placements_of(param.named.handle) for param in optim.params]
    prints: Iterable[str] = [""] * len(placements)
    if with_state and len(group.ranks) > 1:
        prints = ReplicaPrints(group.rank, group.ranks, every_replica=every_replica).of_each(optim.params, placements)
    params = [
        _live_param(param, where, summary, fingerprint, what)
        for param, where, summary, fingerprint in zip(optim.params, placements, summaries, prints, strict=True)
    ]
    return RankReport(
        call=call,
        order=local.order,
        params=tuple(params),
        groups=tuple(
            _compared_values(f"param group {index}", values, group) if with_state else ()
            for index, values in enumerate(optim.groups)
        ),
        other_keys=_compared_values("the optimizer", optim.other_keys, group) if with_state else (),
        counted=local.counted,
        model_order=local.view.order if any(fqn not in local.by_fqn for fqn in local.view.order) else (),
        classes=optim.classes,
        values=()
        if with_state
        else tuple((name, tuple(sorted(values))) for name, values in sorted(optim.values_by_class.items())),
        stateless=() if with_state else local.stateless,
        module_values=_module_values(local.module_values, group, with_state=with_state),
        extra_state_loaders=tuple(local.module_values.extra_state_loaders),
        unmatched=local.view.unmatched,
        views=local.view.seen_through,
        aliases=tuple(local.view.aliases.items()),
        buffers=_buffers_of(local) if with_state and what == ELEMENTS else (),
    )


def _buffers_of(local: Local) -> tuple[str, ...]:
    is_buffer = [not isinstance(named.handle.param, torch.nn.Parameter) for named in local.view.handles]
    return tuple([fqn for named in itertools.compress(local.view.handles, is_buffer) for fqn in named.fqns])


def _module_values(local: ModuleValues, group: RankGroup, *, with_state: bool) -> tuple[tuple[str, str], ...]:
    """Return a fingerprint of each value by FQN, which only a save needs; empty for other calls."""
    prints = []
    for fqn, live in local.values.items():
        if with_state and not all(same(live.value, twin.value) for twin in live.stage_copies):
            raise StateError(
                f"{fqn}: {len(live.stage_copies) + 1} pipeline stages of this rank have this entry of state_dict(), and the "
                "entries differ: make them equal, or give name_of= that tells them apart"
            )
        try:
            prints.append((fqn, fingerprint_of(live.value) if with_state and len(group.ranks) > 1 else ""))
        except Incomparable as error:
            raise StateError(f"{fqn}: {error}, so ranks cannot check that all have the same value") from None
    return tuple(prints)


def _compared_values(where: str, values: Mapping[str, Any], group: RankGroup) -> tuple[tuple[str, str], ...]:
    """Return values that must be equal on all ranks, each as a string that is equal only for equal values."""
    keys = []
    for key, value in values.items() if len(group.ranks) > 1 else ():
        try:
            keys.append((str(key), key_of(value)))
        except Incomparable as error:
            raise StateError(
                f"{where}: {key}: {error}, so ranks cannot check that all have the same value: keep it out of state_dict()"
            ) from None
    return tuple(keys)


def _placements_of(handle: Handle) -> Placements:
    originals = handle.originals
    return (originals[0].placement,) if len(originals) == 1 else tuple([each.placement for each in originals])


def _live_param(
    param: LocalParam, placements: Placements, summary: Summary | None, fingerprint: str, what: str
) -> LiveParam:
    named = param.named
    handle = named.handle
    return LiveParam(
        fqns=named.fqns,
        placements=placements,
        group_index=param.group_index,
        num_padded=handle.num_padded,
        collected=handle.collected,
        summary=summary,
        what=what,
        fingerprint=fingerprint,
        loose=handle.loose,
        fused=handle.fused,
    )
