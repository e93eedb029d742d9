"""The one executor: state values move from one end to another, in batches and windows that fit a memory budget.

    source end --fill--> elements in the source's cut --messages--> elements in the target's cut --drain--> target end

A live end holds all its elements in memory, so its `fill` and `drain` do nothing. A stored end reads and writes windows of
bounded size. No messages are sent between ends with the same cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import not_

import torch

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import Placement
from fsdp_optim.move.ends import End, Parts, Slice, StateValue, local_parts
from fsdp_optim.move.routes import Route, RoutePlans
from fsdp_optim.move.short import split_short
from fsdp_optim.move.short_gather import gather_short
from fsdp_optim.move.short_scatter import scatter_short
from fsdp_optim.plan import Copy, LocalRanges, RankPlan, Window, clip_to_source, clip_to_target, has_from, windows
from fsdp_optim.tensors.allocation import Pages, empty
from fsdp_optim.tensors.memory import Budget, flat_slice, flatten, in_batches
from fsdp_optim.transport.agree import exchange
from fsdp_optim.transport.base import Item, RankGroup
from fsdp_optim.transport.failure import Failure

_CPU = torch.device("cpu")
_MOST_ROUTES = 1 << 13  # at once, so that what a move makes for each value does not grow with the number of values


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
    plans = RoutePlans(group)
    if not source.is_stored and not target.is_stored:
        exchange(group, _items(values, source, target, plans, failure), failure, budget)
        return
    others: list[Route] = []
    for first in range(0, len(values), _MOST_ROUTES):
        direct, cuts, sent = _routes(values[first : first + _MOST_ROUTES], source, target)
        short, long = split_short(sent, budget) if (source if source.is_stored else target).in_any_order else ([], sent)
        others += long
        if failure.error is None:  # nothing is read or written after an error
            with failure:
                _move_direct(direct, cuts, source, target, group.rank, budget)
        if source.is_stored:
            scatter_short(short, source, target, plans, budget, failure)
        else:
            gather_short(short, source, target, plans, budget, failure)
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
    routes = list(map(Route, values, cuts, cuts))
    if not source.is_stored:
        _drain_live(routes, source, target, rank, budget)
        return
    for slices in _stored_slices(routes, rank, budget):
        source.fill(slices)
        target.drain(slices)
        slices.clear()


def _routes(
    values: Sequence[StateValue], source: End, target: End
) -> tuple[list[StateValue], list[Placement], list[Route]]:
    """Return the values that leave a source as they reach the target, with their cuts, and the routes of the others."""
    if source.is_stored and target.is_stored:
        cuts = source.io_placements(values, [value.placement for value in values])
        return [*values], [*target.io_placements(values, cuts)], []
    live, stored = (target, source) if source.is_stored else (source, target)
    homes = list(map(live.placement, values))
    cuts = stored.io_placements(values, homes)
    is_direct = [
        cut is home or (type(cut) is type(home) and cut == home) for cut, home in zip(cuts, homes, strict=True)
    ]
    others = [
        Route(value, cut, home, is_staged_at_source=True) if source.is_stored else Route(value, home, cut)
        for value, home, cut in itertools.compress(zip(values, homes, cuts, strict=True), map(not_, is_direct))
    ]
    return [*itertools.compress(values, is_direct)], [*itertools.compress(homes, is_direct)], others


def _items(
    values: Sequence[StateValue], source: End, target: End, plans: RoutePlans, failure: Failure
) -> Iterator[Item]:
    """Yield the tensors to send and to receive, where both ends are memory."""
    routes = (Route(value, source.placement(value), target.placement(value)) for value in values)
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


def _drain_live(routes: Sequence[Route], source: End, target: End, rank: int, budget: Budget) -> None:
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


def _drain_batch(batch: Sequence[Route], source: End, target: End, ranges: LocalRanges) -> None:
    """Hand the live elements of several values to a stored target."""
    values, cuts = [route.value for route in batch], [route.source for route in batch]
    bounds = [ranges.of(cut) for cut in cuts]
    held = local_parts(values, bounds, source)
    target.drain_parts(Parts(values, cuts, [start for start, _ in bounds], held))


def _stored_slices(routes: Sequence[Route], rank: int, budget: Budget) -> Iterator[list[Slice]]:
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


def _width(route: Route, budget: Budget) -> int:
    """Return the number of elements of a window of one large value."""
    share = budget.share(2, "a window, and what the target makes of it")
    return max(share.nbytes // route.value.dtype.itemsize, 1)


def _own_slice(route: Route, start: int, stop: int) -> Slice:
    """Return elements [start, stop) of a rank's local tensor for a value, in memory that a stored source fills."""
    flat = empty((stop - start,), route.value.dtype, _CPU) if start < stop else None
    return Slice(route.value, route.source, flat, start, is_own=True)


def _move_window(
    batch: Sequence[Route],
    window: Window,
    source: End,
    target: End,
    pages: Pages,
    *,
    plans: RoutePlans,
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


def _batches(sized: Iterable[tuple[Route, int]], most_nbytes: int) -> Iterator[list[Route]]:
    """Yield batches of routes to move together, from pairs (route, elements to hold): a too large value is a batch alone."""
    for batch in in_batches(sized, lambda pair: pair[1] * pair[0].value.dtype.itemsize, most_nbytes):
        yield [route for route, _ in batch]
