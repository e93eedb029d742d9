"""The way of a value from one end to the other, and the plans of the ways of one call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fsdp_optim.errors import LayoutError, counted_noun
from fsdp_optim.layout import Placement, Whole
from fsdp_optim.move.ends import StateValue
from fsdp_optim.plan import RankPlan, Request
from fsdp_optim.transport.base import RankGroup


class Route(NamedTuple):
    """A value to move, with the cuts in which the elements leave the source and reach the target."""

    value: StateValue
    source: Placement
    target: Placement
    is_staged_at_source: bool = False

    @property
    def staged(self) -> Placement:
        """The cut of the elements that are staged in temporary memory."""
        return self.source if self.is_staged_at_source else self.target

    @property
    def live(self) -> Placement:
        """The cut of the elements in live memory, at the other end."""
        return self.target if self.is_staged_at_source else self.source


class RoutePlans:
    """The plans of one call. Values with the same cut, such as values of equal layers, share one plan."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._same: dict[tuple[int, int], Request] = {}

    def of(self, routes: Iterable[Route]) -> Iterator[tuple[Route, RankPlan]]:
        """Yield each route with the plan of its value, which is made together with plans of the next routes.

        Raises LayoutError where no rank holds some elements of a source.
        """
        routes, to_plan = itertools.tee(routes)
        return zip(routes, self.group.world.plans.each(map(self._request, to_plan)), strict=True)

    def of_all_elements(self, routes: Iterable[Route]) -> Iterator[RankPlan]:
        """Yield, for each route, the plan by which the lowest rank of its source would get all elements.

        It says for each element which rank may send it to any other rank, and is the same on all ranks.
        """
        return self.group.world.plans.each(map(self._request_of_all, routes))

    def from_one_rank(self, routes: Iterable[Route]) -> Iterator[RankPlan]:
        """Yield, for each route, the plan by which a rank with all elements sends each shard of the target to its lowest rank.

        It says where the elements of each shard are in the complete value and on all ranks that hold the shard.
        """
        return self.group.world.plans.each(map(_request_from_one, routes))

    def _request_of_all(self, route: Route) -> Request:
        _check_complete(route)
        source = route.source
        lowest = source.ranks[:1]
        return Request(source, Whole(source.shape, lowest), lowest[0], sends=False)

    def _request(self, route: Route) -> Request:
        value, source, target, _ = route
        # Layers share their placements, in which a search for gaps takes long.
        same = self._same.get((id(source), id(target)))
        if same is not None:
            return same
        _check_complete(route)
        sends = len(self.group.ranks) > 1  # a rank that makes the call alone sends nothing
        request = Request(source, target, self.group.rank, value.replica_among(source), sends)
        if source.num_replicas == 1:  # else the sender depends on the value's name
            self._same[id(source), id(target)] = request  # its references keep the ids unique
        return request


def _request_from_one(route: Route) -> Request:
    lowest = route.target.on_lowest_ranks()
    first = lowest.ranks[0]
    return Request(Whole(lowest.shape, (first,)), lowest, first)


def _check_complete(route: Route) -> None:
    """Raise LayoutError where no rank holds some elements of a source."""
    gap = route.source.gap()
    if gap is not None:
        raise LayoutError(
            f"{route.value.fqn}: elements [{gap[0]}, {gap[1]}) of {route.value.name} are held by no rank "
            f"(the source has {counted_noun(len(route.source.ranks), 'rank')})"
        )
