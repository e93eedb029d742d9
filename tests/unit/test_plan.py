"""Plans, executed one element at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import ClassVar
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import oracle
from kit.cases import examples
from kit.layouts import Layout, NamedCopy, named, plan

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Block, Box, Boxes, FlatChunks, MeshBoxes, Placement, Run, Whole
from fsdp_optim.plan import (
    Copy,
    CopyTable,
    clip_to_source,
    clip_to_target,
    copies_into,
    copies_of,
    has_from,
    num_into,
    planner,
    replica_of,
)

most = examples(120)
some = examples(40)


def singly() -> AbstractContextManager[object]:
    """All copies are planned one by one."""
    return mock.patch.multiple(planner, RUNS_FROM=10**9, BOXES_FROM=10**9)


def in_bulk() -> AbstractContextManager[object]:
    """All copies are planned in bulk, where that is possible."""
    return mock.patch.multiple(planner, RUNS_FROM=0, BOXES_FROM=0)


def arrays_of(source: Layout, target: Layout) -> tuple[oracle.Arrays, oracle.Arrays]:
    numbering = {fqn: i for i, fqn in enumerate(source.fqns)}
    return oracle.local_arrays(source, numbering), oracle.local_arrays(target, numbering)


def by_pair(copies: Iterable[Copy]) -> dict[tuple[int, int], list[Copy]]:
    pairs: dict[tuple[int, int], list[Copy]] = {}
    for copy in copies:
        pairs.setdefault((copy.source_rank, copy.target_rank), []).append(copy)
    return pairs


def check_plan(source: Layout, target: Layout) -> tuple[NamedCopy, ...]:
    """Execute the plan and compare every element; a rank takes only elements from others that it does not hold."""
    copies = plan(source, target)
    before, wanted = arrays_of(source, target)
    after = oracle.execute(copies, before, wanted)
    assert after.keys() == wanted.keys()
    for key, array in wanted.items():
        assert after[key].tolist() == array.tolist(), key
    for copy in copies:
        assert copy.numel == len(oracle.addresses(copy)) > 0
        if copy.source_rank != copy.target_rank:
            sent = {before[copy.fqn, copy.source_rank][at] for at, _ in oracle.addresses(copy)}
            own = before.get((copy.fqn, copy.target_rank))
            assert own is None or not sent & set(own), f"the target rank holds some of it: {copy}"
    return copies


@most
@given(oracle.layout_pairs())
def test_a_plan_fills_every_target_element_once(pair: tuple[Layout, Layout]) -> None:
    check_plan(*pair)


@some
@given(oracle.layout_pairs(), st.integers(1, 9))
def test_windows_of_the_local_tensors_make_up_every_copy(pair: tuple[Layout, Layout], width: int) -> None:
    """Element by element, in order, whichever side the window is on."""
    for copy in plan(*pair):
        whole = oracle.addresses(copy)
        for side, part in ((0, clip_to_source), (1, clip_to_target)):
            window_addresses = []
            for start in range(0, max(address[side] for address in whole) + 1, width):
                for piece in part(copy, start, start + width):
                    addresses = oracle.addresses(piece)
                    assert addresses
                    assert len(piece.sizes) == len(piece.source_strides) == len(piece.target_strides) > 0
                    assert all(0 <= address[side] < width for address in addresses)
                    assert (piece.source_rank, piece.target_rank) == (copy.source_rank, copy.target_rank)
                    window_addresses += [
                        tuple(at + start * (i == side) for i, at in enumerate(address)) for address in addresses
                    ]
            assert sorted(window_addresses) == sorted(whole)
            assert [address[side] for address in window_addresses] == sorted(address[side] for address in whole)


@some
@given(oracle.layout_pairs())
def test_from_a_layout_to_itself_nothing_is_sent(pair: tuple[Layout, Layout]) -> None:
    layout = pair[0]
    assert all(copy.source_rank == copy.target_rank for copy in check_plan(layout, layout))


@most
@given(oracle.layout_pairs())
def test_every_rank_plans_the_same_copies_in_the_same_order(pair: tuple[Layout, Layout]) -> None:
    copies = plan(*pair)
    pairs = by_pair(copies)
    for rank in (*oracle.RANKS, 99):
        own_pairs = by_pair(plan(*pair, rank=rank))
        assert own_pairs == {ends: between for ends, between in pairs.items() if rank in ends}
        for fqn in pair[1].fqns:
            placements = pair[0].placements[fqn], pair[1].placements[fqn]
            received = tuple(copy.unnamed for copy in copies if (copy.fqn, copy.target_rank) == (fqn, rank))
            assert copies_into(*placements, rank, replica_of(fqn)) == received


@most
@given(oracle.layout_pairs())
def test_copies_as_arrays_are_those_that_are_made_one_by_one(pair: tuple[Layout, Layout]) -> None:
    for rank in (*oracle.RANKS, 99):
        for fqn in pair[1].fqns:
            placements, replica = (pair[0].placements[fqn], pair[1].placements[fqn]), replica_of(fqn)
            with singly():
                one_by_one = copies_of(*placements, rank=rank, replica=replica)
                received = copies_into(*placements, rank, replica)
            with in_bulk():
                assert list(copies_of(*placements, rank=rank, replica=replica)) == list(one_by_one)
                assert list(copies_into(*placements, rank, replica)) == list(received)
            assert has_from(one_by_one, rank) == any(copy.source_rank == rank for copy in one_by_one)
            assert num_into(received, rank) == sum(copy.numel for copy in received)


@pytest.mark.parametrize(
    "source",
    [
        FlatChunks((1000, 3), 17, 50, (range(64),)),
        FlatChunks((1000, 3), 0, 50, (range(64),), own_tensor=True),
        FlatChunks((1000, 3), 17, 50, (range(64), range(64, 128))),
        FlatChunks((1000, 3), 17, 50, (tuple(reversed(range(64))),)),
        MeshBoxes((1000, 3), (64,), ((0, 0),), (range(64),)),
        MeshBoxes((1001, 3), (2, 64), ((1, 0),), (range(128),)),
    ],
    ids=["flat", "own tensor", "replicas", "other order", "rows", "rows on a grid"],
)
@pytest.mark.parametrize("rank", [0, 1, 63, 64, 127, 200])
def test_many_copies_are_arrays(source: Placement, rank: int) -> None:
    """The ranks whose copies are made in bulk: recipients, sources of a scatter, senders to many; not others."""
    whole, everywhere = Whole(source.shape, (rank,)), Whole(source.shape, range(128))
    for pair in ((source, whole), (whole, source), (source, everywhere), (everywhere, source)):
        copies = copies_of(*pair, rank=rank, replica=5)
        with singly():
            assert copies == copies_of(*pair, rank=rank, replica=5)
        assert isinstance(copies, CopyTable) or len(copies) < 48, (pair, len(copies))
        assert has_from(copies, rank) == any(copy.source_rank == rank for copy in copies)
        assert num_into(copies, rank) == pair[1].numel_on(rank)
        assert copies[: len(copies)] == tuple(copies)


@some
@given(oracle.layout_pairs())
def test_contiguous_dimensions_are_one(pair: tuple[Layout, Layout]) -> None:
    for copy in plan(*pair):
        addresses = oracle.addresses(copy)
        steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(addresses)}
        contiguous = steps <= {(1, 1)}
        assert copy.is_run == contiguous
        assert len(copy.sizes) == 1 or not contiguous
        assert len(copy.sizes) == len(copy.source_strides) == len(copy.target_strides) >= 1
        assert all(size > 1 for size in copy.sizes) or copy.sizes == (1,)
        dims = list(zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True))
        for (_, *outer), (size, *inner) in pairwise(dims):
            assert outer != [size * stride for stride in inner], f"two dimensions could be one: {copy}"


@some
@given(oracle.shapes, st.data())
def test_runs_need_one_copy_for_two_ranks(shape: tuple[int, ...], data: st.DataObject) -> None:
    """But for a source whose ranks hold elements in common: its copies end where any of these do."""
    placements = oracle.placements(shape).filter(lambda p: all(map(p.run, range(p.num_shards))))
    source = Layout({"w": data.draw(placements.filter(lambda p: not p.overlapping))})
    target = Layout({"w": data.draw(placements)})
    copies = plan(source, target)
    assert all(copy.is_run for copy in copies)
    assert all(len(group) == 1 for group in by_pair(copies).values())


class Vague(FlatChunks):
    """FlatChunks whose `shards_over` gives more shards than needed, which is allowed."""

    def shards_over(self, start: int, stop: int) -> range:
        return range(self.num_shards)


def test_shards_that_hold_nothing_of_it_make_no_copy() -> None:
    four, two = ((0, 1, 2, 3),), ((3, 4),)
    source, target = Layout({"w": Vague((12,), 0, 3, four)}), Layout({"w": Vague((12,), 0, 6, two)})
    exact = plan(Layout({"w": FlatChunks((12,), 0, 3, four)}), Layout({"w": FlatChunks((12,), 0, 6, two)}))
    assert len(exact) == 4
    assert plan(source, target) == exact
    for rank in range(5):
        assert by_pair(plan(source, target, rank=rank)) == by_pair(
            c for c in exact if rank in (c.source_rank, c.target_rank)
        )


# -------------------------------------------------------------------------------------------- plans by hand


def test_gather_a_flat_parameter() -> None:
    """The picture in FlatChunks: b begins at element 5; rank 5 holds it after the last element of a."""
    source = Layout({"a": FlatChunks((5,), 0, 4, ((4, 5, 6),)), "b": FlatChunks((3, 1), 5, 4, ((4, 5, 6),))})
    assert plan(source, source.whole_on([4])) == (
        *named("a", [Copy(4, 4, (4,), 0, (1,), 0, (1,)), Copy(5, 4, (1,), 0, (1,), 4, (1,))]),
        *named("b", [Copy(5, 4, (3,), 1, (1,), 0, (1,))]),
    )


def test_columns_are_strided() -> None:
    columns = Boxes((3, 4), tuple((r, (Block(Box((0, 2 * r), (3, 2)), 1),)) for r in (0, 1)))
    source, target = Layout({"w": columns}), Layout({"w": Whole((3, 4), (7,))})
    copies = [Copy(0, 7, (3, 2), 1, (2, 1), 0, (4, 1)), Copy(1, 7, (3, 2), 1, (2, 1), 2, (4, 1))]
    assert plan(source, target) == named("w", copies)
    column = Layout({"w": Boxes((3, 4), tuple((r, (Block(Box((0, r), (3, 1)), 0),)) for r in range(4)))})
    copy = plan(column, target)[0]
    assert (copy.sizes, copy.source_strides, copy.target_strides, copy.is_run) == ((3,), (1,), (4,), False)


def test_rows_of_the_same_width_are_one_run() -> None:
    halves = tuple((r, (Block(Box((2 * r, 0, 0), (2, 2, 3)), 0),)) for r in (0, 1))
    rows = Layout({"w": Boxes((4, 2, 3), halves)})
    copies = [Copy(0, 0, (12,), 0, (1,), 0, (1,)), Copy(1, 0, (12,), 0, (1,), 12, (1,))]
    assert plan(rows, rows.whole_on([0])) == named("w", copies)


# ------------------------------------------------------------------------------------------------- replicas


def sent(copies: Iterable[Copy]) -> Counter[int]:
    """The number of elements that every rank sends to others."""
    count: Counter[int] = Counter()
    for copy in copies:
        if copy.source_rank != copy.target_rank:
            count[copy.source_rank] += copy.numel
    return count


replica_groups = st.sampled_from([((0, 1), (2, 3)), ((0,), (1,), (2,)), ((3, 4), (0, 1), (6, 7)), ((5,),)])


@some
@given(replica_groups, st.lists(st.integers(0, 30), min_size=1, max_size=12))
def test_who_sends_depends_on_the_parameter_alone(groups: tuple[tuple[int, ...], ...], numels: list[int]) -> None:
    """Each parameter has the same copies when it is planned alone, in another order, or beside others."""
    world = len(groups[0])
    source = Layout({f"p{i}": FlatChunks((n,), 0, -(-n // world), groups) for i, n in enumerate(numels)})
    together = plan(source, source.whole_on([99]))
    backwards = source.only(source.fqns[::-1])
    assert sorted(plan(backwards, backwards.whole_on([99])), key=str) == sorted(together, key=str)
    for fqn in source.fqns:
        alone = source.only([fqn])
        own_copies = tuple(copy for copy in together if copy.fqn == fqn)
        assert plan(alone, alone.whole_on([99])) == own_copies


@some
@given(replica_groups, st.integers(1, 30))
def test_the_shards_of_a_parameter_are_sent_by_all_replicas(groups: tuple[tuple[int, ...], ...], chunk: int) -> None:
    world = len(groups[0])
    source = FlatChunks((chunk * world,), 0, chunk, groups)
    copies = copies_of(source, Whole(source.shape, (99,)), replica=replica_of("w"))
    group_of = {rank: i for i, group in enumerate(groups) for rank in group}
    loads = Counter(group_of[copy.source_rank] for copy in copies)
    assert len(loads) == min(world, len(groups))
    assert max(loads.values()) - min(loads.values()) <= 1


def test_many_names_are_spread_over_the_replicas() -> None:
    source = Layout({f"layers.{i}.weight": Whole((4,), (0, 1, 2, 3)) for i in range(400)})
    count = sent(plan(source, source.whole_on([99])))
    assert set(count) == {0, 1, 2, 3}
    assert max(count.values()) < 1.3 * min(count.values())


@some
@given(st.integers(1, 4), st.integers(1, 3), st.integers(4, 9), st.integers(1, 3))
def test_neighbours_read_evenly(replicas: int, times: int, first: int, parameters: int) -> None:
    """Consecutive ranks without the state, as many for each replica."""
    source = Layout({f"p{i}": Whole((3, 2), tuple(range(replicas))) for i in range(parameters)})
    copies = plan(source, source.whole_on(range(first, first + replicas * times)))
    assert sent(copies) == dict.fromkeys(range(replicas), 6 * times * parameters)


# --------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("other_shape", [(6,), (3, 2), (2, 3, 1), (), (0,)])
@pytest.mark.parametrize("rank", [None, 0, 5])
def test_another_shape_is_named(other_shape: tuple[int, ...], rank: int | None) -> None:
    with pytest.raises(LayoutError) as raised:
        copies_of(Whole((2, 3), (0,)), Whole(other_shape, (0,)), rank=rank)
    assert str(raised.value) == f"shape [2, 3] in the source, {list(other_shape)} in the target"


# ---------------------------------------------------------------------------------------------------- scale


class Counted(FlatChunks):
    """FlatChunks that count the calls of their methods."""

    calls: ClassVar[Counter[str]] = Counter()

    def run(self, shard: int) -> Run:
        self.calls["run"] += 1
        return super().run(shard)

    def blocks(self, shard: int) -> tuple[Block, ...]:
        self.calls["blocks"] += 1
        return super().blocks(shard)

    def holders(self, shard: int) -> tuple[int, ...]:
        self.calls["holders"] += 1
        return super().holders(shard)


class CountedMesh(MeshBoxes):
    """MeshBoxes that count the Boxes that they compute."""

    def box(self, shard: int) -> Box:
        Counted.calls["box"] += 1
        return super().box(shard)


WORLD, PARAMETERS = 4096, 200


def one_flat_parameter(world: int, kind: type[FlatChunks]) -> Layout:
    """200 parameters of many sizes in one flat parameter on `world` ranks."""
    shapes = [(37 * i % 101 + 1, 64 + i) for i in range(PARAMETERS)]
    chunk = -(-sum(a * b for a, b in shapes) // world)
    placements: dict[str, Placement] = {}
    start = 0
    for i, shape in enumerate(shapes):
        placements[f"p{i}"] = kind(shape, start, chunk, (tuple(range(world)),))
        start += shape[0] * shape[1]
    return Layout(placements)


@pytest.fixture
def calls() -> Counter[str]:
    Counted.calls.clear()
    return Counted.calls


@pytest.mark.parametrize("rank", [1, 2047, 4095])
def test_a_sender_among_4096_ranks_asks_only_about_itself(rank: int, calls: Counter[str]) -> None:
    source = one_flat_parameter(WORLD, Counted)
    copies = plan(source, source.whole_on([0]), rank=rank)
    assert sum(copy.numel for copy in copies) == sum(p.numel_on(rank) for p in source.placements.values())
    assert all(copy.source_rank == rank and copy.target_rank == 0 and copy.is_run for copy in copies)
    assert calls.total() <= 8 * PARAMETERS


def test_a_recipient_among_4096_ranks_asks_about_what_it_gets(calls: Counter[str]) -> None:
    source = one_flat_parameter(WORLD, Counted)
    copies = plan(source, source.whole_on([0]), rank=0)
    assert sum(copy.numel for copy in copies) == sum(p.numel for p in source.placements.values())
    assert len(copies) < WORLD + PARAMETERS, "one for every rank, and one for every border between parameters"
    assert calls.total() <= 8 * (WORLD + PARAMETERS)


def test_from_4096_ranks_to_3000_asks_about_neighbours(calls: Counter[str]) -> None:
    source, target = one_flat_parameter(WORLD, Counted), one_flat_parameter(3000, Counted)
    copies = plan(source, target, rank=1234)
    received = sum(copy.numel for copy in copies if copy.target_rank == 1234)
    assert received == sum(p.numel_on(1234) for p in target.placements.values()) > 0
    assert 0 < len(copies) <= 20
    assert calls.total() <= 12 * PARAMETERS


def test_from_4096_ranks_to_3000_of_a_mesh_asks_about_neighbours(calls: Counter[str]) -> None:
    def rows(world: int) -> Layout:
        shapes = [(10_000 + i, 64) for i in range(20)]
        placed = {f"p{i}": CountedMesh(s, (world,), ((0, 0),), (range(world),)) for i, s in enumerate(shapes)}
        return Layout(placed)

    source, target = rows(WORLD), rows(3000)
    copies = plan(source, target, rank=1234)
    received = sum(copy.numel for copy in copies if copy.target_rank == 1234)
    assert received == sum(p.numel_on(1234) for p in target.placements.values()) > 0
    assert len(copies) <= 6 * 20
    assert calls.total() <= 30 * 20
