"""This rank's part of a checkpoint's files: its runs, written to their place, and what was written."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.checksums import Rows, rows_of
from fsdp_optim.formats.extents import DataSection, write_extents
from fsdp_optim.layout import Layout
from fsdp_optim.plan import part_from, plan
from fsdp_optim.verbs.filing import File, Part, file_target, offset_in_file
from fsdp_optim.verbs.runs import LocalMemory, Run, Runs, in_host_memory, runs_of

_MOST_OPEN = 64  # files


class Writer:
    """Writes this rank's part of some files, and keeps the checksums of what it wrote, by file."""

    def __init__(
        self, folder: Path, files: Sequence[File], rank: int, *, checksums: bool, durable: bool, bucket_nbytes: int
    ) -> None:
        self.nbytes = 0
        self._files = {file.name: file for file in files}
        self._rows: dict[str, list[Rows]] = {file.name: [] for file in files}
        self._folder, self._rank = folder, rank
        self._checksums, self._durable = checksums, durable
        self._most_nbytes = max(bucket_nbytes // 2, 1)
        self._open: dict[str, int] = {}

    @property
    def rows(self) -> dict[str, Rows]:
        """The segments of what was written, by file."""
        return {name: numpy.concatenate([rows_of(()), *its]) for name, its in self._rows.items()}

    def runs_of(self, parts: Sequence[Part]) -> dict[str, list[Run]]:
        """Which of this rank's elements of some tensors it has to write, and where."""
        sides = [(part.move.side, part.move.tensor.nbytes) for part in parts]
        sources = Layout({str(i): side for i, (side, _) in enumerate(sides)})
        targets = Layout({str(i): file_target(side, nbytes) for i, (side, nbytes) in enumerate(sides)})
        runs: dict[str, list[Run]] = {}
        for copy in plan(sources, targets, rank=self._rank):
            if copy.source_rank != self._rank:
                continue
            part = parts[int(copy.fqn)]
            move, flat = part.move, part.flat
            if flat is None:
                if part.start:
                    continue  # all of it is in windows before
                raise CheckpointError(
                    f"{move.tensor.key}: rank {self._rank} has no elements of it, but {copy.numel} to write"
                )
            base = offset_in_file(targets.placements[copy.fqn], copy.target_rank)
            entry, memory = move.file.entry_of(move.index), LocalMemory(flat)
            runs.setdefault(move.file.name, []).extend(
                memory.run(entry.start + (base + target) * flat.itemsize, source, numel)
                for piece in part_from(copy, part.start, part.start + flat.numel())
                for source, target, numel in runs_of(piece)
            )
        return runs

    def write(self, runs: Runs) -> None:
        """Write runs to their place."""
        for name, its in runs.items():
            file, path = self._files[name], self._folder / name
            section = DataSection(self._fd(path), path, file.offset, file.header.tensors_in)
            for batch in in_host_memory(its, self._most_nbytes):
                batch.bring()
                grid = file.segment_nbytes if self._checksums else 0
                self._rows[name].append(write_extents(section, batch.extents, grid, durable=self._durable))
                self.nbytes += sum(len(extent.memory) for extent in batch.extents)

    def _fd(self, path: Path) -> int:
        if path.name not in self._open:
            while len(self._open) >= _MOST_OPEN:
                self._close(next(iter(self._open)))
            try:
                self._open[path.name] = os.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                hint = (
                    "; the folder has to be on a file system that all ranks share"
                    if error.errno == errno.ENOENT
                    else ""
                )
                raise CheckpointError(
                    f"rank {self._rank} cannot open {path}: {error.strerror or error}{hint}"
                ) from None
        return self._open[path.name]

    def finish(self) -> None:
        """Let go of the files, and hear what the file system has to say: some tell of a full disk only now.

        Returns when what was written is on the disk, where it has to be durable.
        """
        for name in list(self._open):
            self._close(name)

    def _close(self, name: str) -> None:
        fd = self._open.pop(name)
        try:
            try:
                if self._durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise CheckpointError(f"{self._folder / name}: cannot be written: {error.strerror or error}") from None

    def discard(self) -> None:
        """Let go of the files, whatever they say, after a failure."""
        while self._open:
            with contextlib.suppress(OSError):
                os.close(self._open.popitem()[1])
