"""Every rank hears every rank's report, over any set of ranks and any backend."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_optim.errors import RankError
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.callers import Callers

_LENGTH = 8  # bytes of a report's length


def exchange_reports(callers: Callers, content: bytes) -> list[bytes]:
    """The reports of all ranks, in the order of `callers.ranks`, on all of them.

    The lowest rank collects and sends on: messages grow with the number of ranks, not with its square.
    """
    leader, *others = callers.ranks
    if callers.rank != leader:
        _send(callers, leader, content)
        return _split(_receive(callers, leader))
    reports = [content, *(_receive(callers, rank) for rank in others)]
    everything = b"".join(len(report).to_bytes(_LENGTH, "big") + report for report in reports)
    for rank in others:
        _send(callers, rank, everything)
    return reports


def broadcast_report(callers: Callers, content: bytes, source_rank: int) -> bytes:
    """The report of one rank, on all of them."""
    if callers.rank != source_rank:
        return _receive(callers, source_rank)
    for rank in callers.ranks:
        if rank != source_rank:
            _send(callers, rank, content)
    return content


def collect_reports(callers: Callers, content: bytes, recipients: tuple[int, ...]) -> dict[int, bytes]:
    """The reports of all ranks, by rank, on each of `recipients`; nothing elsewhere."""
    found: dict[int, bytes] = {}
    for recipient in recipients:
        if callers.rank == recipient:
            found = {r: _receive(callers, r) for r in callers.ranks if r != recipient}
            found[recipient] = content
        else:
            _send(callers, recipient, content)
    return found


def _split(everything: bytes) -> list[bytes]:
    reports, at = [], 0
    while at < len(everything):
        length = int.from_bytes(everything[at : at + _LENGTH], "big")
        reports.append(everything[at + _LENGTH : at + _LENGTH + length])
        at += _LENGTH + length
    return reports


def _send(callers: Callers, rank: int, content: bytes) -> None:
    _run(callers, dist.isend, torch.tensor([len(content)], dtype=torch.int64), rank)
    if content:
        _run(callers, dist.isend, torch.frombuffer(bytearray(content), dtype=torch.uint8), rank)


def _receive(callers: Callers, rank: int) -> bytes:
    length = int(_run(callers, dist.irecv, torch.zeros(1, dtype=torch.int64), rank))
    if not length:
        return b""
    return _run(callers, dist.irecv, torch.empty(length, dtype=torch.uint8), rank).numpy().tobytes()


def _run(callers: Callers, operation: object, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    tensor = tensor if tensor.device == callers.wire else tensor.to(callers.wire)
    try:
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, rank, callers.group)])  # type: ignore[arg-type]
        work.wait(timedelta(seconds=callers.timeout))
    except RuntimeError as reason:
        lost = RankError(
            f"lost the connection to rank {rank}, or it did not answer within {callers.timeout:g} s: {reason}"
        )
        agree(callers, b"", lost, fatal=True)  # the others may wait for this rank's next message: tell them
        raise lost from reason
    return tensor if tensor.device.type == "cpu" else tensor.cpu()
