"""From files to tensors: which bytes each rank reads, and in which cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_optim.checkpoint.files import has_short_rows, in_runs
from fsdp_optim.checkpoint.runs import LocalMemory, Run, bytes_of, in_host_memory, runs_of
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base import Reader, StoredTensor
from fsdp_optim.formats.extents import Extent
from fsdp_optim.layout import Placement, Whole
from fsdp_optim.memory import Budget, dtype_named
from fsdp_optim.move import End, Slice, StateValue
from fsdp_optim.plan import clip_to_target, copies_into

_CPU = torch.device("cpu")
_CUT_FROM = 256 << 10  # bytes; a smaller tensor that several ranks need is read by one of them
_MOST_RUNS = 512  # at once: of short rows there are many


@dataclass(frozen=True)
class StoredValue(StateValue):
    """A value that a checkpoint has. `flat`: this rank's memory for it; None where it needs none."""

    stored: StoredTensor = field(kw_only=True, compare=False)
    flat: torch.Tensor | None = field(default=None, kw_only=True, compare=False)

    @classmethod
    def of(
        cls,
        fqn: str,
        name: str,
        stored: StoredTensor,
        placement: Placement,
        flat: torch.Tensor | None,
        *,
        is_state: bool,
    ) -> StoredValue:
        dtype = dtype_named(stored.dtype)
        return cls(fqn, name, dtype, placement, is_state, stored=stored, flat=flat)

    def nbytes_on(self, rank: int) -> int:
        return self.placement.numel_on(rank) * self.dtype.itemsize


class StoredFlats(End):
    """The target of a load: the memory that stored values come with."""

    def memory(self, value: StateValue) -> torch.Tensor | None:
        return stored_value(value).flat


def stored_value(value: StateValue) -> StoredValue:
    """The same value, where it is one that a checkpoint has."""
    if not isinstance(value, StoredValue):
        raise CheckpointError(f"{value.fqn}: {value.name} is not described as a value of a checkpoint")
    return value


@dataclass
class CheckpointEnd(End):
    """An open checkpoint on this rank. `nbytes`: how many bytes this rank has read.

    Args:
        budget: for what lies on a device, by way of the host.
        as_needed: every rank reads just the elements that it needs, without a word to the others.
    """

    checkpoint: Reader
    rank: int
    budget: Budget
    progress: Callable[[int], None] = lambda nbytes: None
    as_needed: bool = False
    nbytes: int = 0

    is_stored = True

    def io_placement(self, value: StateValue, other: Placement) -> Placement:
        """What several ranks need is read once, each rank its share; rows of a few bytes are read in long runs."""
        if self.as_needed or not value.nbytes:
            return other
        stored = stored_value(value).stored
        is_shared = other.num_replicas > 1 or other.overlapping
        if not is_shared and not has_short_rows(other, value.dtype.itemsize, stored.short_nbytes):
            return other
        if value.nbytes >= _CUT_FROM:
            return in_runs(other, other.ranks)
        ranks = other.ranks  # neighbours in a file are read together
        return Whole(other.shape, (ranks[stored.start // _CUT_FROM % len(ranks)],))

    def fill(self, parts: Sequence[Slice]) -> None:
        rounds: list[list[Slice]] = []  # a tensor that is wanted twice, because it was tied when saved, is read twice
        times: dict[tuple[str, str], int] = {}
        for part in parts:
            stored = stored_value(part.value).stored
            key = (stored.file, stored.key)
            times[key] = times.get(key, 0) + 1
            if times[key] > len(rounds):
                rounds.append([])
            rounds[times[key] - 1].append(part)
        for its in rounds:
            runs = (run for part in its for run in self._runs(part))
            while few := list(itertools.islice(runs, _MOST_RUNS)):
                by_file: dict[str, list[Run]] = {}
                for name, run in few:
                    by_file.setdefault(name, []).append(run)
                self._read(by_file)

    def _read(self, by_file: dict[str, list[Run]]) -> None:
        for name, runs in by_file.items():
            for batch in in_host_memory(runs, self.budget):
                self.checkpoint.read({name: batch.extents}, self._did_read)
                batch.put()

    def _did_read(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.progress(self.nbytes)

    def _runs(self, part: Slice) -> Iterator[tuple[str, Run]]:
        """In which file, and where in it, the elements of a part are, and the memory that they belong to."""
        if part.cut.local_range(self.rank)[1] <= part.start:
            return
        stored = stored_value(part.value).stored
        if part.flat is None:
            raise CheckpointError(f"{stored.key}: rank {self.rank} has no memory for it")
        memory, itemsize = LocalMemory(part.flat), part.value.dtype.itemsize
        for rank, there, here, numel in elements_in(
            stored.placement, part.cut, self.rank, part.start, part.flat.numel()
        ):
            file, start = stored.place_on(rank)
            yield file, memory.run(start + there * itemsize, here, numel)


def elements_in(
    stored: Placement, cut: Placement, rank: int, first: int, num: int
) -> Iterator[tuple[int, int, int, int]]:
    """(rank of storage, offset in what it has, offset from `first` on this rank, how many) of `num` of this rank's elements."""
    for copy in copies_into(stored, cut, rank):
        for part in clip_to_target(copy, first, first + num):
            for there, here, numel in runs_of(part):
                yield copy.source_rank, there, here, numel


def read_constants(checkpoint: Reader, stored: Sequence[StoredTensor]) -> list[torch.Tensor]:
    """All of some small tensors, on this rank."""
    values = [torch.empty(one.shape, dtype=dtype_named(one.dtype), device=_CPU) for one in stored]
    extents: dict[str, list[Extent]] = {}
    for one, value in zip(stored, values, strict=True):
        memory, size = bytes_of(value.view(-1)), one.itemsize
        for rank, there, here, numel in elements_in(one.placement, Whole(one.shape, (0,)), 0, 0, value.numel()):
            file, start = one.place_on(rank)
            part = memory[here * size : (here + numel) * size]
            extents.setdefault(file, []).append(Extent(start + there * size, part))
    checkpoint.read(extents)
    return values
