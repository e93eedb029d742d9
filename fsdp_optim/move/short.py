"""Short values on their way from live memory to the one rank that writes each: a message to a rank has the rows of many values.

# rank 0 | a0 b0 c0 d0 |    a0 b0 -> rank 0 | a0 a1 b0 b1 |    rank 0 writes a and b,
# rank 1 | a1 b1 c1 d1 |    c1 d1 -> rank 1 | c0 c1 d0 d1 |    rank 1 writes c and d: one run each instead of four

What depends on the structure is computed once for each kind of value (values that are cut alike), the rest for all at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from fsdp_optim.errors import StateError
from fsdp_optim.layout import Placement, Whole
from fsdp_optim.move.ends import CompleteValues, End, local_parts
from fsdp_optim.move.routes import Route, RoutePlans
from fsdp_optim.plan import Copy, run_table
from fsdp_optim.tensors.allocation import empty
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.tensors.rows import copy_rows, places_of, rows_of_kinds
from fsdp_optim.tensors.side_by_side import side_by_side
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
_COPIES = 5  # of the elements of a batch: side by side, by rank, as they arrive, as they belong, and on the way there
_RUN_NBYTES = 100  # about what the tables take for a run
_RECIPIENT = -1  # as the sender of a run: a rank that has all of a value needs nobody else's

_CPU = torch.device("cpu")
_USE = "rows of short values, and the messages that carry them"


def has_room_for_short(budget: Budget) -> bool:
    """Return whether short values travel together in this budget."""
    return budget.nbytes >= _LEAST_BUDGET


def is_short(source: Placement, itemsize: int) -> bool:
    """Return whether a value can travel with others: it is small, and each shard is few runs, side by side in memory."""
    return 0 < source.numel * itemsize <= _MOST_NBYTES and 0 < source.most_runs <= _MOST_RUNS


def split_short(routes: Sequence[Route], budget: Budget) -> tuple[list[Route], list[Route]]:
    """Split values into the short ones that one rank needs completely, which are sent together, and the others."""
    if not has_room_for_short(budget):
        return [], [*routes]
    known: dict[tuple[int, int, torch.dtype], bool] = {}  # the routes keep the ids unique
    short, others = list[Route](), list[Route]()
    for route in routes:
        value, source, target, _ = route
        key = id(source), id(target), value.dtype
        travels = known.get(key)
        if travels is None:
            is_for_one = isinstance(target, Whole) and len(target.on) == 1 and not target.offset
            travels = known[key] = is_for_one and is_short(source, value.dtype.itemsize)
        (short if travels else others).append(route)
    return short, others


def move_short(
    routes: Sequence[Route], source: End, target: End, plans: RoutePlans, budget: Budget, failure: Failure
) -> None:
    """Move short values to a stored target. Called by all ranks of a move, with the same routes."""
    if not routes:
        return
    half, group = budget.share(2, _USE), plans.group
    values = _Values.of(routes)
    kinds: _Kinds | None = None
    with failure:
        kinds = _Kinds.of(values.firsts, plans)
    for begin, end in values.batches(half):
        batch: _Batch | None = None
        items = list[Item]()
        with failure:
            if kinds is not None and failure.error is None:
                batch = _Batch.of(values.between(begin, end), kinds, source, group)
                items = batch.items(group)
        exchange(group, items, failure, half)
        items.clear()
        if batch is not None and failure.error is None:
            with failure:
                target.drain_complete(batch.complete())


class _First(NamedTuple):
    """The first value of a kind: of values that are cut alike. `by_recipient`: who needs such a value has all of it."""

    route: Route
    by_recipient: bool


class _Values(NamedTuple):
    """Values to move. `firsts`: of each kind. `of_kind`, `recipients`: by value, its kind, and the rank that needs it."""

    routes: Sequence[Route]
    firsts: Sequence[_First]
    of_kind: Indices
    recipients: Numbers

    @classmethod
    def of(cls, routes: Sequence[Route]) -> _Values:
        """Number the kinds in the order in which they come, which is the same on all ranks."""
        pairs: dict[tuple[int, int, torch.dtype], int] = {}  # the routes keep the ids unique
        kinds: dict[tuple[int, torch.dtype, bool], int] = {}
        firsts, of_pair, of_value = list[_First](), list[tuple[int, int]](), list[int]()
        for route in routes:
            value, source, target, _ = route
            pair = pairs.setdefault((id(source), id(target), value.dtype), len(of_pair))
            if pair == len(of_pair):
                (recipient,) = target.ranks
                by_recipient = source.num_shards == 1 and recipient in source.ranks
                number = kinds.setdefault((id(source), value.dtype, by_recipient), len(firsts))
                if number == len(firsts):
                    firsts.append(_First(route, by_recipient))
                of_pair.append((number, recipient))
            of_value.append(pair)
        columns = numpy.array(of_pair, numpy.int64)[of_value]
        return cls(routes, firsts, columns[:, 0], columns[:, 1])

    def batches(self, budget: Budget) -> Iterator[tuple[int, int]]:
        """Yield the first value of each batch, and one past its last: as many as a rank can hold that needs all of them."""
        sizes = [
            _COPIES * route.value.nbytes + _RUN_NBYTES * route.source.num_shards * route.source.most_runs
            for route, _ in self.firsts
        ]
        held = numpy.array(sizes, numpy.int64)[self.of_kind]
        number = places_of(held) // max(budget.nbytes - max(sizes), 1)
        return itertools.pairwise([*(numpy.diff(number, prepend=-1) != 0).nonzero()[0].tolist(), len(held)])

    def between(self, begin: int, end: int) -> _Values:
        """Return some of the values."""
        chosen = slice(begin, end)
        return _Values(self.routes[chosen], self.firsts, self.of_kind[chosen], self.recipients[chosen])


class _Kinds(NamedTuple):
    """The runs of values that are cut alike, seen from this rank, by kind. Places and lengths are in bytes.

    Attributes:
        bounds, part_nbytes: the elements [start, stop) of this rank's local tensor in which its runs lie, and their length.
        by_recipient: whether who needs a value has all of it.
        sent: of the runs that this rank sends: their places in these elements, and their lengths.
        received: of all runs: the rank that sends each, its place in the complete value, and its length.
        num_sent, num_received: the number of these runs. The columns of `sent` and `received` are one kind after the other.
        nbytes: of the complete value.
    """

    bounds: Sequence[tuple[int, int]]
    part_nbytes: Numbers
    by_recipient: NDArray[numpy.bool_]
    sent: Numbers
    received: Numbers
    num_sent: Numbers
    num_received: Numbers
    nbytes: Numbers

    @classmethod
    def of(cls, firsts: Sequence[_First], plans: RoutePlans) -> _Kinds:
        """Compute the runs of each kind. Raises LayoutError where no rank holds some elements."""
        rank = plans.group.rank
        bounds: list[tuple[int, int]] = []
        sent: list[Numbers] = []
        received: list[Numbers] = []
        planned = plans.of_all_elements([route for route, _ in firsts])
        for (route, by_recipient), plan in zip(firsts, planned, strict=True):
            itemsize = route.value.dtype.itemsize
            senders, _, places, targets, numels = run_table(plan.copies)
            if by_recipient:
                senders = numpy.full_like(senders, _RECIPIENT)
            start, stop = route.source.local_range(rank)
            bounds.append((start, stop))
            here = (senders == rank) | (senders == _RECIPIENT)  # a complete value lies at one place on all its ranks
            sent.append(numpy.stack([places - start, numels])[:, here] * itemsize)
            received.append(numpy.stack([senders, targets * itemsize, numels * itemsize]))
        itemsizes = [route.value.dtype.itemsize for route, _ in firsts]
        return cls(
            bounds=bounds,
            part_nbytes=numpy.array(
                [(stop - start) * size for (start, stop), size in zip(bounds, itemsizes, strict=True)]
            ),
            by_recipient=numpy.array([by_recipient for _, by_recipient in firsts]),
            sent=numpy.concatenate(sent, axis=1),
            received=numpy.concatenate(received, axis=1),
            num_sent=numpy.array([columns.shape[1] for columns in sent]),
            num_received=numpy.array([columns.shape[1] for columns in received]),
            nbytes=numpy.array([route.value.nbytes for route, _ in firsts]),
        )


class _Rows(NamedTuple):
    """The rows that this rank exchanges with each rank, in messages by rank.

    `places`, `lengths`: of each row, in the order of `memory`: where this rank has, or needs, its bytes.
    """

    memory: torch.Tensor
    places: Numbers
    lengths: Numbers
    messages: dict[int, torch.Tensor]

    @classmethod
    def of(cls, ranks: Numbers, places: Numbers, lengths: Numbers, memory: torch.Tensor) -> _Rows:
        """Sort rows by rank. Rows of one rank stay in their order, which both ranks compute alike."""
        order = ranks.argsort(kind="stable")
        ranks, places, lengths = ranks[order], places[order], lengths[order]
        firsts = (numpy.diff(ranks, prepend=-1) != 0).nonzero()[0]
        sizes = numpy.add.reduceat(lengths, firsts).tolist() if len(firsts) else []
        messages = dict(zip(ranks[firsts].tolist(), memory.split_with_sizes(sizes), strict=True)) if sizes else {}
        return cls(memory, places, lengths, messages)


class _Batch(NamedTuple):
    """The rows of some values: those that this rank sends, and memory for those that it receives.

    `received`: the values of which this rank receives all elements, of `nbytes` bytes each.
    """

    sent: _Rows
    arriving: _Rows
    received: Sequence[Route]
    nbytes: Numbers

    @classmethod
    def of(cls, values: _Values, kinds: _Kinds, source: End, group: RankGroup) -> _Batch:
        """Copy the rows that this rank sends, and make memory for those that it receives."""
        here = (values.recipients == group.rank).nonzero()[0]
        of_kind = values.of_kind[here]
        nbytes = kinds.nbytes[of_kind]
        of, row = rows_of_kinds(kinds.num_received, of_kind)
        senders, places, lengths = kinds.received[:, row]
        senders[senders == _RECIPIENT] = group.rank
        memory = group.world.transport.empty((int(lengths.sum()),), torch.uint8, _CPU)
        arriving = _Rows.of(senders, places_of(nbytes)[of] + places, lengths, memory)
        sent = _sent(values, kinds, source, group.rank)
        return cls(sent, arriving, [values.routes[index] for index in here.tolist()], nbytes)

    def items(self, group: RankGroup) -> list[Item]:
        """Return the messages, after the copy of what this rank sends to itself."""
        rank = group.rank
        sends = {(rank, peer): message for peer, message in self.sent.messages.items()}
        receives = {(peer, rank): message for peer, message in self.arriving.messages.items()}
        own = rank, rank
        if own in receives:
            receives.pop(own).copy_(sends.pop(own))
        return [
            Item([Copy(*pair, (numel,), 0, (1,), 0, (1,))], torch.uint8, sends.get(pair), receives.get(pair))
            for pair, numel in sorted((pair, message.numel()) for pair, message in (sends | receives).items())
        ]

    def complete(self) -> CompleteValues:
        """Return the values that this rank has received, one after the other."""
        memory = empty((int(self.nbytes.sum()),), torch.uint8, _CPU)
        _, places, lengths, _ = rows = self.arriving
        copy_rows(rows.memory.numpy(), places_of(lengths), memory.numpy(), places, lengths)
        values, cuts = [route.value for route in self.received], [route.target for route in self.received]
        return CompleteValues(values, cuts, places_of(self.nbytes), self.nbytes, memory)


def _sent(values: _Values, kinds: _Kinds, source: End, rank: int) -> _Rows:
    """Copy the rows that this rank sends from live memory."""
    sends = (kinds.num_sent > 0)[values.of_kind]
    here = (sends & (~kinds.by_recipient[values.of_kind] | (values.recipients == rank))).nonzero()[0]
    of_kind, chosen = values.of_kind[here], [values.routes[index].value for index in here.tolist()]
    parts = list[torch.Tensor]()
    held = local_parts(chosen, [kinds.bounds[number] for number in of_kind.tolist()], source)
    for value, part in zip(chosen, held, strict=True):
        if part is None:
            raise StateError(
                f"{value.fqn}: {value.name}: rank {rank} has no elements of this value, but must send some"
            )
        parts.append(part)
    live, bases = side_by_side(parts, kinds.part_nbytes[of_kind])
    of, row = rows_of_kinds(kinds.num_sent, of_kind)
    places, lengths = kinds.sent[:, row]
    memory = empty((int(lengths.sum()),), torch.uint8, _CPU)
    rows = _Rows.of(values.recipients[here][of], bases[of] + places, lengths, memory)
    copy_rows(numpy.frombuffer(live, numpy.uint8), rows.places, memory.numpy(), places_of(rows.lengths), rows.lengths)
    return rows
