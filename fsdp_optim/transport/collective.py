"""The `Transport` over torch.distributed: bounded point-to-point messages, without copies where the memory is contiguous.

It works over any process group and backend. `messages.py` plans the messages; this file posts them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from msgspec import Struct

from fsdp_optim.errors import RankError
from fsdp_optim.tensors.allocation import empty, in_pages
from fsdp_optim.tensors.memory import Budget, copy_all
from fsdp_optim.transport.base import Item, RankGroup, Send
from fsdp_optim.transport.failure import INTERRUPTS, RANK_ERRORS, Failure, is_interrupt
from fsdp_optim.transport.messages import Message, Round, Streams, rounds_of

_PEERS_AT_ONCE = 16
_ROUNDS_IN_FLIGHT = 2
_WIDEST = 16  # bytes of one element of the widest dtype, the lower bound of a message's limit

log = logging.getLogger("fsdp_optim")


class CollectiveTransport:
    """The `Transport` of torch.distributed's ranks."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory as `Transport.empty` says: any memory is suitable."""
        return empty(shape, dtype, device)

    def prepare(self, group: RankGroup, items: Iterable[Item], failure: Failure, budget: Budget) -> Send:
        """Prepare as `Transport.prepare` says: plan all messages, and allocate their buffers."""
        width = min(max(len(group.ranks) - 1, 1), _PEERS_AT_ONCE)
        message = budget.share(2 * _ROUNDS_IN_FLIGHT * width, "a buffer to and from each peer, in each round in flight")
        streams = Streams(group.rank, max(message.nbytes // _WIDEST * _WIDEST, _WIDEST))
        rounds: list[list[_Posting]] = []
        with failure:
            for item in items:
                streams.add(item, failure)
            if failure.error is None:
                streams.copy_here()
            if len(group.ranks) > 1:
                rounds = _postings(rounds_of(group.ranks, group.rank, streams, width), group)
        return partial(_post, group, rounds)


def _post(group: RankGroup, rounds: Sequence[Sequence[_Posting]], failure: Failure) -> None:
    """Send and receive, a few rounds at a time. Peers wait for every message, so every operation that can fail is guarded."""
    lost: set[int] = set()
    in_flight: list[tuple[Sequence[dist.Work], Sequence[_Posting]]] = []
    for postings_of_round in (*rounds, *([()] * _ROUNDS_IN_FLIGHT)):
        if len(in_flight) == _ROUNDS_IN_FLIGHT:
            for work, posting in zip(*in_flight.pop(0), strict=True):
                try:
                    while True:
                        try:
                            work.wait(timedelta(seconds=group.timeout))
                            break
                        except INTERRUPTS as interrupt:  # this rank continues: its peers wait for its messages
                            failure.note(interrupt)
                            if work.is_completed():  # Gloo lets a signal through after its only wait for the message
                                break
                except Exception as error:
                    lost.add(posting.peer)
                    with failure:
                        failure.note(_connection_lost(group, {posting.peer}, error), fatal=True)
                else:
                    with failure:
                        _unpack(posting, failure)
        with failure:
            _pack(postings_of_round)
        postings = [posting for posting in postings_of_round if posting.peer not in lost]
        works: Sequence[dist.Work] = ()
        if postings:
            try:
                works = dist.batch_isend_irecv([posting.operation for posting in postings])
            except RANK_ERRORS as error:
                peers = {posting.peer for posting in postings}
                lost |= peers
                if is_interrupt(error):
                    failure.note(error)
                with failure:
                    failure.note(_connection_lost(group, peers, error), fatal=True)
        if len(works) == 1:  # NCCL gives one handle for the whole batch
            works = [works[0]] * len(postings)
        in_flight.append((works, postings if works else ()))


class _Posting(Struct, frozen=True):
    """A message with the operation that posts it. `buffer`: the bytes of a message that does not lie in a local tensor."""

    operation: dist.P2POp
    peer: int
    message: Message
    buffer: torch.Tensor | None
    received: bool


def _postings(rounds: list[Round], group: RankGroup) -> list[list[_Posting]]:
    """Return the postings of a rank's rounds. Rounds that are never in flight together share buffers."""
    comm_device = comm_device_of(group)
    sizes = [[m.nbytes for _, m in (*step.receive, *step.send) if m.find(comm_device) is None] for step in rounds]
    longest = max((nbytes for sizes_of_round in sizes for nbytes in sizes_of_round), default=0)
    num = max(map(len, sizes), default=0)
    slots = [[_buffer(longest, comm_device) for _ in range(num)] for _ in range(min(_ROUNDS_IN_FLIGHT, len(rounds)))]
    postings_by_round = []
    for index, step in enumerate(rounds):
        free = iter(slots[index % _ROUNDS_IN_FLIGHT])
        postings = []
        for received, messages in ((True, step.receive), (False, step.send)):
            for peer, message in messages:
                buffer = next(free).narrow(0, 0, message.nbytes) if message.lies is None else None
                tensor = buffer if buffer is not None else message.lies
                if tensor is None:
                    raise RuntimeError("unreachable: a message lies in a local tensor or in a buffer")
                operation = dist.P2POp(dist.irecv if received else dist.isend, tensor, peer, group.process_group)
                postings.append(_Posting(operation, peer, message, buffer, received))
        postings_by_round.append(postings)
    return postings_by_round


def _buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate memory for packed messages. Saves and loads do so for each window; `malloc` would keep it between windows."""
    if device.type == "cpu":
        return in_pages((nbytes,), torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def comm_device_of(group: RankGroup) -> torch.device:
    """Return the device whose memory the group's backend can send: the CPU where the backend supports it, else the GPU."""
    backends = str(dist.get_backend_config(group.process_group))
    if "cpu:" in backends or "cuda:" not in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _pack(postings: Sequence[_Posting]) -> None:
    """Fill the buffers of sent messages. After an error here a buffer has wrong bytes, which no rank will use."""
    for posting in postings:
        if posting.buffer is not None and not posting.received:
            copy_all([(packed, view) for view, packed in _blocks(posting.message, posting.buffer)])


def _unpack(posting: _Posting, failure: Failure) -> None:
    if posting.buffer is not None and posting.received and failure.error is None:
        copy_all(_blocks(posting.message, posting.buffer))


def _connection_lost(group: RankGroup, peers: set[int], error: BaseException) -> RankError:
    names = ", ".join(f"rank {peer}" for peer in sorted(peers))
    log.error("rank %d lost the connection to %s: %s", group.rank, names, error)
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RankError(f"lost the connection to {names}, or there was no answer within {group.timeout:g} s: {reason}")


def _blocks(message: Message, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the blocks of a message that this rank has: (view of the local tensor, the same elements in the buffer)."""
    pairs = []
    for span in message.spans:
        nbytes = sum(span.numels) * span.dtype.itemsize
        parts = buffer[span.offset : span.offset + nbytes].view(span.dtype).split_with_sizes(span.numels)
        for view, part in zip(span.views, parts, strict=True):
            if view is not None:
                pairs.append((view, part if view.dim() == 1 else part.view(view.shape)))
    return pairs
