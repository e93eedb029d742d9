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
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_optim import memory
from fsdp_optim.errors import RankError
from fsdp_optim.plan import Copy
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.callers import Callers

_PEERS_AT_ONCE = 16
_ROUNDS_IN_FLIGHT = 2
_ALONE_FROM = 1 << 20  # bytes; a longer run travels alone, without packing
_WIDEST = 16  # bytes of one element of the widest dtype: no message is smaller

_TRIES = 3  # to post a round, or to wait for one

_Arg = TypeVar("_Arg")
_Result = TypeVar("_Result")

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


@dataclass(frozen=True)
class Block:
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
        offset = self.end(0, dtype)
        self.blocks.append(Block(view, numel, dtype, offset))
        self.nbytes = offset + numel * dtype.itemsize

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


class Failure:
    """The first thing that went wrong on this rank while data moved; the exchange goes on, so that no rank waits."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.fatal = False

    def note(self, error: Exception, *, fatal: bool = False) -> None:
        self.error = self.error or error
        self.fatal = self.fatal or fatal


def exchange(callers: Callers, items: Iterable[Item], failure: Failure) -> None:
    """Move every item. Called by all ranks of `callers`; the ranks must agree afterwards whether all went well.

    Everything that needs memory is done first, and the ranks agree that all of them are ready: an error in `failure`, or one
    met here, is raised on all ranks before data moves. From then on nothing that one rank alone can see is raised: it is
    put into `failure`, and this rank goes on sending and receiving, so that its peers finish.

    Holds at most `callers.bucket_nbytes` beyond the items' own tensors.
    """
    width = min(max(len(callers.ranks) - 1, 1), _PEERS_AT_ONCE)
    # Per round a buffer for each peer to send to and one for each to receive from.
    limit = max(callers.bucket_nbytes // (2 * _ROUNDS_IN_FLIGHT * width) // _WIDEST * _WIDEST, _WIDEST)
    streams = _Streams(callers.rank, limit)
    rounds: list[_Round] = []
    post = _Post(callers, failure)
    try:
        for item in items:
            streams.add(item, failure)
        if len(callers.ranks) > 1:
            rounds = _rounds(callers, streams, width)
            post.free = _buffers(rounds, callers.wire, 2 * _ROUNDS_IN_FLIGHT * width)
    except Exception as error:
        failure.note(error)
    agree(callers, "ready to move", failure.error)
    in_flight: list[list[_InFlight]] = []
    for this in rounds:
        if len(in_flight) == _ROUNDS_IN_FLIGHT:
            _insist(failure, post.finish, lambda posted, error: None, in_flight.pop(0))
        in_flight.append(_insist(failure, post.start, post.drop, this))
    for posted in in_flight:
        _insist(failure, post.finish, lambda posted, error: None, posted)


def _insist(
    failure: Failure, step: Callable[[_Arg], _Result], otherwise: Callable[[_Arg, Exception], _Result], arg: _Arg
) -> _Result:
    """Take a step that peers wait for: what goes wrong in it is noted, and it is taken all the same, or done without."""
    for _ in range(_TRIES):
        try:
            return step(arg)
        except Exception as error:
            failure.note(error)
            reason = error
    return otherwise(arg, reason)


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


def _buffers(rounds: list[_Round], wire: torch.device, at_most: int) -> list[torch.Tensor]:
    """Memory for the messages that do not travel as they lie in a local tensor: as many as can be under way."""
    sizes = [
        message.nbytes for one in rounds for _, message in (*one.send, *one.receive) if _lies(message, wire) is None
    ]
    return [torch.empty(max(sizes), dtype=torch.uint8, device=wire) for _ in range(min(len(sizes), at_most))]


class _Streams:
    """This rank's messages to and from every peer."""

    def __init__(self, rank: int, limit: int) -> None:
        self._rank, self._limit = rank, limit
        self._to: dict[int, _Stream] = {}
        self._from: dict[int, _Stream] = {}

    def add(self, item: Item, failure: Failure) -> None:
        for copy in item.copies:
            if copy.source_rank == copy.target_rank:
                if item.source is not None and item.target is not None and failure.error is None:
                    try:
                        memory.copy_in_memory((copy,), item.source, item.target)
                    except Exception as error:
                        failure.note(error)
            elif copy.source_rank == self._rank:
                view = _view(memory.source_block, copy, item.source, failure)
                _stream(self._to, copy.target_rank, self._limit).add(copy, item.dtype, view)
            elif copy.target_rank == self._rank:
                view = _view(memory.target_block, copy, item.target, failure)
                _stream(self._from, copy.source_rank, self._limit).add(copy, item.dtype, view)

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
        self._limit = limit
        self._alone: list[_Message] = []
        self._packed: list[_Message] = [_Message()]

    def add(self, copy: Copy, dtype: torch.dtype, view: torch.Tensor | None) -> None:
        for part, numel in _cut(copy.sizes, view, max(self._limit // dtype.itemsize, 1)):
            if copy.is_run and numel * dtype.itemsize >= min(_ALONE_FROM, self._limit):
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


@dataclass
class _InFlight:
    """One posted message: what to wait for, and what to do then."""

    work: dist.Work
    peer: int
    message: _Message
    buffer: torch.Tensor | None
    received: bool


class _Post:
    """Posts the messages of one round, and waits for them."""

    def __init__(self, callers: Callers, failure: Failure) -> None:
        self.free: list[torch.Tensor] = []  # buffers
        self._callers, self._failure = callers, failure
        self._lost: set[int] = set()

    def start(self, this: _Round) -> list[_InFlight]:
        operations, details = [], []
        free = list(self.free)
        try:
            for peer, message in this.receive:
                if peer not in self._lost:
                    tensor, buffer = self._tensor_for(message)
                    operations.append(dist.P2POp(dist.irecv, tensor, peer, self._callers.group))
                    details.append((peer, message, buffer, True))
            for peer, message in this.send:
                if peer not in self._lost:
                    tensor, buffer = self._tensor_for(message)
                    if buffer is not None:
                        self._pack(message, buffer)
                    operations.append(dist.P2POp(dist.isend, tensor, peer, self._callers.group))
                    details.append((peer, message, buffer, False))
        except Exception:
            self.free = free  # nothing is posted: the next try needs no other memory
            raise
        if not operations:
            return []
        try:
            works = dist.batch_isend_irecv(operations)
        except Exception as error:
            self._connection_lost([peer for peer, *_ in details], error)
            return []
        if len(works) != len(details):  # NCCL gives one handle for the whole batch
            works = [works[0]] * len(details)
        return [_InFlight(work, *detail) for work, detail in zip(works, details, strict=True)]

    def drop(self, this: _Round, error: Exception) -> list[_InFlight]:
        """Do without a round that cannot be posted: its peers are lost, and hear of it as soon as all meet."""
        self._connection_lost(sorted({peer for peer, _ in (*this.receive, *this.send)} - self._lost), error)
        return []

    def finish(self, posted: list[_InFlight]) -> None:
        while posted:
            one = posted.pop()
            try:
                one.work.wait(timedelta(seconds=self._callers.timeout))
            except Exception as error:
                self._connection_lost([one.peer], error)
                continue  # its buffer may still be written to: it is not used again, nor is its peer
            if one.buffer is not None:
                try:
                    self._unpack(one)
                except Exception as error:
                    self._failure.note(error)
                self.free.append(one.buffer)

    def _tensor_for(self, message: _Message) -> tuple[torch.Tensor, torch.Tensor | None]:
        if message.lies is not None:
            return message.lies, None
        buffer = (
            self.free.pop() if self.free else torch.empty(message.nbytes, dtype=torch.uint8, device=self._callers.wire)
        )
        return buffer.narrow(0, 0, message.nbytes), buffer

    def _pack(self, message: _Message, buffer: torch.Tensor) -> None:
        try:
            _copy_all([(inside, view) for view, inside in _inside(message, buffer)])
        except Exception as error:  # what goes out is garbage then, and no rank will use it
            self._failure.note(error)

    def _unpack(self, one: _InFlight) -> None:
        if one.buffer is None or not one.received or self._failure.error is not None:
            return
        _copy_all(_inside(one.message, one.buffer))

    def _connection_lost(self, peers: list[int], error: Exception) -> None:
        names = ", ".join(f"rank {peer}" for peer in peers)
        log.error("rank %d lost the connection to %s: %s", self._callers.rank, names, error)
        self._lost.update(peers)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        message = f"lost the connection to {names}, or it did not answer within {self._callers.timeout:g} s: {reason}"
        self._failure.note(RankError(message), fatal=True)


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
