"""Tensors that no file has as they are: their elements are read from those that files have, in long ranges, in bounded memory.

# stored  | q q q q k k v v q q q q k k v v |     long rows are read to where they belong
# part q  | q q q q q q q q |
#
# stored  | a b a b a b a b a b a b a b a b |     short ones are read with what lies between them, and copied from there
# part a  | a a a a a a a a |
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, TypeAlias

import torch
from msgspec import structs

from fsdp_optim.checkpoint.common.local_extents import bytes_of
from fsdp_optim.formats.base.extents import Extent, without_overlaps
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.layout import Placement, Shape, Whole
from fsdp_optim.layout.views import Part, Tile, run_in_live, tiles_of_live, tiles_of_part
from fsdp_optim.plan import Copy, clip_to_target, copies_into, runs_of
from fsdp_optim.tensors.allocation import in_pages

SCRATCH_NBYTES = 4 << 20
"""The most bytes that a read holds for what lies between short rows."""

_LONG_NBYTES = 64 << 10  # a longer row is read to where it belongs
_GAP_NBYTES = 64 << 10  # of bytes that no row has: more of them take longer to read than a further request
_ALIGNMENT = 16  # bytes, of the largest elements
_MOST_EXTENTS = 512  # in one read
_MOST_GATHERED = 4096  # ranges of several reads
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By the bytes of an element, a dtype that copies its bits."""

_Dim: TypeAlias = tuple[int, int, int]  # indices, and the steps of the source and of the target
_Read: TypeAlias = Callable[[Mapping[str, Sequence[Extent]]], None]


class ReadExtents(Protocol):
    """`Reader.read`."""

    def __call__(self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = ..., /) -> None: ...


@dataclass(frozen=True)
class Mapped:
    """A tensor made of others.

    Attributes:
        stored: where it is said to be: a range of a file that there is not.
        sources: the tensors that have its elements, each with a Part: the tensor itself is that part of the first source; or,
            `is_joined`, each source is that part of the tensor.
    """

    stored: StoredTensor
    sources: tuple[tuple[StoredTensor, Part], ...]
    is_joined: bool

    @property
    def nbytes(self) -> int:
        return prod(self.stored.shape) * self.stored.itemsize

    def tiles(self, start: int, stop: int) -> Iterator[tuple[StoredTensor, Tile]]:
        """Yield where its elements [start, stop) are, as Tiles of sources into that range."""
        for source, part in self.sources:
            tiles = tiles_of_live(part, start, stop) if self.is_joined else tiles_of_part(part, start, stop)
            yield from ((source, tile) for tile in tiles)


@dataclass
class MappedFiles:
    """The tensors of an open checkpoint that are made of others. They lie in files that only this object reads.

    One such file stands for each real one, so that what is adjacent there is adjacent here.
    """

    scratch_nbytes: int = SCRATCH_NBYTES
    _tensors: dict[str, list[Mapped]] = field(default_factory=dict)
    _starts: dict[str, list[int]] = field(default_factory=dict)
    _ends: dict[str, int] = field(default_factory=dict)
    _copies: dict[int, tuple[Placement, Sequence[Copy]]] = field(default_factory=dict)
    _of_thread: threading.local = field(default_factory=threading.local)

    def split(
        self, stored: StoredTensor, parts: Iterable[tuple[str, Part]], key_of: Callable[[str], str] = str
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the parts of a stored tensor by name. `key_of`: gives the key for a name."""
        at = 0
        for name, part in parts:
            yield name, self.part_of(stored, part, key_of(name), at)
            at += prod(part.shape) * stored.itemsize

    def part_of(self, stored: StoredTensor, part: Part, key: str, at: int = 0) -> StoredTensor:
        """Return a part of a stored tensor. One that is a run of it lies in its file.

        `at`: the bytes of the parts before it. Where it lies follows from the stored tensor alone, so that ranks agree on it.
        """
        first = run_in_live(part)
        if first is not None and stored.chunks is None:
            return _moved(stored, key, part.shape, stored.start + first * stored.itemsize)
        if first == 0 and part.shape == stored.shape:
            return _moved(stored, key, part.shape, stored.start)
        of_file = (stored.file, stored.start) if stored.chunks is None else (f"{stored.file} of {stored.key}", 0)
        file, start = f"{of_file[0]} seen through Views", of_file[1] + at
        seen = structs.replace(stored, key=key, shape=part.shape, file=file, start=start, chunks=None)
        return self._add(Mapped(seen, ((stored, part),), is_joined=False))

    def joined(self, sources: Sequence[tuple[StoredTensor, Part]], key: str) -> StoredTensor:
        """Return the tensor that parts make."""
        first, part = sources[0]
        if len(sources) == 1 and first.shape == part.live_shape and run_in_live(part) == 0:
            return _moved(first, key, first.shape, first.start)
        file = f"{first.file} joined by Views"
        start = self._ends.get(file, 0)
        seen = structs.replace(first, key=key, shape=part.live_shape, file=file, start=start, chunks=None)
        return self._add(Mapped(seen, tuple(sources), is_joined=True))

    def _add(self, mapped: Mapped) -> StoredTensor:
        seen = mapped.stored
        starts, tensors = self._starts.setdefault(seen.file, []), self._tensors.setdefault(seen.file, [])
        place = bisect.bisect_right(starts, seen.start)
        starts.insert(place, seen.start)
        tensors.insert(place, mapped)
        self._ends[seen.file] = max(self._ends.get(seen.file, 0), seen.start + mapped.nbytes)
        return seen

    def has(self, file: str) -> bool:
        """Return whether a file is one of these."""
        return file in self._tensors

    def read(self, extents: Mapping[str, Sequence[Extent]], read: ReadExtents, did_read: Callable[[int], None]) -> None:
        """Fill ranges of these files, and of those that there are, as `Reader.read` does. `read`: that of the checkpoint."""
        of_files = {file: ranges for file, ranges in extents.items() if not self.has(file)}
        if of_files:
            read(of_files, did_read)
        mapped = {file: ranges for file, ranges in extents.items() if self.has(file)}
        if mapped:
            self.fill(mapped, read, did_read)

    def fill(self, extents: Mapping[str, Sequence[Extent]], read: _Read, did_read: Callable[[int], None]) -> None:
        """Fill ranges of these files. `read`: reads ranges of the files that there are."""
        gathered, nbytes = _Gathered(read, self.scratch_nbytes, self.copies_of, self._scratch), 0
        for file, ranges in extents.items():
            for extent in ranges:
                if len(extent.memory):
                    self._fill(file, extent, gathered)
                    nbytes += len(extent.memory)
        gathered.end()
        did_read(nbytes)

    def _fill(self, file: str, extent: Extent, gathered: _Gathered) -> None:
        index = max(bisect.bisect_right(self._starts[file], extent.start) - 1, 0)
        for mapped in itertools.islice(self._tensors[file], index, None):
            begin = mapped.stored.start
            if begin >= extent.stop:
                return
            low, high = max(extent.start, begin), min(extent.stop, begin + mapped.nbytes)
            if low < high:
                memory = extent.memory[low - extent.start : high - extent.start]
                gathered.add(mapped, low - begin, high - begin, memory)

    def _scratch(self) -> torch.Tensor:
        """Return the scratch memory of this thread, which keeps it: fresh pages take longer than the bytes in them."""
        scratch: torch.Tensor | None = getattr(self._of_thread, "scratch", None)
        if scratch is None:
            scratch = self._of_thread.scratch = in_pages((self.scratch_nbytes,), torch.uint8)
        return scratch

    def copies_of(self, stored: StoredTensor) -> Sequence[Copy]:
        """Return where the row-major elements of a stored tensor in several pieces are, as copies into a whole tensor."""
        placement = stored.placement
        known = self._copies.get(id(placement))
        if known is None:
            known = placement, copies_into(placement, Whole(stored.shape, (0,)), 0)  # keeps the id unique
            self._copies[id(placement)] = known
        return known[1]


def _moved(stored: StoredTensor, key: str, shape: Shape, start: int) -> StoredTensor:
    """Return a tensor whose elements are as another's, from some byte of its file on."""
    return structs.replace(stored, key=key, shape=shape, start=start)


@dataclass
class _Gathered:
    """Reads for ranges of mapped tensors, done together."""

    read: _Read
    most_nbytes: int
    copies_of: Callable[[StoredTensor], Sequence[Copy]]
    scratch: Callable[[], torch.Tensor]
    _extents: dict[str, list[Extent]] = field(default_factory=dict)
    _copied: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _placed: list[tuple[memoryview, memoryview]] = field(default_factory=list)
    _num: int = 0
    _nbytes: int = 0
    _nbytes_placed: int = 0

    def add(self, mapped: Mapped, low: int, high: int, memory: memoryview) -> None:
        """Add the bytes [low, high) of a tensor, which belong in `memory`."""
        size = mapped.stored.itemsize
        start, stop = low // size, -(-high // size)
        if (stop - start) * size == len(memory) and torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % size == 0:
            target, whole = torch.frombuffer(memory, dtype=_WORDS[size]), None
        else:  # a part of an element, or memory in which elements may not begin
            if self._nbytes_placed + (stop - start) * size > self.most_nbytes:
                self.end()
            self._nbytes_placed += (stop - start) * size
            target = in_pages((stop - start,), _WORDS[size])
            whole = bytes_of(target.view(torch.uint8))
        for source, tile in mapped.tiles(start, stop):
            for piece in _pieces(tile, size, self.most_nbytes):
                self._add(source, piece, target)
        if whole is not None:
            self._placed.append((memory, whole[low - start * size : low - start * size + len(memory)]))

    def _add(self, source: StoredTensor, piece: _Piece, target: torch.Tensor) -> None:
        size, num = source.itemsize, piece.width * piece.times
        of_scratch = 0 if piece.is_long else -(-num * size // _ALIGNMENT) * _ALIGNMENT
        if self._nbytes + of_scratch > self.most_nbytes or self._num >= _MOST_GATHERED:
            self.flush()
        if piece.is_long:
            memory = bytes_of(target[piece.target_at : piece.target_at + piece.width].view(torch.uint8))
            self._add_ranges(source, piece.source_at, piece.width, memory)
            return
        scratch = self.scratch()[self._nbytes : self._nbytes + num * size].view(target.dtype)
        memory = bytes_of(scratch.view(torch.uint8))
        for index in range(piece.times):
            first = index * piece.width
            self._add_ranges(
                source,
                piece.source_at + index * piece.step,
                piece.width,
                memory[first * size : (first + piece.width) * size],
            )
        sizes, sources, targets = zip(*piece.dims, strict=True)
        self._copied.append(
            (
                target.as_strided(sizes, targets, piece.target_at),
                scratch.as_strided(sizes, sources, scratch.storage_offset()),
            )
        )
        self._nbytes += of_scratch

    def _add_ranges(self, source: StoredTensor, first: int, num: int, memory: memoryview) -> None:
        """Add elements [first, first + num) of a stored tensor, which belong in `memory`."""
        size = source.itemsize
        if source.chunks is None:
            self._extents.setdefault(source.file, []).append(Extent(source.start + first * size, memory))
            self._num += 1
            return
        for copy in self.copies_of(source):
            for clipped in clip_to_target(copy, first, first + num):
                for stored_offset, offset, numel in runs_of(clipped):
                    file, start = source.place_on(copy.source_rank)
                    part = memory[offset * size : (offset + numel) * size]
                    self._extents.setdefault(file, []).append(Extent(start + stored_offset * size, part))
                    self._num += 1

    def flush(self) -> None:
        """Read all that was added, and copy it to where it belongs."""
        for file, ranges in self._extents.items():
            for apart in without_overlaps(ranges):
                for at in range(0, len(apart), _MOST_EXTENTS):
                    self.read({file: apart[at : at + _MOST_EXTENTS]})
        for target, scratch in self._copied:
            target.copy_(scratch)
        self._extents, self._copied, self._nbytes, self._num = {}, [], 0, 0

    def end(self) -> None:
        """Read what is left, and place what was read apart from the memory in which it belongs."""
        self.flush()
        for memory, placed in self._placed:
            memory[:] = placed
        self._placed, self._nbytes_placed = [], 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a Tile that is read at once: `times` ranges of `width` elements of the source, `step` elements apart.

    They are read side by side, and `dims` leads from there to the target. `is_long`: there is one, a run of the target too.
    """

    source_at: int
    target_at: int
    width: int
    times: int = 1
    step: int = 0
    dims: tuple[_Dim, ...] = ()
    is_long: bool = False


def _pieces(tile: Tile, itemsize: int, most_nbytes: int) -> Iterator[_Piece]:
    dims = sorted(zip(tile.sizes, tile.source_steps, tile.target_steps, strict=True), key=lambda dim: -dim[1])
    *outer, last = dims
    if last[1:] == (1, 1) and (not outer or last[0] * itemsize >= _LONG_NBYTES):
        for source_at, target_at in _places(tile, outer):
            yield _Piece(source_at, target_at, last[0], is_long=True)
        return
    num_outer = next((at for at, dim in enumerate(dims) if dim[1] * itemsize <= _GAP_NBYTES), len(dims))
    outer, inner = dims[:num_outer], dims[num_outer:]
    most = max(most_nbytes // itemsize, 1)
    for source_at, target_at in _places(tile, outer[:-1]):
        for cut in _cut(inner, most):
            width = _span(cut.dims)
            at = source_at + cut.source_at, target_at + cut.target_at
            if not outer:
                yield _Piece(*at, width, dims=cut.dims)
                continue
            size, source_step, target_step = outer[-1]
            together = max(most // width, 1)
            for first in range(0, size, together):
                times = min(together, size - first)
                listed = ((times, width, target_step), *cut.dims)
                places = at[0] + first * source_step, at[1] + first * target_step
                yield _Piece(*places, width, times, source_step, listed)


def _places(tile: Tile, outer: Sequence[_Dim]) -> Iterator[tuple[int, int]]:
    """Yield the first element of the source and of the target for each index of some dimensions."""
    for index in itertools.product(*(range(size) for size, _, _ in outer)):
        source = sum(at * step for at, (_, step, _) in zip(index, outer, strict=True))
        target = sum(at * step for at, (_, _, step) in zip(index, outer, strict=True))
        yield tile.source_at + source, tile.target_at + target


@dataclass(frozen=True, slots=True)
class _Cut:
    source_at: int
    target_at: int
    dims: tuple[_Dim, ...]


def _span(dims: Sequence[_Dim]) -> int:
    """Return the number of elements of the source from the first to the last."""
    return 1 + sum((size - 1) * step for size, step, _ in dims)


def _cut(dims: Sequence[_Dim], most: int) -> Iterator[_Cut]:
    """Yield dimensions, whose slowest of the source comes first, cut so that each cut spans at most `most` elements there."""
    if _span(dims) <= most or not dims:
        yield _Cut(0, 0, tuple(dims) or ((1, 1, 1),))
        return
    (size, source_step, target_step), *rest = dims
    together = max((most - _span(rest)) // max(source_step, 1) + 1, 1)
    for first in range(0, size, together):
        times = min(together, size - first)
        listed = [(times, source_step, target_step), *rest] if times > 1 else rest
        for cut in _cut(listed, most):
            yield _Cut(first * source_step + cut.source_at, first * target_step + cut.target_at, cut.dims)
