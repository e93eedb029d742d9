"""The files of a save: the tensors in each file, and the cut in which the ranks write and read a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from msgspec import Struct

from fsdp_optim.checkpoint.common.contents import SavedValue
from fsdp_optim.formats.base.protocols import Half, PlannedFile, PlannedTensor, Writer
from fsdp_optim.layout import STORAGE, FlatChunks, OnMesh, Placement, Whole
from fsdp_optim.layout.views import PlacedPart
from fsdp_optim.move import StateValue
from fsdp_optim.tensors.memory import dtype_name

_SHORT_NBYTES = 128 << 10  # a shorter strided row is not written by itself
_FEW_ROWS = 16  # of a part of a fused parameter; a rank writes or reads as many by themselves, however short they are
_MOST_PARTS = 1024
WRITTEN_TOGETHER = 256 << 10
"""A range of a file, in bytes. One rank writes all small values in such a range that are replicated, or scattered."""

_SHORT_RUN_NBYTES = 2 << 10  # a rank sends a shorter run of a small value, and does not write it by itself
_LEAST_PART = 64 << 10  # bytes; the smallest share of a tensor that a replica writes


class File(Struct, frozen=True):
    """One file to write, with its values in the order of their bytes."""

    plan: PlannedFile
    values: tuple[SavedValue, ...]

    @property
    def name(self) -> str:
        return self.plan.name

    def elements(self, index: int) -> tuple[int, int]:
        """Return the first element of a value that the file has, and one past the last.

        `index`: the place of the value in `values`.
        """
        return self.plan.slices[index] if self.plan.slices else (0, self.values[index].placement.numel)


def planned_files(
    writer: Writer,
    values: Mapping[Half, Sequence[SavedValue]],
    shared: str,
    *,
    most_nbytes: int,
    num_ranks: int,
) -> list[File]:
    """Return the files that a format plans, in which one file may have slices of values, of both halves."""
    tensors = {half: [planned(value) for value in half_values] for half, half_values in values.items()}
    # Made before the writer has the lists, which it may change: `made` keeps the ids unique.
    made = [tensor for half in values for tensor in tensors[half]]
    plans = writer.files(tensors, shared, most_nbytes=most_nbytes, num_ranks=num_ranks)
    of_tensor = dict(zip(map(id, made), (value for half in values for value in values[half]), strict=True))
    if all(id(tensor) in of_tensor for plan in plans for tensor in plan.tensors):  # nearly always
        return [File(plan, tuple([of_tensor[id(tensor)] for tensor in plan.tensors])) for plan in plans]
    by_key = {(half, value.stored_name): value for half, half_values in values.items() for value in half_values}
    return [File(plan, tuple([by_key[tensor.half, tensor.key] for tensor in plan.tensors])) for plan in plans]


def planned(tensor: SavedValue) -> PlannedTensor:
    """Return the key, dtype, shape and half of a tensor, by which a format plans its files."""
    return PlannedTensor(tensor.stored_name, dtype_name(tensor.dtype), tensor.placement.shape, tensor.half)


def written_cut(value: StateValue, placement: Placement, owner: int | None) -> Placement:
    """Return the cut in which the ranks write a value of `placement`: the same, contiguous chunks, or all on `owner`."""
    if owner is not None:
        is_there = placement.ranks == (owner,)
        return in_rows(placement, value.dtype.itemsize) if is_there else Whole(placement.shape, (owner,))
    if placement.overlapping or has_short_rows(placement, value.dtype.itemsize):
        return in_flat_chunks(placement, placement.first_holders)
    return in_rows(placement, value.dtype.itemsize)


def is_scattered(placement: Placement, itemsize: int) -> bool:
    """Return whether the ranks have so little of a small value each that one of them should write it, which gets the rest.

    Elsewhere a write, and the checksum of what is written, would take longer than the bytes.
    """
    if not isinstance(placement, OnMesh) or placement.num_shards < 2:
        return False
    nbytes = placement.numel * itemsize
    return 0 < nbytes < placement.num_shards * _SHORT_RUN_NBYTES


def in_rows(placement: Placement, itemsize: int, short_nbytes: int = _SHORT_NBYTES) -> Placement:
    """Return the cut in which a rank writes or reads its elements: side by side in memory, if they lie in short rows.

    A part of a fused parameter may lie element by element between those of another one, and be long rows of the file.
    """
    if not isinstance(placement, PlacedPart) or not _are_short(placement, itemsize, short_nbytes, in_memory=True):
        return placement
    return placement.in_memory_of_its_own()


def _are_short(part: PlacedPart, itemsize: int, short_nbytes: int, *, in_memory: bool) -> bool:
    numel, rows = part.rows(in_memory=in_memory)
    return rows > _FEW_ROWS and numel // rows * itemsize < short_nbytes


def in_flat_chunks(placement: Placement, ranks: Sequence[int]) -> FlatChunks:
    """Cut the parameter into one contiguous chunk for each of some ranks."""
    return FlatChunks(placement.shape, 0, -(-placement.numel // len(ranks)), (ranks,))


def has_short_rows(placement: Placement, itemsize: int, short_nbytes: int = _SHORT_NBYTES) -> bool:
    """Return whether the elements of a rank are short rows of the full parameter, with fewer than `short_nbytes` bytes each."""
    if isinstance(placement, PlacedPart):
        return _are_short(placement, itemsize, short_nbytes, in_memory=False)
    if not isinstance(placement, OnMesh) or not placement.numel:
        return False
    sizes, shape = placement.blocks(0)[0].box.sizes, placement.shape
    cut = max((dim for dim, (size, full) in enumerate(zip(sizes, shape, strict=True)) if size < full), default=0)
    return prod(sizes[:cut]) > 1 and prod(sizes[cut:]) * itemsize < short_nbytes


def stored_on(placement: Placement, nbytes: int) -> FlatChunks | Whole:
    """Return the placement in storage of a value that is written as `placement`: one rank, or a rank per part of a replica."""
    num = placement.num_replicas
    most = num * min(placement.num_shards, _MOST_PARTS) if num > 1 else 1  # of each shard, one part per replica
    parts = min(most, nbytes // _LEAST_PART)
    if parts <= 1:
        return Whole(placement.shape, (STORAGE,))
    return FlatChunks(placement.shape, 0, -(-placement.numel // parts), (range(-parts, 0),))


def offset_in_storage(target: Placement, rank: int) -> int:
    """Return the element of the tensor at which the part of a rank of storage begins."""
    if isinstance(target, FlatChunks):
        return (rank + target.num_shards) * target.chunk_numel
    return 0
