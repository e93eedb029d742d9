"""The source of a load: the bytes that each rank reads from files, and the cut of these reads."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

from fsdp_optim.checkpoint.common import local_extents
from fsdp_optim.checkpoint.common.files import has_short_rows, in_flat_chunks, in_rows
from fsdp_optim.checkpoint.common.local_extents import LocalExtent, LocalMemory, in_host_memory
from fsdp_optim.checkpoint.load.short_ranges import SHORT_NBYTES, ShortRanges
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.protocols import StoredTensor, TensorReader
from fsdp_optim.layout import STORAGE, Placement, Whole, whole_on
from fsdp_optim.move import End, Slice, StateValue
from fsdp_optim.plan import Copy, Plans, clip_to_target, copies_into, replica_of, runs_of
from fsdp_optim.tensors.memory import Budget, dtype_named, flatten

_CPU = torch.device("cpu")
_REQUESTS_TOGETHER = 4  # one rank reads the small tensors in as many bytes of a file as this number of requests
_CUT_FROM = 256 << 10  # bytes; one rank reads a smaller tensor that several ranks need
_MOST_EXTENTS = 512  # at once, because there may be many short rows
_MOST_RANGES = 1 << 16  # short ones in a table
_CONSTANTS_NBYTES = 1 << 20


class StoredValue(StateValue, frozen=True, eq=False, gc=False, kw_only=True):
    """A value of a checkpoint. `memory`: this rank's memory for its elements, contiguous; None if this rank needs none."""

    stored: StoredTensor
    memory: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        fqn: str,
        name: str,
        stored: StoredTensor,
        placement: Placement,
        memory: torch.Tensor | None,
        *,
        is_state: bool,
    ) -> StoredValue:
        dtype = dtype_named(stored.dtype)
        return cls(fqn, name, dtype, placement, is_state, stored=stored, memory=memory)


class Sizes:
    """The bytes of some values. Each of the placements, which layers share, is asked once."""

    def __init__(self, values: Sequence[StoredValue]) -> None:
        numbers = Counter([(id(value.placement), value.dtype) for value in values])
        placements = {id(value.placement): value.placement for value in values}
        self._alike = [(placements[key], number * dtype.itemsize) for (key, dtype), number in numbers.items()]

    @property
    def nbytes(self) -> int:
        return sum(placement.numel * size for placement, size in self._alike)

    def nbytes_on(self, rank: int) -> int:
        """Return the bytes of a rank's part of them."""
        return sum(placement.numel_on(rank) * size for placement, size in self._alike)


class FlatsEnd(End):
    """The target of a load: the memory of each stored value."""

    def memory(self, value: StateValue) -> torch.Tensor | None:
        memory = stored_value(value).memory
        return flatten(memory) if memory is not None else None

    def memories(self, values: Sequence[StateValue]) -> Sequence[torch.Tensor | None]:
        return [value.memory if isinstance(value, StoredValue) else stored_value(value).memory for value in values]


def stored_value(value: StateValue) -> StoredValue:
    """Return a value typed as a StoredValue. Raises CheckpointError for any other value."""
    if not isinstance(value, StoredValue):
        raise CheckpointError(f"{value.fqn}: {value.name} is not a value of a checkpoint")
    return value


class _Reads(NamedTuple):
    """How the ranks read values of one dtype that they need in the cut `other`.

    Attributes:
        cut: the cut in which they read each; None if it depends on the place of the value in the file.
        num_readers: the number of ranks that read each, if `cut` is None.
        together: the bytes of a file in which one rank is the first reader of all values; equal for all values of a file.
    """

    other: Placement
    cut: Placement | None
    num_readers: int
    together: int

    @classmethod
    def of(cls, value: StateValue, stored: StoredTensor, other: Placement) -> _Reads:
        itemsize, num_ranks, request_nbytes = value.dtype.itemsize, len(other.ranks), stored.request_nbytes
        together = max(_CUT_FROM, _REQUESTS_TOGETHER * request_nbytes)
        is_shared = other.num_replicas > 1 or other.overlapping
        is_long = num_ranks * request_nbytes <= value.nbytes
        if not value.nbytes or (not is_shared and is_long and not has_short_rows(other, itemsize, stored.short_nbytes)):
            return cls(other, in_rows(other, itemsize, stored.short_nbytes), 0, together)
        if value.nbytes < max(_CUT_FROM, 2 * request_nbytes):
            return cls(other, other if num_ranks == 1 else None, 1, together)
        if is_long:
            return cls(other, in_flat_chunks(other, other.ranks), 0, together)
        return cls(other, None, value.nbytes // request_nbytes, together)

    def first_reader(self, stored: StoredTensor) -> int:
        """Return the index of a rank: one rank reads adjacent tensors.

        Equal layers are equally far apart, so that a remainder could give all of them to one rank.
        """
        return replica_of(f"{stored.file} {stored.start // self.together}") % len(self.other.ranks)


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

    _reads: dict[tuple[int, torch.dtype, int, int], _Reads] = field(default_factory=dict)
    _whole: dict[tuple[int, int], tuple[Placement, Placement]] = field(default_factory=dict)
    _by_reader: dict[tuple[int, str, int], tuple[Placement, Placement]] = field(default_factory=dict)
    _planned: dict[tuple[int, int], tuple[Placement, Placement, Sequence[Copy]]] = field(default_factory=dict)

    is_stored = True

    @property
    def in_any_order(self) -> bool:
        """Not where a request costs much: there, short values are read in one request with the long ones beside them."""
        return not any(request_nbytes for *_, request_nbytes in self._reads)

    def io_placement(self, value: StateValue, other: Placement) -> Placement:
        """Return the cut in which the ranks read. Ranks that need the same elements each read a share; short rows: by chunks."""
        if self.as_needed:
            return other
        stored = value.stored if isinstance(value, StoredValue) else stored_value(value).stored
        key = id(other), value.dtype, stored.short_nbytes, stored.request_nbytes
        reads = self._reads.get(key)  # layers share their placements
        if reads is None:
            reads = self._reads[key] = _Reads.of(value, stored, other)  # keeps the id unique
        if reads.cut is not None:
            return reads.cut
        if reads.num_readers > 1:
            ranks, first = other.ranks, reads.first_reader(stored)
            return in_flat_chunks(other, [ranks[(first + index) % len(ranks)] for index in range(reads.num_readers)])
        place = id(other), stored.file, stored.start // reads.together
        by_reader = self._by_reader.get(place)
        if by_reader is None:
            reader = other.ranks[reads.first_reader(stored)]
            by_reader = self._by_reader[place] = other, self._on_one_rank(other, reader)  # keeps the id unique
        return by_reader[1]

    def _on_one_rank(self, other: Placement, rank: int) -> Placement:
        """Return all of a value on one rank: one object for all values that are cut alike, by which plans are found again."""
        known = self._whole.get((id(other), rank))
        if known is None:
            known = self._whole[id(other), rank] = other, Whole(other.shape, (rank,))  # keeps the id unique
        return known[1]

    def fill(self, parts: Sequence[Slice]) -> None:
        ranges = _Ranges(self)
        others = ranges.take(parts)
        ranges.read()
        for parts_of_round in _rounds(others):
            extents = (extent for part in parts_of_round for extent in self._extents(part))
            while few := list(itertools.islice(extents, _MOST_EXTENTS)):
                by_file: dict[str, list[LocalExtent]] = {}
                for name, extent in few:
                    by_file.setdefault(name, []).append(extent)
                self._read(by_file)

    def _read(self, by_file: dict[str, list[LocalExtent]]) -> None:
        for name, extents in by_file.items():
            for batch in in_host_memory(extents, self.budget):
                self.checkpoint.read({name: batch.extents}, self.did_read)
                batch.copy_to_device()

    def did_read(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.progress(self.nbytes)

    def _extents(self, part: Slice) -> Iterator[tuple[str, LocalExtent]]:
        """Yield the extents of a part, each with the name of its file."""
        if part.cut.local_range(self.rank)[1] <= part.start:
            return
        stored = stored_value(part.value).stored
        if part.flat is None:
            raise CheckpointError(f"{stored.key}: rank {self.rank} has no memory for its elements")
        memory, itemsize = LocalMemory(flatten(part.flat)), part.value.dtype.itemsize
        planned = self.plan_of(stored, part.cut)
        for storage_rank, stored_offset, offset, numel in elements_of(planned, part.start, part.flat.numel()):
            file, start = stored.place_on(storage_rank)
            yield file, memory.extent(start + stored_offset * itemsize, offset, numel)

    def plan_of(self, stored: StoredTensor, cut: Placement) -> Sequence[Copy]:
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


def _rounds(parts: Sequence[Slice]) -> list[list[Slice]]:
    """A tensor that was tied at the save may be needed twice, and is read twice, one time after the other."""
    rounds: list[list[Slice]] = []
    times: dict[tuple[str, int], int] = {}
    for part in parts:
        stored = stored_value(part.value).stored
        key = (stored.file, stored.start)
        times[key] = times.get(key, 0) + 1
        if times[key] > len(rounds):
            rounds.append([])
        rounds[times[key] - 1].append(part)
    return rounds


_Range: TypeAlias = tuple[int, int, int]
"""The byte of a stored piece of a tensor, the byte of the memory of a part, and the number of bytes."""


class _Alike(NamedTuple):
    """Parts of tensors that are stored and cut alike: the ranges of each part that lie in one piece, which has `nbytes` bytes."""

    ranges: Sequence[_Range]
    nbytes: int
    firsts: list[int]  # for each part, the first byte of the piece
    memory: list[int]  # the address of the memory of each


class _InChunks(NamedTuple):
    """The ranges of parts of tensors in several pieces, by rank of storage. The placements keep the ids unique that find them.

    The pieces of one rank may be in several files, so that the ranges are kept here, and what is read in `_Alike`, by file.
    """

    placement: Placement
    cut: Placement
    by_rank: Mapping[int, Sequence[_Range]]


class _Ranges:
    """The short ranges of some parts in host memory. Parts that are stored and cut alike have the same ranges, found once."""

    def __init__(self, end: CheckpointEnd) -> None:
        self._end, self._num = end, 0
        self._alike: dict[tuple[Any, ...], _Alike] = {}
        self._in_chunks: dict[tuple[Any, ...], _InChunks] = {}

    def take(self, parts: Sequence[Slice]) -> list[Slice]:
        """Take parts, which the caller keeps, and read them now and then. Returns those that are to be read by themselves: on a
        device, or with a range that is not short.

        So is every part from a store where a request costs much: it is read in one request with the long ones beside it.
        """
        others, on_host = list[Slice](), local_extents.lies_on_host
        for part in parts:
            value, cut, flat, start, _ = part
            stored = value.stored if isinstance(value, StoredValue) else stored_value(value).stored
            if flat is None or stored.request_nbytes or not on_host(flat):
                others.append(part)
                continue
            if stored.chunks is not None:
                num = self._take_chunks(part, flat, stored, stored.chunks.placement)
            else:
                key = stored.file, id(cut), stored.shape, value.dtype, start, flat.numel()
                alike = self._alike.get(key)
                if alike is None:
                    nbytes, by_rank = prod(stored.shape) * stored.itemsize, self._ranges_of(part, stored)
                    alike = self._alike[key] = _Alike(by_rank.get(STORAGE, ()), nbytes, [], [])
                num = len(alike.ranges)
                if num:
                    alike.firsts.append(stored.start)
                    alike.memory.append(flat.data_ptr())
            self._num += num
            if not num:
                others.append(part)
            elif self._num >= _MOST_RANGES:
                self.read()
        return others

    def _take_chunks(self, part: Slice, flat: torch.Tensor, stored: StoredTensor, placement: Placement) -> int:
        """Take a part of a tensor that is stored in several pieces. Returns the number of its ranges; 0: they are not short."""
        key = id(placement), id(part.cut), part.value.dtype, part.start, flat.numel()
        kind = self._in_chunks.get(key)
        if kind is None:
            by_rank = self._ranges_of(part, stored)
            kind = self._in_chunks[key] = _InChunks(placement, part.cut, by_rank)
        num = 0
        for rank, ranges in kind.by_rank.items():
            file, start = stored.place_on(rank)
            of_piece = file, rank, key
            alike = self._alike.get(of_piece)
            if alike is None:
                alike = self._alike[of_piece] = _Alike(ranges, placement.numel_on(rank) * stored.itemsize, [], [])
            alike.firsts.append(start)
            alike.memory.append(flat.data_ptr())
            num += len(ranges)
        return num

    def _ranges_of(self, part: Slice, stored: StoredTensor) -> Mapping[int, Sequence[_Range]]:
        """Return the ranges by rank of storage; nothing if they are not short."""
        if part.flat is None or part.cut.local_range(self._end.rank)[1] <= part.start:
            return {}
        size, planned = part.value.dtype.itemsize, self._end.plan_of(stored, part.cut)
        by_rank: dict[int, list[_Range]] = {}
        for num, (rank, stored_offset, offset, numel) in enumerate(elements_of(planned, part.start, part.flat.numel())):
            if num == _MOST_EXTENTS or numel * size > SHORT_NBYTES:
                return {}
            by_rank.setdefault(rank, []).append((stored_offset * size, offset * size, numel * size))
        return by_rank

    def read(self) -> None:
        """Fill the memory of all parts so far."""
        by_file: dict[str, list[ShortRanges]] = {}
        for (file, *_), (ranges, nbytes, firsts, memory) in self._alike.items():
            if firsts:
                by_file.setdefault(file, []).append(ShortRanges.of(firsts, memory, nbytes, ranges))
        for file, tables in by_file.items():
            ShortRanges.joined(tables).read(self._end.checkpoint, file, self._end.budget.nbytes, self._end.did_read)
        self._alike.clear()
        self._num = 0


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
            for stored_offset, offset, numel in runs_of(part):
                yield copy.source_rank, stored_offset, offset, numel


def read_constants(checkpoint: TensorReader, stored: Sequence[StoredTensor]) -> list[torch.Tensor]:
    """Read some small tensors completely, on this rank. Those without dimensions are views of one tensor for each dtype."""
    numbers: dict[tuple[str, str], dict[int, int]] = {}  # by file and dtype: the first byte of each, by its id
    values: dict[int, torch.Tensor] = {}
    others: list[Slice] = []
    by_file: dict[str, list[ShortRanges]] = {}
    for tensor in stored:
        if tensor.shape:
            whole = whole_on(tensor.shape, (0,))
            value = values[id(tensor)] = torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype), device=_CPU)
            others.append(
                Slice(StoredValue.of(tensor.key, "", tensor, whole, None, is_state=True), whole, value.view(-1))
            )
        else:
            file, start = tensor.first_place
            numbers.setdefault((file, tensor.dtype), {})[id(tensor)] = start
    for (file, dtype), starts in numbers.items():
        memory = torch.empty(len(starts), dtype=dtype_named(dtype), device=_CPU)
        values.update(zip(starts, memory.unbind(), strict=True))
        size, begin = memory.itemsize, memory.data_ptr()
        addresses = range(begin, begin + memory.nbytes, size)
        by_file.setdefault(file, []).append(ShortRanges.of([*starts.values()], addresses, size, [(0, 0, size)]))
    budget = Budget(_CONSTANTS_NBYTES, "small tensors, with what lies between them")
    CheckpointEnd(checkpoint, 0, budget).fill(others)
    for file, tables in by_file.items():
        ShortRanges.joined(tables).read(checkpoint, file, budget.nbytes)
    return [values[id(tensor)] for tensor in stored]
