"""Placements against sets of elements: what every kind says, FlatChunks, MeshBoxes and Boxes."""

from __future__ import annotations

import copy
import cProfile
import pickle
import pstats
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import oracle
from kit.cases import examples
from kit.layouts import Layout, Piece

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import (
    Block,
    Box,
    Boxes,
    BoxTable,
    FlatChunks,
    FlatRuns,
    MeshBoxes,
    OnMesh,
    Placement,
    Run,
    Shape,
    StridedBoxes,
    Whole,
    number_array,
    ranks_in_order,
    row_major_strides,
)
from fsdp_optim.layout.views import PlacedPart, View

many = examples(100)
some = examples(40)

shapes = oracle.shapes
flat_groups = shapes.flatmap(lambda shape: oracle.flat_groups({"w": shape, "x": (3,), "y": (0, 2)}))


def shard_elements(placement: Placement, shard: int) -> dict[int, int]:
    """{index into the local tensor: element} of a shard, from its blocks."""
    return {
        place: element
        for block in placement.blocks(shard)
        for place, element in zip(
            oracle.addresses_of_block(block), oracle.elements_of_box(placement.shape, block.box), strict=True
        )
    }


# ------------------------------------------------------------------------------- what every Placement says


@many
@given(oracle.shapes.flatmap(oracle.placements))
def test_placements_hold_what_the_oracle_says(placement: Placement) -> None:
    check_placement(placement)


def check_placement(placement: Placement) -> None:
    held = oracle.held(placement)
    assert placement.numel == prod(placement.shape)
    assert placement.ranks == tuple(sorted(held))
    seen = [rank for shard in range(placement.num_shards) for rank in placement.holders(shard)]
    assert sorted(seen) == sorted(held), "every rank is a holder of one shard"
    for shard in range(placement.num_shards):
        elements, run = shard_elements(placement, shard), placement.run(shard)
        for rank in placement.holders(shard):
            assert placement.shard_of(rank) == shard
            assert elements == held[rank]
            assert placement.numel_on(rank) == len(held[rank])
            start, stop = placement.local_range(rank)
            assert (start, stop) == (min(elements), max(elements) + 1) if elements else start == stop
        if run is not None:
            numbers = range(run.stop - run.start)
            assert {run.offset + i: run.start + i for i in numbers} == elements
    assert placement.shard_of(99) is None
    assert placement.numel_on(99) == 0


@many
@given(oracle.shapes.flatmap(oracle.placements))
def test_its_ranks_in_groups_and_one_for_each_shard(placement: Placement) -> None:
    firsts = {placement.holders(shard)[0] for shard in range(placement.num_shards)}
    assert list(placement.first_holders) == sorted(firsts)
    assert tuple(sorted({rank for group in placement.rank_groups for rank in group})) == placement.ranks
    for shard in range(placement.num_shards):
        if all(len(placement.holders(other)) == len(placement.holders(0)) for other in range(placement.num_shards)):
            assert tuple(placement.holders_of(np.array([shard]))[:, 0].tolist()) == placement.holders(shard)


@many
@given(oracle.shapes.flatmap(oracle.placements), st.data())
def test_tables_have_the_elements_of_the_shards(placement: Placement, data: st.DataObject) -> None:
    """Row by row, whether a table has the runs of shards or their Boxes, and for shards in any order, also asked for twice."""
    shards = data.draw(st.lists(st.integers(0, placement.num_shards - 1), max_size=6)) if placement.num_shards else []
    asked = np.array(shards, np.int64)
    tables = placement.run_table(asked), placement.box_table(asked)
    assert tables != (None, None)
    for table, shape in zip(tables, ((placement.numel,), placement.shape), strict=True):
        if table is not None:
            elements: list[dict[int, int]] = [{} for _ in shards]
            owners = range(len(shards)) if table.owners is None else table.owners.tolist()
            for row, owner in enumerate(owners):
                elements[owner] |= elements_of_row(table, row, shape)
            assert elements == [shard_elements(placement, shard) for shard in shards]


def elements_of_row(table: BoxTable, row: int, shape: Shape) -> dict[int, int]:
    """{index into the local tensor: element of the parameter} of one Box of a table."""
    lows, highs = table.lows[:, row].tolist(), table.highs[:, row].tolist()
    strides = np.broadcast_to(table.strides, table.lows.shape)[:, row].tolist()
    elements = {}
    for index in product(*map(range, lows, highs)):
        place = int(table.bases[row]) + sum(i * stride for i, stride in zip(index, strides, strict=True))
        elements[place] = sum(i * stride for i, stride in zip(index, row_major_strides(shape), strict=True))
    return elements


@many
@given(oracle.shapes.flatmap(oracle.placements), st.data())
def test_shards_over_misses_no_shard(placement: Placement, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, placement.numel))
    stop = data.draw(st.integers(start, placement.numel))
    holding = {
        shard
        for shard in range(placement.num_shards)
        if set(shard_elements(placement, shard).values()) & set(range(start, stop))
    }
    shards = placement.shards_over(start, stop)
    assert len(set(shards)) == len(shards)
    assert holding <= set(shards) <= set(range(placement.num_shards))
    rows = isinstance(placement, MeshBoxes) and placement.splits == ((0, 0),)
    if rows or isinstance(placement, FlatChunks):
        assert holding == set(shards), "exact, or a plan for many ranks visits all of them"


@many
@given(oracle.shapes.flatmap(lambda shape: st.tuples(oracle.placements(shape), oracle.placements(shape))))
def test_joined_placements_hold_what_both_hold(pair: tuple[Placement, Placement]) -> None:
    placement, other = pair
    joined = placement.join(other)
    again = placement.join(placement)
    assert again is not None
    assert oracle.held(again) == oracle.held(placement)
    if joined is not None:
        check_placement(joined)
        assert oracle.held(joined) == oracle.held(placement) | oracle.held(other)


@some
@given(st.data(), oracle.shapes)
def test_replicas_on_other_ranks_join(data: st.DataObject, shape: Shape) -> None:
    """Placements join with the same cut ten ranks further on, not with another cut or another place in the local tensor."""
    placement = data.draw(oracle.placements(shape))
    assert placement.join(Whole((*shape, 2), (99,))) is None
    if isinstance(placement, (Boxes, FlatRuns, PlacedPart)):
        return  # tests/unit/test_placed_parts.py has those of parts
    other: Placement
    unlike: Placement
    if isinstance(placement, Whole):
        other = replace(placement, on=[rank + 10 for rank in placement.on])
        unlike = replace(other, offset=placement.offset + 1)
    else:
        assert isinstance(placement, (FlatChunks, OnMesh))
        other = replace(placement, replicas=tuple([rank + 10 for rank in group] for group in placement.replicas))
        if isinstance(other, FlatChunks):
            unlike = replace(other, own_tensor=not other.own_tensor)
        else:
            unlike = replace(other, mesh_shape=(*other.mesh_shape, 1))
    joined = placement.join(other)
    assert joined is not None
    assert joined == other.join(placement)
    check_placement(joined)
    assert oracle.held(joined) == oracle.held(placement) | oracle.held(other)
    assert placement.join(unlike) is None


@pytest.mark.parametrize(
    ("placement", "other"),
    [
        (MeshBoxes((4,), (2,), ((0, 0),), ((0, 1),)), MeshBoxes((4,), (3,), ((0, 0),), ((2, 3, 4),))),
        (FlatChunks((4,), 0, 2, ((0, 1),)), FlatChunks((4,), 0, 2, ((2, 3, 4),))),
    ],
)
def test_groups_of_another_size_do_not_join(placement: Placement, other: Placement) -> None:
    assert placement.join(other) is None


def test_a_rank_that_would_hold_two_shards_does_not_join() -> None:
    flat = FlatChunks((4,), 0, 2, ((0, 1),))
    assert flat.join(FlatChunks((4,), 0, 2, ((1, 0),))) is None
    assert flat.join(FlatChunks((4,), 0, 2, ((3, 2), (0, 1)))) == FlatChunks((4,), 0, 2, ((0, 1), (3, 2)))


@some
@given(st.lists(st.integers(0, 20), unique=True, max_size=5))
def test_ranks_stay_in_order(ranks: list[int]) -> None:
    assert list(ranks_in_order(ranks)) == ranks
    assert ranks_in_order(ranks) == ranks_in_order(tuple(ranks)) == ranks_in_order(iter(ranks))


def test_evenly_spaced_ranks_are_a_range() -> None:
    assert ranks_in_order([3]) == range(3, 4)
    assert ranks_in_order([4, 6, 8]) == range(4, 9, 2)
    assert ranks_in_order(()) == range(0) == ranks_in_order(range(4, 4))
    assert ranks_in_order(range(2, 0, -1)) == (2, 1)
    for ranks in ((4, 6, 7), (6, 4), (2, 2), (4, 6, 8, 11)):
        assert ranks_in_order(ranks) == ranks


VIEW = View("a.w", "(b + c) n", {"b.w": "b n", "c.w": "c n"})
PICKLED: list[Placement] = [
    FlatChunks((4, 5), 0, 20, (range(3, 4),)),  # not cut: a range of one rank, whose hash has that of None inside
    FlatChunks((4, 5), 3, 6, ((0, 2), (1, 3)), own_tensor=True),
    FlatRuns((6,), (0, 2), (3, 6), (1, 0)),
    MeshBoxes((6, 4), (2, 3), ((0, 0), (1, 1)), (range(6),)),
    Boxes((4,), ((0, (Block(Box((0,), (2,)), 0),)), (1, (Block(Box((2,), (2,)), 0),)))),
    Whole((3, 2), (2, 0), 5),
    PlacedPart(MeshBoxes((6, 4), (2,), ((0, 0),), (range(2),)), VIEW.bind("a.w", (6, 4)).parts[1][1]),
]


@pytest.mark.parametrize("placement", PICKLED, ids=lambda placement: type(placement).__name__)
def test_a_pickle_has_the_fields_alone(placement: Placement) -> None:
    """Ranks compare reports by their bytes, and look for placements of others by their hash."""
    data = pickle.dumps(placement)
    assert {hash(placement), placement.numel, *placement.ranks, *map(placement.numel_on, placement.ranks)}
    placement.run_table(number_array((0,)))
    assert pickle.dumps(placement) == data
    for again in (pickle.loads(data), copy.copy(placement), copy.deepcopy(placement)):
        assert again == placement
        assert again in {placement}


@pytest.mark.parametrize("placement", PICKLED, ids=lambda placement: type(placement).__name__)
def test_a_hash_is_computed_once(placement: Placement) -> None:
    """It may be that of thousands of ranks; equal placements have equal ones. Whole, which lists nothing else, has no need."""
    counts = Counter[str]()

    class Ranks(tuple[int, ...]):
        def __hash__(self) -> int:
            counts["hash"] += 1
            return super().__hash__()

    fresh = replace(placement)
    name = next(iter(type(placement).__dataclass_fields__))  # type: ignore[attr-defined]
    value = getattr(fresh, name)
    fresh.__dict__[name] = Ranks(value) if isinstance(value, tuple) else value
    assert hash(fresh) == hash(fresh) == hash(placement)
    if isinstance(value, tuple):
        assert counts["hash"] == (2 if isinstance(placement, Whole) else 1)


PROGRAM = """
import pickle, sys
from dataclasses import replace
made = [replace(placement) for placement in pickle.load(sys.stdin.buffer)]
hashes = {hash(placement) for placement in made}
pickle.dump(made, sys.stdout.buffer)
"""


def test_a_pickle_of_another_process() -> None:
    """Where `None` may have another hash, as under torchrun."""
    data = pickle.dumps(PICKLED)
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=data, capture_output=True, check=True)
    for again, placement in zip(pickle.loads(done.stdout), PICKLED, strict=True):
        assert again == placement
        assert again in {placement}


def test_a_list_of_ranks_is_searched_and_hashed_once_for_all_cuts() -> None:
    """What a rank that is in no range costs a plan: no more with thousands of other ranks than with one."""
    num = 64
    group = (*range(0, 2 * (num - 1), 2), 2 * num + 1)

    def ask(size: int) -> None:
        flat, mesh = FlatChunks((size,), 0, 1, (group,)), MeshBoxes((size, 2), (num,), ((0, 0),), (group,))
        for placement in (flat, mesh):
            assert placement.shard_of(group[num // 2]) == num // 2
            assert placement.shard_of(1) is None
            assert {placement: size}[replace(placement)] == size

    profile = cProfile.Profile()
    profile.enable()
    for size in range(1, 11):
        ask(size)
    profile.disable()
    calls = Counter[str]()
    for (_, _, name), (_, number, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        calls[name] += number
    assert calls["_places"] == 1
    assert calls["index"] == 40
    assert calls["<method 'index' of 'tuple' objects>"] == 0
    assert calls["__hash__"] > 20
    ranks = ranks_in_order(group)
    assert all(FlatChunks((size,), 0, 1, (group,)).replicas[0] is ranks for size in (2, 3))


def test_ranks_of_other_types_of_integers() -> None:
    """They are ints from then on, also for later cuts over the same ranks."""
    for first in (np.array([4, 6, 9]), torch.tensor([4, 6, 9]), (np.int64(4), 6, 9), (4, 6, 9)):
        assert [type(rank) for rank in ranks_in_order(first)] == [int] * 3
    assert [type(rank) for rank in ranks_in_order((True, 0, 3))] == [int] * 3
    for wrong in ((1.0, 2.0), (1.0, 2.0, 5.0), ("a", "b")):
        with pytest.raises(TypeError):
            ranks_in_order(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("parent", [Placement, OnMesh])
def test_a_class_without_all_methods_has_no_instances(parent: type[Placement]) -> None:
    class Incomplete(parent):  # type: ignore[misc, valid-type]
        full_shape = (2,)

    with pytest.raises(TypeError, match="abstract"):
        Incomplete()
    with pytest.raises(TypeError, match="abstract"):
        OnMesh((2,), (1,), (), ((0,),))  # type: ignore[abstract]


def test_ranks_that_no_range_has_are_one_tuple() -> None:
    ranks, group = ranks_in_order([4, 6, 7]), (4, 6, 7)
    assert ranks is ranks_in_order((4, 6, 7)) is ranks_in_order(ranks)
    assert (ranks, hash(ranks)) == (group, hash(group))
    assert {ranks: 1}[group] == {group: 1}[ranks] == 1
    assert [ranks.index(rank) for rank in group] == [0, 1, 2]
    assert ranks.index(6, 1) == ranks.index(6, 0, 2) == 1
    assert 6 in ranks
    assert 5 not in ranks
    for bounds in ((5,), (4, 1), (7, 0, 2)):
        with pytest.raises(ValueError, match=r"not in|^5$"):
            ranks.index(*bounds)
    assert ranks_in_order((2, 1, 2)).index(2) == 0
    for same in (pickle.loads(pickle.dumps(ranks)), copy.deepcopy(ranks), copy.copy(ranks)):
        assert (same, type(same), same.index(7)) == (ranks, type(ranks), 2)
    assert len(pickle.dumps(ranks)) < 100 + len(pickle.dumps(group))
    numbers = number_array(ranks)
    assert numbers.tolist() == [4, 6, 7]
    with pytest.raises(ValueError, match="read-only"):
        numbers[0] = 1


# ------------------------------------------------------------------------------------------------ FlatChunks


@many
@given(flat_groups)
def test_parameters_of_one_flat_parameter(group: dict[str, FlatChunks]) -> None:
    total = sum(placement.numel for placement in group.values())
    local: Counter[int] = Counter()
    for placement in group.values():
        check_placement(placement)
        assert placement.gap() is None
        assert not placement.overlapping
        for rank in placement.replicas[0]:
            local[rank] += placement.numel_on(rank)
    assert sum(local.values()) == total
    assert max(local.values()) <= group["w"].chunk_numel


@many
@given(st.lists(oracle.shapes, min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 5))
def test_cuts_where_torch_chunk_cuts(shapes: list[Shape], world: int, first_rank: int) -> None:
    flat = torch.cat([torch.full((prod(shape),), i) for i, shape in enumerate(shapes)])
    chunks = [chunk.tolist() for chunk in flat.chunk(world)] if len(flat) else []
    chunks += [[]] * (world - len(chunks))
    group = tuple(range(first_rank, first_rank + world))
    start = 0
    for i, shape in enumerate(shapes):
        placement = FlatChunks(shape, start, -(-len(flat) // world), (group,))
        for shard, rank in enumerate(group):
            places = [place for place, owner in enumerate(chunks[shard]) if owner == i]
            assert sorted(shard_elements(placement, shard)) == places
            assert placement.numel_on(rank) == len(places)
        start += prod(shape)


@some
@given(oracle.shapes.flatmap(lambda shape: oracle.flat_groups({"w": shape, "x": (2,)}, complete=False)))
def test_flat_chunks_that_are_too_short_have_a_gap(group: dict[str, FlatChunks]) -> None:
    for placement in group.values():
        check_placement(placement)
        assert set(placement.shards_over(0, placement.numel)) <= set(range(placement.num_shards))
        if placement.numel:
            assert placement.gap() == oracle.first_range(oracle.missing(placement))


def test_a_parameter_without_elements_has_no_gap_past_the_last_chunk() -> None:
    assert FlatChunks((0,), start=5, chunk_numel=2, replicas=((0, 1),)).gap() is None


def test_flat_chunks_by_hand() -> None:
    """The picture in the docstring, on ranks that do not start at 0: | a a a a | a b b b | c c . . |"""
    group = ((4, 5, 6),)
    a, b, c = FlatChunks((5,), 0, 4, group), FlatChunks((3,), 5, 4, group), FlatChunks((2,), 8, 4, group)
    assert [a.run(i) for i in range(3)] == [Run(0, 4, 0), Run(4, 5, 0), Run(5, 5, 0)]
    assert [b.run(i) for i in range(3)] == [Run(0, 0, 0), Run(0, 3, 1), Run(3, 3, 0)]
    assert [c.numel_on(rank) for rank in (3, 4, 5, 6)] == [0, 0, 0, 2]
    assert FlatChunks((3,), 5, 4, group, own_tensor=True).run(1) == Run(0, 3, 0)
    assert a.holders(1) == (5,)
    assert FlatChunks((5,), 0, 4, ((4, 5, 6), (8, 9, 7))).holders(2) == (6, 7)


@pytest.mark.parametrize("replicas", [(), ((),), ((0, 1), (2,))])
def test_replicas_of_unlike_size_are_refused(replicas: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(LayoutError, match="groups of ranks of equal size"):
        FlatChunks((4,), 0, 2, replicas)


@pytest.mark.parametrize(("start", "chunk_numel"), [(-1, 2), (0, -2)])
def test_negative_numbers_are_refused(start: int, chunk_numel: int) -> None:
    with pytest.raises(LayoutError, match="start and chunk_numel must be at least 0"):
        FlatChunks((4,), start, chunk_numel, ((0, 1),))


# ------------------------------------------------------------------------------------------------- MeshBoxes


@some
@given(oracle.shapes.flatmap(oracle.mesh_placements))
def test_a_mesh_cuts_where_torch_chunk_cuts(placement: MeshBoxes) -> None:
    """The shards of DTensor's cut, mesh dimension by mesh dimension; ranks without a chunk get nothing."""
    for group in placement.replicas:
        for rank, coordinate in zip(group, np.ndindex(placement.mesh_shape), strict=True):
            local = torch.arange(placement.numel).reshape(placement.shape)
            for mesh_dim, dim in placement.splits:
                chunks = local.chunk(placement.mesh_shape[mesh_dim], dim)
                index = coordinate[mesh_dim]
                local = chunks[index] if index < len(chunks) else local.narrow(dim, 0, 0)
            shard = placement.shard_of(rank)
            assert shard is not None
            assert shard_elements(placement, shard) == dict(enumerate(local.reshape(-1).tolist()))


def test_a_mesh_by_hand() -> None:
    """The picture in the docstring, on ranks that do not start at 0."""
    placement = MeshBoxes((3, 4), (2, 2), ((1, 1), (0, 0)), ((4, 5, 6, 7),))
    boxes = [Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((2, 0), (1, 2)), Box((2, 2), (1, 2))]
    layout = Layout({"w": placement})
    for rank, box in enumerate(boxes, start=4):
        assert list(layout.pieces(rank)) == [Piece("w", box, rank, 0)]
    rows = MeshBoxes((3, 4), (2, 2), ((1, 0),), ((4, 5, 6, 7), (0, 1, 2, 3)))
    assert [rows.holders(shard) for shard in range(2)] == [(4, 6, 0, 2), (5, 7, 1, 3)]
    assert [rows.run(shard) for shard in range(2)] == [Run(0, 8, 0), Run(8, 12, 0)]
    assert list(rows.shards_over(7, 8)) == [0]
    assert placement.run(0) is None


@pytest.mark.parametrize(
    ("mesh", "splits", "group"),
    [
        ((2, 2), (), (0, 1, 2)),
        ((2, 2), ((0, 0), (0, 1)), (0, 1, 2, 3)),
        ((2,), ((1, 0),), (0, 1)),
        ((2,), ((0, 2),), (0, 1)),
    ],
)
def test_impossible_meshes_are_refused(mesh: Shape, splits: tuple[tuple[int, int]], group: Shape) -> None:
    with pytest.raises(LayoutError):
        MeshBoxes((3, 4), mesh, splits, (group,))


@pytest.mark.parametrize("factors", [(), (2, 2), (0,)])
def test_each_split_needs_a_factor(factors: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError):
        StridedBoxes((6,), (2,), ((0, 0),), ((0, 1),), factors)


def test_strided_boxes_by_hand() -> None:
    """The picture in the docstring, and the same columns of two rows, which are strided in the local tensor."""
    rows = StridedBoxes((6,), (2,), ((0, 0),), ((4, 5),), (2,))
    assert rows.blocks(0) == (Block(Box((0,), (2,)), 0), Block(Box((3,), (2,)), 2))
    assert rows.blocks(1) == (Block(Box((2,), (1,)), 0), Block(Box((5,), (1,)), 1))
    columns = StridedBoxes((2, 6), (2,), ((0, 1),), ((4, 5),), (2,))
    assert columns.blocks(0) == (Block(Box((0, 0), (2, 2)), 0, (4, 1)), Block(Box((0, 3), (2, 2)), 2, (4, 1)))
    assert columns.local_shape(1) == (2, 2)
    check_placement(rows)
    check_placement(columns)
    assert columns.gap() is None
    assert columns.join(MeshBoxes((2, 6), (2,), ((0, 1),), ((0, 1),))) is None


def test_a_mesh_without_ranks_holds_nothing() -> None:
    with pytest.raises(LayoutError):
        MeshBoxes((3, 4), (2,), ((0, 0),), ())


# ----------------------------------------------------------------------------------------------------- Boxes


@many
@given(oracle.shapes.flatmap(oracle.boxes_placements))
def test_boxes_know_whether_they_overlap(placement: Boxes) -> None:
    assert placement.gap() is None
    count: Counter[int] = Counter()
    for shard in range(placement.num_shards):
        for block in placement.blocks(shard):
            count.update(oracle.elements_of_box(placement.shape, block.box))
    assert placement.overlapping == any(n > 1 for n in count.values())


@many
@given(oracle.shapes.flatmap(lambda shape: oracle.boxes_placements(shape, complete=False)))
def test_boxes_find_a_gap_where_there_is_one(placement: Boxes) -> None:
    missing, gap = oracle.missing(placement), placement.gap()
    assert (gap is None) == (not missing)
    if gap is not None:
        assert gap[0] == missing[0]


@pytest.mark.parametrize(
    ("box", "gap"),
    [
        (Box((0, 0), (3, 3)), (3, 4)),  # the last column is missing; gap() is (3, 12), most of which is held
        (Box((1, 2), (2, 2)), (0, 6)),  # a row and a half are missing; gap() is (0, 4)
    ],
)
def test_the_gap_is_the_first_range_of_missing_elements(box: Box, gap: tuple[int, int]) -> None:
    placement = Boxes((3, 4), ((0, (Block(box, 0),)),))
    assert oracle.first_range(oracle.missing(placement)) == gap
    assert placement.gap() == gap


def test_ranks_with_the_same_blocks_are_holders_of_one_shard() -> None:
    top, bottom = Block(Box((0, 0), (1, 2)), 0), Block(Box((1, 0), (1, 2)), 0)
    placement = Boxes((2, 2), ((5, (top,)), (3, (bottom,)), (4, (top,)), (9, ())))
    assert [placement.holders(shard) for shard in range(placement.num_shards)] == [(5, 4), (3,), (9,)]
    assert placement.ranks == (3, 4, 5, 9)
    assert not placement.overlapping


def test_a_box_on_two_ranks_at_different_offsets_overlaps() -> None:
    box = Box((0,), (2,))
    assert Boxes((2,), ((0, (Block(box, 0),)), (1, (Block(box, 7),)))).overlapping


def test_blocks_without_elements_are_no_part_of_a_local_tensor() -> None:
    blocks = Block(Box((0, 0), (0, 1)), 0), Block(Box((0, 1), (0, 1)), 1)
    check_placement(Boxes((0, 2), ((0, blocks),)))


def test_lists_that_contradict_each_other_about_a_rank_do_not_join() -> None:
    top, bottom = Block(Box((0, 0), (1, 2)), 0), Block(Box((1, 0), (1, 2)), 0)
    for is_open in (False, True):
        listed = Boxes((2, 2), ((0, (top,)), (1, (bottom,))), is_open)
        assert listed.join(Boxes((2, 2), ((0, (bottom,)), (1, (top,))), is_open)) is None
        assert listed.join(Boxes((2, 2), ((1, (top, bottom)), (2, (bottom,)), (3, (top,))), is_open)) is None
        other = Boxes((2, 2), ((1, (bottom,)), (2, (bottom,)), (3, (top,))), is_open)
        joined = listed.join(other)
        assert joined is not None
        assert oracle.held(joined) == oracle.held(listed) | oracle.held(other)


def test_impossible_placements_are_refused() -> None:
    block = Block(Box((1, 0), (1, 3)), 0)
    with pytest.raises(LayoutError, match="listed only once"):
        Boxes((2, 3), ((0, (block,)), (0, ())))
    for shape in ((2, 2), (1, 3), (6,), ()):
        with pytest.raises(LayoutError, match=r"^rank 7: .* lies outside"):
            Boxes(shape, ((7, (block,)),))
    for starts, stops in (((0, 1), (5, 3)), ((2, 1), (3, 4))):
        with pytest.raises(LayoutError, match="in the order of their elements"):
            FlatRuns((6,), starts, stops, (0, 1))
    for starts, stops in (((0, 3), (3, 7)), ((0, 4), (3, 3)), ((-1, 3), (3, 6))):
        with pytest.raises(LayoutError, match="inside the 6 elements"):
            FlatRuns((6,), starts, stops, (0, 1))
