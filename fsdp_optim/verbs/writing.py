"""This rank's part of a checkpoint's files: its runs, written to their place, and what was written."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.checksums import Rows, rows_of
from fsdp_optim.formats.extents import DataSection, write_extents
from fsdp_optim.formats.header import Entry
from fsdp_optim.layout import Placement
from fsdp_optim.memory import Budget
from fsdp_optim.move import End, Key, Part, StateValue
from fsdp_optim.plan import Copy, copies_of, part_from
from fsdp_optim.verbs.filing import File, offset_in_storage, stored_on, written_cut
from fsdp_optim.verbs.runs import LocalMemory, Run, Runs, in_host_memory, runs_of

_MOST_OPEN = 64  # files


@dataclass(frozen=True)
class FilesEnd(End):
    """The target of a save. `take` gets this rank's parts; `owners`: by key the rank that writes all of it, where one does."""

    take: Callable[[Sequence[Part]], None]
    owners: Mapping[Key, int] = field(default_factory=dict)

    is_stored = True

    def io_placement(self, value: StateValue, other: Placement) -> Placement:
        return written_cut(value, other, self.owners.get(value.key))

    def drain(self, parts: Sequence[Part]) -> None:
        self.take(parts)


class Writer:
    """Writes this rank's part of some files, and keeps the checksums of what it wrote, by file."""

    def __init__(
        self, folder: Path, files: Sequence[File], rank: int, *, checksums: bool, durable: bool, budget: Budget
    ) -> None:
        self.nbytes = 0
        self._files = {file.name: file for file in files}
        self._entries: dict[Key, tuple[File, Entry]] = {
            value.key: (file, entry)
            for file in files
            for value, entry in zip(file.tensors, file.header.entries, strict=True)
        }
        self._planned: dict[tuple[Placement, Placement, int], list[tuple[int, Copy]]] = {}
        self._rows: dict[str, list[Rows]] = {file.name: [] for file in files}
        self._folder, self._rank = folder, rank
        self._checksums, self._durable = checksums, durable
        self._budget = budget
        self._open: dict[str, int] = {}

    @property
    def rows(self) -> dict[str, Rows]:
        """The segments of what was written, by file."""
        return {name: numpy.concatenate([rows_of(()), *its]) for name, its in self._rows.items()}

    def runs_of(self, parts: Sequence[Part]) -> dict[str, list[Run]]:
        """Which of this rank's elements of some tensors it has to write, and where."""
        runs: dict[str, list[Run]] = {}
        for part in parts:
            if part.flat is None and part.start:
                continue  # all of it is in windows before
            file, entry = self._entries[part.value.key]
            memory = LocalMemory(part.flat) if part.flat is not None else None
            for base, copy in self._copies(part):
                if memory is None or part.flat is None:
                    raise CheckpointError(
                        f"{entry.key}: rank {self._rank} has no elements of it, but {copy.numel} to write"
                    )
                runs.setdefault(file.name, []).extend(
                    memory.run(entry.start + (base + target) * entry.itemsize, source, numel)
                    for piece in part_from(copy, part.start, part.start + part.flat.numel())
                    for source, target, numel in runs_of(piece)
                )
        return runs

    def _copies(self, part: Part) -> Sequence[tuple[int, Copy]]:
        """What this rank writes of a value, as copies to storage, each with the element at which its part of storage begins."""
        stored = stored_on(part.cut, part.value.nbytes)
        replica = part.value.replica_among(part.cut)
        key = (part.cut, stored, replica)
        if key not in self._planned:
            copies = copies_of(part.cut, stored, rank=self._rank, replica=replica)
            mine = (copy for copy in copies if copy.source_rank == self._rank)
            self._planned[key] = [(offset_in_storage(stored, copy.target_rank), copy) for copy in mine]
        return self._planned[key]

    def write(self, runs: Runs) -> None:
        """Write runs to their place."""
        for name, its in runs.items():
            file, path = self._files[name], self._folder / name
            section = DataSection(self._fd(path), path, file.offset, file.header.tensors_in)
            for batch in in_host_memory(its, self._budget):
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
