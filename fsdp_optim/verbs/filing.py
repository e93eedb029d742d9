"""From tensors to files: which file has which tensor, and how each rank's elements come to where they are written from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Protocol, TypeVar

import torch

from fsdp_optim.formats.checksums import segment_nbytes
from fsdp_optim.formats.header import Entry, Header
from fsdp_optim.layout import FlatChunks, Layout, MeshBoxes, Placement, Whole
from fsdp_optim.memory import empty, flatten
from fsdp_optim.plan import Copy, part_into, plan
from fsdp_optim.transport.callers import Callers
from fsdp_optim.transport.collective import Failure, Item, exchange
from fsdp_optim.verbs.contents import Tensor, described

# A file is a rank of its own in a plan: a number that no process has. A tensor with replicas is cut into as many parts as it
# has replicas, each a rank of its own, so that each replica writes one.
FILE = -1
_CPU = torch.device("cpu")
_SHORT_NBYTES = 128 << 10  # a strided row that is shorter is not written by itself
_MOST_PARTS = 1024
_SPREAD_FROM = 1 << 20  # bytes; a smaller tensor with replicas is written by one of them


@dataclass(frozen=True)
class File:
    """One file to write: its tensors in the order of their bytes."""

    name: str
    tensors: tuple[Tensor, ...]
    header: Header
    segment_nbytes: int

    def entry_of(self, index: int) -> Entry:
        return self.header.entries[index]

    @cached_property
    def head(self) -> bytes:
        """Everything before the data section."""
        return self.header.encoded()

    @property
    def offset(self) -> int:
        """Where the data section begins."""
        return len(self.head)

    @property
    def nbytes(self) -> int:
        return self.offset + self.header.data_nbytes


def cut_into_files(
    stem: str, tensors: Sequence[Tensor], most_nbytes: int, metadata: Mapping[str, str], num_ranks: int
) -> list[File]:
    """The tensors in files of at most `most_nbytes` each (or one tensor that is larger), named as Hugging Face names them."""
    parts: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.nbytes > most_nbytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    files = []
    for number, part in enumerate(parts, start=1):
        name = f"{stem}.safetensors" if len(parts) == 1 else f"{stem}-{number:05}-of-{len(parts):05}.safetensors"
        header = Header.of((described(tensor) for tensor in part), metadata if number == 1 else {"format": "pt"})
        grid = segment_nbytes((tensor.nbytes for tensor in part), num_ranks)
        files.append(File(name, tuple(part), header, grid))
    return files


def on_file_side(tensor: Tensor, owner: int | None) -> Placement:
    """Where the elements are when they are written: as they are, or in long runs, or whole on `owner`."""
    placement = tensor.placement
    if owner is not None:
        return placement if placement.ranks == (owner,) else Whole(placement.shape, (owner,))
    if placement.overlapping or has_short_rows(placement, tensor.dtype.itemsize):
        ranks = tuple(placement.holders(shard)[0] for shard in range(placement.num_shards))
        return in_runs(placement, tuple(sorted(set(ranks))))
    return placement


def in_runs(placement: Placement, ranks: Sequence[int]) -> FlatChunks:
    """The parameter cut into one run for each of some ranks."""
    return FlatChunks(placement.shape, 0, -(-placement.numel // len(ranks)), (tuple(ranks),))


def has_short_rows(placement: Placement, itemsize: int, short_nbytes: int = _SHORT_NBYTES) -> bool:
    """Whether a rank's elements lie in rows of a few bytes each, seen from the whole parameter."""
    if not isinstance(placement, MeshBoxes) or not placement.numel:
        return False
    sizes, shape = placement.box(0).sizes, placement.shape
    cut = max((dim for dim, (size, full) in enumerate(zip(sizes, shape, strict=True)) if size < full), default=0)
    return prod(sizes[:cut]) > 1 and prod(sizes[cut:]) * itemsize < short_nbytes


def file_target(placement: Placement, nbytes: int) -> FlatChunks | Whole:
    """The file as a Placement: one rank, or one for each replica where they share the work."""
    num = len(placement.holders(0)) if placement.num_shards else 1
    if num == 1 or nbytes < _SPREAD_FROM:
        return Whole(placement.shape, (FILE,))
    parts = num * min(placement.num_shards, _MOST_PARTS)  # as many of each shard as it has replicas
    return FlatChunks(placement.shape, 0, -(-placement.numel // parts), (range(-parts, 0),))


def offset_in_file(target: Placement, rank: int) -> int:
    """Where in the tensor the part begins that one of the file's ranks stands for, in elements."""
    if isinstance(target, FlatChunks):
        return (rank + target.num_shards) * target.chunk_numel
    return 0


@dataclass(frozen=True)
class Move:
    """A tensor on its way to its file: the placement that it is written from, and whether it has to be moved there first."""

    file: File
    index: int
    side: Placement

    @property
    def tensor(self) -> Tensor:
        return self.file.tensors[self.index]

    @property
    def is_direct(self) -> bool:
        return self.side == self.tensor.placement

    @property
    def itemsize(self) -> int:
        return self.tensor.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """This rank's elements of a tensor, 1-D, as its move's side has them: all, or those from `start` on. None: it has none."""

    move: Move
    flat: torch.Tensor | None
    start: int = 0


def moves_of(files: Sequence[File], owners: Sequence[int] | None) -> list[Move]:
    """How each tensor comes to its file. `owners`: for each file the rank that writes all of it; None: all write."""
    return [
        Move(file, index, on_file_side(tensor, owners[number] if owners is not None else None))
        for number, file in enumerate(files)
        for index, tensor in enumerate(file.tensors)
    ]


Held = Callable[[Tensor], torch.Tensor]
"""This rank's part of a tensor, as it lies in memory"""


def staged(callers: Callers, moves: Sequence[Move], held: Held, failure: Failure) -> Iterator[list[Part]]:
    """Move tensors that are not written as they are, a bucket at a time: this rank's elements on the CPU.

    Called by all ranks, which must exhaust it. Use each batch before asking for the next: it is emptied then.
    """
    half = replace(callers, bucket_nbytes=max(callers.bucket_nbytes // 2, 1))
    for batch in batches_of(moves, half.bucket_nbytes):
        copies: list[tuple[Copy, ...]] = []
        try:
            for move in batch:
                source, target = Layout({"": move.tensor.placement}), Layout({"": move.side})
                copies.append(plan(source, target, rank=callers.rank))
        except Exception as error:  # told to all before data moves
            failure.note(error)
        for window in windows_of(batch, half.bucket_nbytes):
            items: list[Item] = []
            parts: list[Part] = []
            try:
                for move, its in zip(batch, copies, strict=True):
                    mine = [part for copy in its for part in part_into(copy, window.start, window.stop)]
                    here = window.of(move.side.numel_on(callers.rank))
                    flat = empty((here,), move.tensor.dtype, _CPU) if here else None
                    has = any(copy.source_rank == callers.rank for copy in mine)
                    items.append(Item(mine, move.tensor.dtype, flatten(held(move.tensor)) if has else None, flat))
                    parts.append(Part(move, flat, window.start))
            except Exception as error:
                failure.note(error)
            exchange(half, items, failure)
            items.clear()
            yield parts
            parts.clear()


class Sided(Protocol):
    """A tensor that is moved: how it is cut on the side where it is in a file."""

    @property
    def side(self) -> Placement: ...

    @property
    def itemsize(self) -> int: ...


_SidedT = TypeVar("_SidedT", bound=Sided)


def _most_numel(one: Sided) -> int:
    """What a rank holds of it at most while it is moved."""
    return -(-one.side.numel // max(one.side.num_shards, 1))


def batches_of(moves: Iterable[_SidedT], most_nbytes: int) -> Iterator[list[_SidedT]]:
    """What is moved together: as much as fits into `most_nbytes` on any rank, or one that is larger."""
    batch: list[_SidedT] = []
    size = 0
    for move in moves:
        nbytes = _most_numel(move) * move.itemsize
        if batch and size + nbytes > most_nbytes:
            yield batch
            batch, size = [], 0
        batch.append(move)
        size += nbytes
    if batch:
        yield batch


@dataclass(frozen=True)
class Window:
    """Elements [start, stop) of what each rank holds of a tensor."""

    start: int
    stop: int

    def of(self, numel: int) -> int:
        """How many of so many elements are in it."""
        return max(min(numel, self.stop) - self.start, 0)


def windows_of(batch: Sequence[Sided], most_nbytes: int) -> Iterator[Window]:
    """All of a batch at once where it fits into `most_nbytes`, else its one tensor bit by bit. The same on all ranks."""
    numel = max(map(_most_numel, batch))
    width = numel if len(batch) > 1 else max(most_nbytes // batch[0].itemsize, 1)
    return (Window(start, start + width) for start in range(0, numel, max(width, 1)))
