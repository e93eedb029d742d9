"""Blocks that fill a tensor one after the other are cut from it at once, and reach the same places as all other blocks."""

from __future__ import annotations

import pytest
import torch

from fsdp_optim.layout import FlatChunks, MeshBoxes, Placement, Whole
from fsdp_optim.plan import Copy, copies_of
from fsdp_optim.transport import Failure, Item
from fsdp_optim.transport.messages import Streams

RANKS = range(4)
WHOLE = Whole((6, 5), (0,))
SOURCES: dict[str, Placement] = {
    "equal chunks": FlatChunks((6, 5), 0, 8, (RANKS,), True),
    "a part of a chunk": FlatChunks((6, 5), 11, 20, (RANKS,)),
    "chunks in another order": FlatChunks((6, 5), 3, 9, ((2, 0, 3, 1),)),
    "empty chunks": FlatChunks((6, 5), 0, 30, (RANKS,), True),
    "replicas": FlatChunks((6, 5), 0, 15, ((0, 1), (2, 3))),
    "rows": MeshBoxes((6, 5), (4,), ((0, 0),), (RANKS,)),
    "columns": MeshBoxes((6, 5), (4,), ((0, 1),), (RANKS,)),
    "elsewhere": Whole((6, 5), (3,)),
    "here": Whole((6, 5), (0,)),
}


def held(placement: Placement, rank: int, elements: torch.Tensor) -> torch.Tensor:
    """A rank's local tensor, 1-D, with one more element at its end that belongs to another parameter."""
    shard = placement.shard_of(rank)
    blocks = placement.blocks(shard) if shard is not None else ()
    local = torch.full((max((block.end for block in blocks), default=0) + 1,), -1.0)
    for block in blocks:
        box = elements
        for dim, (first, size) in enumerate(zip(block.box.offsets, block.box.sizes, strict=True)):
            box = box.narrow(dim, first, size)
        local[block.offset : block.offset + box.numel()] = box.reshape(-1)
    return local if rank % 2 else local[:-1]  # some ranks' tensors end with the block


def streams_of(
    rank: int, source: Placement, target: Placement, sent: torch.Tensor, taken: torch.Tensor | None
) -> Streams:
    streams, failure = Streams(rank, 1 << 10), Failure()
    copies = copies_of(source, target, rank=rank, replica=0)
    for _ in range(2):  # the second value shares the plan of the first
        streams.add(Item(copies, sent.dtype, sent, taken), failure)
    streams.copy_here()
    if failure.error is not None:
        raise failure.error
    return streams


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("longer", [0, 1])
def test_all_elements_arrive(name: str, longer: int) -> None:
    """`longer`: elements of the target after its blocks, so that the blocks do not fill the target."""
    source, elements = SOURCES[name], torch.arange(30.0).view(6, 5)
    taken = torch.full((30 + longer,), -2.0)
    here = streams_of(0, source, WHOLE, held(source, 0, elements), taken)
    for rank in RANKS[1:]:
        there = streams_of(rank, source, WHOLE, held(source, rank, elements), None)
        pairs = zip(here.incoming(rank), there.outgoing(0), strict=True)
        for received, message in pairs:
            assert received.nbytes == message.nbytes
            for to_span, from_span in zip(received.spans, message.spans, strict=True):
                for to, view in zip(to_span.views, from_span.views, strict=True):
                    to.copy_(view)
    assert torch.equal(taken[:30].view(6, 5), elements)
    assert taken[30:].tolist() == [-2.0] * longer


def test_runs_in_another_order_than_in_the_target() -> None:
    elements, taken = torch.arange(7.0), torch.full((7,), -2.0)
    copies = [Copy(0, 0, (4,), 0, (1,), 3, (1,)), Copy(0, 0, (3,), 4, (1,), 0, (1,))]
    streams, failure = Streams(0, 1 << 10), Failure()
    streams.add(Item(copies, torch.float32, elements, taken), failure)
    streams.copy_here()
    assert failure.error is None
    assert taken.tolist() == [4, 5, 6, 0, 1, 2, 3]


def test_a_target_that_is_too_short_keeps_the_place_of_its_messages() -> None:
    source = SOURCES["equal chunks"]
    copies = copies_of(source, WHOLE, rank=0, replica=0)
    streams, failure = Streams(0, 1 << 10), Failure()
    streams.add(Item(copies, torch.float32, torch.zeros(8), torch.zeros(12)), failure)
    assert failure.error is not None
    assert [[message.nbytes for message in streams.incoming(rank)] for rank in RANKS[1:]] == [[32], [32], [24]]


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_large_block_is_packed_at_the_end_alone_where_it_is_strided(is_sent: bool) -> None:
    """A part of a transposed parameter, of 2 MiB: contiguous where it goes to, or where it comes from."""
    rows, columns = 512, 1024
    row_major, turned = (columns, 1), (1, rows)
    source, target = (turned, row_major) if is_sent else (row_major, turned)
    copies = [Copy(0, 1, (rows, columns), 0, source, 0, target), Copy(0, 1, (3,), 0, (1,), 0, (1,))]
    failure, local = Failure(), torch.zeros(rows * columns)
    here, there = Streams(0, 64 << 20), Streams(1, 64 << 20)
    here.add(Item(copies, torch.float32, local, None), failure)
    there.add(Item(copies, torch.float32, None, local), failure)
    sent, received = here.outgoing(1), there.incoming(0)
    assert failure.error is None
    assert [message.nbytes for message in sent] == [message.nbytes for message in received] == [12, rows * columns * 4]
    cpu = torch.device("cpu")
    assert [message.in_place(cpu) is not None for message in sent] == [True, not is_sent]
    assert [message.in_place(cpu) is not None for message in received] == [True, is_sent]
