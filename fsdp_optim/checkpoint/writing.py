"""This rank's part of a checkpoint's files: its runs, written to their place, and what was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy

from fsdp_optim.checkpoint.files import WRITTEN_TOGETHER, File, offset_in_storage, stored_on
from fsdp_optim.checkpoint.parts import Stretch
from fsdp_optim.checkpoint.runs import LocalMemory, Run, Runs, clipped, in_host_memory, runs_of
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.checksums import Rows, rows_of
from fsdp_optim.formats.extents import DataSection, write_extents
from fsdp_optim.layout import FlatRuns, Placement
from fsdp_optim.memory import Budget
from fsdp_optim.move import Key, Slice
from fsdp_optim.plan import Copy, clip_to_source, copies_of
from fsdp_optim.storage.base import StoreWriter


class Writer:
    """Writes this rank's part of some files, and keeps the checksums of what it wrote, by file.

    `hand`: this rank's hand in the store; `receipt`: what it gave when it had finished. `stretches`: this rank's bytes of values
    whose files are put in parts.
    """

    def __init__(
        self,
        hand: StoreWriter,
        files: Sequence[File],
        rank: int,
        *,
        checksums: bool,
        budget: Budget,
        stretches: Mapping[Key, Stretch],
    ) -> None:
        self.nbytes = 0
        self.hand, self.receipt = hand, b""
        self._files = {file.name: file for file in files}
        self._starts: dict[Key, tuple[str, int]] = {
            value.key: (file.name, start)
            for file in files
            for value, start in zip(file.values, file.plan.starts, strict=True)
        }
        self._planned: dict[tuple[Placement, Placement, int], list[tuple[int, Copy]]] = {}
        self._rows: dict[str, list[Rows]] = {file.name: [] for file in files}
        self._rank, self._checksums, self._stretches = rank, checksums, stretches
        self._budget = budget

    @property
    def rows(self) -> dict[str, Rows]:
        """The segments of what was written, by file."""
        return {name: numpy.concatenate([rows_of(()), *its]) for name, its in self._rows.items()}

    def runs_of(self, parts: Sequence[Slice]) -> dict[str, list[Run]]:
        """Which of this rank's elements of some tensors it has to write, and where."""
        runs: dict[str, list[Run]] = {}
        for part in parts:
            if part.flat is None and part.start:
                continue  # all of it is in windows before
            (name, begin), itemsize = self._starts[part.value.key], part.value.dtype.itemsize
            memory = LocalMemory(part.flat) if part.flat is not None else None
            stretch = self._stretches.get(part.value.key)
            if isinstance(part.cut, FlatRuns):
                if stretch is not None and memory is not None and part.flat is not None:
                    run = memory.run(begin + (stretch.first + part.start) * itemsize, 0, part.flat.numel())
                    offset = self._files[name].plan.offset
                    runs.setdefault(name, []).append(clipped(run, stretch.start - offset, stretch.stop - offset))
                continue
            for base, copy in self._copies(part, begin):
                if memory is None or part.flat is None:
                    raise CheckpointError(
                        f"{part.value.fqn}: {part.value.name}: rank {self._rank} has no elements of it, but {copy.numel} to write"
                    )
                runs.setdefault(name, []).extend(
                    memory.run(begin + (base + target) * itemsize, source, numel)
                    for piece in clip_to_source(copy, part.start, part.start + part.flat.numel())
                    for source, target, numel in runs_of(piece)
                )
        return runs

    def _copies(self, part: Slice, start: int) -> Sequence[tuple[int, Copy]]:
        """What this rank writes of a value, as copies to storage, each with the element at which its part of storage begins.

        Where several ranks could write a small value, its place in the file decides: neighbours are written by one of them.
        """
        stored = stored_on(part.cut, part.value.nbytes)
        replica = start // WRITTEN_TOGETHER % part.cut.num_replicas
        key = (part.cut, stored, replica)
        if key not in self._planned:
            copies = copies_of(part.cut, stored, rank=self._rank, replica=replica)
            mine = (copy for copy in copies if copy.source_rank == self._rank)
            self._planned[key] = [(offset_in_storage(stored, copy.target_rank), copy) for copy in mine]
        return self._planned[key]

    def write(self, runs: Runs) -> None:
        """Write runs to their place."""
        for name, its in runs.items():
            file = self._files[name].plan
            section = DataSection(name, partial(self.hand.write, name), file.offset, file.tensors_in)
            for batch in in_host_memory(its, self._budget):
                batch.bring()
                grid = file.segment_nbytes if self._checksums else 0
                self._rows[name].append(write_extents(section, batch.extents, grid))
                self.nbytes += sum(len(extent.memory) for extent in batch.extents)

    def finish(self) -> None:
        """Return when what was written is there, and on the disk, where it has to be durable."""
        self.receipt = self.hand.finish()

    def discard(self) -> None:
        """Let go of the files, whatever they say, after a failure."""
        self.hand.discard()
