"""Fused parameters that Views take apart: their ranks must agree on the whole, though each may hold other parts of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from msgspec import structs

from fsdp_optim.errors import StateError
from fsdp_optim.layout import Placement
from fsdp_optim.layout.views import PlacedPart
from fsdp_optim.state.merged.merge_param import ReportedParam, compare_holders, settled
from fsdp_optim.state.merged.replicas import format_ranks
from fsdp_optim.state.merged.reports import LiveParam, ReportsByRanks


def check_fused(reports: ReportsByRanks, *, take_lowest_rank: bool) -> None:
    """Refuse a fused parameter whose state differs between ranks: its scalars, dtypes and values, and whether it has any.

    No rank may hold two of its parts, so that a comparison part by part would see nothing.

    `take_lowest_rank`: of replicas, only the lowest rank's count.
    """
    if len(reports) < 2:
        return
    by_name: dict[str, list[tuple[ReportedParam, tuple[Placement, ...]]]] = {}
    for report, ranks in reports:
        for param in report.params:
            for name, places in _fused_in(param) if param.fused and param.collected else ():
                by_name.setdefault(name, []).append((ReportedParam(name, param, places[0], ranks), places))
    for name, listed in by_name.items():
        if len({(item.live.summary, item.live.group_index) for item, _ in listed}) < 2:
            continue
        holding = [item for item, places in listed if _holds(item.ranks, places, take_lowest_rank=take_lowest_rank)]
        if not holding:
            continue
        for other in holding[1:]:
            _check_group(name, holding[0], other)
        compare_holders(list(map(_without_places, settled(holding))))


def _check_group(name: str, first: ReportedParam, other: ReportedParam) -> None:
    if other.live.group_index != first.live.group_index:
        raise StateError(
            f"{name}: in param group {first.live.group_index} on {format_ranks(first.ranks)}, in group "
            f"{other.live.group_index} on {format_ranks(other.ranks)}"
        )


def _fused_in(param: LiveParam) -> Iterator[tuple[str, tuple[Placement, ...]]]:
    """Yield each fused parameter that Views have taken apart, with the placements of its parts."""
    if len(param.fused) == 1 and not any(isinstance(place, PlacedPart) for place in param.placements):
        yield param.fused[0], param.placements  # listed: a flat parameter has no such parts
        return
    names, places = iter(param.fused), list[Placement]()
    left = 0
    for place in param.placements:
        if isinstance(place, PlacedPart):
            left = (left or prod(place.live.shape)) - prod(place.shape)
            places.append(place)
            if not left:
                yield next(names), tuple(places)
                places = []


def _holds(ranks: tuple[int, ...], places: tuple[Placement, ...], *, take_lowest_rank: bool) -> bool:
    counting = [place.on_lowest_ranks() for place in places] if take_lowest_rank else places
    return any(place.numel_on(rank) for place in counting for rank in ranks)


def _without_places(item: ReportedParam) -> ReportedParam:
    """Return a report without the placements of values, which are merged part by part."""
    summary = item.live.summary
    if summary is None:
        return item
    return item._replace(live=structs.replace(item.live, summary=replace(summary, placed=())))
