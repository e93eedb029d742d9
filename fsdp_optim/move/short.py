"""Short values, which travel together: the rows of many values in one message.

The elements of each are complete on one rank, its root, and in the cut of the live model on all ranks. What depends on the
structure is computed once for each kind of value (values that are cut alike), the rest for all at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy
import torch

from fsdp_optim.layout import Placement, Whole
from fsdp_optim.move.ends import End
from fsdp_optim.move.routes import Route
from fsdp_optim.plan import Copy
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.tensors.rows import places_of
from fsdp_optim.transport.agree import exchange
from fsdp_optim.transport.base import Item, RankGroup
from fsdp_optim.transport.failure import Failure

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.int64]
    Indices = NDArray[numpy.intp]

_MOST_NBYTES = 64 << 10  # of a complete short value
_MOST_RUNS = 16  # of a shard
_LEAST_BUDGET = 8 << 20  # bytes; with less, each batch would have few values, and the ranks meet before each
_COPIES = 5  # of the elements of a batch: as read, by rank, as they arrive, as written, and on the way there
_RUN_NBYTES = 100  # about what the tables take for a run

_USE = "rows of short values, and the messages that carry them"


def has_room_for_short(budget: Budget) -> bool:
    """Return whether short values travel together in this budget."""
    return budget.nbytes >= _LEAST_BUDGET


def is_short(live: Placement, itemsize: int) -> bool:
    """Return whether a value can travel with others: it is small, and each shard is few runs, side by side in memory."""
    return 0 < live.numel * itemsize <= _MOST_NBYTES and 0 < live.most_runs <= _MOST_RUNS


def split_short(routes: Sequence[Route], budget: Budget) -> tuple[list[Route], list[Route]]:
    """Split values into the short ones that one rank reads or writes completely, which travel together, and the others."""
    if not has_room_for_short(budget):
        return [], [*routes]
    known: dict[tuple[int, int, torch.dtype], bool] = {}  # the routes keep the ids unique
    short, others = list[Route](), list[Route]()
    for route in routes:
        value, source, target, _ = route
        key = id(source), id(target), value.dtype
        travels = known.get(key)
        if travels is None:
            staged = route.staged
            has_root = isinstance(staged, Whole) and len(staged.on) == 1 and not staged.offset
            travels = known[key] = has_root and is_short(route.live, value.dtype.itemsize)
        (short if travels else others).append(route)
    return short, others


class ShortBatch(Protocol):
    """Some short values on this rank: what it sends of them is ready, and there is memory for what it receives."""

    def items(self, group: RankGroup) -> list[Item]:
        """Return the messages, after the copy of what this rank sends to itself."""

    def deliver(self, target: End) -> None:
        """Hand what has arrived to the target."""


def move_short(
    routes: Sequence[Route],
    target: End,
    group: RankGroup,
    budget: Budget,
    failure: Failure,
    prepare: Callable[[Sequence[First]], Callable[[ShortValues], ShortBatch]],
) -> None:
    """Move short values. Called by all ranks of a move, with the same routes.

    `prepare`: computes what the values of each kind have in common, and returns the function that makes a batch of some values.
    """
    if not routes:
        return
    half, values = budget.share(2, _USE), ShortValues.of(routes)
    batch_of: Callable[[ShortValues], ShortBatch] | None = None
    with failure:
        batch_of = prepare(values.firsts)
    for begin, end in values.batches(half):
        batch: ShortBatch | None = None
        items = list[Item]()
        with failure:
            if batch_of is not None and failure.error is None:
                batch = batch_of(values.between(begin, end))
                items = batch.items(group)
        exchange(group, items, failure, half)
        items.clear()
        if batch is not None and failure.error is None:
            with failure:
                batch.deliver(target)


def items_of(
    sends: Mapping[tuple[int, int, int], torch.Tensor], receives: Mapping[tuple[int, int, int], torch.Tensor]
) -> list[Item]:
    """Return the items of messages by (sender, receiver, number), after the copy of what this rank sends to itself."""
    for way, arriving in receives.items():
        if way[0] == way[1]:
            arriving.copy_(sends[way])
    return [
        Item([Copy(way[0], way[1], (numel,), 0, (1,), 0, (1,))], torch.uint8, sends.get(way), receives.get(way))
        for way, numel in sorted((way, message.numel()) for way, message in {**sends, **receives}.items())
        if way[0] != way[1]
    ]


class First(NamedTuple):
    """The first value of a kind: of values that are cut alike. `is_at_root`: whether the root of each holds all of it live."""

    route: Route
    is_at_root: bool


class ShortValues(NamedTuple):
    """Values to move. `firsts`: of each kind. `of_kind`, `roots`: by value, its kind, and the rank that has it completely."""

    routes: Sequence[Route]
    firsts: Sequence[First]
    of_kind: Indices
    roots: Numbers

    @classmethod
    def of(cls, routes: Sequence[Route]) -> ShortValues:
        """Number the kinds in the order in which they come, which is the same on all ranks."""
        pairs: dict[tuple[int, int, torch.dtype], int] = {}  # the routes keep the ids unique
        kinds: dict[tuple[int, torch.dtype, bool], int] = {}
        firsts, of_pair, of_value = list[First](), list[tuple[int, int]](), list[int]()
        for route in routes:
            value, source, target, _ = route
            pair = pairs.setdefault((id(source), id(target), value.dtype), len(of_pair))
            if pair == len(of_pair):
                live, (root,) = route.live, route.staged.ranks
                is_at_root = live.num_shards == 1 and root in live.ranks
                number = kinds.setdefault((id(live), value.dtype, is_at_root), len(firsts))
                if number == len(firsts):
                    firsts.append(First(route, is_at_root))
                of_pair.append((number, root))
            of_value.append(pair)
        columns = numpy.array(of_pair, numpy.int64)[of_value]
        return cls(routes, firsts, columns[:, 0], columns[:, 1])

    def batches(self, budget: Budget) -> Iterator[tuple[int, int]]:
        """Yield the first value of each batch, and one past its last: as many as a rank can hold that is the root of all."""
        sizes = [
            _COPIES * route.value.nbytes + _RUN_NBYTES * route.live.num_shards * route.live.most_runs
            for route, _ in self.firsts
        ]
        held = numpy.array(sizes, numpy.int64)[self.of_kind]
        number = places_of(held) // max(budget.nbytes - max(sizes), 1)
        return itertools.pairwise([*(numpy.diff(number, prepend=-1) != 0).nonzero()[0].tolist(), len(held)])

    def at(self, chosen: NDArray[numpy.bool_]) -> ShortValues:
        """Return some of the values."""
        routes = [*itertools.compress(self.routes, chosen.tolist())]
        return ShortValues(routes, self.firsts, self.of_kind[chosen], self.roots[chosen])

    def between(self, begin: int, end: int) -> ShortValues:
        """Return the values [begin, end)."""
        chosen = slice(begin, end)
        return ShortValues(self.routes[chosen], self.firsts, self.of_kind[chosen], self.roots[chosen])


class Rows(NamedTuple):
    """The rows that this rank sends, or receives, in messages by number: of a rank, or of another kind.

    `places`, `lengths`: of each row, in the order of `memory`: where this rank has, or needs, its bytes. `order`: the index of
    each among the rows as they were given.
    """

    memory: torch.Tensor
    order: Indices
    places: Numbers
    lengths: Numbers
    messages: dict[int, torch.Tensor]

    @classmethod
    def of(cls, numbers: Numbers, places: Numbers, lengths: Numbers, memory: torch.Tensor) -> Rows:
        """Sort rows by message. Rows of one message stay in their order, which both ranks compute alike."""
        order = numbers.argsort(kind="stable")
        numbers, places, lengths = numbers[order], places[order], lengths[order]
        if not len(numbers):
            return cls(memory, order, places, lengths, {})
        firsts = (numpy.diff(numbers, prepend=-1) != 0).nonzero()[0]
        sizes = numpy.add.reduceat(lengths, firsts).tolist()
        messages = dict(zip(numbers[firsts].tolist(), memory.split_with_sizes(sizes), strict=True))
        return cls(memory, order, places, lengths, messages)
