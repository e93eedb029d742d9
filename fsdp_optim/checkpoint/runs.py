"""Runs: bytes of a local tensor that lie together in a file, on their way there or back, by way of host memory for devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdp_optim.formats.extents import Extent
from fsdp_optim.memory import Budget, empty
from fsdp_optim.plan import Copy

_CPU = torch.device("cpu")
_COPIED_BY_TORCH_FROM = 1 << 20  # bytes; torch copies long runs with several threads


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """Bytes on a device, a 1-D uint8 tensor, and where in a file's data section they belong."""

    start: int
    memory: torch.Tensor


Run = Extent | DeviceRun


def clipped(run: Run, start: int, stop: int) -> Run:
    """The bytes of a run that belong in [start, stop)."""
    first, last = max(start - run.start, 0), min(stop - run.start, len(run.memory))
    part = run.memory[first : max(last, first)]
    return DeviceRun(run.start + first, part) if isinstance(part, torch.Tensor) else Extent(run.start + first, part)


Runs = Mapping[str, Sequence[Run]]
"""By file name"""


def lies_on_host(flat: torch.Tensor) -> bool:
    """Whether files can be read into its memory as it is."""
    return flat.device.type == "cpu"


def bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a 1-D tensor on the CPU; writing to it writes to the tensor."""
    view: memoryview = flat.detach().view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())
    return view


def runs_of(copy: Copy) -> Iterator[tuple[int, int, int]]:
    """(source offset, target offset, elements) of each contiguous part of a copy."""
    *outer, last = zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True)
    width = last[0] if last[1] == last[2] == 1 else 1
    if width == 1 and last[0] > 1:
        outer.append(last)
    for index in itertools.product(*(range(size) for size, _, _ in outer)):
        source = sum(i * s for i, (_, s, _) in zip(index, outer, strict=True))
        target = sum(i * t for i, (_, _, t) in zip(index, outer, strict=True))
        yield copy.source_offset + source, copy.target_offset + target, width


class LocalMemory:
    """The bytes of one local tensor, 1-D, of which runs are taken."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._size = flat.itemsize
        self._memory = bytes_of(flat) if lies_on_host(flat) else flat.detach().view(torch.uint8)

    def run(self, start: int, offset: int, numel: int) -> Run:
        """`numel` elements from `offset` on, which belong at byte `start`."""
        part = self._memory[offset * self._size : (offset + numel) * self._size]
        return DeviceRun(start, part) if isinstance(part, torch.Tensor) else Extent(start, part)


@dataclass(frozen=True)
class Batch:
    """Runs in host memory; `pairs`: of those that lie on a device, their bytes there and here."""

    extents: Sequence[Extent]
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def bring(self) -> None:
        """Copy from the device to the host."""
        for there, here in self.pairs:
            here.copy_(there)

    def put(self) -> None:
        """Copy from the host to the device."""
        for there, here in self.pairs:
            there.copy_(here)


def in_host_memory(runs: Sequence[Run], budget: Budget) -> Iterator[Batch]:
    """All runs that lie on the host at once; those on a device in batches of at most `budget`, in memory made for them."""
    most_nbytes = budget.nbytes
    host = [run for run in runs if isinstance(run, Extent)]
    if host:
        yield Batch(host)
    batch: list[DeviceRun] = []
    left = most_nbytes
    for run in sorted((run for run in runs if isinstance(run, DeviceRun)), key=lambda run: run.start):
        at = 0
        while at < len(run.memory):
            part = run.memory[at : at + left]
            batch.append(DeviceRun(run.start + at, part))
            at, left = at + len(part), left - len(part)
            if not left:
                yield _by_way_of_host(batch)
                batch, left = [], most_nbytes
    if batch:
        yield _by_way_of_host(batch)


def _by_way_of_host(runs: Sequence[DeviceRun]) -> Batch:
    buffer = _host_memory(runs)
    extents, pairs, at = [], [], 0
    for run in runs:
        here = buffer[at : at + len(run.memory)]
        extents.append(Extent(run.start, bytes_of(here)))
        pairs.append((run.memory, here))
        at += len(run.memory)
    return Batch(extents, pairs)


def _host_memory(runs: Iterable[Run]) -> torch.Tensor:
    """Room for some runs on the host; pinned where one of them is on a CUDA device."""
    nbytes, pinned = 0, False
    for run in runs:
        nbytes += len(run.memory)
        pinned = pinned or (isinstance(run, DeviceRun) and run.memory.is_cuda)
    return (
        torch.empty(nbytes, dtype=torch.uint8, device=_CPU, pin_memory=True)
        if pinned
        else empty((nbytes,), torch.uint8, _CPU)
    )


def copied(runs: Runs) -> dict[str, list[Extent]]:
    """The same bytes in host memory of their own: in the order of the files, so that neighbours in a file are one run."""
    listed = [(name, run) for name, its in runs.items() for run in sorted(its, key=lambda run: run.start)]
    buffer = _host_memory(run for _, run in listed)
    memory, at = bytes_of(buffer), 0
    made: dict[str, list[Extent]] = {name: [] for name in runs}
    devices: set[torch.device] = set()
    for name, run in listed:
        nbytes = len(run.memory)
        if isinstance(run, DeviceRun):
            buffer[at : at + nbytes].copy_(run.memory, non_blocking=run.memory.is_cuda)
            if run.memory.is_cuda:
                devices.add(run.memory.device)
        elif nbytes >= _COPIED_BY_TORCH_FROM:
            buffer[at : at + nbytes].copy_(torch.frombuffer(run.memory, dtype=torch.uint8))
        else:
            memory[at : at + nbytes] = run.memory
        its = made[name]
        if its and its[-1].stop == run.start:
            last = its.pop()
            its.append(Extent(last.start, memory[at - len(last.memory) : at + nbytes]))
        else:
            its.append(Extent(run.start, memory[at : at + nbytes]))
        at += nbytes
    for device in devices:
        torch.cuda.synchronize(device)
    return made
