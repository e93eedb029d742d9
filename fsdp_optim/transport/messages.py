"""What a rank sends and receives, as messages of bounded size: cut from the plan alone, alike at both ends.

Each rank turns its copies into one stream of messages per peer. A large run travels as it lies in memory; small and strided
blocks are packed. Nothing here sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fsdp_optim import memory
from fsdp_optim.memory import copy_all
from fsdp_optim.plan import Copy
from fsdp_optim.transport.base import Item
from fsdp_optim.transport.failure import Failure

_ALONE_FROM = 1 << 20  # bytes; a longer run travels alone, without packing


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
class Message:
    """Blocks that travel together between two ranks."""

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

    def find(self, wire: torch.device) -> torch.Tensor | None:
        """Find out where the message lies, before anything is posted."""
        self.lies = self.in_place(wire)
        return self.lies


@dataclass(frozen=True)
class Round:
    """At most one message to and from each of some peers: (peer, message)."""

    send: list[tuple[int, Message]]
    receive: list[tuple[int, Message]]


def rounds_of(ranks: Sequence[int], rank: int, streams: Streams, width: int) -> list[Round]:
    """What `rank` sends to and receives from the other `ranks`, with one set of peers after the other.

    Everyone meets its peers in the same order, and every pair its messages: the rank that is furthest behind never waits
    for one that has not posted yet.
    """
    num, here = len(ranks), ranks.index(rank)
    rounds = []
    for first in range(1, num, width):
        shifts = range(first, min(first + width, num))
        send = [(r, streams.outgoing(r)) for r in (ranks[(here + shift) % num] for shift in shifts)]
        receive = [(r, streams.incoming(r)) for r in (ranks[(here - shift) % num] for shift in shifts)]
        for index in range(max(len(messages) for _, messages in (*send, *receive))):
            rounds.append(
                Round(
                    [(peer, messages[index]) for peer, messages in send if index < len(messages)],
                    [(peer, messages[index]) for peer, messages in receive if index < len(messages)],
                )
            )
    return rounds


class Streams:
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
        copy_all(pairs)

    def outgoing(self, rank: int) -> list[Message]:
        stream = self._to.pop(rank, None)
        return stream.messages() if stream is not None else []

    def incoming(self, rank: int) -> list[Message]:
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
        self._alone: list[Message] = []
        self._packed: list[Message] = [Message()]

    def add(self, copy: Copy, dtype: torch.dtype, view: torch.Tensor | None) -> None:
        numel, message = copy.numel, self._packed[-1]
        nbytes = numel * dtype.itemsize
        if nbytes < self._alone_from and message.end(numel, dtype) <= self._limit:
            message.add(view, numel, dtype)  # as most are
            return
        for part, numel in _cut(copy.sizes, view, max(self._limit // dtype.itemsize, 1)):
            if copy.is_run and numel * dtype.itemsize >= self._alone_from:
                message = Message()
                self._alone.append(message)
            else:
                message = self._packed[-1]
                if message.blocks and message.end(numel, dtype) > self._limit:
                    message = Message()
                    self._packed.append(message)
            message.add(part, numel, dtype)

    def messages(self) -> list[Message]:
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
