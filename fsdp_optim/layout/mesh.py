"""A parameter that is cut along its dimensions over the dimensions of a mesh of ranks (DTensor)."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.boxes import Block, Box, Run, Shape, bounds_of_box, row_major_strides
from fsdp_optim.layout.placement import Placement, hash_once
from fsdp_optim.layout.ranks import Ranks, check_distinct, join_replicas, ranks_at, ranks_in_order
from fsdp_optim.layout.tables import BoxTable, Columns, Numbers


@dataclass(frozen=True)
class OnMesh(Placement):
    """A parameter on a mesh of ranks. Parent of the Placements of DTensor.

    Attributes:
        splits: pairs (mesh dimension, parameter dimension), which cut one after the other. Mesh dimensions without a split hold
            replicas.
        replicas: the ranks of each mesh that holds the parameter in this way, row-major.
    """

    full_shape: Shape
    mesh_shape: Shape
    splits: tuple[tuple[int, int], ...]
    replicas: tuple[Ranks, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "replicas", tuple(map(ranks_in_order, self.replicas)))
        if not self.replicas or any(len(group) != prod(self.mesh_shape) for group in self.replicas):
            raise LayoutError(
                f"a mesh of shape {self.mesh_shape} needs {prod(self.mesh_shape)} ranks in each replica, not {self.replicas}"
            )
        if len({mesh_dim for mesh_dim, _ in self.splits}) != len(self.splits):
            raise LayoutError(f"each mesh dimension may be in one split only, not as in {self.splits}")
        for mesh_dim, dim in self.splits:
            if mesh_dim >= len(self.mesh_shape) or dim >= len(self.full_shape):
                raise LayoutError(
                    f"the split {(mesh_dim, dim)} needs a mesh dimension of {self.mesh_shape} and a dimension of the shape "
                    f"{self.full_shape}"
                )
        check_distinct(self.replicas)

    @property
    def _split_parts(self) -> tuple[tuple[int, int], ...]:
        """Each split as (parameter dimension, number of parts)."""
        return _split_parts(self.mesh_shape, self.splits)

    @property
    def num_shards(self) -> int:
        return prod([parts for _, parts in self._split_parts])

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for group in self.replicas for rank in group}))

    @property
    def _split_dims(self) -> Shape:
        return tuple([mesh_dim for mesh_dim, _ in self.splits])

    @property
    def first_holders(self) -> Ranks:
        return _first_holders(self.mesh_shape, self._split_dims, self.replicas[0])

    @property
    def num_replicas(self) -> int:
        return len(self.replicas) * len(self.replicas[0]) // self.num_shards if self.num_shards else 1

    @property
    def rank_groups(self) -> tuple[Ranks, ...]:
        return self.replicas

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """The splits. A split that interleaves has a third number: the number of groups that every rank has a part of."""
        return self.splits

    @abstractmethod
    def local_shape(self, shard: int) -> Shape:
        """Return the shape of the local tensor of a shard."""

    def holders(self, shard: int) -> tuple[int, ...]:
        places = _places_by_shard(self.mesh_shape, self._split_dims)[shard]
        return tuple(group[place] for group in self.replicas for place in places)

    def shard_of(self, rank: int) -> int | None:
        for group in self.replicas:
            try:
                place = group.index(rank)  # one search, where `in` would be another
            except ValueError:
                continue
            return _shards_by_place(self.mesh_shape, self._split_dims)[place]
        return None

    def holders_of(self, shards: Numbers) -> Numbers:
        places = _place_table(self.mesh_shape, self._split_dims)[shards].T
        return numpy.concatenate([ranks_at(group, places) for group in self.replicas])

    def join(self, other: Placement) -> Placement | None:
        if not isinstance(other, OnMesh) or self._cut != other._cut:
            return None
        return join_replicas(self, other)

    @property
    def most_numel(self) -> int:
        return prod(self.local_shape(0)) if self.num_shards else 0  # the first part of each split is the largest

    def on_lowest_ranks(self) -> OnMesh:
        sizes = tuple(size if dim in self._split_dims else 1 for dim, size in enumerate(self.mesh_shape))
        ranks = [0] * self.num_shards
        for shard, (place,) in enumerate(_places_by_shard(sizes, self._split_dims)):
            ranks[place] = min(self.holders(shard))
        return replace(self, mesh_shape=sizes, replicas=(ranks,))

    def without_ranks(self) -> OnMesh:
        sizes = tuple(size if dim in self._split_dims else 1 for dim, size in enumerate(self.mesh_shape))
        return replace(self, mesh_shape=sizes, replicas=(range(self.num_shards),))

    @property
    def _cut(self) -> tuple[object, ...]:
        return type(self), self.full_shape, self.mesh_shape, self.cuts

    def __str__(self) -> str:
        cuts = ", ".join(
            f"dimension {cut[1]} over {parts}" + (f" in {cut[2]} groups" if len(cut) > 2 else "")
            for cut, (_, parts) in zip(self.cuts, self._split_parts, strict=True)
        )
        return f"of shape {list(self.shape)}, a DTensor cut along {cuts or 'no dimension'},"


@hash_once
@dataclass(frozen=True)
class MeshBoxes(OnMesh):
    """A parameter on a mesh of ranks, as DTensor places it: each rank holds one Box, row-major in a separate tensor.

    `splits`: pairs (mesh dimension, parameter dimension). Each split cuts the Boxes that the splits before it have made into
    chunks of equal size, of which the last may be shorter or empty. Mesh dimensions without a split hold replicas.

    # shape (3, 4), mesh (2, 2), splits ((1, 1), (0, 0)):   | rank 0 | rank 1 |
    # first mesh dimension 1 cuts the columns,              | rank 0 | rank 1 |
    # then mesh dimension 0 the rows                        | rank 2 | rank 3 |

    `replicas`: the ranks of each mesh that holds the parameter in this way, row-major.
    """

    def box(self, shard: int) -> Box:
        """Return the Box of a shard, which is empty where the cut left no elements for the shard."""
        return _box_of_shard(self.full_shape, self._split_parts, shard)

    def local_shape(self, shard: int) -> Shape:
        return self.box(shard).sizes

    def blocks(self, shard: int) -> tuple[Block, ...]:
        box = self.box(shard)
        return (Block(box, 0),) if box.numel else ()

    def run(self, shard: int) -> Run | None:
        return _run_of_shard(self.full_shape, self._split_parts, shard)

    def bounds(self, shard: int) -> tuple[int, int] | None:
        box = self.box(shard)
        return bounds_of_box(self.full_shape, box) if box.numel else None

    @property
    def in_runs(self) -> bool:
        return bool(self.shape) and not any(dim for _, dim in self.splits)

    @property
    def most_runs(self) -> int:
        return prod(self.local_shape(0)[: max((dim for _, dim in self.splits), default=0)]) if self.num_shards else 0

    @property
    def kind(self) -> tuple[object, ...]:
        return type(self), self.mesh_shape, self.splits, self.replicas

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.full_shape

    def run_table(self, shards: Numbers, numbers: Columns | None = None) -> BoxTable | None:
        if not self.in_runs:
            return None
        shape = self.full_shape if numbers is None else numbers
        lows, highs = self._bounds_of(shards, shape)  # cuts along the first dimension alone give every shard whole rows
        row, zeros = prod(shape[1:]), numpy.zeros_like(shards)
        return BoxTable.of_runs(zeros + lows[0] * row, zeros + highs[0] * row, zeros)

    def box_table(self, shards: Numbers, numbers: Columns | None = None) -> BoxTable:
        shape = self.full_shape if numbers is None else numbers
        return BoxTable.of_boxes(len(shards), *self._bounds_of(shards, shape))

    def _bounds_of(self, shards: Numbers, shape: Columns) -> tuple[list[int | Numbers], list[int | Numbers]]:
        """Return the first index of each shard in each dimension, and one past the last; a number if all shards have the same."""
        lows: list[int | Numbers] = [0] * len(shape)
        highs: list[int | Numbers] = list(shape)
        weight = self.num_shards
        left: Numbers | int = shards  # their numbers among the parts that the cuts so far have made
        for dim, parts in self._split_parts:
            weight //= parts
            index, left = (left, 0) if weight == 1 else (left // weight, left % weight)
            low, high = lows[dim], highs[dim]
            chunk = -((low - high) // parts)
            start = low + index * chunk
            lows[dim], highs[dim] = numpy.minimum(start, high), numpy.minimum(start + chunk, high)
        return lows, highs

    def shards_over(self, start: int, stop: int) -> Sequence[int]:
        if start >= stop or not self.splits:
            return range(1 if start < stop else 0)
        if len(self.splits) > 1 and stop - start == self.numel:
            return range(self.num_shards)
        return _shards_over(self.shape, self._split_parts, _indices_over(self.shape, start, stop))


@functools.lru_cache(maxsize=256)
def _split_parts(mesh_shape: Shape, splits: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return each of `splits`, pairs (mesh dimension, parameter dimension), as (parameter dimension, number of parts)."""
    return tuple((dim, mesh_shape[mesh_dim]) for mesh_dim, dim in splits)


@functools.lru_cache(maxsize=256)
def _shards_by_place(mesh_shape: Shape, split_dims: Shape) -> tuple[int, ...]:
    """Return the shard of each row-major place in the mesh. Cached: parameters share their mesh."""
    return tuple(_shard_at(place, mesh_shape, split_dims) for place in range(prod(mesh_shape)))


@functools.lru_cache(maxsize=256)
def _places_by_shard(mesh_shape: Shape, split_dims: Shape) -> tuple[tuple[int, ...], ...]:
    """Return the row-major places in the mesh that hold each shard. Cached: parameters share their mesh."""
    places: list[list[int]] = [[] for _ in range(prod(mesh_shape[dim] for dim in split_dims))]
    for place, shard in enumerate(_shards_by_place(mesh_shape, split_dims)):
        places[shard].append(place)
    return tuple(tuple(shard_places) for shard_places in places)


@functools.lru_cache(maxsize=64)
def _place_table(mesh_shape: Shape, split_dims: Shape) -> Numbers:
    """Return `_places_by_shard` as an array with a row for each shard."""
    return numpy.array(_places_by_shard(mesh_shape, split_dims), numpy.int64)


@functools.lru_cache(maxsize=64)
def _first_holders(mesh_shape: Shape, split_dims: Shape, ranks: Ranks) -> Ranks:
    """Return the rank at the first place of each shard, sorted. Cached: parameters share their mesh."""
    return ranks_in_order(sorted({ranks[places[0]] for places in _places_by_shard(mesh_shape, split_dims)}))


def _shard_at(place: int, mesh_shape: Shape, split_dims: Shape) -> int:
    coordinates = _coordinates(place, mesh_shape)
    shard = 0
    for dim in split_dims:
        shard = shard * mesh_shape[dim] + coordinates[dim]
    return shard


@functools.lru_cache(maxsize=4096)
def _box_of_shard(shape: Shape, splits: tuple[tuple[int, int], ...], shard: int) -> Box:
    """Return the Box of a shard when `splits`, pairs (dimension, parts), cut a shape in turn. Cached: layers are equal."""
    offsets, sizes = [0] * len(shape), list(shape)
    indices = []
    for _, parts in reversed(splits):
        shard, index = divmod(shard, parts)
        indices.append(index)
    for (dim, parts), index in zip(splits, reversed(indices), strict=True):
        chunk = -(-sizes[dim] // parts)
        start = min(index * chunk, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes))


@functools.lru_cache(maxsize=4096)
def _run_of_shard(shape: Shape, splits: tuple[tuple[int, int], ...], shard: int) -> Run | None:
    """Return a shard as one Run; None if it is not contiguous."""
    return run_of_box(shape, _box_of_shard(shape, splits, shard))


def run_of_box(shape: Shape, box: Box) -> Run | None:
    """Return a Box as one Run; None if it is not contiguous."""
    numel = prod(box.sizes)
    if not numel:
        return Run(0, 0, 0)
    inner = 1  # elements of the inner dimensions, which are full
    for dim in reversed(range(len(shape))):
        if box.sizes[dim] != shape[dim]:
            if inner * box.sizes[dim] != numel:
                return None
            break
        inner *= shape[dim]
    start, _ = bounds_of_box(shape, box)
    return Run(start, start + numel, 0)


def _indices_over(shape: Shape, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the first and the last index, in each dimension, of the row-major elements [start, stop). There is at least one."""
    first, last, bounds = start, stop - 1, list[tuple[int, int]]()
    for step in row_major_strides(shape):
        low, high = first // step, last // step
        bounds.append((low, high))
        if low != high:
            return bounds + [(0, size - 1) for size in shape[len(bounds) :]]
        first, last = first - low * step, last - low * step
    return bounds


def _shards_over(shape: Shape, splits: tuple[tuple[int, int], ...], ranges: Sequence[tuple[int, int]]) -> Sequence[int]:
    """Return the shards that hold elements with an index in `ranges`, [first, last] of each dimension.

    `splits`: (dimension, parts), which cut one after the other. The shards are a product: of the parts of each dimension.
    """
    if len(splits) == 1:
        return _parts_over(shape[splits[0][0]], [(splits[0][1], 1)], *ranges[splits[0][0]])
    weight, cuts = prod(parts for _, parts in splits), dict[int, list[tuple[int, int]]]()
    for dim, parts in splits:
        weight //= parts
        cuts.setdefault(dim, []).append((parts, weight))
    shards: Sequence[int] = range(1)
    for dim, dim_cuts in cuts.items():
        parts_over = _parts_over(shape[dim], dim_cuts, *ranges[dim])
        shards = [a + b for a in shards for b in parts_over] if len(shards) > 1 or shards[0] else parts_over
    return shards if isinstance(shards, range) else sorted(shards)


def _parts_over(size: int, cuts: Sequence[tuple[int, int]], first: int, last: int) -> Sequence[int]:
    """Return the parts of one dimension with an index in [first, last], each as the amount that it adds to the number of a shard.

    `cuts`: (number of parts, weight in the number of a shard), each of which cuts the parts that the previous cut made.
    """
    (parts, weight), *inner = cuts
    chunk = -(-size // parts)
    indices = range(first // chunk, last // chunk + 1)
    if not inner:
        return range(indices[0] * weight, indices[-1] * weight + 1, weight)
    return [
        index * weight + number
        for index in indices
        for number in _parts_over(
            min(chunk, size - index * chunk), inner, max(first - index * chunk, 0), min(last - index * chunk, chunk - 1)
        )
    ]


def _coordinates(index: int, shape: Shape) -> Shape:
    """Return the coordinates of a row-major `index` in a grid."""
    coordinates = []
    for size in reversed(shape):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def cut_of(placement: Placement) -> str:
    """Return the cut of a placed value as text: the number of mesh dimensions, then the numbers of each cut: `2 1:0 0:3:2`."""
    if not isinstance(placement, OnMesh):
        return ""
    return " ".join([str(len(placement.mesh_shape)), *(":".join(map(str, cut)) for cut in placement.cuts)])


def cut_named(word: str) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
    """Return the inverse of `cut_of`: the mesh's number of dimensions and the cuts; None for an empty text.

    Raises ValueError for a text that `cut_of` does not write.
    """
    if not word:
        return None
    ndim, *cuts = word.split(" ")
    numbers = tuple(tuple(map(int, cut.split(":"))) for cut in cuts)
    if any(len(cut) not in (2, 3) for cut in numbers):
        raise ValueError(f"{word!r} is not the cut of a value")
    return int(ndim), numbers
