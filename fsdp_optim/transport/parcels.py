"""Values of any class sent from one rank to other ranks, as a bounded number of bytes at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from fsdp_optim.layout import Whole
from fsdp_optim.plan import copies_of
from fsdp_optim.tensors import memory
from fsdp_optim.transport.agree import exchange, exchange_reports
from fsdp_optim.transport.base import Item, RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.packing import Packed, pack, unpack

_ALIGNED = 16  # bytes of one element of the widest dtype
NOTHING = object()
"""The result of `value_of` on a source rank that has no value to send: then no rank receives the parcel."""


class Parcel(Struct, frozen=True):
    """One value that the rank `source` has and the ranks `targets` need."""

    source: int
    targets: tuple[int, ...]


class _ByteRange(Struct, frozen=True):
    """Bytes [start, stop) of one part of a packed parcel."""

    parcel: int
    part: int
    start: int
    stop: int


def send(
    group: RankGroup,
    parcels: Sequence[Parcel],
    value_of: Callable[[int], Any],
    failure: Failure,
    name_of: Callable[[int], str] = "value {}".format,
) -> dict[int, Any]:
    """Send parcels; return the values for which this rank is a target, by index. Called by all ranks, with the same parcels.

    `value_of(index)`: the value, called on the source rank only. `name_of(index)`: its name for errors.

    An error in `failure`, or an error of this preparation, is raised on all ranks before data moves. Holds at most
    `group.budget` beyond the values and their pickles, which contain no tensors.
    """
    packed: dict[int, Packed] = {}
    with failure:
        for index, parcel in enumerate(parcels):
            if parcel.source == group.rank and any(rank != group.rank for rank in parcel.targets):
                value = value_of(index)
                if value is not NOTHING:
                    refusal = f"{name_of(index)}: cannot be sent to other ranks"
                    packed[index] = memory.made_of(value, pack, refusal)
    content = json.dumps({index: value.nbytes for index, value in packed.items()}).encode()
    sizes: dict[int, list[int]] = {}
    for report in exchange_reports(group, content, failure.error):
        sizes.update((int(index), nbytes) for index, nbytes in json.loads(report).items())
    arrived: dict[int, list[torch.Tensor]] = {}
    with failure:
        for index in sorted(sizes):
            if group.rank in parcels[index].targets and group.rank != parcels[index].source:
                arrived[index] = [
                    group.world.transport.empty((n,), torch.uint8, torch.device("cpu")) for n in sizes[index]
                ]
    half = group.budget.share(2, "byte ranges of parcels, and the messages that carry them")
    for byte_ranges in _batches(sizes, half.nbytes):
        items = []
        for byte_range in byte_ranges:
            parcel = parcels[byte_range.parcel]
            targets = tuple(rank for rank in parcel.targets if rank != parcel.source)
            shape = (byte_range.stop - byte_range.start,)
            copies = copies_of(Whole(shape, (parcel.source,)), Whole(shape, targets), rank=group.rank)
            items.append(Item(copies, torch.uint8, *_memory_of(byte_range, packed, arrived, failure)))
        exchange(group, items, failure, half)
    if failure.error is not None:
        return {}
    return {index: unpack(parts) for index, parts in arrived.items()}


def _memory_of(
    byte_range: _ByteRange,
    packed: Mapping[int, Packed],
    arrived: Mapping[int, Sequence[torch.Tensor]],
    failure: Failure,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return this rank's memory for a byte range, as (source, target)."""
    with failure:
        if byte_range.parcel in packed:
            part = packed[byte_range.parcel].parts[byte_range.part]
            start, stop = byte_range.start // part.itemsize, byte_range.stop // part.itemsize
            return memory.flat_slice(part, start, stop).view(torch.uint8), None
        if byte_range.parcel in arrived:
            return None, arrived[byte_range.parcel][byte_range.part][byte_range.start : byte_range.stop]
    return None, None


def _batches(sizes: Mapping[int, Sequence[int]], most_nbytes: int) -> Iterator[list[_ByteRange]]:
    """Return batches of byte ranges with at most `most_nbytes` in each, the same on all ranks."""
    most = max(most_nbytes // _ALIGNED * _ALIGNED, _ALIGNED)
    byte_ranges = (
        _ByteRange(index, part, start, min(start + most, nbytes))
        for index in sorted(sizes)
        for part, nbytes in enumerate(sizes[index])
        for start in range(0, nbytes, most)
    )
    return memory.in_batches(byte_ranges, lambda byte_range: byte_range.stop - byte_range.start, most)
