"""The messages of bounded size that a rank sends and receives, derived from the plan alone, the same at both ends.

Each rank turns its copies into one stream of messages per peer. A large block that is contiguous is sent from its memory, or
received in it, without a copy; small and strided blocks are packed. This file sends nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from msgspec import Struct

from fsdp_optim.plan import RankPlan, Way, Ways
from fsdp_optim.tensors import memory
from fsdp_optim.tensors.memory import copy_all
from fsdp_optim.transport.base import Item
from fsdp_optim.transport.failure import RANK_ERRORS, Failure

_ALONE_FROM = (
    1 << 20
)  # bytes; a longer block is a message by itself, without packing at the ends where it is contiguous


class BlockSpan(NamedTuple):
    """Consecutive blocks of one dtype in a message, from byte `offset` on; `views` of the local tensor, or None for no memory."""

    dtype: torch.dtype
    offset: int
    views: list[torch.Tensor | None]
    numels: list[int]


class Message:
    """Blocks that are sent together. `lies`: the message's bytes in the local tensor; None where it needs a buffer."""

    __slots__ = ("lies", "nbytes", "spans")

    def __init__(self) -> None:
        self.spans: list[BlockSpan] = []
        self.nbytes = 0
        self.lies: torch.Tensor | None = None

    def add(self, view: torch.Tensor | None, numel: int, dtype: torch.dtype) -> None:
        if not self.spans or self.spans[-1].dtype is not dtype:
            self.nbytes = self.start(dtype)
            self.spans.append(BlockSpan(dtype, self.nbytes, [], []))
        span = self.spans[-1]
        span.views.append(view)
        span.numels.append(numel)
        self.nbytes += numel * dtype.itemsize

    def start(self, dtype: torch.dtype) -> int:
        """Return the byte at which a next block of this dtype would begin, aligned for a view of the dtype."""
        return -(-self.nbytes // dtype.itemsize) * dtype.itemsize

    def in_place(self, comm_device: torch.device) -> torch.Tensor | None:
        """Return the bytes in the local tensor of a message that is one contiguous block on the device; None for all others."""
        if len(self.spans) != 1 or len(self.spans[0].views) != 1 or self.spans[0].views[0] is None:
            return None
        view = self.spans[0].views[0]
        if view.dim() > 1 and view.numel() > 1 and view.is_contiguous():  # strided at the other end alone
            view = view.view(-1)
        # A single element may have another stride, and then has no view as bytes.
        is_run = view.dim() == 1 and view.stride(0) == 1
        return view.view(torch.uint8) if is_run and view.device == comm_device else None

    def find(self, comm_device: torch.device) -> torch.Tensor | None:
        """Set `lies`, before anything is posted."""
        self.lies = self.in_place(comm_device)
        return self.lies


class Round(Struct, frozen=True):
    """At most one message to, and one message from, each of some peers, as pairs (peer, message)."""

    send: list[tuple[int, Message]]
    receive: list[tuple[int, Message]]


def rounds_of(ranks: Sequence[int], rank: int, streams: Streams, width: int) -> list[Round]:
    """Return the rounds in which `rank` exchanges messages with the other `ranks`, with one set of `width` peers after the other.

    All ranks take their peers in the same order, and two peers take their messages in the same order, so the rank that is
    furthest behind never waits for a message that its peer has not posted.
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
        self._rank = rank
        self._here: list[tuple[torch.Tensor, torch.Tensor]] = []  # (target, source) on this rank, still to be copied
        self._here_nbytes = 0
        self._to: defaultdict[int, _Stream] = defaultdict(partial(_Stream, limit))
        self._from: defaultdict[int, _Stream] = defaultdict(partial(_Stream, limit))

    def add(self, item: Item, failure: Failure) -> None:
        """Add the copies of one item that this rank takes part in, as blocks of messages."""
        copies, dtype, source, target = item
        ways = copies.ways if isinstance(copies, RankPlan) else Ways.of(copies, self._rank)
        parts = iter(_cut_at_once(target, ways.tiles, failure))
        for way in ways.ways:
            peer, is_sent, numel, source_at, target_at, strided = way
            part = None if is_sent and peer is not None else next(parts, None)
            if peer is None:
                if source is not None and target is not None:
                    self._add_here(way, source, target, part, failure)
                continue
            flat = source if is_sent else target
            view = part
            if flat is not None and view is None:
                try:
                    if strided is None:
                        view = _run(flat, source_at if is_sent else target_at, numel)
                    else:
                        view = _source_view(way, flat) if is_sent else _target_view(way, flat)
                except RANK_ERRORS as error:  # the message keeps its place, so that both ends stay in step
                    failure.note(error)
            (self._to if is_sent else self._from)[peer].add(way, dtype, view)

    def _add_here(
        self, way: Way, source: torch.Tensor, target: torch.Tensor, part: torch.Tensor | None, failure: Failure
    ) -> None:
        """Add a block that stays on this rank. `part`: the block's elements in `target`, where they are known already."""
        with failure:
            pair = _target_view(way, target) if part is None else part, _source_view(way, source)
            if failure.error is None:
                self._here.append(pair)
                self._here_nbytes += pair[0].nbytes
                if self._here_nbytes >= _ALONE_FROM:  # bounds the memory of temporary source tensors
                    self.copy_here()

    def copy_here(self) -> None:
        """Copy the blocks from this rank to itself, many blocks in one call of torch."""
        pairs, self._here, self._here_nbytes = self._here, [], 0
        copy_all(pairs)

    def outgoing(self, rank: int) -> list[Message]:
        stream = self._to.pop(rank, None)
        return stream.messages() if stream is not None else []

    def incoming(self, rank: int) -> list[Message]:
        stream = self._from.pop(rank, None)
        return stream.messages() if stream is not None else []


def _source_view(way: Way, flat: torch.Tensor) -> torch.Tensor:
    """Return the elements that a copy reads from a 1-D local tensor."""
    return _run(flat, way.source_at, way.numel) if way.strided is None else memory.source_view(way.strided, flat)


def _target_view(way: Way, flat: torch.Tensor) -> torch.Tensor:
    """Return the elements that a copy writes in a 1-D local tensor."""
    return _run(flat, way.target_at, way.numel) if way.strided is None else memory.target_view(way.strided, flat)


def _run(flat: torch.Tensor, at: int, numel: int) -> torch.Tensor:
    """Return elements [at, at + numel) of a 1-D tensor; the tensor itself where these are all its elements."""
    return flat if not at and flat.numel() == numel else flat.narrow(0, at, numel)


def _cut_at_once(target: torch.Tensor | None, tiles: Sequence[int], failure: Failure) -> Sequence[torch.Tensor]:
    """Return the tiles of a target as views, in one call of torch; empty where there are none, or they do not fill the target."""
    if target is not None and tiles and target.numel() == sum(tiles):
        with failure:
            return target.split_with_sizes(tiles)
    return ()


class _Stream:
    """The messages between this rank and one peer, in one direction."""

    def __init__(self, limit: int) -> None:
        self._limit, self._alone_from = limit, min(_ALONE_FROM, limit)
        self._alone: list[Message] = []
        self._packed: list[Message] = [Message()]

    def add(self, way: Way, dtype: torch.dtype, view: torch.Tensor | None) -> None:
        """Add the block of one copy to the message that is being packed, or as messages by itself."""
        numel = way.numel
        message, nbytes = self._packed[-1], numel * dtype.itemsize
        span = message.spans[-1] if message.spans else None
        if nbytes < self._alone_from:
            if span is not None and span.dtype is dtype and message.nbytes + nbytes <= self._limit:  # nearly always
                span.views.append(view)
                span.numels.append(numel)
                message.nbytes += nbytes
                return
            if message.start(dtype) + nbytes <= self._limit:
                message.add(view, numel, dtype)
                return
        for part, numel in _cut(way.sizes, view, max(self._limit // dtype.itemsize, 1)):
            nbytes = numel * dtype.itemsize
            if nbytes >= self._alone_from:
                message = Message()
                self._alone.append(message)
            else:
                message = self._packed[-1]
                if message.spans and message.start(dtype) + nbytes > self._limit:
                    message = Message()
                    self._packed.append(message)
            message.add(part, numel, dtype)

    def messages(self) -> list[Message]:
        return [*(m for m in self._packed if m.spans), *self._alone]


def _cut(sizes: tuple[int, ...], view: torch.Tensor | None, limit: int) -> Iterator[tuple[torch.Tensor | None, int]]:
    """Yield a block in parts of at most `limit` elements, cut along its first dimension, then the next."""
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
