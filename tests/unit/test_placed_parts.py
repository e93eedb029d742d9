"""Parts of live parameters, element by element, under every Placement. `oracle.placements` draws them for other tests too."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import oracle
from kit.cases import examples
from kit.layouts import Layout

from fsdp_optim import View
from fsdp_optim.layout import Boxes, FlatChunks, MeshBoxes, Placement, StridedBoxes, Whole
from fsdp_optim.layout.views import PlacedPart, live_placement, placed_part, placement_of_part
from fsdp_optim.plan import clip_to_source, clip_to_target, copies_of

many = examples(100)
some = examples(40)

placed = oracle.shapes.flatmap(oracle.placed_parts)


def elements_of(placement: Placement, rank: int) -> dict[int, int]:
    """{index into the local tensor: element of the part}, from the Blocks."""
    shard = placement.shard_of(rank)
    return {
        place: element
        for block in (placement.blocks(shard) if shard is not None else ())
        for place, element in zip(
            oracle.addresses_of_block(block), oracle.elements_of_box(placement.shape, block.box), strict=True
        )
    }


@many
@given(placed)
def test_a_part_is_where_its_elements_of_the_live_parameter_are(placement: PlacedPart) -> None:
    held = oracle.held(placement)
    assert placement.ranks == tuple(sorted(held)) == placement.live.ranks
    for rank, own_elements in held.items():
        assert elements_of(placement, rank) == own_elements
    again = placement_of_part(placement.live, placement.part)
    assert oracle.held(again) == held
    if isinstance(placement.live, Boxes):
        assert isinstance(again, Boxes), "listed again, so that lists of ranks join"
        assert (again.is_open, again.apart) == (placement.live.is_open, placement.live.apart)
    else:
        assert live_placement(again) == placement.live


@many
@given(placed)
def test_packed_elements_are_the_same_in_memory_without_gaps(placement: PlacedPart) -> None:
    packed = placement.in_memory_of_its_own()
    for rank, own_elements in oracle.held(placement).items():
        elements = elements_of(packed, rank)
        assert sorted(elements) == list(range(len(own_elements)))
        assert sorted(elements.values()) == sorted(own_elements.values())
        assert packed.numel_on(rank) == len(own_elements)


@some
@given(placed)
def test_on_lowest_ranks_and_without_ranks(placement: PlacedPart) -> None:
    held = oracle.held(placement)
    lowest = placement.on_lowest_ranks()
    for rank, own_elements in oracle.held(lowest).items():
        assert own_elements == held[rank]
    assert placement.without_ranks().num_shards == placement.num_shards


def test_parts_of_replicas_join() -> None:
    live = MeshBoxes((4, 6), (2,), ((0, 0),), (range(2),))
    part = dict(View("w", "(a + b) c", {"x": "c a", "y": "c b"}).bind("w", (4, 6)).parts)
    placement, other = (placement_of_part(each, part["x"]) for each in (live, replace(live, replicas=((2, 3),))))
    joined = placement.join(other)
    assert joined is not None
    assert oracle.held(joined) == oracle.held(placement) | oracle.held(other)
    assert placement.join(placement_of_part(live, part["y"])) is None
    assert placement.join(live) is None
    assert placement.join(placement_of_part(Whole((4, 6), (5,)), part["x"])) is None


def test_layers_share_one_placement() -> None:
    view = View("l.{i}.w", "(a + b) c", {"l.{i}.x": "a c", "l.{i}.y": "b c"})
    live = MeshBoxes((4, 6), (2,), ((0, 0),), (range(2),))
    first, other = (view.bind(f"l.{i}.w", (4, 6)).parts[0][1] for i in range(2))
    assert placed_part(live, first) is placed_part(replace(live), other)


@pytest.mark.parametrize(
    ("live", "axes", "in_part", "in_memory"),
    [
        (MeshBoxes((8, 6), (2,), ((0, 0),), (range(2),)), "(f (a + b)) c", (12, 1), (12, 2)),
        (MeshBoxes((8, 6), (2,), ((0, 1),), (range(2),)), "(f (a + b)) c", (12, 4), (12, 4)),
        (Whole((8, 6), (0,)), "c (f (a + b))", (24, 1), (24, 24)),
        (Whole((8, 6), (0,)), "((a + b) f) c", (24, 1), (24, 1)),
    ],
)
def test_rows(live: Placement, axes: str, in_part: tuple[int, int], in_memory: tuple[int, int]) -> None:
    """By which a save decides whether ranks write the elements from where they are, side by side, or as other ranks' too."""
    parts = {"x": "(f a) c", "y": "(f b) c"}
    (_, part), _ = (
        View("w", axes, parts, a=1 if "(f" in axes else 4, b=1 if "(f" in axes else 4).bind("w", (8, 6)).parts
    )
    placement = placed_part(live, part)
    assert placement.rows(in_memory=False) == in_part
    assert placement.rows(in_memory=True) == in_memory


@many
@given(placed, st.data())
def test_copies_are_clipped_to_a_window_of_either_side(placement: PlacedPart, data: st.DataObject) -> None:
    """Also those of a transposed part, whose rows lie between one another."""
    whole = Whole(placement.shape, (3,), data.draw(st.integers(0, 2)))
    source, target = (whole, placement) if data.draw(st.booleans()) else (placement, whole)
    if source.gap() is not None:
        return
    start = data.draw(st.integers(0, 40))
    stop = data.draw(st.integers(start, start + 40))
    for copy in copies_of(source, target):
        every = oracle.addresses(copy)
        to = [pair for piece in clip_to_target(copy, start, stop) for pair in oracle.addresses(piece)]
        assert sorted(to) == sorted((a, b - start) for a, b in every if start <= b < stop)
        out = [pair for piece in clip_to_source(copy, start, stop) for pair in oracle.addresses(piece)]
        assert sorted(out) == sorted((a - start, b) for a, b in every if start <= a < stop)


@some
@given(st.data(), oracle.shapes)
def test_plans_between_parts_and_other_placements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """From a fused parameter to an unfused one, and back, each on ranks of its own."""
    sides = data.draw(oracle.placed_parts(shape)), data.draw(oracle.placements(shape))
    source, target = sides if data.draw(st.booleans()) else reversed(sides)
    if source.gap() is not None:
        return
    before = oracle.local_arrays(Layout({"w": source}), {"w": 0})
    wanted = oracle.local_arrays(Layout({"w": target}), {"w": 0})
    filled: dict[tuple[int, int], int] = {}
    for copy in copies_of(source, target):
        for at, to in oracle.addresses(copy):
            assert (copy.target_rank, to) not in filled
            filled[copy.target_rank, to] = int(before["w", copy.source_rank][at])
    for (_, rank), array in wanted.items():
        expected = {(rank, place): int(value) for place, value in enumerate(array) if value != oracle.HOLE}
        assert {key: value for key, value in filled.items() if key[0] == rank} == expected


def test_tensor_parallel_of_megatron_is_the_live_placement() -> None:
    """Rank r has `[gate_r; up_r]`: interleaved cuts of the rows, not of the View."""
    live = StridedBoxes((8, 2), (2,), ((0, 0),), (range(2),), (2,))
    parts = dict(View("w", "(a + b) c", {"gate": "a c", "up": "b c"}).bind("w", (8, 2)).parts)
    gate, up = (placement_of_part(live, parts[name]) for name in ("gate", "up"))
    for rank in range(2):
        rows = [4 * rank + element for element in range(4)]
        assert elements_of(gate, rank) == dict(zip(range(4), rows, strict=True))
        assert elements_of(up, rank) == dict(zip(range(4, 8), rows, strict=True))


def test_a_shard_of_a_flat_parameter_cuts_a_part_anywhere() -> None:
    part = dict(View("w", "(f (a + b)) c", {"x": "(f a) c", "y": "(f b) c"}, a=1, b=1).bind("w", (4, 3)).parts)["y"]
    placement = placement_of_part(FlatChunks((4, 3), 2, 5, (range(3),)), part)
    assert elements_of(placement, 0) == {}
    assert elements_of(placement, 1) == {0: 0, 1: 1, 2: 2}
    assert elements_of(placement, 2) == {1: 3, 2: 4, 3: 5}
