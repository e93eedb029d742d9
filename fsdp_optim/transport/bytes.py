"""Bytes of any length from every rank to some of them."""

from __future__ import annotations

import torch

from fsdp_optim.layout import Layout, Whole
from fsdp_optim.plan import plan
from fsdp_optim.transport.callers import Callers
from fsdp_optim.transport.collective import Failure, Item, exchange
from fsdp_optim.transport.reports import exchange_reports


def collect_bytes(
    callers: Callers, content: bytes, recipients: tuple[int, ...], failure: Failure
) -> dict[int, torch.Tensor]:
    """The contents of all ranks, as uint8 tensors by rank, on recipients; nothing elsewhere. Called by all ranks.

    An error in `failure` is raised on all of them before data moves.
    """
    lengths = [int(length) for length in exchange_reports(callers, b"%d" % len(content), failure.error)]
    items, collected = [], {}
    for rank, length in zip(callers.ranks, lengths, strict=True):
        source = Layout({"content": Whole((length,), (rank,))})
        mine = list(plan(source, source.whole_on(recipients), rank=callers.rank))
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if rank == callers.rank and content else None
        if callers.rank in recipients:
            collected[rank] = torch.empty(length, dtype=torch.uint8)
        items.append(Item(mine, torch.uint8, flat, collected.get(rank)))
    exchange(callers, items, failure)
    return collected
