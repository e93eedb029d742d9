"""Short values on their way from live memory to the one rank that writes each: a message to a rank has the rows of many values.

# rank 0 | a0 b0 c0 d0 |    a0 b0 -> rank 0 | a0 a1 b0 b1 |    rank 0 writes a and b,
# rank 1 | a1 b1 c1 d1 |    c1 d1 -> rank 1 | c0 c1 d0 d1 |    rank 1 writes c and d: one run each instead of four
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from fsdp_optim.errors import StateError
from fsdp_optim.move.ends import CompleteValues, End, local_parts
from fsdp_optim.move.routes import Route, RoutePlans
from fsdp_optim.move.short import First, Rows, ShortValues, items_of, move_short
from fsdp_optim.plan import run_table
from fsdp_optim.tensors.allocation import empty
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.tensors.rows import copy_rows, places_of, rows_of_kinds
from fsdp_optim.tensors.side_by_side import side_by_side
from fsdp_optim.transport.base import Item, RankGroup
from fsdp_optim.transport.failure import Failure

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.int64]

_ROOT = -1  # as the sender of a run: a rank that has all of a value needs nobody else's

_CPU = torch.device("cpu")


def gather_short(
    routes: Sequence[Route], source: End, target: End, plans: RoutePlans, budget: Budget, failure: Failure
) -> None:
    """Move short values to a stored target. Called by all ranks of a move, with the same routes."""

    def prepare(firsts: Sequence[First]) -> Callable[[ShortValues], _Batch]:
        kinds = _Kinds.of(firsts, plans)
        return lambda values: _Batch.of(values, kinds, source, plans.group)

    move_short(routes, target, plans.group, budget, failure, prepare)


class _Kinds(NamedTuple):
    """The runs of values that are cut alike, seen from this rank, by kind. Places and lengths are in bytes.

    Attributes:
        bounds, part_nbytes: the elements [start, stop) of this rank's local tensor in which its runs lie, and their length.
        is_at_root: whether the root of each holds all of it live.
        sent: of the runs that this rank sends: their places in these elements, and their lengths.
        received: of all runs: the rank that sends each, its place in the complete value, and its length.
        num_sent, num_received: the number of these runs. The columns of `sent` and `received` are one kind after the other.
        nbytes: of the complete value.
    """

    bounds: Sequence[tuple[int, int]]
    part_nbytes: Numbers
    is_at_root: NDArray[numpy.bool_]
    sent: Numbers
    received: Numbers
    num_sent: Numbers
    num_received: Numbers
    nbytes: Numbers

    @classmethod
    def of(cls, firsts: Sequence[First], plans: RoutePlans) -> _Kinds:
        """Compute the runs of each kind. Raises LayoutError where no rank holds some elements."""
        rank = plans.group.rank
        bounds: list[tuple[int, int]] = []
        sent: list[Numbers] = []
        received: list[Numbers] = []
        planned = plans.of_all_elements([route for route, _ in firsts])
        for (route, is_at_root), plan in zip(firsts, planned, strict=True):
            itemsize = route.value.dtype.itemsize
            senders, _, places, targets, numels = run_table(plan.copies)
            if is_at_root:
                senders = numpy.full_like(senders, _ROOT)
            start, stop = route.source.local_range(rank)
            bounds.append((start, stop))
            here = (senders == rank) | (senders == _ROOT)  # a complete value lies at one place on all its ranks
            sent.append(numpy.stack([places - start, numels])[:, here] * itemsize)
            received.append(numpy.stack([senders, targets * itemsize, numels * itemsize]))
        itemsizes = [route.value.dtype.itemsize for route, _ in firsts]
        return cls(
            bounds=bounds,
            part_nbytes=numpy.array(
                [(stop - start) * size for (start, stop), size in zip(bounds, itemsizes, strict=True)]
            ),
            is_at_root=numpy.array([is_at_root for _, is_at_root in firsts]),
            sent=numpy.concatenate(sent, axis=1),
            received=numpy.concatenate(received, axis=1),
            num_sent=numpy.array([columns.shape[1] for columns in sent]),
            num_received=numpy.array([columns.shape[1] for columns in received]),
            nbytes=numpy.array([route.value.nbytes for route, _ in firsts]),
        )


class _Batch(NamedTuple):
    """The rows of some values: those that this rank sends, and memory for those that it receives.

    `received`: the values of which this rank receives all elements, of `nbytes` bytes each.
    """

    sent: Rows
    arriving: Rows
    received: Sequence[Route]
    nbytes: Numbers

    @classmethod
    def of(cls, values: ShortValues, kinds: _Kinds, source: End, group: RankGroup) -> _Batch:
        """Copy the rows that this rank sends, and make memory for those that it receives."""
        here = values.at(values.roots == group.rank)
        nbytes = kinds.nbytes[here.of_kind]
        of, row = rows_of_kinds(kinds.num_received, here.of_kind)
        senders, places, lengths = kinds.received[:, row]
        senders[senders == _ROOT] = group.rank
        memory = group.world.transport.empty((int(lengths.sum()),), torch.uint8, _CPU)
        arriving = Rows.of(senders, places_of(nbytes)[of] + places, lengths, memory)
        sent = _sent(values, kinds, source, group.rank)
        return cls(sent, arriving, here.routes, nbytes)

    def items(self, group: RankGroup) -> list[Item]:
        rank = group.rank
        sends = {(rank, peer, 0): message for peer, message in self.sent.messages.items()}
        return items_of(sends, {(peer, rank, 0): message for peer, message in self.arriving.messages.items()})

    def deliver(self, target: End) -> None:
        memory = empty((int(self.nbytes.sum()),), torch.uint8, _CPU)
        rows = self.arriving
        copy_rows(rows.memory.numpy(), places_of(rows.lengths), memory.numpy(), rows.places, rows.lengths)
        values, cuts = [route.value for route in self.received], [route.target for route in self.received]
        target.drain_complete(CompleteValues(values, cuts, places_of(self.nbytes), self.nbytes, memory))


def _sent(values: ShortValues, kinds: _Kinds, source: End, rank: int) -> Rows:
    """Copy the rows that this rank sends from live memory."""
    sends = (kinds.num_sent > 0)[values.of_kind]
    here = values.at(sends & (~kinds.is_at_root[values.of_kind] | (values.roots == rank)))
    chosen, of_kind = [route.value for route in here.routes], here.of_kind
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
    rows = Rows.of(here.roots[of], bases[of] + places, lengths, memory)
    copy_rows(numpy.frombuffer(live, numpy.uint8), rows.places, memory.numpy(), places_of(rows.lengths), rows.lengths)
    return rows
