"""Where every element of every original parameter lives: Box, Piece, Placement, Layout. No torch, no ranks, no files.

A `Placement` says where one parameter lives, by arithmetic: any rank's Pieces come from a few integers. A `Layout` is
one Placement per parameter. All numbers count elements; the rank numbers are global ranks.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TypeVar

from fsdp_optim.errors import LayoutError

Shape = tuple[int, ...]
Ranks = Sequence[int]
"""Global ranks in the order of their group: a range wherever they are evenly spaced, so that thousands cost nothing."""


def ranks_in_order(ranks: Iterable[int]) -> Ranks:
    """The same ranks as a range where they are evenly spaced, else as a tuple: equal ranks are equal values."""
    if isinstance(ranks, range) and ranks.step > 0:
        return ranks if ranks else range(0)
    listed = tuple(ranks)
    if not listed:
        return range(0)
    step = listed[1] - listed[0] if len(listed) > 1 else 1
    if step > 0:
        evenly = range(listed[0], listed[-1] + 1, step)
        if len(evenly) == len(listed) and all(a == b for a, b in zip(evenly, listed, strict=True)):
            return evenly
    return listed


def _check_distinct(groups: tuple[Ranks, ...]) -> None:
    """Refuse a rank that is listed twice: it would hold two parts in one place."""
    if len(groups) == 1 and isinstance(groups[0], range):
        return
    if sum(map(len, groups)) != len({rank for group in groups for rank in group}):
        raise LayoutError(f"a rank is listed twice in {groups}")


@functools.lru_cache(maxsize=256)
def _places_by_shard(mesh_shape: Shape, split_dims: Shape) -> tuple[tuple[int, ...], ...]:
    """For each shard, the places in a mesh that hold it. Cached: parameters share their mesh."""
    places: list[list[int]] = [[] for _ in range(prod(mesh_shape[dim] for dim in split_dims))]
    for place in range(prod(mesh_shape)):
        places[_shard_at(place, mesh_shape, split_dims)].append(place)
    return tuple(tuple(found) for found in places)


def _shard_at(place: int, mesh_shape: Shape, split_dims: Shape) -> int:
    coordinates = _coordinates(place, mesh_shape)
    shard = 0
    for dim in split_dims:
        shard = shard * mesh_shape[dim] + coordinates[dim]
    return shard


@dataclass(frozen=True, slots=True)
class Box:
    """An n-dimensional box of one parameter: element `i` is inside when `offsets <= i < offsets + sizes`.

    The same words as torch.distributed.checkpoint and TensorStore use. A 0-dimensional Box holds one element.
    """

    offsets: Shape
    sizes: Shape

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise LayoutError(f"a box needs as many offsets as sizes, not {self.offsets} and {self.sizes}")
        if any(n < 0 for n in itertools.chain(self.offsets, self.sizes)):
            raise LayoutError(f"a box has no negative numbers, not offsets {self.offsets}, sizes {self.sizes}")

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The common part, None when there is none."""
        offsets = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = (
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return Box(offsets, sizes) if all(n > 0 for n in sizes) else None

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """This box without `other`: at most two boxes per dimension, that do not overlap."""
        common = self.intersect(other)
        if common is None:
            return (self,) if self.numel else ()
        rest = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (offset, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
            end, common_end = offsets[dim] + sizes[dim], offset + size
            for first, last in ((offsets[dim], offset), (common_end, end)):
                if first < last:
                    rest.append(
                        Box(
                            (*offsets[:dim], first, *offsets[dim + 1 :]),
                            (*sizes[:dim], last - first, *sizes[dim + 1 :]),
                        )
                    )
            offsets[dim], sizes[dim] = offset, size
        return tuple(rest)


@dataclass(frozen=True, slots=True)
class Block:
    """One Box of a parameter, contiguous and row-major, `offset` elements into a rank's local tensor."""

    box: Box
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A Block with its owner: one Box of parameter `fqn` held by global rank `rank`."""

    fqn: str
    box: Box
    rank: int
    offset: int


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, stop) of a parameter in row-major order, `offset` elements into a rank's local tensor."""

    start: int
    stop: int
    offset: int


def row_major_strides(sizes: Shape) -> Shape:
    """Strides, in elements, of a contiguous tensor of these sizes."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)


def boxes_of_run(shape: Shape, start: int, stop: int) -> tuple[Box, ...]:
    """The row-major elements [start, stop) of a parameter as Boxes, in order; at most 2n-1 of them.

    # shape (4, 3), elements [2, 10):   . . a      head: the rest of a row
    #                                   b b b      whole rows
    #                                   b b b
    #                                   c . .      tail: the beginning of a row
    """
    if start >= stop:
        return ()
    if not shape:
        return (Box((), ()),)
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        inner = boxes_of_run(shape[1:], start - first * row, stop - first * row)
        return tuple(Box((first, *box.offsets), (1, *box.sizes)) for box in inner)
    boxes: list[Box] = []
    if start > first * row:
        boxes += boxes_of_run(shape, start, (first + 1) * row)
        first += 1
    whole_end = stop // row
    if whole_end > first:
        boxes.append(Box((first, *([0] * (len(shape) - 1))), (whole_end - first, *shape[1:])))
    boxes += boxes_of_run(shape, whole_end * row, stop)
    return tuple(boxes)


def bounds_of_box(shape: Shape, box: Box) -> tuple[int, int]:
    """The row-major index of the first element of a Box that is not empty, and one past that of its last."""
    strides = row_major_strides(shape)
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    last = sum((o + n - 1) * stride for o, n, stride in zip(box.offsets, box.sizes, strides, strict=True))
    return first, last + 1


def _runs_of_box(shape: Shape, box: Box) -> Iterator[tuple[int, int]]:
    """The row-major ranges [start, stop) that make up a Box, row by row."""
    strides = row_major_strides(shape)
    width = box.sizes[-1] if shape else 1
    for index in itertools.product(*(range(o, o + n) for o, n in zip(box.offsets[:-1], box.sizes[:-1], strict=True))):
        start = sum(i * stride for i, stride in zip((*index, *box.offsets[-1:]), strides, strict=True))
        yield start, start + width


class Placement(ABC):
    """Where one parameter lives. Shards are numbered; every rank that holds a shard holds all of its Blocks.

    Frozen values with arithmetic in them, so that any rank can compute any other's part.
    """

    @property
    @abstractmethod
    def shape(self) -> Shape: ...

    @property
    @abstractmethod
    def num_shards(self) -> int: ...

    @abstractmethod
    def holders(self, shard: int) -> tuple[int, ...]:
        """The global ranks that hold this shard, bit for bit alike."""

    @abstractmethod
    def shard_of(self, rank: int) -> int | None:
        """The shard that a rank holds; None when it holds none."""

    @abstractmethod
    def blocks(self, shard: int) -> tuple[Block, ...]:
        """What a shard holds; empty when the cut left it nothing."""

    def run(self, shard: int) -> Run | None:
        """The shard as one Run, where it is one: a shortcut for plans, `blocks` says the same."""
        return None

    def shards_over(self, start: int, stop: int) -> Sequence[int]:
        """Shards that may hold some of the row-major elements [start, stop); never fewer than do."""
        return range(self.num_shards)

    @property
    def overlapping(self) -> bool:
        """Whether different shards may hold the same element."""
        return False

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks hold the same shard. All shards of a placement have equally many holders, but for Boxes."""
        return self.num_shards > 0 and len(self.holders(0)) > 1

    def join(self, other: Placement) -> Placement | None:
        """One Placement for two groups of ranks that hold replicas, cut alike; None where they are cut differently."""
        return self if self == other else None

    @abstractmethod
    def on_lowest_ranks(self) -> Placement:
        """The same shards, by the same numbers, each held by the lowest of its ranks only."""

    def gap(self) -> tuple[int, int] | None:
        """The first row-major range of elements that no rank holds; None when all are held."""
        return None

    @property
    def num_replicas(self) -> int:
        """How many ranks hold each shard; the most of any, where shards differ in that."""
        return len(self.holders(0)) if self.num_shards else 1

    @property
    def most_numel(self) -> int:
        """At least as many elements as any rank holds, the same on all ranks."""
        return max((sum(b.box.numel for b in self.blocks(shard)) for shard in range(self.num_shards)), default=0)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for shard in range(self.num_shards) for rank in self.holders(shard)}))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def numel_on(self, rank: int) -> int:
        """How many elements a rank holds."""
        shard = self.shard_of(rank)
        if shard is None:
            return 0
        run = self.run(shard)
        return run.stop - run.start if run is not None else sum(b.box.numel for b in self.blocks(shard))

    def local_range(self, rank: int) -> tuple[int, int]:
        """The elements [start, stop) of a rank's local tensor among which this parameter's are; (0, 0) where it holds none."""
        shard = self.shard_of(rank)
        run = self.run(shard) if shard is not None else None
        if run is not None:
            return run.offset, run.offset + run.stop - run.start
        blocks = self.blocks(shard) if shard is not None else ()
        if not blocks:
            return 0, 0
        return min(b.offset for b in blocks), max(b.offset + b.box.numel for b in blocks)


@dataclass(frozen=True)
class Whole(Placement):
    """The whole parameter on each of `ranks`, row-major, `offset` elements into their local tensor."""

    full_shape: Shape
    on: Ranks
    offset: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "on", ranks_in_order(self.on))
        _check_distinct((self.on,))

    @property
    def shape(self) -> Shape:
        return self.full_shape

    @property
    def num_shards(self) -> int:
        return 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.on))

    def holders(self, shard: int) -> tuple[int, ...]:
        return tuple(self.on)

    def shard_of(self, rank: int) -> int | None:
        return 0 if rank in self.on else None

    def blocks(self, shard: int) -> tuple[Block, ...]:
        return (Block(Box((0,) * len(self.shape), self.shape), self.offset),) if self.numel else ()

    def run(self, shard: int) -> Run:
        return Run(0, self.numel, self.offset)

    @property
    def most_numel(self) -> int:
        return self.numel

    def join(self, other: Placement) -> Placement | None:
        if isinstance(other, Whole) and replace(other, on=self.on) == self:
            return replace(self, on=tuple(sorted({*self.on, *other.on})))
        return None

    def on_lowest_ranks(self) -> Whole:
        return replace(self, on=(min(self.on),)) if self.on else self

    def gap(self) -> tuple[int, int] | None:
        return None if self.on or not self.numel else (0, self.numel)

    def __str__(self) -> str:
        return f"whole, of shape {list(self.shape)},"


@dataclass(frozen=True)
class FlatChunks(Placement):
    """A parameter that lies in a flat parameter, `start` elements in, cut into equal chunks without regard for borders.

    # flat parameter  | a a a a a b b b c c |     chunk_numel = 4, three ranks
    # rank 0          | a a a a |
    # rank 1                    | a b b b |
    # rank 2                              | c c . . |   dots are padding: held by nobody, never saved

    Shard `i` is elements [i * chunk_numel, (i + 1) * chunk_numel) of the flat parameter, held by `replicas[k][i]` for
    every k. `own_tensor`: the rank keeps this parameter's elements in a tensor of their own (torch FSDP1 with
    use_orig_params), not in the chunk of the flat parameter.
    """

    full_shape: Shape
    start: int
    chunk_numel: int
    replicas: tuple[Ranks, ...]
    own_tensor: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "replicas", tuple(ranks_in_order(group) for group in self.replicas))
        sizes = {len(group) for group in self.replicas}
        if len(sizes) != 1 or 0 in sizes:
            raise LayoutError(f"replicas of a flat parameter need groups of one size, not {self.replicas}")
        if self.start < 0 or self.chunk_numel < 0:
            raise LayoutError(f"start {self.start} and chunk_numel {self.chunk_numel} must not be negative")
        _check_distinct(self.replicas)

    @property
    def shape(self) -> Shape:
        return self.full_shape

    @property
    def num_shards(self) -> int:
        return len(self.replicas[0])

    @cached_property
    def _numel(self) -> int:
        return prod(self.full_shape)

    @property
    def numel(self) -> int:
        return self._numel

    @property
    def ranks(self) -> tuple[int, ...]:
        if len(self.replicas) == 1 and isinstance(self.replicas[0], range):
            return tuple(self.replicas[0])
        return tuple(sorted({rank for group in self.replicas for rank in group}))

    def holders(self, shard: int) -> tuple[int, ...]:
        return tuple(group[shard] for group in self.replicas)

    def shard_of(self, rank: int) -> int | None:
        return next((group.index(rank) for group in self.replicas if rank in group), None)

    def run(self, shard: int) -> Run:
        chunk_start = shard * self.chunk_numel - self.start
        start = min(max(chunk_start, 0), self._numel)
        stop = max(min(chunk_start + self.chunk_numel, self._numel), start)
        return Run(start, stop, 0 if self.own_tensor or start == stop else start - chunk_start)

    def blocks(self, shard: int) -> tuple[Block, ...]:
        run = self.run(shard)
        blocks, offset = [], run.offset
        for box in boxes_of_run(self.shape, run.start, run.stop):
            blocks.append(Block(box, offset))
            offset += box.numel
        return tuple(blocks)

    def shards_over(self, start: int, stop: int) -> Sequence[int]:
        if start >= stop or not self.chunk_numel:
            return range(0)
        last = (self.start + stop - 1) // self.chunk_numel
        return range((self.start + start) // self.chunk_numel, min(last + 1, self.num_shards))

    def join(self, other: Placement) -> Placement | None:
        if not isinstance(other, FlatChunks) or self._cut != other._cut:
            return None
        return _join_replicas(self, other)

    @property
    def most_numel(self) -> int:
        return min(self.chunk_numel, self.numel)

    def on_lowest_ranks(self) -> FlatChunks:
        return replace(self, replicas=(tuple(min(self.holders(shard)) for shard in range(self.num_shards)),))

    @property
    def _cut(self) -> tuple[object, ...]:
        return self.full_shape, self.start, self.chunk_numel, self.own_tensor, self.num_shards

    def gap(self) -> tuple[int, int] | None:
        held = max(self.num_shards * self.chunk_numel - self.start, 0)
        return (held, self.numel) if held < self.numel else None

    def __str__(self) -> str:
        return (
            f"of shape {list(self.shape)}, {self.start} elements into a flat parameter that is cut into {self.num_shards} "
            f"chunks of {self.chunk_numel},"
        )


@dataclass(frozen=True)
class MeshBoxes(Placement):
    """A parameter on a mesh of ranks, as DTensor places it: one Box per rank, row-major in a tensor of its own.

    `splits`: (mesh dimension, parameter dimension), in the order in which they cut; each cuts what the one before left,
    into chunks of equal size, the last ones shorter or empty. Mesh dimensions that cut nothing hold replicas.

    # shape (3, 4), mesh (2, 2), splits ((1, 1), (0, 0)):   | rank 0 | rank 1 |
    # first mesh dimension 1 cuts the columns,              | rank 0 | rank 1 |
    # then mesh dimension 0 the rows                        | rank 2 | rank 3 |

    `replicas`: the ranks of each mesh that holds the parameter so, row-major.
    """

    full_shape: Shape
    mesh_shape: Shape
    splits: tuple[tuple[int, int], ...]
    replicas: tuple[Ranks, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "replicas", tuple(ranks_in_order(group) for group in self.replicas))
        if not self.replicas or any(len(group) != prod(self.mesh_shape) for group in self.replicas):
            raise LayoutError(f"a mesh of shape {self.mesh_shape} does not have the ranks {self.replicas}")
        if len({mesh_dim for mesh_dim, _ in self.splits}) != len(self.splits):
            raise LayoutError(f"each mesh dimension may cut once, not {self.splits}")
        for mesh_dim, dim in self.splits:
            if mesh_dim >= len(self.mesh_shape) or dim >= len(self.full_shape):
                raise LayoutError(f"split {(mesh_dim, dim)} of shape {self.full_shape} on mesh {self.mesh_shape}")
        _check_distinct(self.replicas)

    @property
    def shape(self) -> Shape:
        return self.full_shape

    @cached_property
    def _parts(self) -> Shape:
        """How many parts each split makes."""
        return tuple(self.mesh_shape[mesh_dim] for mesh_dim, _ in self.splits)

    @cached_property
    def _split_parts(self) -> tuple[tuple[int, int], ...]:
        """Each split: the dimension of the parameter, and how many parts it makes of it."""
        return tuple((dim, parts) for (_, dim), parts in zip(self.splits, self._parts, strict=True))

    @property
    def num_shards(self) -> int:
        return prod(self._parts)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for group in self.replicas for rank in group}))

    @cached_property
    def _split_dims(self) -> Shape:
        return tuple(mesh_dim for mesh_dim, _ in self.splits)

    def holders(self, shard: int) -> tuple[int, ...]:
        places = _places_by_shard(self.mesh_shape, self._split_dims)[shard]
        return tuple(group[place] for group in self.replicas for place in places)

    def shard_of(self, rank: int) -> int | None:
        place = next((group.index(rank) for group in self.replicas if rank in group), None)
        return _shard_at(place, self.mesh_shape, self._split_dims) if place is not None else None

    def box(self, shard: int) -> Box:
        """What a shard holds; a Box without elements where the cut left it nothing."""
        return _box_of_shard(self.full_shape, self._split_parts, shard)

    def blocks(self, shard: int) -> tuple[Block, ...]:
        box = self.box(shard)
        return (Block(box, 0),) if box.numel else ()

    def run(self, shard: int) -> Run | None:
        box = self.box(shard)
        if not box.numel:
            return Run(0, 0, 0)
        start, stop = bounds_of_box(self.shape, box)
        return Run(start, stop, 0) if stop - start == box.numel else None

    def shards_over(self, start: int, stop: int) -> Sequence[int]:
        if start >= stop:
            return range(0)
        if len(self.splits) != 1 or self.splits[0][1] != 0:
            return range(self.num_shards)
        rows = -(-self.shape[0] // self._parts[0])  # of one shard
        row = prod(self.shape[1:])
        return range(start // row // rows, min((stop - 1) // row // rows + 1, self.num_shards))

    def join(self, other: Placement) -> Placement | None:
        if not isinstance(other, MeshBoxes) or self._cut != other._cut:
            return None
        return _join_replicas(self, other)

    @property
    def most_numel(self) -> int:
        return self.box(0).numel if self.num_shards else 0  # the first shard of each cut is the largest

    def on_lowest_ranks(self) -> MeshBoxes:
        sizes = tuple(size if dim in self._split_dims else 1 for dim, size in enumerate(self.mesh_shape))
        ranks = [0] * self.num_shards
        for shard, (place,) in enumerate(_places_by_shard(sizes, self._split_dims)):
            ranks[place] = min(self.holders(shard))
        return replace(self, mesh_shape=sizes, replicas=(ranks,))

    @property
    def _cut(self) -> tuple[object, ...]:
        return self.full_shape, self.mesh_shape, self.splits

    def __str__(self) -> str:
        cuts = ", ".join(
            f"dimension {dim} over {parts}" for (_, dim), parts in zip(self.splits, self._parts, strict=True)
        )
        return f"of shape {list(self.shape)}, a DTensor cut along {cuts or 'no dimension'},"


@functools.lru_cache(maxsize=4096)
def _box_of_shard(shape: Shape, splits: tuple[tuple[int, int], ...], shard: int) -> Box:
    """What a shard holds when `splits`, (dimension, parts), cut a shape one after the other. Cached: layers are alike."""
    offsets, sizes = [0] * len(shape), list(shape)
    for (dim, parts), index in zip(splits, _coordinates(shard, tuple(parts for _, parts in splits)), strict=True):
        chunk = -(-sizes[dim] // parts)
        start = min(index * chunk, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes))


def _coordinates(index: int, shape: Shape) -> Shape:
    """Where the row-major `index` lies in a grid."""
    coordinates = []
    for size in reversed(shape):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


_Replicated = TypeVar("_Replicated", FlatChunks, MeshBoxes)


def _join_replicas(one: _Replicated, other: _Replicated) -> _Replicated | None:
    """Both groups of replicas, where no rank is in two of them."""
    groups = tuple(dict.fromkeys((*one.replicas, *other.replicas)))
    if len({rank for group in groups for rank in group}) != sum(map(len, groups)):
        return None
    return replace(one, replicas=tuple(sorted(groups, key=lambda group: group[0])))


@dataclass(frozen=True)
class Boxes(Placement):
    """Any Blocks on any ranks: what a file or a peer lists. Ranks may hold the same or overlapping Boxes."""

    full_shape: Shape
    by_rank: tuple[tuple[int, tuple[Block, ...]], ...]

    def __post_init__(self) -> None:
        ranks = [rank for rank, _ in self.by_rank]
        if len(ranks) != len(set(ranks)):
            raise LayoutError(f"each rank may be listed once, not {ranks}")
        for rank, blocks in self.by_rank:
            for block in blocks:
                ends = [o + n for o, n in zip(block.box.offsets, block.box.sizes, strict=True)]
                if len(ends) != len(self.full_shape) or any(e > n for e, n in zip(ends, self.full_shape, strict=True)):
                    raise LayoutError(f"rank {rank}: {block.box} lies outside of the shape {self.full_shape}")

    @property
    def shape(self) -> Shape:
        return self.full_shape

    @cached_property
    def _shards(self) -> tuple[tuple[tuple[Block, ...], tuple[int, ...]], ...]:
        """Ranks that list the same Blocks are one shard with several holders."""
        holders: dict[tuple[Block, ...], list[int]] = {}
        for rank, blocks in self.by_rank:
            holders.setdefault(blocks, []).append(rank)
        return tuple((blocks, tuple(ranks)) for blocks, ranks in holders.items())

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def holders(self, shard: int) -> tuple[int, ...]:
        return self._shards[shard][1]

    def shard_of(self, rank: int) -> int | None:
        return next((i for i, (_, ranks) in enumerate(self._shards) if rank in ranks), None)

    def blocks(self, shard: int) -> tuple[Block, ...]:
        return self._shards[shard][0]

    @property
    def has_replicas(self) -> bool:
        return any(len(ranks) > 1 for _, ranks in self._shards)

    def join(self, other: Placement) -> Placement | None:
        if not isinstance(other, Boxes) or other.full_shape != self.full_shape:
            return None
        mine, theirs = dict(self.by_rank), dict(other.by_rank)
        cut_alike = {blocks for blocks in mine.values() if blocks} == {blocks for blocks in theirs.values() if blocks}
        if not cut_alike or any(mine[rank] != theirs[rank] for rank in mine.keys() & theirs.keys()):
            return None
        return replace(self, by_rank=tuple(sorted((mine | theirs).items())))

    @property
    def num_replicas(self) -> int:
        return max((len(ranks) for _, ranks in self._shards), default=1)

    @cached_property
    def _overlapping(self) -> bool:
        boxes = [block.box for blocks, _ in self._shards for block in blocks]
        return any(a.intersect(b) is not None for a, b in itertools.combinations(boxes, 2))

    @property
    def overlapping(self) -> bool:
        return self._overlapping

    def on_lowest_ranks(self) -> Boxes:
        lowest = {min(ranks) for _, ranks in self._shards}
        return replace(self, by_rank=tuple(one for one in self.by_rank if one[0] in lowest))

    def gap(self) -> tuple[int, int] | None:
        missing: tuple[Box, ...] = (Box((0,) * len(self.shape), self.shape),) if self.numel else ()
        for blocks, _ in self._shards:
            for block in blocks:
                missing = tuple(rest for box in missing for rest in box.subtract(block.box))
        runs = sorted(run for box in missing for run in _runs_of_box(self.shape, box))
        if not runs:
            return None
        start, stop = runs[0]
        for run_start, run_stop in runs[1:]:
            if run_start > stop:
                break
            stop = max(stop, run_stop)
        return start, stop


@dataclass(frozen=True)
class Layout:
    """One Placement per parameter, by FQN, in the order of the unwrapped model's `parameters()`.

    Raises LayoutError when an element of a parameter is held by no rank.
    """

    placements: Mapping[str, Placement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for fqn, placement in self.placements.items():
            gap = placement.gap()
            if gap is not None:
                raise LayoutError(
                    f"{fqn}: elements [{gap[0]}, {gap[1]}) are held by no rank (world size {len(placement.ranks)})"
                )

    @property
    def fqns(self) -> tuple[str, ...]:
        return tuple(self.placements)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for placement in self.placements.values() for rank in placement.ranks}))

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Everything that one rank holds, parameter by parameter."""
        for fqn, placement in self.placements.items():
            shard = placement.shard_of(rank)
            for block in placement.blocks(shard) if shard is not None else ():
                yield Piece(fqn, block.box, rank, block.offset)

    def only(self, fqns: Sequence[str]) -> Layout:
        """The Layout of some of the parameters, in the order given."""
        return Layout({fqn: self.placements[fqn] for fqn in fqns})

    def whole_on(self, ranks: Sequence[int]) -> Layout:
        """The same parameters, each whole on every one of `ranks`, in a tensor of its own."""
        on = ranks_in_order(ranks)
        return Layout({fqn: Whole(p.shape, on) for fqn, p in self.placements.items()})
