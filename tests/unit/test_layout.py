"""Layouts against sets of elements."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from kit import oracle
from kit.cases import examples
from kit.layouts import Layout, Piece

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import (
    Block,
    Box,
    Boxes,
    FlatChunks,
    MeshBoxes,
    Placement,
    Whole,
)

some = examples(40)


@some
@given(oracle.layout_pairs())
def test_pieces_are_everything_that_a_rank_holds(pair: tuple[Layout, Layout]) -> None:
    layout = pair[0]
    assert set(layout.ranks) == {rank for p in layout.placements.values() for rank in oracle.held(p)}
    assert layout.ranks == tuple(sorted(set(layout.ranks)))
    for rank in (*layout.ranks, 99):
        held: dict[str, dict[int, int]] = {fqn: {} for fqn in layout.fqns}
        for piece in layout.pieces(rank):
            assert piece.rank == rank
            elements = oracle.elements_of_box(layout.placements[piece.fqn].shape, piece.box)
            places = oracle.addresses_of_block(Block(piece.box, piece.offset, piece.strides))
            held[piece.fqn] |= dict(zip(places, elements, strict=True))
        assert held == {fqn: oracle.held(p).get(rank, {}) for fqn, p in layout.placements.items()}


def test_a_layout_by_hand() -> None:
    layout = Layout({"b": FlatChunks((2, 2), 1, 3, ((1, 0),)), "a": Whole((), (7,), offset=2)})
    assert layout.fqns == ("b", "a")
    assert layout.ranks == (0, 1, 7)
    assert list(layout.pieces(1)) == [Piece("b", Box((0, 0), (1, 2)), 1, 1)]
    assert list(layout.pieces(7)) == [Piece("a", Box((), ()), 7, 2)]
    assert layout.only(["a"]).placements == {"a": Whole((), (7,), offset=2)}
    assert layout.only(["a", "b"]).fqns == ("a", "b")
    assert layout.whole_on([3, 4]) == Layout({"b": Whole((2, 2), (3, 4)), "a": Whole((), (3, 4))})


def missing_elements() -> list[tuple[Placement, tuple[int, int]]]:
    boxes = Boxes((6,), ((0, (Block(Box((0,), (3,)), 0),)), (4, (Block(Box((2,), (2,)), 0),)), (5, ())))
    hole = Boxes((2, 3), ((0, (Block(Box((0, 0), (1, 2)), 0), Block(Box((1, 0), (1, 3)), 2))),))
    return [
        (boxes, (4, 6)),
        (hole, (2, 3)),
        (Boxes((), ()), (0, 1)),
        (FlatChunks((6,), 2, 2, ((3, 4, 5),)), (4, 6)),
        (FlatChunks((6,), 9, 2, ((3, 4), (5, 6))), (0, 6)),
        (Whole((2, 2), ()), (0, 4)),
    ]


@pytest.mark.parametrize(("placement", "gap"), missing_elements())
def test_a_placement_knows_what_no_rank_holds(placement: Placement, gap: tuple[int, int]) -> None:
    assert placement.gap() == gap


def test_parameters_without_elements_need_no_holder() -> None:
    for placement in (Whole((0, 3), ()), Boxes((0,), ()), FlatChunks((2, 0), 0, 0, ((0, 1),))):
        assert placement.gap() is None
        assert not [piece for rank in (0, 1) for piece in Layout({"w": placement}).pieces(rank)]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Box((), ()), "sizes"),
        (Whole((), (0,)), "on"),
        (FlatChunks((1,), 0, 1, ((0,),)), "start"),
        (Boxes((0,), ()), "by_rank"),
        (MeshBoxes((), (1,), (), ((0,),)), "splits"),
    ],
)
def test_values_are_frozen(value: object, name: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(value, name, ())


def test_a_rank_that_is_listed_twice_is_refused() -> None:
    for make in (
        lambda: FlatChunks((4,), 0, 2, ((0, 1), (1, 0))),
        lambda: FlatChunks((4,), 0, 2, ((1, 1),)),
        lambda: MeshBoxes((4,), (2,), ((0, 0),), ((0, 1), (1, 2))),
        lambda: Whole((1,), (1, 1)),
    ):
        with pytest.raises(LayoutError, match="listed twice"):
            make()


ON_TWO_RANKS = {
    "whole": Whole((3, 4), (0,)),
    "flat": FlatChunks((3, 4), 2, 7, ((0, 1),)),
    "rows": MeshBoxes((3, 4), (2,), ((0, 0),), ((0, 1),)),
    "rows, replicated": MeshBoxes((3, 4), (1, 2), ((1, 0),), ((0, 1),)),
    "columns": MeshBoxes((3, 4), (2,), ((0, 1),), ((0, 1),)),
}


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("whole", Whole((3, 4), (5, 3))),
        ("flat", FlatChunks((3, 4), 2, 7, ((6, 2), (7, 3)))),
        ("rows", MeshBoxes((3, 4), (2,), ((0, 0),), ((4, 9),))),
        ("rows, replicated", MeshBoxes((3, 4), (3, 2), ((1, 0),), ((1, 2, 3, 4, 5, 6),))),
        ("columns", MeshBoxes((3, 4), (2,), ((0, 1),), ((8, 9), (2, 3)))),
    ],
)
def test_equal_cuts_on_any_ranks_are_equal_without_ranks(name: str, placement: Placement) -> None:
    """Without ranks, a placement on any ranks is that of its shards on ranks 0, 1, 2, ..., with the same boxes."""
    assert placement.without_ranks() == ON_TWO_RANKS[name].without_ranks() == ON_TWO_RANKS[name]
    assert placement.without_ranks().num_replicas == 1
    for shard in range(placement.num_shards):
        assert placement.without_ranks().holders(shard) == (shard,)
        assert placement.without_ranks().blocks(shard) == placement.blocks(shard)
    assert [other for other, cut in ON_TWO_RANKS.items() if cut == placement.without_ranks()] == [name]
