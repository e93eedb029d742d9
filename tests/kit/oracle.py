"""The meaning of Layouts and plans, one element at a time, from the definitions alone.

The second half draws random Layouts. A tensor's elements are known by their row-major numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise, product
from math import prod

import numpy as np
from hypothesis import strategies as st

from fsdp_optim.layout import (
    Block,
    Box,
    Boxes,
    FlatChunks,
    FlatRuns,
    MeshBoxes,
    OnMesh,
    Placement,
    Shape,
    StridedBoxes,
    Whole,
)
from fsdp_optim.layout.views import Part, PlacedPart
from fsdp_optim.plan import Copy
from kit.layouts import Layout, NamedCopy

HOLE = -1  # an element of a local tensor that no parameter owns: padding, or another parameter's
UNSET = -2
Arrays = dict[tuple[str, int], np.ndarray]


def elements_of_box(shape: Shape, box: Box) -> list[int]:
    """The elements of a Box, in the Box's own row-major order."""
    numbers = np.arange(prod(shape)).reshape(shape)
    indices = product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))
    return [int(numbers[index]) for index in indices]


def held(placement: Placement) -> dict[int, dict[int, int]]:
    """For every rank, {index into its local tensor: element of the parameter}."""
    tensors: dict[int, dict[int, int]] = {}
    if isinstance(placement, Whole):
        for rank in placement.on:
            tensors[rank] = {placement.offset + element: element for element in range(prod(placement.shape))}
    elif isinstance(placement, FlatChunks):
        for group in placement.replicas:
            tensors |= {rank: {} for rank in group}
            for element in range(prod(placement.shape) if placement.chunk_numel else 0):
                chunk, place = divmod(placement.start + element, placement.chunk_numel)
                if chunk < len(group):
                    by_place = tensors[group[chunk]]
                    by_place[len(by_place) if placement.own_tensor else place] = element
    elif isinstance(placement, FlatRuns):
        for rank, start, stop in zip(placement.by, placement.starts, placement.stops, strict=True):
            by_place = tensors.setdefault(rank, {})
            for element in range(start, stop):
                by_place[len(by_place)] = element
    elif isinstance(placement, OnMesh):
        for group in placement.replicas:
            for rank, coordinate in zip(group, np.ndindex(placement.mesh_shape), strict=True):
                local: np.ndarray = np.arange(prod(placement.shape)).reshape(placement.shape)
                for mesh_dim, dim, *factor in placement.cuts:
                    size, parts = local.shape[dim], placement.mesh_shape[mesh_dim]
                    rows = max(-(-size // (factor[0] if factor else 1)), 1)  # of a group
                    taken = []
                    for i in range(size):
                        first = i // rows * rows
                        chunk = -(-(min(first + rows, size) - first) // parts)
                        taken.append((i - first) // chunk == coordinate[mesh_dim])
                    local = local.compress(taken, axis=dim)
                tensors[rank] = dict(enumerate(local.ravel().tolist()))
    elif isinstance(placement, PlacedPart):
        part_of = {live: element for element, live in enumerate(live_elements(placement.part))}
        for rank, by_place in held(placement.live).items():
            tensors[rank] = {place: part_of[live] for place, live in by_place.items() if live in part_of}
    else:
        assert isinstance(placement, Boxes)
        for rank, blocks in placement.by_rank:
            tensors[rank] = {
                place: element
                for block in blocks
                for place, element in zip(
                    addresses_of_block(block), elements_of_box(placement.shape, block.box), strict=True
                )
            }
            numel = sum(prod(block.box.sizes) for block in blocks)
            assert len(tensors[rank]) == numel, "blocks on top of each other"
    return tensors


def live_elements(part: Part) -> list[int]:
    """The element of the live parameter that is each element of a part, in the part's order."""
    factors = [size for dim in part.factors for size in dim]
    numbers = np.arange(prod(factors)).reshape(factors)
    taken = numbers[tuple(slice(low, low + size) for low, size in zip(part.lows, part.sizes, strict=True))]
    order = [factor for dim in part.dims for factor in dim]
    return taken.transpose([*order, *(set(range(len(factors))) - set(order))]).ravel().tolist()


def addresses_of_block(block: Block) -> list[int]:
    """Where the elements of a block are in the local tensor, in the row-major order of its Box."""
    indices = product(*(range(size) for size in block.box.sizes))
    return [
        block.offset + sum(i * step for i, step in zip(index, block.local_strides, strict=True)) for index in indices
    ]


def missing(placement: Placement) -> list[int]:
    """The elements that no rank holds."""
    covered = {element for by_place in held(placement).values() for element in by_place.values()}
    return [element for element in range(prod(placement.shape)) if element not in covered]


def first_range(elements: list[int]) -> tuple[int, int] | None:
    """The first unbroken range of sorted elements."""
    if not elements:
        return None
    stop = elements[0]
    while stop in elements:
        stop += 1
    return elements[0], stop


def local_arrays(layout: Layout, numbering: Mapping[str, int]) -> Arrays:
    """Every rank's local array of every parameter: 1000 * the parameter's number + the element, or HOLE."""
    arrays = {}
    for fqn, placement in layout.placements.items():
        for rank, by_place in held(placement).items():
            arrays[fqn, rank] = np.full(max(by_place, default=0) + 3, HOLE)
            for place, element in by_place.items():
                arrays[fqn, rank][place] = 1000 * numbering[fqn] + element
    return arrays


def addresses(copy: Copy) -> list[tuple[int, int]]:
    """Where every element of a copy is read and written."""
    pairs = []
    for index in product(*(range(size) for size in copy.sizes)):
        at, to = copy.source_offset, copy.target_offset
        for i, s, t in zip(index, copy.source_strides, copy.target_strides, strict=True):
            at, to = at + i * s, to + i * t
        pairs.append((at, to))
    return pairs


def execute(copies: Iterable[NamedCopy], source: Arrays, target: Arrays) -> Arrays:
    """Make the copies, one element at a time, into new arrays like the target's: its HOLEs, else UNSET."""
    result = {key: np.where(array == HOLE, HOLE, UNSET) for key, array in target.items()}
    for copy in copies:
        read, written = source[copy.fqn, copy.source_rank], result[copy.fqn, copy.target_rank]
        for at, to in addresses(copy):
            assert 0 <= at < len(read), f"reads outside of its rank's tensor, at {at}: {copy}"
            assert 0 <= to < len(written), f"writes outside of its rank's tensor, at {to}: {copy}"
            assert read[at] != HOLE, f"reads what its rank does not hold, at {at}: {copy}"
            assert written[to] != HOLE, f"writes what its rank does not hold, at {to}: {copy}"
            assert written[to] == UNSET, f"writes an element again, at {to}: {copy}"
            written[to] = read[at]
    return result


# -------------------------------------------------------------------------------------------- random Layouts

RANKS = range(8)  # few, so that the ranks of two Layouts often meet

shapes: st.SearchStrategy[Shape] = st.one_of(
    st.tuples(st.integers(1, 12)),
    st.tuples(*[st.integers(1, 6)] * 2),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.tuples(*[st.integers(1, 3)] * 4),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)


@st.composite
def some_ranks(draw: st.DrawFn, most: int = len(RANKS)) -> tuple[int, ...]:
    return tuple(draw(st.permutations(RANKS))[: draw(st.integers(1, most))])


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    """Any Box of a shape, also an empty one."""
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    sizes = tuple(draw(st.integers(0, n - offset)) for n, offset in zip(shape, offsets, strict=True))
    return Box(offsets, sizes)


@st.composite
def tilings(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """A whole parameter, cut straight through at random up to five times."""
    tiles = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        tile = tiles.pop(draw(st.integers(0, len(tiles) - 1)))
        dims = [dim for dim, size in enumerate(tile.sizes) if size > 1]
        if not dims:
            tiles.append(tile)
            continue
        dim = draw(st.sampled_from(dims))
        o, s, at = tile.offsets, tile.sizes, draw(st.integers(1, tile.sizes[dim] - 1))
        tiles.append(Box(o, (*s[:dim], at, *s[dim + 1 :])))
        tiles.append(Box((*o[:dim], o[dim] + at, *o[dim + 1 :]), (*s[:dim], s[dim] - at, *s[dim + 1 :])))
    return draw(st.permutations(tiles))


@st.composite
def boxes_placements(draw: st.DrawFn, shape: Shape, complete: bool = True) -> Boxes:
    """Tiles dealt to ranks, with replicas and empty ranks; sometimes Boxes on top, holes between Blocks."""
    boxes = draw(tilings(shape))
    if not complete:
        del boxes[0]
    if draw(st.booleans()):
        boxes += draw(st.lists(st.one_of(boxes_in(shape), *map(st.just, boxes)), min_size=1, max_size=3))
    ranks = draw(some_ranks())
    shard_of_rank = [draw(st.integers(0, i)) for i in range(len(ranks))]  # at or below i: some shards repeat
    shards: dict[int, list[Block]] = {shard: [] for shard in shard_of_rank}
    ends = dict.fromkeys(shards, 0)
    for box in boxes:
        shard = draw(st.sampled_from(sorted(shards)))
        offset = ends[shard] + draw(st.integers(0, 2))
        shards[shard].append(Block(box, offset))
        ends[shard] = offset + prod(box.sizes)
    return Boxes(shape, tuple((r, tuple(shards[s])) for r, s in zip(ranks, shard_of_rank, strict=True)))


@st.composite
def flat_groups(draw: st.DrawFn, of: Mapping[str, Shape], complete: bool = True) -> dict[str, FlatChunks]:
    """Parameters end to end in one flat parameter, cut as torch.chunk cuts or larger, on any ranks."""
    order = draw(st.permutations(list(of)))
    starts, total = {}, 0
    for fqn in order:
        starts[fqn] = total
        total += prod(of[fqn])
    ranks = draw(some_ranks())
    copies = draw(st.sampled_from([n for n in (1, 1, 2, 3) if len(ranks) >= n]))
    world = len(ranks) // copies
    replicas = tuple(ranks[i * world : (i + 1) * world] for i in range(copies))
    exact = -(-total // world)
    larger, smaller = st.sampled_from([exact, exact, exact + 1, exact + 4]), st.integers(0, max(exact - 1, 0))
    chunk = draw(larger if complete else smaller)
    own = draw(st.booleans())
    return {fqn: FlatChunks(shape, starts[fqn], chunk, replicas, own) for fqn, shape in of.items()}


@st.composite
def mesh_placements(draw: st.DrawFn, shape: Shape) -> MeshBoxes:
    """A mesh of up to three dimensions, each of which cuts any dimension of the parameter, or nothing."""
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (5,), (8,), (2, 2), (3, 2), (2, 4), (2, 1, 3), (2, 2, 2)]))
    cutting = draw(st.permutations(range(len(mesh))))[: draw(st.integers(0, len(mesh)))] if shape else []
    splits = tuple((mesh_dim, draw(st.integers(0, len(shape) - 1))) for mesh_dim in cutting)
    ranks = draw(st.permutations(RANKS))
    copies = draw(st.integers(1, len(RANKS) // prod(mesh)))
    replicas = tuple(tuple(ranks[i * prod(mesh) : (i + 1) * prod(mesh)]) for i in range(copies))
    return MeshBoxes(shape, mesh, splits, replicas)


@st.composite
def strided_placements(draw: st.DrawFn, shape: Shape) -> StridedBoxes:
    """The same, with cuts that interleave."""
    mesh = draw(mesh_placements(shape))
    factors = tuple(draw(st.integers(1, 4)) for _ in mesh.splits)
    return StridedBoxes(mesh.full_shape, mesh.mesh_shape, mesh.splits, mesh.replicas, factors)


@st.composite
def split_placements(draw: st.DrawFn, shape: Shape) -> FlatRuns:
    """Runs on any ranks, some of them on the same one; sometimes neighbours have elements in common."""
    borders = sorted(draw(st.sets(st.integers(0, prod(shape)), max_size=6)) | {0, prod(shape)})
    more = [draw(st.integers(0, 1)) if stop < prod(shape) else 0 for stop in borders[1:]]
    by = tuple(draw(st.sampled_from(RANKS)) for _ in borders[1:])
    stops = tuple(
        stop + shared if a != b else stop
        for stop, shared, a, b in zip(borders[1:], more, by, (*by[1:], -1)[: len(by)], strict=True)
    )
    return FlatRuns(shape, tuple(borders[:-1]), stops, by)


def whole_placements(shape: Shape) -> st.SearchStrategy[Whole]:
    return st.builds(Whole, st.just(shape), some_ranks(4), st.integers(0, 3))


@st.composite
def parts(draw: st.DrawFn, shape: Shape) -> Part:
    """A part of this shape: factors of its dimensions in any order, beside ranges of other parts, in any dimensions."""
    dims, sizes = list[list[int]](), list[int]()
    for length in shape:
        factors = [length]
        for size in (2, 3):
            if length % size == 0 and length and draw(st.booleans()):
                factors = [size, length // size] if draw(st.booleans()) else [length // size, size]
        dims.append(list(range(len(sizes), len(sizes) + len(factors))))
        sizes += factors
    for _ in range(draw(st.integers(0, 1))):
        sizes.append(1)  # an index, of an axis that the part does not have
    before = [draw(st.sampled_from([0, 0, 0, 1, 2])) for _ in sizes]
    after = [draw(st.sampled_from([0, 0, 0, 1])) for _ in sizes]
    order = draw(st.permutations(range(len(sizes)))) if draw(st.booleans()) else list(range(len(sizes)))
    cuts = sorted(draw(st.sets(st.integers(1, max(len(sizes) - 1, 1)))) | {0, len(sizes)})
    live = [order[a:b] for a, b in pairwise(cuts) if order[a:b]]
    place = {factor: number for number, factor in enumerate(order)}
    return Part(
        tuple(tuple(before[f] + sizes[f] + after[f] for f in factors) for factors in live),
        tuple(before[f] for f in order),
        tuple(sizes[f] for f in order),
        tuple(tuple(place[f] for f in dim) for dim in dims),
    )


@st.composite
def placed_parts(draw: st.DrawFn, shape: Shape) -> PlacedPart:
    """A part of a parameter that is placed in any way but this one."""
    part = draw(parts(shape))
    kinds = [whole_placements, mesh_placements, strided_placements, boxes_placements, split_placements]
    if draw(st.booleans()):
        return PlacedPart(draw(flat_groups({"before": (3,), "w": part.live_shape}))["w"], part)
    return PlacedPart(draw(draw(st.sampled_from(kinds))(part.live_shape)), part)


@st.composite
def placements(draw: st.DrawFn, shape: Shape) -> Placement:
    if draw(st.sampled_from([False, False, True])):
        return draw(placed_parts(shape))
    kinds = [whole_placements, mesh_placements, strided_placements, boxes_placements, split_placements]
    if draw(st.booleans()):
        return draw(draw(st.sampled_from(kinds))(shape))
    return draw(flat_groups({"before": draw(shapes), "w": shape}))["w"]


@st.composite
def layouts(draw: st.DrawFn, of: Mapping[str, Shape]) -> Layout:
    """Parameters placed at random; those in FlatChunks share one flat parameter."""
    kinds: dict[str, Callable[[Shape], st.SearchStrategy[Placement]]]
    kinds = {"boxes": boxes_placements, "mesh": mesh_placements, "strided": strided_placements}
    kinds["whole"] = whole_placements
    kinds["split"] = split_placements
    kinds["part"] = placed_parts
    kind = {fqn: draw(st.sampled_from(["flat", *kinds])) for fqn in of}
    flat = draw(flat_groups({fqn: shape for fqn, shape in of.items() if kind[fqn] == "flat"}))
    return Layout({fqn: flat[fqn] if fqn in flat else draw(kinds[kind[fqn]](of[fqn])) for fqn in of})


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """A source and a target of the same parameters, in any order; the source may have one more."""
    of = {f"p{i}": shape for i, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=3)))}
    source, target = draw(layouts(of)), draw(layouts(of))
    fqns = draw(st.permutations(target.fqns))
    return source, target.only(fqns if len(fqns) == 1 or draw(st.booleans()) else fqns[1:])
