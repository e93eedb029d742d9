"""From tensors to files: which file has which tensor, and in which cut the ranks write and read one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fsdp_optim.checkpoint.contents import SavedValue, planned
from fsdp_optim.formats.base import Half, PlannedFile, Writer
from fsdp_optim.layout import STORAGE, FlatChunks, MeshBoxes, Placement, Whole
from fsdp_optim.move import StateValue

_SHORT_NBYTES = 128 << 10  # a strided row that is shorter is not written by itself
_MOST_PARTS = 1024
WRITTEN_TOGETHER = 256 << 10
"""Bytes of a file in which small values that several ranks have are written by one of them."""

_LEAST_PART = 64 << 10  # bytes that a replica writes of a tensor, at least


@dataclass(frozen=True)
class File:
    """One file to write, and its values in the order of their bytes."""

    plan: PlannedFile
    values: tuple[SavedValue, ...]

    @property
    def name(self) -> str:
        return self.plan.name


def planned_files(
    writer: Writer, half: Half, values: Sequence[SavedValue], shared: str, *, most_nbytes: int, num_ranks: int
) -> list[File]:
    """The files that a format plans for the values of one half, each with its values."""
    by_key = {value.stored_name: value for value in values}
    plans = writer.files(
        half, [planned(value) for value in values], shared, most_nbytes=most_nbytes, num_ranks=num_ranks
    )
    return [File(plan, tuple(by_key[one.key] for one in plan.tensors)) for plan in plans]


def written_cut(value: StateValue, placement: Placement, owner: int | None) -> Placement:
    """The cut in which the ranks write a value that they have as `placement`: as it is, in long runs, or whole on `owner`."""
    if owner is not None:
        return placement if placement.ranks == (owner,) else Whole(placement.shape, (owner,))
    if placement.overlapping or has_short_rows(placement, value.dtype.itemsize):
        return in_runs(placement, placement.first_holders)
    return placement


def in_runs(placement: Placement, ranks: Sequence[int]) -> FlatChunks:
    """The parameter cut into one run for each of some ranks."""
    return FlatChunks(placement.shape, 0, -(-placement.numel // len(ranks)), (ranks,))


def has_short_rows(placement: Placement, itemsize: int, short_nbytes: int = _SHORT_NBYTES) -> bool:
    """Whether a rank's elements lie in rows of a few bytes each, seen from the whole parameter."""
    if not isinstance(placement, MeshBoxes) or not placement.numel:
        return False
    sizes, shape = placement.box(0).sizes, placement.shape
    cut = max((dim for dim, (size, full) in enumerate(zip(sizes, shape, strict=True)) if size < full), default=0)
    return prod(sizes[:cut]) > 1 and prod(sizes[cut:]) * itemsize < short_nbytes


def stored_on(placement: Placement, nbytes: int) -> FlatChunks | Whole:
    """Where a value is in storage that is written as `placement`: on one rank, or on one for each part that a replica writes."""
    num = placement.num_replicas
    most = num * min(placement.num_shards, _MOST_PARTS) if num > 1 else 1  # as many of each shard as it has replicas
    parts = min(most, nbytes // _LEAST_PART)
    if parts <= 1:
        return Whole(placement.shape, (STORAGE,))
    return FlatChunks(placement.shape, 0, -(-placement.numel // parts), (range(-parts, 0),))


def offset_in_storage(target: Placement, rank: int) -> int:
    """Where in the tensor the part of one of the ranks that stand for storage begins, in elements."""
    if isinstance(target, FlatChunks):
        return (rank + target.num_shards) * target.chunk_numel
    return 0
