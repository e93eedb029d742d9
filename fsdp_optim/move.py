"""The one executor: state values move from one end to another, in batches and windows of a memory budget.

    source end --fill--> elements in the source's cut --messages--> elements in the target's cut --drain--> target end

Live memory has its elements already, and has room for those that arrive: its `fill` and `drain` do nothing. A stored end
reads and writes windows of bounded size. Where both ends are cut alike, no messages are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fsdp_optim.errors import LayoutError, StateError, counted_noun
from fsdp_optim.layout import Placement
from fsdp_optim.memory import Budget, empty, flatten, in_batches, window
from fsdp_optim.plan import Copy, copies_into, copies_of, has_from, num_into, part_from, part_into, replica_of
from fsdp_optim.transport.agree import exchange
from fsdp_optim.transport.base import Item, RankGroup
from fsdp_optim.transport.failure import Failure

_CPU = torch.device("cpu")


Key = tuple[bool, str, str]
"""What tells a value from the others of a move to or from storage: whether it is state, its FQN, its name."""


@dataclass(frozen=True)
class StateValue:
    """One named value of one parameter; a weight is a value too, and no state.

    `placement`: where the live model has its elements.
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
        """The number of the replica that sends it where it lies so: a function of its name alone."""
        return replica_of(f"{self.fqn}: {self.name}") % source.num_replicas if source.num_replicas > 1 else 0


@dataclass(frozen=True)
class Part:
    """Elements of this rank's local tensor for a value in the placement `cut`, 1-D: those from `start` on.

    `flat` None: this rank has none of these. `is_own`: its memory was made for this part, so that whoever takes it may keep it.
    """

    value: StateValue
    cut: Placement
    flat: torch.Tensor | None
    start: int = 0
    is_own: bool = False


class End:
    """One side of a move, seen from this rank. This base class is live memory; a stored end overrides `fill` or `drain`.

    The executor asks for the placements of every value on all ranks, in the same order, and they must be the same there.
    """

    is_stored = False

    def placement(self, value: StateValue) -> Placement:
        """Where this end has a value, or wants it."""
        return value.placement

    def io_placement(self, value: StateValue, other: Placement) -> Placement:
        """The cut, among the ranks of the call, in which a stored end gives or takes a value; the other end has it as `other`."""
        return other

    def memory(self, value: StateValue) -> torch.Tensor | None:
        """This rank's elements of a value, in any shape and strides, or memory to fill, contiguous; None where there are none."""
        return None

    def fill(self, parts: Sequence[Part]) -> None:
        """As a source that is stored: fill the memory of some parts."""

    def drain(self, parts: Sequence[Part]) -> None:
        """As a target that is stored: take some parts."""


def move(
    values: Sequence[StateValue], source: End, target: End, callers: RankGroup, budget: Budget, failure: Failure
) -> None:
    """Move values from one end to another. Called by all ranks of `callers`, with the same values and the same kinds of ends.

    What goes wrong on one rank is put into `failure`, and is raised on all ranks before data moves where messages are needed;
    in any case the ranks must agree afterwards whether all went well. Holds at most `budget` beyond the ends' own memory.

    Raises:
        LayoutError: no rank of the source has some of a value's elements.
        StateError: a plan does not fill all of a rank's memory, which comes uninitialised.
    """
    plans = _Plans(callers)
    if not source.is_stored and not target.is_stored:
        exchange(callers, _items(values, source, target, plans, failure), failure, budget)
        return
    routes = [_Route(value, *_cuts(value, source, target)) for value in values]
    as_it_is = [route for route in routes if route.is_direct]
    with failure:
        if failure.error is not None:
            pass  # nothing is read or written after it
        elif target.is_stored:
            for parts in _parts(as_it_is, source, callers.rank, budget):
                if source.is_stored:
                    source.fill(parts)
                target.drain(parts)
                parts.clear()
        else:
            source.fill([Part(route.value, route.target, target.memory(route.value)) for route in as_it_is])
    staging = budget.share(2, "elements in another cut than they are stored in, and the messages that carry them")
    staged = [(route, route.staged.most_numel) for route in routes if not route.is_direct]
    for batch in _batches(staged, staging.nbytes):
        for one in _windows(batch, max(route.staged.most_numel for route in batch), staging.nbytes):
            _move_window(batch, one, source, target, plans, callers, staging, failure)


@dataclass(frozen=True)
class _Route:
    """A value on its way: the cuts in which its elements leave the source and reach the target."""

    value: StateValue
    source: Placement
    target: Placement
    is_staged_at_source: bool = False

    @property
    def is_direct(self) -> bool:
        return self.source == self.target

    @property
    def staged(self) -> Placement:
        """The cut of the elements that are held for a while."""
        return self.source if self.is_staged_at_source else self.target


def _cuts(value: StateValue, source: End, target: End) -> tuple[Placement, Placement, bool]:
    if not source.is_stored:
        home = source.placement(value)
        return home, target.io_placement(value, home) if target.is_stored else target.placement(value), False
    if not target.is_stored:
        home = target.placement(value)
        return source.io_placement(value, home), home, True
    cut = target.io_placement(value, source.io_placement(value, value.placement))
    return cut, cut, True


def _items(values: Sequence[StateValue], source: End, target: End, plans: _Plans, failure: Failure) -> Iterator[Item]:
    """What to send and to receive, where both ends are memory."""
    for value in values:
        planned = plans.of(value, source.placement(value), target.placement(value))
        planned.check_filled(value)
        if not planned.copies and not planned.receives:
            continue
        taken = given = None
        with failure:
            if planned.receives:
                given = target.memory(value)
            if planned.sends:
                taken = source.memory(value)
                taken = flatten(taken) if taken is not None else None
        yield Item(planned.copies, value.dtype, taken, given)


def _parts(routes: Sequence[_Route], source: End, rank: int, budget: Budget) -> Iterator[list[Part]]:
    """Parts for a stored target, cut as the source has them: a batch at a time, or windows of one value that is larger.

    Of live memory they are views wherever it is contiguous. No messages are needed, so this rank decides for itself.
    """
    ranges = [route.source.local_range(rank) for route in routes]
    numels = (stop - start for start, stop in ranges)
    at = iter(ranges)
    for batch in _batches(zip(routes, numels, strict=True), budget.nbytes):
        if len(batch) > 1:
            yield [_part(route, source, *next(at)) for route in batch]
            continue
        start, stop = next(at)
        width = budget.share(2, "a window, and what the target makes of it").nbytes // batch[0].value.dtype.itemsize
        if not source.is_stored and (held := source.memory(batch[0].value)) is not None and held.is_contiguous():
            width = stop - start
        for first in range(start, max(stop, start + 1), max(width, 1)):
            yield [_part(batch[0], source, first, min(first + max(width, 1), stop))]


def _part(route: _Route, source: End, start: int, stop: int) -> Part:
    """Elements of a rank's local tensor for a value: those of live memory, or memory for those of a stored end."""
    flat, is_own = None, True
    if start < stop and source.is_stored:
        flat = empty((stop - start,), route.value.dtype, _CPU)
    elif start < stop:
        held = source.memory(route.value)
        if held is not None:
            flat, is_own = window(held, start, stop), False  # others may take only a part of it
    return Part(route.value, route.source, flat, start, is_own)


def _move_window(
    batch: Sequence[_Route],
    one: Window,
    source: End,
    target: End,
    plans: _Plans,
    callers: RankGroup,
    budget: Budget,
    failure: Failure,
) -> None:
    """Move the elements of a window of each rank's staged elements; the other end is live memory."""
    rank, parts, items = callers.rank, list[Part](), list[Item]()
    with failure:
        for route in batch:
            planned = plans.of(route.value, route.source, route.target)
            if not target.is_stored:
                planned.check_filled(route.value)
            numel = one.of(route.staged.numel_on(rank))
            flat = callers.world.transport.empty((numel,), route.value.dtype, _CPU) if numel else None
            parts.append(Part(route.value, route.staged, flat, one.start, is_own=True))
            if route.is_staged_at_source:
                mine = [part for copy in planned.copies for part in part_from(copy, one.start, one.stop)]
                items.append(Item(mine, route.value.dtype, flat, target.memory(route.value)))
            else:
                mine = [part for copy in planned.copies for part in part_into(copy, one.start, one.stop)]
                held = source.memory(route.value) if any(copy.source_rank == rank for copy in mine) else None
                items.append(Item(mine, route.value.dtype, flatten(held) if held is not None else None, flat))
        if source.is_stored and failure.error is None:
            source.fill(parts)
    exchange(callers, items, failure, budget)
    items.clear()
    if target.is_stored and failure.error is None:
        with failure:
            target.drain(parts)


# ------------------------------------------------------------------------------------------- plans, made once for each cut


@dataclass(frozen=True)
class _Planned:
    """This rank's copies of every value that is cut so, and which part it has on each side.

    `receives`: it has a part of the target, an empty one too. `num_wanted`: the elements of that part, without padding.
    """

    rank: int
    copies: Sequence[Copy]
    sends: bool
    receives: bool
    num_filled: int
    num_wanted: int

    def check_filled(self, value: StateValue) -> None:
        """Memory comes uninitialised: every element of it that is not padding has to be planned."""
        if self.num_filled != self.num_wanted:
            raise StateError(
                f"{value.fqn}: {value.name}: rank {self.rank} needs {counted_noun(self.num_wanted, 'element')}, "
                f"{self.num_filled} were planned"
            )


class _Plans:
    """The plans of one call. Values that are cut alike, as those of equal layers are, share one."""

    def __init__(self, callers: RankGroup) -> None:
        self._callers = callers
        self._made: dict[tuple[Placement, Placement, int], _Planned] = {}
        self._last: tuple[Placement, Placement, _Planned] | None = None

    def of(self, value: StateValue, source: Placement, target: Placement) -> _Planned:
        """The plan of a value that is cut as `source` and is to be cut as `target`."""
        last = self._last  # the values of one parameter share its placement and come one after the other
        if last is not None and last[0] is source and last[1] is target:
            return last[2]
        replica = value.replica_among(source)
        key = (source, target, replica)
        planned = self._made.get(key)
        if planned is None:
            planned = self._made[key] = self._plan(value, source, target, replica)
        self._last = (source, target, planned) if source.num_replicas == 1 else None
        return planned

    def _plan(self, value: StateValue, source: Placement, target: Placement, replica: int) -> _Planned:
        rank = self._callers.rank
        gap = source.gap()
        if gap is not None:
            raise LayoutError(
                f"{value.fqn}: elements [{gap[0]}, {gap[1]}) of {value.name} are held by no rank "
                f"(of {len(source.ranks)} that have others)"
            )
        if len(self._callers.ranks) == 1:  # what other ranks would get of it is no matter of this call
            copies = copies_into(source, target, rank, replica)
        else:
            copies = copies_of(source, target, rank=rank, replica=replica)
        return _Planned(
            rank=rank,
            copies=copies,
            sends=has_from(copies, rank),
            receives=target.shard_of(rank) is not None,
            num_filled=num_into(copies, rank),
            num_wanted=target.numel_on(rank),
        )


# ------------------------------------------------------------------------------------------- batches and windows


def _batches(sized: Iterable[tuple[_Route, int]], most_nbytes: int) -> Iterator[list[_Route]]:
    """What is moved together, of routes with the elements to hold: as much as fits, or one value that is larger."""
    for batch in in_batches(sized, lambda one: one[1] * one[0].value.dtype.itemsize, most_nbytes):
        yield [route for route, _ in batch]


@dataclass(frozen=True)
class Window:
    """Elements [start, stop) of what each rank holds of a value."""

    start: int
    stop: int

    def of(self, numel: int) -> int:
        """How many of so many elements are in it."""
        return max(min(numel, self.stop) - self.start, 0)


def _windows(batch: Sequence[_Route], numel: int, most_nbytes: int) -> Iterator[Window]:
    """All of a batch at once, or its one value in as many windows as it needs; no rank holds more than `numel` of any."""
    width = numel if len(batch) > 1 else max(most_nbytes // batch[0].value.dtype.itemsize, 1)
    return (Window(start, start + width) for start in range(0, numel, max(width, 1)))
