"""Extents of local tensors: bytes that are adjacent in a file. For devices they are copied through host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec import Struct

from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.packed import PackedExtents
from fsdp_optim.move import CompleteValues, Parts, Taken
from fsdp_optim.tensors.allocation import empty
from fsdp_optim.tensors.memory import Budget, in_batches

_CPU = torch.device("cpu")
_COPIED_BY_TORCH_FROM = 1 << 20  # bytes; torch copies long runs with several threads


@dataclass(frozen=True, slots=True)
class DeviceExtent:
    """Bytes on a device (`memory`: 1-D, uint8), and the byte `start` of a file's data section at which they belong."""

    start: int
    memory: torch.Tensor


LocalExtent = Extent | DeviceExtent | PackedExtents
"""A range in a rank's memory, or many short ranges in host memory of their own."""


def clipped(extent: Extent | DeviceExtent, start: int, stop: int) -> Extent | DeviceExtent:
    """Return the bytes of an extent that belong in [start, stop)."""
    first, last = max(start - extent.start, 0), min(stop - extent.start, len(extent.memory))
    part = extent.memory[first : max(last, first)]
    start = extent.start + first
    return DeviceExtent(start, part) if isinstance(part, torch.Tensor) else Extent(start, part)


ExtentsByFile = Mapping[str, Sequence[LocalExtent]]
"""The extents of this rank, by file name."""


def lies_on_host(flat: torch.Tensor) -> bool:
    """Return whether files can be read directly into the memory of a tensor."""
    return flat.is_cpu


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a 1-D tensor on the CPU; a write to this memory changes the tensor."""
    view: memoryview = flat.detach().view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())
    return view


class LocalMemory:
    """The bytes of one local 1-D tensor."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._size = flat.itemsize
        self._memory = bytes_of(flat) if lies_on_host(flat) else flat.detach().view(torch.uint8)

    def extent(self, start: int, offset: int, numel: int) -> Extent | DeviceExtent:
        """Return the extent of `numel` elements from `offset` on, which belong at byte `start` of the data section."""
        part = self._memory[offset * self._size : (offset + numel) * self._size]
        return DeviceExtent(start, part) if isinstance(part, torch.Tensor) else Extent(start, part)


class HostBatch(Struct, frozen=True):
    """Extents in host memory. `pairs`: for each extent on a device, its bytes there and their copy on the host."""

    extents: Sequence[Extent]
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def copy_to_host(self) -> None:
        """Copy from the device to the host."""
        for on_device, on_host in self.pairs:
            on_host.copy_(on_device)

    def copy_to_device(self) -> None:
        """Copy from the host to the device."""
        for on_device, on_host in self.pairs:
            on_device.copy_(on_host)


def in_host_memory(extents: Sequence[LocalExtent], budget: Budget) -> Iterator[HostBatch]:
    """Yield batches of extents in host memory: first all on the host, then copies of device extents, at most `budget` each."""
    host = [extent for extent in extents if isinstance(extent, Extent)]
    for packed in extents:
        if isinstance(packed, PackedExtents):  # beside longer ones, with which they share segments
            host += map(Extent, packed.starts.tolist(), packed.parts())
    if host:
        yield HostBatch(host)
    on_devices = sorted((e for e in extents if isinstance(e, DeviceExtent)), key=lambda extent: extent.start)
    parts = (
        DeviceExtent(extent.start + at, extent.memory[at : at + budget.nbytes])
        for extent in on_devices
        for at in range(0, len(extent.memory), budget.nbytes)
    )
    for batch in in_batches(parts, lambda part: len(part.memory), budget.nbytes):
        yield _by_way_of_host(batch)


def _by_way_of_host(on_devices: Sequence[DeviceExtent]) -> HostBatch:
    buffer = _host_memory(on_devices)
    extents, pairs, at = [], [], 0
    for extent in on_devices:
        on_host = buffer[at : at + len(extent.memory)]
        extents.append(Extent(extent.start, bytes_of(on_host)))
        pairs.append((extent.memory, on_host))
        at += len(extent.memory)
    return HostBatch(extents, pairs)


def _host_memory(extents: Iterable[Extent | DeviceExtent]) -> torch.Tensor:
    """Return memory on the host for the bytes of some extents; pinned if one of them is on a CUDA device."""
    nbytes, pinned = 0, False
    for extent in extents:
        nbytes += len(extent.memory)
        pinned = pinned or (isinstance(extent, DeviceExtent) and extent.memory.is_cuda)
    return (
        torch.empty(nbytes, dtype=torch.uint8, device=_CPU, pin_memory=True)
        if pinned
        else empty((nbytes,), torch.uint8, _CPU)
    )


def is_all_of(extents: ExtentsByFile, taken: Taken) -> bool:
    """Return whether extents need no copy: what was taken has memory of its own, and the extents cover all its bytes."""
    if isinstance(taken, CompleteValues):
        return True
    if isinstance(taken, Parts) or not all(part.is_own for part in taken):
        return False
    kept = sum(
        extent.nbytes if isinstance(extent, PackedExtents) else len(extent.memory)
        for file_extents in extents.values()
        for extent in file_extents
    )
    return kept == sum(part.flat.nbytes for part in taken if part.flat is not None)


def snapshot_of(live: ExtentsByFile) -> dict[str, list[LocalExtent]]:
    """Return a copy of the bytes in new host memory. Extents that are adjacent in a file become one extent.

    Packed extents, which lie in memory of their own, stay as they are.
    """
    snapshot: dict[str, list[LocalExtent]] = {}
    listed: list[tuple[str, Extent | DeviceExtent]] = []
    for name, extents in live.items():
        snapshot[name] = [extent for extent in extents if isinstance(extent, PackedExtents)]
        in_place = [extent for extent in extents if not isinstance(extent, PackedExtents)]
        listed += [(name, extent) for extent in sorted(in_place, key=lambda extent: extent.start)]
    buffer = _host_memory(extent for _, extent in listed)
    memory, at = bytes_of(buffer), 0
    devices: set[torch.device] = set()
    for name, extent in listed:
        nbytes = len(extent.memory)
        if isinstance(extent, DeviceExtent):
            buffer[at : at + nbytes].copy_(extent.memory, non_blocking=extent.memory.is_cuda)
            if extent.memory.is_cuda:
                devices.add(extent.memory.device)
        elif nbytes >= _COPIED_BY_TORCH_FROM:
            buffer[at : at + nbytes].copy_(torch.frombuffer(extent.memory, dtype=torch.uint8))
        else:
            memory[at : at + nbytes] = extent.memory
        copies = snapshot[name]
        last = copies[-1] if copies else None
        if isinstance(last, Extent) and last.stop == extent.start:
            copies[-1] = Extent(last.start, memory[at - len(last.memory) : at + nbytes])
        else:
            copies.append(Extent(extent.start, memory[at : at + nbytes]))
        at += nbytes
    for device in devices:
        torch.cuda.synchronize(device)
    return snapshot
