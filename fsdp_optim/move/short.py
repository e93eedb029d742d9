"""Short values on their way from live memory to the one rank that writes each: a message to a rank has the rows of many values.

# rank 0 | a0 b0 c0 d0 |    a0 b0 -> rank 0 | a0 a1 b0 b1 |    rank 0 writes a and b,
# rank 1 | a1 b1 c1 d1 |    c1 d1 -> rank 1 | c0 c1 d0 d1 |    rank 1 writes c and d: one run each instead of four

What depends on the structure is computed once for each kind of value (values that are cut alike), the rest for all at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from fsdp_optim.errors import StateError
from fsdp_optim.layout import Whole
from fsdp_optim.move.ends import CompleteValues, End, local_parts
from fsdp_optim.move.routes import Route, RoutePlans
from fsdp_optim.plan import Copy, RankPlan, run_table
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

MOST_NBYTES = 256 << 10
"""The most bytes of a complete short value, where the budget has room for several of them."""

_CPU = torch.device("cpu")
_USE = "rows of short values, and the messages that carry them"
_COPIES = 8  # of a batch, at most, that a rank holds: as they are sent, as they arrive, and as they belong


def split_short(routes: Sequence[Route], budget: Budget) -> tuple[list[Route], list[Route]]:
    """Return the values that can travel with others, which are small and of which one rank needs all, and the other values."""
    most = _most_nbytes(_share(budget))
    known: dict[tuple[int, torch.dtype], bool] = {}  # the routes keep the ids unique
    short, others = list[Route](), list[Route]()
    for route in routes:
        value, _, target, _ = route
        key = id(target), value.dtype
        is_short = known.get(key)
        if is_short is None:
            is_for_one = isinstance(target, Whole) and len(target.on) == 1 and not target.offset
            is_short = known[key] = is_for_one and target.numel * value.dtype.itemsize <= most
        (short if is_short else others).append(route)
    return short, others


def move_short(
    routes: Sequence[Route], source: End, target: End, plans: RoutePlans, budget: Budget, failure: Failure
) -> None:
    """Move short values to a stored target. Called by all ranks of a move, with the same routes."""
    if not routes:
        return
    share = _share(budget)
    firsts, of_kind = _numbered(routes)
    kinds = list[_Kind]()
    with failure:
        kinds += map(_Kind.of, firsts, plans.of_kinds(firsts))
    sizes = numpy.array([route.value.nbytes for route in firsts], numpy.int64)[of_kind]
    number = places_of(sizes) // max(share.nbytes - _most_nbytes(share), 1)
    borders = [*(numpy.diff(number, prepend=-1) != 0).nonzero()[0].tolist(), len(routes)]
    for begin, end in itertools.pairwise(borders):
        batch: _Batch | None = None
        items = list[Item]()
        with failure:
            if failure.error is None:
                batch = _Batch.of(routes[begin:end], kinds, of_kind[begin:end], source, plans.group)
                items = batch.items(plans.group)
        exchange(plans.group, items, failure, budget.share(2, _USE))
        items.clear()
        if batch is not None and failure.error is None:
            with failure:
                target.drain_complete(batch.complete())


def _share(budget: Budget) -> Budget:
    """Return the budget for the values of a batch."""
    return budget.share(2, _USE).share(_COPIES, "copies of a batch, beside the messages")


def _most_nbytes(share: Budget) -> int:
    """Return the most bytes of a short value: some must fit in a batch."""
    return min(MOST_NBYTES, share.share(2, "one value").nbytes)


def _numbered(routes: Sequence[Route]) -> tuple[list[Route], Indices]:
    """Return the first value of each kind, and the number of each value's kind."""
    numbers: dict[tuple[int, int, torch.dtype], int] = {}  # the routes keep the ids unique
    firsts, of_kind = list[Route](), list[int]()
    for route in routes:
        value, source, target, _ = route
        number = numbers.setdefault((id(source), id(target), value.dtype), len(firsts))
        if number == len(firsts):
            firsts.append(route)
        of_kind.append(number)
    return firsts, numpy.array(of_kind, numpy.intp)


class _Kind(NamedTuple):
    """What this rank sends and receives of values that are cut alike. Places and lengths are in bytes.

    Attributes:
        start, stop, part_nbytes: the elements of the local tensor in which the sent runs lie, and their length.
        sent: by run, the rank that receives it, its place in these elements, and its length.
        received: by run, the rank that sends it, its place in the complete value, and its length.
        nbytes: of the complete value, where this rank receives it; else 0.
    """

    start: int
    stop: int
    part_nbytes: int
    sent: Numbers
    received: Numbers
    nbytes: int

    @classmethod
    def of(cls, route: Route, planned: RankPlan) -> _Kind:
        """Return the kind of a value."""
        rank, itemsize = planned.rank, route.value.dtype.itemsize
        start, stop = route.source.local_range(rank)
        senders, recipients, places, targets, numels = run_table(planned.copies)
        sent = numpy.stack([recipients, (places - start) * itemsize, numels * itemsize])[:, senders == rank]
        received = numpy.stack([senders, targets * itemsize, numels * itemsize])[:, recipients == rank]
        return cls(start, stop, (stop - start) * itemsize, sent, received, planned.num_wanted * itemsize)


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
    def of(
        cls, routes: Sequence[Route], kinds: Sequence[_Kind], of_kind: Indices, source: End, group: RankGroup
    ) -> _Batch:
        """Copy the rows that this rank sends, and make memory for those that it receives."""
        nbytes = numpy.array([kind.nbytes for kind in kinds], numpy.int64)[of_kind]
        here = nbytes.nonzero()[0]
        nbytes = nbytes[here]
        (ranks, places, lengths), of = _rows_of([kind.received for kind in kinds], of_kind[here])
        memory = group.world.transport.empty((int(lengths.sum()),), torch.uint8, _CPU)
        arriving = _Rows.of(ranks, places_of(nbytes)[of] + places, lengths, memory)
        sent = _sent(routes, kinds, of_kind, source, group.rank)
        return cls(sent, arriving, [routes[index] for index in here.tolist()], nbytes)

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


def _sent(routes: Sequence[Route], kinds: Sequence[_Kind], of_kind: Indices, source: End, rank: int) -> _Rows:
    """Copy the rows that this rank sends from live memory."""
    here = numpy.array([kind.sent.shape[1] for kind in kinds])[of_kind].nonzero()[0]
    of_kind, values = of_kind[here], [routes[index].value for index in here.tolist()]
    bounds = [(kind.start, kind.stop) for kind in kinds]
    parts = list[torch.Tensor]()
    for value, part in zip(
        values, local_parts(values, [bounds[number] for number in of_kind.tolist()], source), strict=True
    ):
        if part is None:
            raise StateError(
                f"{value.fqn}: {value.name}: rank {rank} has no elements of this value, but must send some"
            )
        parts.append(part)
    live, bases = side_by_side(parts, numpy.array([kind.part_nbytes for kind in kinds], numpy.int64)[of_kind])
    (ranks, places, lengths), of = _rows_of([kind.sent for kind in kinds], of_kind)
    rows = _Rows.of(ranks, bases[of] + places, lengths, empty((int(lengths.sum()),), torch.uint8, _CPU))
    memory = numpy.frombuffer(live, numpy.uint8)
    copy_rows(memory, rows.places, rows.memory.numpy(), places_of(rows.lengths), rows.lengths)
    return rows


def _rows_of(columns: Sequence[Numbers], of_kind: Indices) -> tuple[Numbers, Numbers]:
    """Return the columns of the rows of all values, and the index of each row's value. `columns`: of the rows of each kind."""
    of, row = rows_of_kinds(numpy.array([kind.shape[1] for kind in columns], numpy.int64), of_kind)
    return numpy.concatenate(columns, axis=1)[:, row], of
