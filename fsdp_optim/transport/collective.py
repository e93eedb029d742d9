"""Bytes move between ranks: bounded messages, point to point, straight from the shard and straight into place.

Works over any process group and backend. Each rank turns its copies into one stream of messages per peer; both ends of a
stream cut it alike, from the plan alone. A large run travels as it lies in memory; small and strided blocks are packed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_optim import memory
from fsdp_optim.errors import RankError
from fsdp_optim.memory import Budget
from fsdp_optim.plan import Copy
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.callers import Callers
from fsdp_optim.transport.failure import Failure

_PEERS_AT_ONCE = 16
_ROUNDS_IN_FLIGHT = 2
_ALONE_FROM = 1 << 20  # bytes; a longer run travels alone, without packing
_WIDEST = 16  # bytes of one element of the widest dtype: no message is smaller

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class Item:
    """One tensor to move: the copies of one state value of one parameter that this rank takes part in.

    Ranks list the items that they share in the same order. `source` and `target` are this rank's local tensors, 1-D;
    None where it has no part on that side, and a `target` of None where its elements are to be dropped.
    """

    copies: Sequence[Copy]
    dtype: torch.dtype
    source: torch.Tensor | None = None
    target: torch.Tensor | None = None


class Block(NamedTuple):
    """Part of a copy inside one message: a view of the local tensor, `offset` bytes into the message."""

    view: torch.Tensor | None
    numel: int
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class _Message:
    blocks: list[Block] = field(default_factory=list)
    nbytes: int = 0
    lies: torch.Tensor | None = None  # the message in the local tensor, where it needs no buffer

    def add(self, view: torch.Tensor | None, numel: int, dtype: torch.dtype) -> None:
        size = dtype.itemsize
        offset = -(-self.nbytes // size) * size
        self.blocks.append(Block(view, numel, dtype, offset))
        self.nbytes = offset + numel * size

    def end(self, numel: int, dtype: torch.dtype) -> int:
        """How long the message would be with this block: each begins where its dtype can be viewed."""
        return -(-self.nbytes // dtype.itemsize) * dtype.itemsize + numel * dtype.itemsize

    def in_place(self, wire: torch.device) -> torch.Tensor | None:
        """The message as it lies in the local tensor, where one contiguous block on the right device is all of it."""
        if len(self.blocks) != 1 or self.blocks[0].view is None:
            return None
        view = self.blocks[0].view
        return view.view(torch.uint8) if view.dim() == 1 and view.is_contiguous() and view.device == wire else None


def _lies(message: _Message, wire: torch.device) -> torch.Tensor | None:
    """Find out where a message lies, before anything is posted."""
    message.lies = message.in_place(wire)
    return message.lies


def exchange(callers: Callers, items: Iterable[Item], failure: Failure, budget: Budget) -> None:
    """Move every item. Called by all ranks of `callers`; the ranks must agree afterwards whether all went well.

    Everything that needs memory is done first, and the ranks agree that all of them are ready: an error in `failure`, or one
    met here, is raised on all ranks before data moves. From then on nothing that one rank alone can see is raised: it is
    put into `failure`, and this rank goes on sending and receiving, so that its peers finish.

    Holds at most `budget`, which is the same on all ranks, beyond the items' own tensors.
    """
    width = min(max(len(callers.ranks) - 1, 1), _PEERS_AT_ONCE)
    message = budget.share(2 * _ROUNDS_IN_FLIGHT * width, "a buffer to and from each peer, in each round in flight")
    streams = _Streams(callers.rank, max(message.nbytes // _WIDEST * _WIDEST, _WIDEST))
    rounds: list[list[_Posting]] = []
    with failure:
        for item in items:
            streams.add(item, failure)
        if failure.error is None:
            streams.copy_here()
        if len(callers.ranks) > 1:
            rounds = _postings(_rounds(callers, streams, width), callers)
    agree(callers, "ready to move", failure.error)
    # From here on the peers wait for every message, so this function calls nothing that could fail without a guard.
    lost: set[int] = set()
    in_flight: list[tuple[Sequence[dist.Work], Sequence[_Posting]]] = []
    for this in (*rounds, *([()] * _ROUNDS_IN_FLIGHT)):
        if len(in_flight) == _ROUNDS_IN_FLIGHT:
            for work, posting in zip(*in_flight.pop(0), strict=True):
                try:
                    work.wait(timedelta(seconds=callers.timeout))
                except Exception as error:
                    lost.add(posting.peer)
                    with failure:
                        failure.note(_connection_lost(callers, {posting.peer}, error), fatal=True)
                else:
                    with failure:
                        _unpack(posting, failure)
        with failure:
            _pack(this)
        postings = [one for one in this if one.peer not in lost]
        works: Sequence[dist.Work] = ()
        if postings:
            try:
                works = dist.batch_isend_irecv([one.operation for one in postings])
            except Exception as error:
                lost.update(one.peer for one in postings)
                with failure:
                    failure.note(_connection_lost(callers, {one.peer for one in postings}, error), fatal=True)
        if len(works) == 1:  # NCCL gives one handle for the whole batch
            works = [works[0]] * len(postings)
        in_flight.append((works, postings if works else ()))


@dataclass(frozen=True)
class _Round:
    """At most one message to and from each of some peers: (peer, message)."""

    send: list[tuple[int, _Message]]
    receive: list[tuple[int, _Message]]


def _rounds(callers: Callers, streams: _Streams, width: int) -> list[_Round]:
    """What to send and to receive, with one set of peers after the other.

    Everyone meets its peers in the same order, and every pair its messages: the rank that is furthest behind never waits
    for one that has not posted yet.
    """
    num, here = len(callers.ranks), callers.position
    rounds = []
    for first in range(1, num, width):
        shifts = range(first, min(first + width, num))
        send = [(r, streams.outgoing(r)) for r in (callers.ranks[(here + shift) % num] for shift in shifts)]
        receive = [(r, streams.incoming(r)) for r in (callers.ranks[(here - shift) % num] for shift in shifts)]
        for index in range(max(len(messages) for _, messages in (*send, *receive))):
            rounds.append(
                _Round(
                    [(peer, messages[index]) for peer, messages in send if index < len(messages)],
                    [(peer, messages[index]) for peer, messages in receive if index < len(messages)],
                )
            )
    return rounds


@dataclass(frozen=True)
class _Posting:
    """A message with everything that is needed to post it. `buffer`: its bytes, where it does not lie in a local tensor."""

    operation: dist.P2POp
    peer: int
    message: _Message
    buffer: torch.Tensor | None
    received: bool


def _postings(rounds: list[_Round], callers: Callers) -> list[list[_Posting]]:
    """All that a rank needs to post its rounds. Rounds that are not under way together share buffers."""
    wire = callers.wire
    sizes = [[m.nbytes for _, m in (*one.receive, *one.send) if _lies(m, wire) is None] for one in rounds]
    longest = max((nbytes for its in sizes for nbytes in its), default=0)
    num = max(map(len, sizes), default=0)
    slots = [
        [torch.empty(longest, dtype=torch.uint8, device=wire) for _ in range(num)]
        for _ in range(min(_ROUNDS_IN_FLIGHT, len(rounds)))
    ]
    made = []
    for index, one in enumerate(rounds):
        free = iter(slots[index % _ROUNDS_IN_FLIGHT])
        postings = []
        for received, its in ((True, one.receive), (False, one.send)):
            for peer, message in its:
                buffer = next(free).narrow(0, 0, message.nbytes) if message.lies is None else None
                tensor = buffer if buffer is not None else message.lies
                if tensor is None:
                    raise RuntimeError("unreachable: a message lies in a local tensor or in a buffer")
                operation = dist.P2POp(dist.irecv if received else dist.isend, tensor, peer, callers.group)
                postings.append(_Posting(operation, peer, message, buffer, received))
        made.append(postings)
    return made


class _Streams:
    """This rank's messages to and from every peer."""

    def __init__(self, rank: int, limit: int) -> None:
        self._rank, self._limit = rank, limit
        self._here: list[tuple[torch.Tensor, torch.Tensor]] = []  # from this rank to itself, not copied yet
        self._here_nbytes = 0
        self._to: dict[int, _Stream] = {}
        self._from: dict[int, _Stream] = {}

    def add(self, item: Item, failure: Failure) -> None:
        for copy in item.copies:
            if copy.source_rank == copy.target_rank:
                if item.source is not None and item.target is not None:
                    source = _view(memory.source_block, copy, item.source, failure)
                    target = _view(memory.target_block, copy, item.target, failure)
                    if source is not None and target is not None and failure.error is None:
                        self._here.append((target, source))
                        self._here_nbytes += target.nbytes
                        if self._here_nbytes >= _ALONE_FROM:  # what was made for an item is not kept for long
                            with failure:
                                self.copy_here()
            elif copy.source_rank == self._rank:
                view = _view(memory.source_block, copy, item.source, failure)
                _stream(self._to, copy.target_rank, self._limit).add(copy, item.dtype, view)
            elif copy.target_rank == self._rank:
                view = _view(memory.target_block, copy, item.target, failure)
                _stream(self._from, copy.source_rank, self._limit).add(copy, item.dtype, view)

    def copy_here(self) -> None:
        """Copy what this rank has itself, in calls of torch for many blocks each."""
        pairs, self._here, self._here_nbytes = self._here, [], 0
        _copy_all(pairs)

    def outgoing(self, rank: int) -> list[_Message]:
        stream = self._to.pop(rank, None)
        return stream.messages() if stream is not None else []

    def incoming(self, rank: int) -> list[_Message]:
        stream = self._from.pop(rank, None)
        return stream.messages() if stream is not None else []


def _view(
    block: Callable[[Copy, torch.Tensor], torch.Tensor], copy: Copy, flat: torch.Tensor | None, failure: Failure
) -> torch.Tensor | None:
    """The part of a local tensor; None where there is none, or where it does not fit, so that messages stay in step."""
    try:
        return block(copy, flat) if flat is not None else None
    except Exception as error:
        failure.note(error)
        return None


class _Stream:
    """The messages between this rank and one peer, in one direction."""

    def __init__(self, limit: int) -> None:
        self._limit, self._alone_from = limit, min(_ALONE_FROM, limit)
        self._alone: list[_Message] = []
        self._packed: list[_Message] = [_Message()]

    def add(self, copy: Copy, dtype: torch.dtype, view: torch.Tensor | None) -> None:
        numel, message = copy.numel, self._packed[-1]
        nbytes = numel * dtype.itemsize
        if nbytes < self._alone_from and message.end(numel, dtype) <= self._limit:
            message.add(view, numel, dtype)  # as most are
            return
        for part, numel in _cut(copy.sizes, view, max(self._limit // dtype.itemsize, 1)):
            if copy.is_run and numel * dtype.itemsize >= self._alone_from:
                message = _Message()
                self._alone.append(message)
            else:
                message = self._packed[-1]
                if message.blocks and message.end(numel, dtype) > self._limit:
                    message = _Message()
                    self._packed.append(message)
            message.add(part, numel, dtype)

    def messages(self) -> list[_Message]:
        return [*(m for m in self._packed if m.blocks), *self._alone]


def _stream(streams: dict[int, _Stream], peer: int, limit: int) -> _Stream:
    found = streams.get(peer)
    if found is None:
        found = streams[peer] = _Stream(limit)
    return found


def _cut(sizes: tuple[int, ...], view: torch.Tensor | None, limit: int) -> Iterator[tuple[torch.Tensor | None, int]]:
    """A block in parts of at most `limit` elements, cut along its first dimension, then the next."""
    numel = 1
    for size in sizes:
        numel *= size
    if numel <= limit:
        yield view, numel
        return
    row = numel // sizes[0]
    if row > limit:
        for index in range(sizes[0]):
            yield from _cut(sizes[1:], view[index] if view is not None else None, limit)
        return
    step = limit // row
    for first in range(0, sizes[0], step):
        size = min(step, sizes[0] - first)
        yield view.narrow(0, first, size) if view is not None else None, size * row


def _pack(postings: Sequence[_Posting]) -> None:
    """Fill the buffers of what is sent. Where it fails, what goes out is garbage, and no rank will use it."""
    for one in postings:
        if one.buffer is not None and not one.received:
            _copy_all([(inside, view) for view, inside in _inside(one.message, one.buffer)])


def _unpack(one: _Posting, failure: Failure) -> None:
    if one.buffer is not None and one.received and failure.error is None:
        _copy_all(_inside(one.message, one.buffer))


def _connection_lost(callers: Callers, peers: set[int], error: Exception) -> RankError:
    names = ", ".join(f"rank {peer}" for peer in sorted(peers))
    log.error("rank %d lost the connection to %s: %s", callers.rank, names, error)
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RankError(f"lost the connection to {names}, or it did not answer within {callers.timeout:g} s: {reason}")


def _inside(message: _Message, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The blocks of a message that this rank has: (the local tensor's part, the same elements in the buffer)."""
    found = []
    for dtype, blocks in itertools.groupby(message.blocks, key=lambda block: block.dtype):
        run = list(blocks)  # they lie together: only another dtype begins where it can be viewed
        start, stop = run[0].offset, run[-1].offset + run[-1].nbytes
        parts = buffer[start:stop].view(dtype).split_with_sizes([block.numel for block in run])
        for block, part in zip(run, parts, strict=True):
            if block.view is not None:
                found.append((block.view, part if block.view.dim() == 1 else part.view(block.view.shape)))
    return found


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first, with one call of torch."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)
