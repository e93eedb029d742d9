"""Values of any kind on their way from one rank to some others: as bytes, a bounded number at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_optim import memory
from fsdp_optim.layout import Whole
from fsdp_optim.plan import copies_of
from fsdp_optim.transport.agree import exchange
from fsdp_optim.transport.base import Item, RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.packing import Packed, pack, unpack
from fsdp_optim.transport.reports import exchange_reports

_ALIGNED = 16  # bytes of one element of the widest dtype
NOTHING = object()
"""What a rank says that is to send a value and has none: then nobody gets one."""


@dataclass(frozen=True)
class Parcel:
    """One value that a rank has and others need."""

    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class _Window:
    """Bytes [start, stop) of one part of a parcel."""

    parcel: int
    part: int
    start: int
    stop: int


def send(
    group: RankGroup, parcels: Sequence[Parcel], value_of: Callable[[int], Any], failure: Failure
) -> dict[int, Any]:
    """The values of the parcels that this rank is a target of, by their index. Called by all ranks, with the same parcels.

    `value_of(index)`: the value, asked for on its source only. An error in `failure`, or one met here, is raised on all ranks
    before data moves. Holds at most `group.budget` beyond the values, and the pickle of what is no tensor in them.
    """
    packed: dict[int, Packed] = {}
    with failure:
        for index, parcel in enumerate(parcels):
            if parcel.source == group.rank and any(rank != group.rank for rank in parcel.targets):
                value = value_of(index)
                if value is not NOTHING:
                    packed[index] = pack(value)
    content = json.dumps({index: one.nbytes for index, one in packed.items()}).encode()
    sizes: dict[int, list[int]] = {}
    for told in exchange_reports(group, content, failure.error):
        sizes.update((int(index), nbytes) for index, nbytes in json.loads(told).items())
    arrived: dict[int, list[torch.Tensor]] = {}
    with failure:
        for index in sorted(sizes):
            if group.rank in parcels[index].targets and group.rank != parcels[index].source:
                arrived[index] = [
                    group.world.transport.empty((n,), torch.uint8, torch.device("cpu")) for n in sizes[index]
                ]
    half = group.budget.share(2, "windows of parcels, and the messages that carry them")
    for windows in _batches(sizes, half.nbytes):
        items = []
        for window in windows:
            parcel = parcels[window.parcel]
            targets = tuple(rank for rank in parcel.targets if rank != parcel.source)
            shape = (window.stop - window.start,)
            copies = copies_of(Whole(shape, (parcel.source,)), Whole(shape, targets), rank=group.rank)
            items.append(Item(copies, torch.uint8, *_ends(window, packed, arrived, failure)))
        exchange(group, items, failure, half)
    if failure.error is not None:
        return {}
    return {index: unpack(parts) for index, parts in arrived.items()}


def _ends(
    window: _Window, packed: Mapping[int, Packed], arrived: Mapping[int, Sequence[torch.Tensor]], failure: Failure
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """This rank's memory for a window, on the one side or the other."""
    with failure:
        if window.parcel in packed:
            part = packed[window.parcel].parts[window.part]
            start, stop = window.start // part.itemsize, window.stop // part.itemsize
            return memory.flat_slice(part, start, stop).view(torch.uint8), None
        if window.parcel in arrived:
            return None, arrived[window.parcel][window.part][window.start : window.stop]
    return None, None


def _batches(sizes: Mapping[int, Sequence[int]], most_nbytes: int) -> Iterator[list[_Window]]:
    """What moves together: at most so many bytes. The same on all ranks."""
    most = max(most_nbytes // _ALIGNED * _ALIGNED, _ALIGNED)
    windows = (
        _Window(index, part, start, min(start + most, nbytes))
        for index in sorted(sizes)
        for part, nbytes in enumerate(sizes[index])
        for start in range(0, nbytes, most)
    )
    return memory.in_batches(windows, lambda window: window.stop - window.start, most)
