"""The source of a load: the bytes that each rank reads from files, and the cut of these reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_optim.checkpoint.common.files import has_short_rows, in_flat_chunks
from fsdp_optim.checkpoint.common.local_extents import LocalExtent, LocalMemory, bytes_of, in_host_memory, ranges_of
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.protocols import StoredTensor, TensorReader
from fsdp_optim.layout import Placement, Whole
from fsdp_optim.memory import Budget, dtype_named
from fsdp_optim.move import End, Slice, StateValue
from fsdp_optim.plan import Copy, Plans, clip_to_target, copies_into, replica_of

_CPU = torch.device("cpu")
_REQUESTS_TOGETHER = 4  # one rank reads the small tensors in as many bytes of a file as this number of requests
_CUT_FROM = 256 << 10  # bytes; one rank reads a smaller tensor that several ranks need
_MOST_EXTENTS = 512  # at once, because there may be many short rows


class StoredValue(StateValue, frozen=True, eq=False, gc=False, kw_only=True):
    """A value of a checkpoint. `flat`: this rank's memory for its elements, a 1-D tensor; None if this rank needs none."""

    stored: StoredTensor
    flat: torch.Tensor | None = None

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


class FlatsEnd(End):
    """The target of a load: the memory `flat` of each stored value."""

    def memory(self, value: StateValue) -> torch.Tensor | None:
        return stored_value(value).flat


def stored_value(value: StateValue) -> StoredValue:
    """Return a value typed as a StoredValue. Raises CheckpointError for any other value."""
    if not isinstance(value, StoredValue):
        raise CheckpointError(f"{value.fqn}: {value.name} is not a value of a checkpoint")
    return value


@dataclass
class CheckpointEnd(End):
    """The source of a load: an open checkpoint. `nbytes`: the number of bytes that this rank has read.

    Args:
        budget: the budget for copies of device memory on the host.
        as_needed: every rank reads exactly the elements that it needs, even if other ranks read them too.
        plans: the plans of earlier calls, in which the plans of this load are kept.
    """

    checkpoint: TensorReader
    rank: int
    budget: Budget
    progress: Callable[[int], None] = lambda nbytes: None
    as_needed: bool = False
    nbytes: int = 0
    plans: Plans = field(default_factory=Plans)

    _as_they_are: dict[tuple[int, torch.dtype, int, int], tuple[Placement, bool]] = field(default_factory=dict)
    _planned: dict[tuple[int, int], tuple[Placement, Placement, Sequence[Copy]]] = field(default_factory=dict)

    is_stored = True

    def io_placement(self, value: StateValue, other: Placement) -> Placement:
        """Return the cut in which the ranks read. Ranks that need the same elements each read a share; short rows: by chunks."""
        if self.as_needed or not value.nbytes:
            return other
        stored = stored_value(value).stored
        key = id(other), value.dtype, stored.short_nbytes, stored.request_nbytes
        known = self._as_they_are.get(key)  # layers share their placements
        if known is None:
            is_shared = other.num_replicas > 1 or other.overlapping
            is_short = has_short_rows(other, value.dtype.itemsize, stored.short_nbytes)
            is_long = len(other.ranks) * stored.request_nbytes <= value.nbytes
            known = self._as_they_are[key] = other, not is_shared and not is_short and is_long  # keeps the id unique
        if known[1]:
            return other
        ranks = other.ranks
        together = max(_CUT_FROM, _REQUESTS_TOGETHER * stored.request_nbytes)
        # One rank reads adjacent tensors. Equal layers are equally far apart, so that a remainder could give all to one rank.
        first = replica_of(f"{stored.file} {stored.start // together}") % len(ranks)
        if value.nbytes < max(_CUT_FROM, 2 * stored.request_nbytes):
            return other if len(ranks) == 1 else Whole(other.shape, (ranks[first],))
        if len(ranks) * stored.request_nbytes <= value.nbytes:
            return in_flat_chunks(other, ranks)
        num = value.nbytes // stored.request_nbytes
        return in_flat_chunks(other, [ranks[(first + index) % len(ranks)] for index in range(num)])

    def fill(self, parts: Sequence[Slice]) -> None:
        rounds: list[list[Slice]] = []  # a tensor that was tied at the save may be needed twice, and is read twice
        times: dict[tuple[str, str], int] = {}
        for part in parts:
            stored = stored_value(part.value).stored
            key = (stored.file, stored.key)
            times[key] = times.get(key, 0) + 1
            if times[key] > len(rounds):
                rounds.append([])
            rounds[times[key] - 1].append(part)
        for parts_of_round in rounds:
            extents = (extent for part in parts_of_round for extent in self._extents(part))
            while few := list(itertools.islice(extents, _MOST_EXTENTS)):
                by_file: dict[str, list[LocalExtent]] = {}
                for name, extent in few:
                    by_file.setdefault(name, []).append(extent)
                self._read(by_file)

    def _read(self, by_file: dict[str, list[LocalExtent]]) -> None:
        for name, extents in by_file.items():
            for batch in in_host_memory(extents, self.budget):
                self.checkpoint.read({name: batch.extents}, self._did_read)
                batch.copy_to_device()

    def _did_read(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.progress(self.nbytes)

    def _extents(self, part: Slice) -> Iterator[tuple[str, LocalExtent]]:
        """Yield the extents of a part, each with the name of its file."""
        if part.cut.local_range(self.rank)[1] <= part.start:
            return
        stored = stored_value(part.value).stored
        if part.flat is None:
            raise CheckpointError(f"{stored.key}: rank {self.rank} has no memory for its elements")
        memory, itemsize = LocalMemory(part.flat), part.value.dtype.itemsize
        planned = self._plan_of(stored, part.cut)
        for storage_rank, stored_offset, offset, numel in elements_of(planned, part.start, part.flat.numel()):
            file, start = stored.place_on(storage_rank)
            yield file, memory.extent(start + stored_offset * itemsize, offset, numel)

    def _plan_of(self, stored: StoredTensor, cut: Placement) -> Sequence[Copy]:
        """Return the plan of a value's reads. Values that are stored and cut alike share it: to compare placements takes long."""
        placement = stored.placement
        if stored.chunks is not None:  # in pieces of its own
            return self.plans.of(placement, cut, self.rank, sends=False)
        key = id(placement), id(cut)
        known = self._planned.get(key)
        if known is None:
            plan = self.plans.of(placement, cut, self.rank, sends=False)
            known = self._planned[key] = placement, cut, plan  # references that keep the ids unique
        return known[2]


def elements_in(
    stored: Placement, cut: Placement, rank: int, first: int, num: int
) -> Iterator[tuple[int, int, int, int]]:
    """Find where `num` of this rank's elements, from `first` on, are stored.

    Yields (rank of storage, offset in the elements of that rank, offset from `first` on this rank, numel).
    """
    return elements_of(copies_into(stored, cut, rank), first, num)


def elements_of(copies: Sequence[Copy], first: int, num: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield as `elements_in`, from copies that lead from storage to this rank."""
    for copy in copies:
        for part in clip_to_target(copy, first, first + num):
            for stored_offset, offset, numel in ranges_of(part):
                yield copy.source_rank, stored_offset, offset, numel


def read_constants(checkpoint: TensorReader, stored: Sequence[StoredTensor]) -> list[torch.Tensor]:
    """Read some small tensors completely, on this rank."""
    values = [torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype), device=_CPU) for tensor in stored]
    extents: dict[str, list[Extent]] = {}
    plans = Plans()
    for tensor, value in zip(stored, values, strict=True):
        memory, size = bytes_of(value.view(-1)), tensor.itemsize
        planned = plans.of(tensor.placement, Whole(tensor.shape, (0,)), 0, sends=False)
        for rank, stored_offset, offset, numel in elements_of(planned, 0, value.numel()):
            file, start = tensor.place_on(rank)
            part = memory[offset * size : (offset + numel) * size]
            extents.setdefault(file, []).append(Extent(start + stored_offset * size, part))
    checkpoint.read(extents)
    return values
