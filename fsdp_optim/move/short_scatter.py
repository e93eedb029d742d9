"""Short values on their way from the one rank that reads each to the live memory of all: a message has the rows of many values.

# rank 0 | a0 a1 b0 b1 |    a0 b0 -> rank 0 | a0 b0 c0 d0 |    rank 0 has read a and b,
# rank 1 | c0 c1 d0 d1 |    a1 b1 -> rank 1 | a1 b1 c1 d1 |    rank 1 has read c and d

Ranks that hold the same shards get the same message, which is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.move.ends import End, Slice, local_parts
from fsdp_optim.move.routes import Route, RoutePlans
from fsdp_optim.move.short import First, Rows, ShortValues, items_of, move_short
from fsdp_optim.plan import run_table
from fsdp_optim.tensors.allocation import empty
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.tensors.rows import copy_rows, places_of, rows_of_kinds
from fsdp_optim.tensors.side_by_side import empty_side_by_side, put_rows
from fsdp_optim.transport.base import Item, RankGroup
from fsdp_optim.transport.failure import Failure

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.int64]
    Indices = NDArray[numpy.intp]

_CPU = torch.device("cpu")


def scatter_short(
    routes: Sequence[Route], source: End, target: End, plans: RoutePlans, budget: Budget, failure: Failure
) -> None:
    """Move short values from a stored source. Called by all ranks of a move, with the same routes."""

    def prepare(firsts: Sequence[First]) -> Callable[[ShortValues], _Batch]:
        kinds = _Kinds.of(firsts, plans)
        return lambda values: _Batch.of_values(values, kinds, source, plans.group)

    move_short(routes, target, plans.group, budget, failure, prepare)


class _Kinds(NamedTuple):
    """The runs of values that are cut alike, seen from this rank, by kind. Places and lengths are in bytes.

    Attributes:
        holders: the sets of ranks that hold the same shards, by their numbers.
        bounds: the elements [start, stop) of this rank's local tensor in which its runs lie.
        sent: of all runs: the number of the ranks that hold each, its place in the complete value, and its length.
        received: of the runs of this rank: the same number, their places in these elements, and their lengths.
        num_sent, num_received: the number of these runs. The columns of `sent` and `received` are one kind after the other.
        nbytes: of the complete value.
    """

    holders: Sequence[tuple[int, ...]]
    bounds: Sequence[tuple[int, int]]
    sent: Numbers
    received: Numbers
    num_sent: Numbers
    num_received: Numbers
    nbytes: Numbers

    @classmethod
    def of(cls, firsts: Sequence[First], plans: RoutePlans) -> _Kinds:
        """Compute the runs of each kind. Raises StateError where some of a rank's memory would stay uninitialised."""
        rank = plans.group.rank
        numbers: dict[tuple[int, ...], int] = {}
        bounds: list[tuple[int, int]] = []
        sent: list[Numbers] = []
        received: list[Numbers] = []
        planned = plans.from_one_rank([route for route, _ in firsts])
        for (route, _), plan in zip(firsts, planned, strict=True):
            live, size = route.live, route.value.dtype.itemsize
            _, lowest, complete, local, numels = run_table(plan.copies)
            start, stop = live.local_range(rank)
            shards = {holder: plan.target.shard_of(holder) for holder in dict.fromkeys(lowest.tolist())}
            sets = {holder: live.holders(shard) for holder, shard in shards.items() if shard is not None}
            of = numpy.array(
                [numbers.setdefault(sets[holder], len(numbers)) for holder in lowest.tolist()], numpy.int64
            )
            here = numpy.array([rank in sets[holder] for holder in lowest.tolist()], bool)
            num_filled, num_wanted = int(numels[here].sum()), live.numel_on(rank)
            if num_filled != num_wanted:
                raise StateError(
                    f"{route.value.fqn}: {route.value.name}: rank {rank} needs {counted_noun(num_wanted, 'element')}, and the "
                    f"plan brings {num_filled}"
                )
            bounds.append((start, stop))
            sent.append(numpy.stack([of, complete * size, numels * size]))
            received.append(numpy.stack([of, (local - start) * size, numels * size])[:, here])
        return cls(
            holders=list(numbers),
            bounds=bounds,
            sent=numpy.concatenate(sent, axis=1),
            received=numpy.concatenate(received, axis=1),
            num_sent=numpy.array([columns.shape[1] for columns in sent]),
            num_received=numpy.array([columns.shape[1] for columns in received]),
            nbytes=numpy.array([route.value.nbytes for route, _ in firsts]),
        )


class _Batch(NamedTuple):
    """The rows of some values: those that this rank has read and sends, and memory for those that it receives.

    `received`: the values of which this rank receives rows. `of`: of each row, in the order of `arriving`, the index of its value
    among them.
    """

    rank: int
    kinds: _Kinds
    sent: Rows
    arriving: Rows
    received: ShortValues
    of: Indices

    @classmethod
    def of_values(cls, values: ShortValues, kinds: _Kinds, source: End, group: RankGroup) -> _Batch:
        """Read the values that this rank sends to others, and make memory for the rows that it receives."""
        chosen = values.at(kinds.num_received[values.of_kind] > 0)
        of, row = rows_of_kinds(kinds.num_received, chosen.of_kind)
        holders, places, lengths = kinds.received[:, row]
        memory = group.world.transport.empty((int(lengths.sum()),), torch.uint8, _CPU)
        arriving = Rows.of(chosen.roots[of] * len(kinds.holders) + holders, places, lengths, memory)
        sent = _read(values, kinds, source, group.rank)
        return cls(group.rank, kinds, sent, arriving, chosen, of[arriving.order])

    def items(self, group: RankGroup) -> list[Item]:
        rank, holders = group.rank, self.kinds.holders
        sends = {(rank, peer, number): sent for number, sent in self.sent.messages.items() for peer in holders[number]}
        receives = {divmod(key, len(holders)): arriving for key, arriving in self.arriving.messages.items()}
        return items_of(sends, {(root, rank, number): arriving for (root, number), arriving in receives.items()})

    def deliver(self, target: End) -> None:
        values, bounds = self.received, [self.kinds.bounds[number] for number in self.received.of_kind.tolist()]
        parts = local_parts([route.value for route in values.routes], bounds, target)
        for (value, *_), part, (start, stop) in zip(values.routes, parts, bounds, strict=True):
            if part is not None and (part.numel() != stop - start or not part.is_contiguous()):
                raise StateError(
                    f"{value.fqn}: {value.name}: rank {self.rank} needs contiguous memory for {stop - start} elements, and has "
                    f"memory of shape {list(part.shape)} and strides {list(part.stride())}"
                )
        rows = self.arriving
        put_rows(rows.memory, places_of(rows.lengths), parts, self.of, rows.places, rows.lengths)


def _read(values: ShortValues, kinds: _Kinds, source: End, rank: int) -> Rows:
    """Read the values that this rank sends, and copy their rows into one message for each set of ranks with the same shards."""
    here = values.at(values.roots == rank)
    sizes = [route.value.placement.numel for route in here.routes]
    complete, flats, bases = empty_side_by_side(sizes, [route.value.dtype for route in here.routes])
    source.fill([Slice(route.value, route.source, flat) for route, flat in zip(here.routes, flats, strict=True)])
    of, row = rows_of_kinds(kinds.num_sent, here.of_kind)
    holders, places, lengths = kinds.sent[:, row]
    memory = empty((int(lengths.sum()),), torch.uint8, _CPU)
    rows = Rows.of(holders, bases[of] + places, lengths, memory)
    copy_rows(complete.numpy(), rows.places, memory.numpy(), places_of(rows.lengths), rows.lengths)
    return rows
