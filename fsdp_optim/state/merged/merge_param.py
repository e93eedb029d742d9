"""The merge of several ranks' reports of one parameter, or an error that names the ranks whose reports differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from fsdp_optim.errors import StateError, shortened
from fsdp_optim.layout import Block, Boxes, Placement, RankSet, Whole
from fsdp_optim.layout.once import once_each
from fsdp_optim.layout.views import PlacedPart, live_placement, placement_of_part
from fsdp_optim.state.merged.global_state import Param
from fsdp_optim.state.merged.replicas import ELEMENTS, NAME_OF, STATE, format_ranks, not_replicas
from fsdp_optim.state.merged.reports import LiveParam
from fsdp_optim.state.values.kinds import is_known_moment
from fsdp_optim.state.values.summary import OpaqueType, Summary


class ReportedParam(NamedTuple):
    """One parameter in the report that the ranks `ranks` gave."""

    fqn: str
    live: LiveParam
    placement: Placement
    ranks: tuple[int, ...]

    @property
    def is_sure(self) -> bool:
        """Whether nothing is left to settle if all holders of the parameter give this report."""
        live, summary = self.live, self.live.summary
        return live.collected and (summary is None or not summary.unsure or live.what == ELEMENTS)


def sure_params(live: Iterable[LiveParam], ranks: RankSet, not_held: Set[str]) -> dict[str, Param]:
    """Return the parameters in the single report of all ranks that leave nothing to merge or settle: nearly all.

    `not_held`: the parameters of the model that are not in the optimizer.
    """

    def is_sure_at(placement: Placement) -> bool:
        return not placement.is_open and ranks.includes_holders_of(placement)

    sure: dict[str, Param] = {}
    others = set(not_held)
    is_sure = once_each(is_sure_at)
    for param in live:
        summary = param.summary
        if param.loose or not param.collected or (summary is not None and (summary.unsure or summary.placed)):
            others.update(param.fqns)
            continue
        for fqn, placement in zip(param.fqns, param.placements, strict=True):
            if fqn in sure or not is_sure(placement):
                others.add(fqn)
            else:
                sure[fqn] = Param(fqn, placement, param.group_index, summary)
    for fqn in others & sure.keys():
        del sure[fqn]
    return sure


def of_single_report(reports: list[ReportedParam], ranks: RankSet) -> Param | None:
    """Return the parameter, if a single report from all its holders leaves nothing to merge or settle; else None.

    `ranks`: the ranks that gave the first report.
    """
    first = reports[0]
    if len(reports) > 1 or not first.is_sure or not ranks.includes_holders_of(first.placement):
        return None
    placed = first.live.summary.placed if first.live.summary is not None else ()
    if not all(ranks.includes_holders_of(where) for _, (_, where) in placed):
        return None
    return Param(first.fqn, first.placement, first.live.group_index, first.live.summary)


def on_reporting_ranks(reports: list[ReportedParam]) -> list[ReportedParam]:
    """Give a parameter without a wrapper (of a pipeline stage, say) a placement on the ranks whose models have it."""
    ranks = tuple(sorted(rank for item in reports for rank in item.ranks))
    return [item._replace(placement=_whole_on(item.placement, ranks)) for item in reports]


def _whole_on(placement: Placement, ranks: tuple[int, ...]) -> Placement:
    live = Whole(live_placement(placement).shape, ranks)
    return placement_of_part(live, placement.part) if isinstance(placement, PlacedPart) else live


def all_listed(fqn: str, reports: list[ReportedParam]) -> list[ReportedParam]:
    """Give a parameter whose ranks list their own shards the placement with the shards of all ranks.

    Raises StateError where no rank lists some elements.
    """
    if len({item.placement.shape for item in reports}) > 1:
        return reports  # merge_param raises the error
    _check_unequal_lists(fqn, reports)
    listed = _merge_placements(reports)
    if not isinstance(listed, Boxes):
        return reports
    common = listed.partly_common() if listed.apart else None
    if common is not None:
        (first, first_box), (other, other_box) = common
        raise StateError(
            f"{fqn}: rank {first} has the slice {first_box.as_index} of the shape {list(listed.shape)}, and rank {other} the "
            f"slice {other_box.as_index}, which overlap: declare slices that are equal, or apart"
        )
    gap = listed.gap()
    if gap is not None and listed.apart:
        slices = [f"rank {rank} {_listed_boxes(blocks)}" for rank, blocks in listed.by_rank]
        raise StateError(
            f"{fqn}: the elements {gap[0]} to {gap[1] - 1} of {listed.numel}, of the shape {list(listed.shape)}, are in the "
            f"slice of no rank: {shortened(slices)}; give process_group= with all ranks that have slices of "
            "this parameter, or declare the missing slice"
        )
    if gap is not None:
        raise StateError(
            f"{fqn}: the elements {gap[0]} to {gap[1] - 1} of {listed.numel} are in no shard that {format_ranks(listed.ranks)} "
            f"{'list' if len(listed.ranks) > 1 else 'lists'}; give process_group= with all ranks that hold shards of this tensor"
        )
    return [item._replace(placement=listed.closed()) for item in reports]


def _check_unequal_lists(fqn: str, reports: list[ReportedParam]) -> None:
    """Raise StateError where two ranks list different slices for one rank."""
    known: dict[int, tuple[int, tuple[Block, ...]]] = {}
    for item in reports:
        if isinstance(item.placement, Boxes) and item.placement.apart:
            for rank, blocks in item.placement.by_rank:
                first, listed = known.setdefault(rank, (item.ranks[0], blocks))
                if listed != blocks:
                    raise StateError(
                        f"{fqn}: rank {rank} holds {_listed_boxes(listed)} as rank {first} declares it, and "
                        f"{_listed_boxes(blocks)} as rank {item.ranks[0]} does: declare the same slice on all ranks over which a "
                        "wrapper has sharded it"
                    )


def _listed_boxes(blocks: Sequence[Block]) -> str:
    return " and ".join(block.box.as_index for block in blocks) or "nothing"


def merge_param(reports: list[ReportedParam], *, take_lowest_rank: bool) -> Param:
    """Merge several ranks' reports of one parameter."""
    first = reports[0]
    for other in reports[1:]:
        if other.placement.shape != first.placement.shape:
            raise StateError(
                f"{first.fqn}: shape {list(first.placement.shape)} on {format_ranks(first.ranks)}, "
                f"{list(other.placement.shape)} on {format_ranks(other.ranks)}{NAME_OF}"
            )
        if other.live.group_index != first.live.group_index:
            if first.live.what == ELEMENTS:
                raise StateError(
                    f'{first.fqn}: weights="trainable" takes this parameter on one of {format_ranks(first.ranks)} and '
                    f"{format_ranks(other.ranks)} only: requires_grad must be the same on all ranks"
                )
            raise StateError(
                f"{first.fqn}: in param group {first.live.group_index} on {format_ranks(first.ranks)}, in group "
                f"{other.live.group_index} on {format_ranks(other.ranks)}"
            )
    reports = settled(reports)
    first = reports[0]
    if not all(item.live.collected for item in reports):
        variants = tuple({item.placement: item.live.summary for item in reports}.items())
        return Param(first.fqn, first.placement, first.live.group_index, first.live.summary, variants)
    placement = _merge_placements(reports)
    _check_all_holders_report(first.fqn, placement, reports)
    reports = _with_common_places(reports)
    if take_lowest_rank:
        placement = placement.on_lowest_ranks()
        reports = [item for item in reports if not set(item.ranks).isdisjoint(placement.ranks)]
        return Param(first.fqn, placement, first.live.group_index, _merge_summaries(placement, reports))
    summary = _merge_summaries(placement, reports)  # before the fingerprints, because its errors say more
    _check_replicas_are_equal(reports)
    return Param(first.fqn, placement, first.live.group_index, summary)


def _merge_placements(reports: list[ReportedParam]) -> Placement:
    by_placement = {item.placement: item for item in reversed(reports)}
    first, *others = dict.fromkeys(item.placement for item in reports)
    joined: Placement | None = first
    for other in others:
        joined = joined.join(other) if joined is not None else None
        if joined is None:
            hint = NAME_OF if set(first.ranks).isdisjoint(other.ranks) else ". Is the model wrapped alike on all ranks?"
            raise StateError(
                f"{reports[0].fqn}: {first} to {format_ranks(by_placement[first].ranks)}, and {other} to "
                f"{format_ranks(by_placement[other].ranks)}{hint}"
            )
    return joined or first


def _with_common_places(reports: list[ReportedParam]) -> list[ReportedParam]:
    """Give each value that records its own placement one placement in all reports: on all its ranks, in all replicas.

    Raises StateError where the placements of ranks contradict each other, or name ranks that do not report the value.
    """
    places_by_name: dict[str, list[tuple[Placement, tuple[int, ...]]]] = {}
    for item in reports:
        for name, (_, where) in item.live.summary.placed if item.live.summary is not None else ():
            places_by_name.setdefault(name, []).append((where, item.ranks))
    common = {name: _common_place(f"{reports[0].fqn}: {name}", places) for name, places in places_by_name.items()}
    if all(where is common[name] for name, places in places_by_name.items() for where, _ in places):
        return reports
    return [
        item._replace(live=structs.replace(item.live, summary=_placed_at(item.live.summary, common)))
        for item in reports
    ]


def _placed_at(summary: Summary | None, places: Mapping[str, Placement]) -> Summary | None:
    if summary is None:
        return None
    return replace(summary, placed=tuple((name, (dtype, places[name])) for name, (dtype, _) in summary.placed))


def _common_place(what: str, places: Sequence[tuple[Placement, tuple[int, ...]]]) -> Placement:
    (joined, first_ranks), *others = places
    for where, ranks in others:
        both = joined if where == joined else joined.join(where)
        if both is None:
            raise StateError(
                f"{what} is {joined} on {format_ranks(first_ranks)} and {where} on {format_ranks(ranks)}: make the DTensor "
                "alike on all ranks, on one mesh, or on meshes of one shape with the complete value on each"
            )
        joined = both
    reporting = {rank for _, ranks in places for rank in ranks}
    silent = tuple(rank for rank in joined.ranks if rank not in reporting and joined.numel_on(rank))
    if silent:
        raise StateError(
            f"{what} is {joined} and {format_ranks(silent)} should have a part of it, but only "
            f"{ranks_have(tuple(sorted(reporting)))} this value in the call: make the call on all ranks of the mesh, and give "
            "process_group= if nothing else in the model shows them"
        )
    return joined


def _replicas(reports: list[ReportedParam]) -> Iterator[tuple[ReportedParam, ReportedParam]]:
    """Yield pairs (first report of a shard, report of the same shard), for every report."""
    first: dict[int, ReportedParam] = {}
    for item in reports:
        for rank in item.ranks:
            shard = item.placement.shard_of(rank)
            if shard is not None and not _is_nothing(item.placement, shard):
                yield first.setdefault(shard, item), item


def _is_nothing(placement: Placement, shard: int) -> bool:
    """Return whether a listed shard has no elements, as several ranks may have of different slices, without being replicas."""
    return isinstance(placement, Boxes) and not placement.blocks(shard)


def _prints_agree(first: ReportedParam, other: ReportedParam) -> bool:
    """Return whether the fingerprints of two reports are equal, or one report has none."""
    prints = {first.live.fingerprint, other.live.fingerprint} - {""}
    return len(prints) < 2


def replicas_differ(reports: list[ReportedParam]) -> bool:
    """Return whether ranks that hold the same shard of a parameter have different elements or scalars of its state."""
    return len(reports) > 1 and any(
        not _prints_agree(first, other)
        or (first.live.summary and first.live.summary.scalars) != (other.live.summary and other.live.summary.scalars)
        for first, other in _replicas(reports)
    )


def _check_replicas_are_equal(reports: list[ReportedParam]) -> None:
    """Raise StateError where two ranks have different elements for the same shard, so that they do not hold replicas."""
    for first, other in _replicas(reports) if len(reports) > 1 else ():
        if not _prints_agree(first, other):
            is_state = first.live.what == STATE
            what = (first.live.summary or other.live.summary) if is_state else first.live.what
            raise not_replicas(first.fqn, str(what), first.ranks, other.ranks)


def _check_all_holders_report(fqn: str, placement: Placement, reports: list[ReportedParam]) -> None:
    reporting = {rank for item in reports for rank in item.ranks}
    silent = [r for r in placement.ranks if r not in reporting and placement.numel_on(r)]
    if silent:
        raise StateError(
            f"{fqn}: {format_ranks(tuple(silent))} should hold a part of this parameter, but found no such parameter in the "
            f"model and optimizer; {ranks_have(tuple(sorted(reporting)))} one. Is the model built and wrapped alike on all ranks?"
        )


def _merge_summaries(placement: Placement, reports: list[ReportedParam]) -> Summary | None:
    """Return the common summary. A rank that holds no element of the parameter may have no state for it."""
    if len(reports) == 1:
        return reports[0].live.summary
    holding = [item for item in reports if any(placement.numel_on(rank) for rank in item.ranks)] or reports
    compare_holders(holding)
    return holding[0].live.summary


def compare_holders(holding: list[ReportedParam]) -> None:
    """Raise StateError where two of the ranks that hold a parameter have different kinds of state for it."""
    first = holding[0]
    for other in holding[1:]:
        a, b = first.live.summary, other.live.summary
        if a is None or b is None:
            if a is not b:
                has, lacks = (first, other) if b is None else (other, first)
                raise StateError(
                    f"{first.fqn}: {ranks_have(has.ranks)} {has.live.summary}, {ranks_have(lacks.ranks)} no state; "
                    "did all ranks step, or load, the optimizer?"
                )
            continue
        _compare(first, a, other, b)


def settled(reports: list[ReportedParam]) -> list[ReportedParam]:
    """Give each value one kind in all reports, where ranks classified it differently or were unsure.

    A value that has the shape of the local part on some ranks only does not follow the parameter. Elements of parameters and
    buffers are not settled: they are what the shape is of, and no evidence is needed where ranks hold at most one of them.
    """
    if reports[0].live.what == ELEMENTS:
        return reports
    summaries = [item.live.summary for item in reports if item.live.summary is not None]
    if not any(summary.unsure for summary in summaries) and len({summary.sharded for summary in summaries}) < 2:
        return reports
    sure = {name for s in summaries for name, _ in s.sharded if name not in s.unsure}
    unsure = {name for s in summaries for name in s.unsure}
    other = {
        name
        for s in summaries
        for name, opaque in s.opaque
        if opaque.class_name == "Tensor" and not is_known_moment(name)
    }
    apart = (unsure - sure) | (other & (sure | unsure))
    return [
        item._replace(live=structs.replace(item.live, summary=item.live.summary.as_opaque(apart)))
        if item.live.summary is not None
        else item
        for item in reports
    ]


def _of_any_rank(description: object) -> object:
    """Return the description of a value without the shape of an opaque tensor, which may differ between ranks."""
    return replace(description, shape=()) if isinstance(description, OpaqueType) else description


def _compare(first: ReportedParam, a: Summary, other: ReportedParam, b: Summary) -> None:
    on_first, on_other = (
        {name: _of_any_rank(description) for name, description in s.everything.items()} for s in (a, b)
    )
    for name in {**on_first, **on_other}:
        if name not in on_first or name not in on_other or on_first[name] != on_other[name]:
            raise StateError(
                f"{first.fqn}: {name} is {_shown(on_first.get(name, 'absent'))} on {format_ranks(first.ranks)} and "
                f"{_shown(on_other.get(name, 'absent'))} on {format_ranks(other.ranks)}"
                f"{NAME_OF if first.placement != other.placement else ''}"
            )


def _shown(description: object) -> str:
    """Return a description as an error shows it; for a DTensor with its own cut, the dtype and placement."""
    return " ".join(map(str, description)) if isinstance(description, tuple) else str(description)


def ranks_have(ranks: tuple[int, ...]) -> str:
    """Return `rank 3 has`, `ranks 0, 1 have`."""
    return f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"
