"""The one executor: state values move from one end to another, in batches and windows that fit a memory budget.

    source end --fill--> elements in the source's cut --messages--> elements in the target's cut --drain--> target end

A live end holds all its elements in memory, so its `fill` and `drain` do nothing. A stored end reads and writes windows of
bounded size. No messages are sent between ends with the same cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import not_
from typing import NamedTuple

import torch
from msgspec import Struct

from fsdp_optim.errors import LayoutError, StateError, counted_noun
from fsdp_optim.layout import Placement
from fsdp_optim.plan import (
    Copy,
    LocalRanges,
    RankPlan,
    Request,
    Window,
    clip_to_source,
    clip_to_target,
    has_from,
    replica_of,
    windows,
)
from fsdp_optim.tensors.allocation import Pages, empty
from fsdp_optim.tensors.memory import Budget, flat_slice, flatten, in_batches
from fsdp_optim.transport.agree import exchange
from fsdp_optim.transport.base import Item, RankGroup
from fsdp_optim.transport.failure import Failure

_CPU = torch.device("cpu")
_MOST_ROUTES = 1 << 13  # at once, so that what a move makes for each value does not grow with the number of values


Key = tuple[bool, str, str]
"""The key of a value in storage: (whether the value is state, FQN, name)."""


class StateValue(Struct, frozen=True, eq=False, gc=False):
    """One named value of one parameter. A weight is a value too, with `is_state` False.

    `placement`: where the live model has the elements.
    """

    fqn: str
    name: str
    dtype: torch.dtype
    placement: Placement
    is_state: bool = True

    @property
    def key(self) -> Key:
        return self.is_state, self.fqn, self.name

    @property
    def nbytes(self) -> int:
        return self.placement.numel * self.dtype.itemsize

    def replica_among(self, source: Placement) -> int:
        """Return the number of the replica of `source` that sends this value: a function of the value's name alone."""
        return replica_of(f"{self.fqn}: {self.name}") % source.num_replicas if source.num_replicas > 1 else 0


class Slice(NamedTuple):
    """A range of this rank's local tensor for a value that is cut as `cut`: the 1-D tensor `flat`, from element `start` on.

    `flat` None: this rank has no elements of the value. `is_own`: the memory of `flat` was allocated for this slice, so an end
    that takes the slice may keep the memory. In `End.fill`, contiguous memory for a complete local tensor may have any shape.
    """

    value: StateValue
    cut: Placement
    flat: torch.Tensor | None
    start: int = 0
    is_own: bool = False


class Parts(NamedTuple):
    """Live elements of several values: of `values[i]`, cut as `cuts[i]`, the elements from `starts[i]` on of the local tensor.

    `held[i]` has all elements of the value that this rank has, in any shape and strides; None: it has none.
    """

    values: Sequence[StateValue]
    cuts: Sequence[Placement]
    starts: Sequence[int]
    held: Sequence[torch.Tensor | None]

    def slices(self, index: Iterable[int]) -> list[Slice]:
        """Return some of the parts as slices: views of contiguous memory, else copies."""
        slices = []
        for i in index:
            held = self.held[i]
            flat = flat_slice(held, 0, held.numel()) if held is not None else None
            slices.append(Slice(self.values[i], self.cuts[i], flat, self.starts[i], is_own=flat is None))
        return slices


class End:
    """One side of a move, seen from this rank. This base class is live memory; a stored end overrides `fill` or `drain`.

    Every rank calls the placement methods for all values in the same order, and must get the same placements.
    """

    is_stored = False

    @property
    def keeps_memory(self) -> bool:
        """Whether `drain`, of a stored target, may keep the memory of slices that are their own."""
        return True

    def placement(self, value: StateValue) -> Placement:
        """Return where this end holds a value, as a source, or needs it, as a target."""
        return value.placement

    def io_placement(self, value: StateValue, other: Placement) -> Placement:
        """Return the cut in which the ranks read or write a value of a stored end. `other`: the cut of the other end."""
        return other

    def memory(self, value: StateValue) -> torch.Tensor | None:
        """Return this rank's elements of a value, in any shape and strides, or contiguous memory to fill; None without any."""
        return None

    def io_placements(self, values: Sequence[StateValue], others: Sequence[Placement]) -> Sequence[Placement]:
        """Return `io_placement` of several values."""
        return [self.io_placement(value, other) for value, other in zip(values, others, strict=True)]

    def memories(self, values: Sequence[StateValue]) -> Sequence[torch.Tensor | None]:
        """Return `memory` of several values."""
        return list(map(self.memory, values))

    def fill(self, slices: Sequence[Slice], /) -> None:
        """Read some slices, as a stored source: fill their memory."""

    def drain(self, slices: Sequence[Slice], /) -> None:
        """Write some slices, as a stored target."""

    def drain_parts(self, parts: Parts, /) -> None:
        """Write live elements, as a stored target."""
        self.drain(parts.slices(range(len(parts.values))))


def move(
    values: Sequence[StateValue], source: End, target: End, group: RankGroup, budget: Budget, failure: Failure
) -> None:
    """Move values from one end to another. Called by all ranks of `group`, with the same values and the same kinds of ends.

    An error of one rank is noted in `failure`. Where messages are needed, all ranks raise the error before data moves; in any
    case the ranks must agree afterwards whether all of them succeeded. Holds at most `budget` beyond the ends' own memory.

    Raises:
        LayoutError: some elements of a value are held by no rank of the source.
        StateError: a plan leaves some of a rank's memory uninitialised.
    """
    plans = _Plans(group)
    if not source.is_stored and not target.is_stored:
        exchange(group, _items(values, source, target, plans, failure), failure, budget)
        return
    others: list[_Route] = []
    for first in range(0, len(values), _MOST_ROUTES):
        direct, cuts, staged = _routes(values[first : first + _MOST_ROUTES], source, target)
        others += staged
        if failure.error is None:  # nothing is read or written after an error
            with failure:
                _move_direct(direct, cuts, source, target, group.rank, budget)
    staging = budget.share(2, "elements in another cut than they are stored in, and the messages that carry them")
    sized = [(route, route.staged.most_numel) for route in others]
    pages = Pages(is_kept=target.is_stored and target.keeps_memory)
    for batch in _batches(sized, staging.nbytes):
        most = max(route.staged.most_numel for route in batch)
        width = max(staging.nbytes // batch[0].value.dtype.itemsize, 1) if len(batch) == 1 else most
        for window in windows(most, width):
            _move_window(batch, window, source, target, pages, plans=plans, budget=staging, failure=failure)


def _move_direct(
    values: Sequence[StateValue], cuts: Sequence[Placement], source: End, target: End, rank: int, budget: Budget
) -> None:
    """Move values that leave the source in the cut of the target, without messages."""
    if not target.is_stored:
        source.fill(list(map(Slice, values, cuts, target.memories(values))))
        return
    routes = list(map(_Route, values, cuts, cuts))
    if not source.is_stored:
        _drain_live(routes, source, target, rank, budget)
        return
    for slices in _stored_slices(routes, rank, budget):
        source.fill(slices)
        target.drain(slices)
        slices.clear()


class _Route(NamedTuple):
    """A value to move, with the cuts in which the elements leave the source and reach the target."""

    value: StateValue
    source: Placement
    target: Placement
    is_staged_at_source: bool = False

    @property
    def staged(self) -> Placement:
        """The cut of the elements that are staged in temporary memory."""
        return self.source if self.is_staged_at_source else self.target


def _routes(
    values: Sequence[StateValue], source: End, target: End
) -> tuple[list[StateValue], list[Placement], list[_Route]]:
    """Return the values that leave a source as they reach the target, with their cuts, and the routes of the others."""
    if source.is_stored and target.is_stored:
        cuts = source.io_placements(values, [value.placement for value in values])
        return [*values], [*target.io_placements(values, cuts)], []
    live, stored = (target, source) if source.is_stored else (source, target)
    homes = list(map(live.placement, values))
    cuts = stored.io_placements(values, homes)
    is_direct = [cut is home or cut == home for cut, home in zip(cuts, homes, strict=True)]
    others = [
        _Route(value, cut, home, is_staged_at_source=True) if source.is_stored else _Route(value, home, cut)
        for value, home, cut in itertools.compress(zip(values, homes, cuts, strict=True), map(not_, is_direct))
    ]
    return [*itertools.compress(values, is_direct)], [*itertools.compress(homes, is_direct)], others


def _items(values: Sequence[StateValue], source: End, target: End, plans: _Plans, failure: Failure) -> Iterator[Item]:
    """Yield the tensors to send and to receive, where both ends are memory."""
    routes = (_Route(value, source.placement(value), target.placement(value)) for value in values)
    for route, planned in plans.of(routes):
        value = route.value
        _check_filled(planned, value)
        if not planned.sends and not planned.receives:
            continue
        outgoing = incoming = None
        with failure:
            if planned.receives:
                incoming = target.memory(value)
            if planned.sends:
                outgoing = source.memory(value)
                outgoing = flatten(outgoing) if outgoing is not None else None
        yield Item(planned, value.dtype, outgoing, incoming)


def _drain_live(routes: Sequence[_Route], source: End, target: End, rank: int, budget: Budget) -> None:
    """Hand live elements to a stored target: a batch of values at a time, or windows of a value that is larger.

    Slices of contiguous live memory are views. No messages are needed, so the sizes may differ between ranks.
    """
    ranges = LocalRanges(rank)
    for batch in _batches(((route, ranges.numel(route.source)) for route in routes), budget.nbytes):
        if len(batch) > 1:
            _drain_batch(batch, source, target, ranges)
            continue
        (route,), (start, stop) = batch, ranges.of(batch[0].source)
        held = source.memory(route.value) if start < stop else None
        if held is None:
            target.drain([Slice(route.value, route.source, None, start, is_own=True)])
            continue
        width = _width(route, budget) if not held.is_contiguous() else stop - start  # a view is no copy
        for first in range(start, stop, width):
            last = min(first + width, stop)
            target.drain([Slice(route.value, route.source, flat_slice(held, first, last), first)])


def _drain_batch(batch: Sequence[_Route], source: End, target: End, ranges: LocalRanges) -> None:
    """Hand the live elements of several values to a stored target."""
    values, cuts = [route.value for route in batch], [route.source for route in batch]
    bounds = [ranges.of(cut) for cut in cuts]
    here = [value for value, (start, stop) in zip(values, bounds, strict=True) if start < stop]
    memories = iter(source.memories(here))
    held = []
    for start, stop in bounds:
        memory = next(memories) if start < stop else None
        if memory is not None and memory.numel() != stop - start:  # a flat parameter has the elements of several values
            memory = flat_slice(memory, start, stop)
        held.append(memory)
    target.drain_parts(Parts(values, cuts, [start for start, _ in bounds], held))


def _stored_slices(routes: Sequence[_Route], rank: int, budget: Budget) -> Iterator[list[Slice]]:
    """Yield slices with memory for a stored source to fill: a batch of values at a time, or windows of a larger value."""
    ranges = LocalRanges(rank)
    for batch in _batches(((route, ranges.numel(route.source)) for route in routes), budget.nbytes):
        if len(batch) > 1:
            yield [_own_slice(route, *ranges.of(route.source)) for route in batch]
            continue
        (route,), (start, stop) = batch, ranges.of(batch[0].source)
        width = _width(route, budget)
        for first in range(start, max(stop, start + 1), width):
            yield [_own_slice(route, first, min(first + width, stop))]


def _width(route: _Route, budget: Budget) -> int:
    """Return the number of elements of a window of one large value."""
    share = budget.share(2, "a window, and what the target makes of it")
    return max(share.nbytes // route.value.dtype.itemsize, 1)


def _own_slice(route: _Route, start: int, stop: int) -> Slice:
    """Return elements [start, stop) of a rank's local tensor for a value, in memory that a stored source fills."""
    flat = empty((stop - start,), route.value.dtype, _CPU) if start < stop else None
    return Slice(route.value, route.source, flat, start, is_own=True)


def _move_window(
    batch: Sequence[_Route],
    window: Window,
    source: End,
    target: End,
    pages: Pages,
    *,
    plans: _Plans,
    budget: Budget,
    failure: Failure,
) -> None:
    """Move one window of each rank's staged elements of a batch. The other end is live memory."""
    group, slices, items = plans.group, list[Slice](), list[Item]()
    with failure:
        numels = [window.numel_in(route.staged.numel_on(group.rank)) for route in batch]
        flats = pages.flats([(numel, route.value.dtype) for numel, route in zip(numels, batch, strict=True)])
        for (route, planned), flat in zip(plans.of(batch), flats, strict=True):
            if not target.is_stored:
                _check_filled(planned, route.value)
            slices.append(Slice(route.value, route.staged, flat, window.start, is_own=pages.is_kept))
            if route.is_staged_at_source:
                copies = planned if window.is_all else _clipped(clip_to_source, planned, window)
                items.append(Item(copies, route.value.dtype, flat, target.memory(route.value)))
            else:
                copies = planned if window.is_all else _clipped(clip_to_target, planned, window)
                sends = planned.sends and (window.is_all or has_from(copies, group.rank))
                held = source.memory(route.value) if sends else None
                items.append(Item(copies, route.value.dtype, flatten(held) if held is not None else None, flat))
        if source.is_stored and failure.error is None:
            source.fill(slices)
    exchange(group, items, failure, budget)
    items.clear()
    if target.is_stored and failure.error is None:
        with failure:
            target.drain(slices)


class _Plans:
    """The plans of one call. Values with the same cut, such as values of equal layers, share one plan."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._same: dict[tuple[int, int], Request] = {}

    def of(self, routes: Iterable[_Route]) -> Iterator[tuple[_Route, RankPlan]]:
        """Yield each route with the plan of its value, which is made together with plans of the next routes.

        Raises LayoutError where no rank holds some elements of a source.
        """
        routes, to_plan = itertools.tee(routes)
        return zip(routes, self.group.world.plans.each(map(self._request, to_plan)), strict=True)

    def _request(self, route: _Route) -> Request:
        value, source, target = route.value, route.source, route.target
        # Layers share their placements, in which a search for gaps takes long.
        same = self._same.get((id(source), id(target)))
        if same is not None:
            return same
        gap = source.gap()
        if gap is not None:
            raise LayoutError(
                f"{value.fqn}: elements [{gap[0]}, {gap[1]}) of {value.name} are held by no rank "
                f"(the source has {counted_noun(len(source.ranks), 'rank')})"
            )
        sends = len(self.group.ranks) > 1  # a rank that makes the call alone sends nothing
        request = Request(source, target, self.group.rank, value.replica_among(source), sends)
        if source.num_replicas == 1:  # else the sender depends on the value's name
            self._same[id(source), id(target)] = request  # its references keep the ids unique
        return request


def _clipped(clip: Callable[[Copy, int, int], Iterator[Copy]], planned: RankPlan, window: Window) -> list[Copy]:
    """Return the copies of a plan in a window of the staged elements. `clip`: `clip_to_source` or `clip_to_target`."""
    return [part for copy in planned for part in clip(copy, window.start, window.stop)]


def _check_filled(planned: RankPlan, value: StateValue) -> None:
    """Raise StateError where the copies leave some of this rank's memory uninitialised."""
    if planned.num_filled != planned.num_wanted:
        raise StateError(
            f"{value.fqn}: {value.name}: rank {planned.rank} needs {counted_noun(planned.num_wanted, 'element')}, and the plan "
            f"brings {planned.num_filled}"
        )


def _batches(sized: Iterable[tuple[_Route, int]], most_nbytes: int) -> Iterator[list[_Route]]:
    """Yield batches of routes to move together, from pairs (route, elements to hold): a too large value is a batch alone."""
    for batch in in_batches(sized, lambda pair: pair[1] * pair[0].value.dtype.itemsize, most_nbytes):
        yield [route for route, _ in batch]
