"""This rank's part of a save: the extents that it writes, and their checksums."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy
import torch

from fsdp_optim.checkpoint.common.files import WRITTEN_TOGETHER, offset_in_storage, stored_on
from fsdp_optim.checkpoint.common.local_extents import (
    ExtentsByFile,
    LocalExtent,
    LocalMemory,
    clipped,
    in_host_memory,
)
from fsdp_optim.checkpoint.save.file_plan import FilePlan
from fsdp_optim.checkpoint.save.short_parts import SHORT_NBYTES, Kind, ShortParts
from fsdp_optim.checkpoint.save.trace import Trace
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.checksums import Rows, rows_of
from fsdp_optim.formats.base.extents import DataSection, write_extents
from fsdp_optim.formats.base.frames import Pieces
from fsdp_optim.formats.base.packed import PackedExtents, write_packed
from fsdp_optim.formats.base.protocols import PlannedFile
from fsdp_optim.layout import FlatRuns, Placement
from fsdp_optim.move import CompleteValues, Parts, Slice, StateValue, Taken
from fsdp_optim.plan import Copy, Plans, clip_to_source, runs_of
from fsdp_optim.storage.base import StoreWriter
from fsdp_optim.tensors.memory import Budget


class RankWriter:
    """Writes this rank's part of the planned files, and keeps the checksums of the written segments.

    `store_writer`: the access of this rank to the store. `receipt`: the result of its `finish`. `seconds`: the time that writes
    took. `trace`: the timeline of the save, to which the writes are added. `plans`: the plans of earlier calls.
    """

    def __init__(
        self,
        store_writer: StoreWriter,
        plan: FilePlan,
        rank: int,
        *,
        checksums: bool,
        budget: Budget,
        plans: Plans,
        trace: Trace,
    ) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self.trace = trace
        self.store_writer = store_writer
        self.receipts: list[bytes] = []
        self._plan, self._files = plan, {file.name: file for file in plan.files}
        self._rows: dict[str, list[Rows]] = {file.name: [] for file in plan.files}
        self._rank, self._checksums, self._part_ranges = rank, checksums, plan.ranges_on(rank)
        self._budget, self._plans = budget, plans
        self._heads = dict(plan.heads_on(rank))
        self._stored: dict[tuple[int, torch.dtype, int], tuple[Placement, Sequence[tuple[int, Copy]], Kind | None]] = {}
        self._num_replicas: dict[int, int] = {}  # by the id of a cut, which `_stored` keeps unique
        self._frames = {name: dict(by_index) for name, by_index in plan.frames_on(rank).items()}

    @property
    def rows(self) -> dict[str, Rows]:
        """The written segments, by file."""
        return {name: numpy.concatenate([rows_of(()), *tables]) for name, tables in self._rows.items()}

    def extents_of(self, parts: Taken) -> dict[str, list[LocalExtent]]:
        """Return the extents that this rank must write of some parts, by file. Those of short parts are copies."""
        if isinstance(parts, CompleteValues):
            return self._of_complete(parts)
        extents: dict[str, list[LocalExtent]] = {}
        short: dict[str, ShortParts] = {}
        for part in self._without_short(parts, short) if isinstance(parts, Parts) else parts:
            flat = part.flat
            name, begin = self._plan.start_of(part.value)
            if isinstance(part.cut, FlatRuns):
                if flat is not None:
                    ranges = self._in_ranges(part, LocalMemory(flat), flat.numel(), begin)
                    extents.setdefault(name, []).extend(ranges)
                continue
            copies, kind = self._copies(part.value, part.cut, begin)
            if not copies:
                continue
            if flat is None:
                if part.start:
                    continue  # earlier windows contain all of it
                raise CheckpointError(
                    f"{part.value.fqn}: {part.value.name}: rank {self._rank} has no elements of this value, but must write "
                    f"{copies[0][1].numel}"
                )
            if kind is not None and part.start == kind.start and flat.numel() == kind.numel:
                if name not in short:
                    short[name] = ShortParts()
                short[name].add(begin, kind, flat)
            else:
                extents.setdefault(name, []).extend(self._of_copies(part, flat, begin, copies))
        for name, collected in short.items():
            extents.setdefault(name, []).append(collected.packed())
        return extents

    def _of_complete(self, complete: CompleteValues) -> dict[str, list[LocalExtent]]:
        """Return the extents of values that this rank alone writes, by file."""
        by_file: dict[str, tuple[list[int], list[int]]] = {}
        starts_of = self._plan.starts
        for number, value in enumerate(complete.values):
            name, begin = starts_of.get(id(value)) or self._plan.start_of(value)
            of_file = by_file.get(name)
            if of_file is None:
                of_file = by_file[name] = [], []
            of_file[0].append(number)
            of_file[1].append(begin)
        extents: dict[str, list[LocalExtent]] = {}
        memory: memoryview = complete.memory.numpy().data
        for name, (numbers, begins) in by_file.items():
            starts, index = numpy.array(begins, numpy.int64), numpy.array(numbers, numpy.intp)
            extents[name] = [PackedExtents.of(starts, complete.nbytes[index], complete.places[index], memory)]
        return extents

    def _without_short(self, parts: Parts, short: dict[str, ShortParts]) -> list[Slice]:
        """Add the short parts to `short`, by file, and return the others."""
        others: list[int] = []
        starts = self._plan.starts
        kinds: dict[tuple[int, torch.dtype], Kind | None] = {}  # of values without replicas, by their cut and dtype
        for i, (value, cut, held) in enumerate(zip(parts.values, parts.cuts, parts.held, strict=True)):
            name, begin = starts.get(id(value)) or self._plan.start_of(value)
            copies: Sequence[tuple[int, Copy]] = ()
            kind = kinds.get((id(cut), value.dtype))
            if kind is None:
                if isinstance(cut, FlatRuns):
                    others.append(i)
                    continue
                copies, kind = self._copies(value, cut, begin)
                if self._num_replicas[id(cut)] == 1:
                    kinds[id(cut), value.dtype] = kind
            if kind is not None and held is not None:
                collected = short.get(name)
                if collected is None:
                    collected = short[name] = ShortParts()
                collected.add(begin, kind, held)
            elif copies:
                others.append(i)
        return parts.slices(others)

    def _of_copies(
        self, part: Slice, flat: torch.Tensor, begin: int, copies: Sequence[tuple[int, Copy]]
    ) -> Iterator[LocalExtent]:
        """Yield the extents of a part, whose memory is used as it is."""
        memory, itemsize = LocalMemory(flat), part.value.dtype.itemsize
        for base, copy in copies:
            for piece in clip_to_source(copy, part.start, part.start + flat.numel()):
                for source, target, numel in runs_of(piece):
                    yield memory.extent(begin + (base + target) * itemsize, source, numel)

    def _in_ranges(self, part: Slice, memory: LocalMemory, numel: int, begin: int) -> Iterator[LocalExtent]:
        """Yield the extents of a part whose local tensor has this rank's ranges of the value, one after the other."""
        at, size = 0, part.value.dtype.itemsize
        for part_range in self._part_ranges.get(part.value.key, ()):
            num = part_range.last - part_range.first
            first, last = max(part.start, at), min(part.start + numel, at + num)
            if first < last:
                start = begin + (part_range.first + first - at) * size
                yield clipped(memory.extent(start, first - part.start, last - first), part_range.start, part_range.stop)
            at += num

    def _copies(self, value: StateValue, cut: Placement, start: int) -> tuple[Sequence[tuple[int, Copy]], Kind | None]:
        """Return the copies of a value to storage that this rank writes, each with the first element of its part of storage.

        Of several ranks that could write a small value, its place in the file selects one, so that one rank writes adjacent
        values. The second result: the copies as a kind of short parts; None where the local tensor is long.
        """
        num = self._num_replicas.get(id(cut))  # layers share their cuts, which take long to compare
        if num is None:
            num = self._num_replicas[id(cut)] = cut.num_replicas
        replica = start // WRITTEN_TOGETHER % num if num > 1 else 0
        key = id(cut), value.dtype, replica
        known = self._stored.get(key)
        if known is None:
            stored = stored_on(cut, value.nbytes)
            planned = self._plans.of(cut, stored, self._rank, replica)
            copies = [(offset_in_storage(stored, c.target_rank), c) for c in planned if c.source_rank == self._rank]
            (first, last), itemsize = cut.local_range(self._rank), value.dtype.itemsize
            is_short = (last - first) * itemsize <= SHORT_NBYTES
            kind = Kind.of(copies, itemsize, first, last) if is_short and copies else None
            known = self._stored[key] = cut, copies, kind  # a reference that keeps the id unique
        return known[1], known[2]

    def write(self, extents_by_file: ExtentsByFile) -> None:
        """Write extents to their files."""
        with self.timed("write"):
            for name, extents in extents_by_file.items():
                file = self._files[name].plan
                self._write_head(name)
                section = self._section(file)
                grid = file.segment_nbytes if self._checksums else 0
                if len(extents) == 1 and isinstance(extents[0], PackedExtents):
                    self._rows[name].append(write_packed(extents[0], grid, section.move, section.offset))
                    self.nbytes += extents[0].nbytes
                    continue
                for batch in in_host_memory(extents, self._budget):
                    batch.copy_to_host()
                    self._rows[name].append(write_extents(section, batch.extents, grid))
                    self.nbytes += sum(len(extent.memory) for extent in batch.extents)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time that a block takes to `seconds` and, under this name, to the timeline."""
        begun = time.monotonic()
        try:
            with self.trace.span(name):
                yield
        finally:
            self.seconds += time.monotonic() - begun

    def _section(self, file: PlannedFile) -> DataSection:
        """Return the data section of a file. Its frames are written too: of a file in parts, by the rank that puts the part."""
        if file.name not in self._frames:
            return file.section(partial(self.store_writer.write, file.name))

        def write(pieces: Pieces, start: int) -> None:
            stop = start + sum(map(len, pieces))
            for place, parts in file.frames.without_frames(pieces, start):
                self.store_writer.write(file.name, parts, place)
            for index in file.frames.touched(start, stop):
                self._write_frame(file.name, index)

        return DataSection(file.name, write, 0, file.tensors_in)

    def _write_head(self, name: str) -> None:
        """Write the head of a file in parts before the first tensor: a part is open from its first byte to its last one."""
        for place, content in self._heads.pop(name, ()):
            self.store_writer.write(name, [content], place)

    def _write_frame(self, name: str, index: int) -> None:
        for place, content in self._frames[name].pop(index, ()):
            self.store_writer.write(name, [content], place)

    def finish(self) -> None:
        """Return when all writes are complete, and on the disk if the save is durable."""
        with self.timed("flush"):
            for name in list(self._heads):
                self._write_head(name)
            for name, frames in self._frames.items():
                for index in list(frames):  # the frames in parts without a byte of a tensor
                    self._write_frame(name, index)
            self.receipts = [self.store_writer.finish()]
        self._plan.forget_starts()

    def discard(self) -> None:
        """Close the files after a failure. Raises nothing."""
        self.store_writer.discard()
