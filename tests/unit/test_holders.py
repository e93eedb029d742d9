"""A RankSet answers as the placement itself does, also for a second placement with the same groups of ranks."""

from __future__ import annotations

import itertools

import pytest

from fsdp_optim.layout import Block, Box, Boxes, FlatChunks, MeshBoxes, Placement, RankSet, Whole

SETS = [ranks for length in range(1, 5) for ranks in itertools.combinations(range(4), length)]
ROW = Block(Box((0,), (4,)), 0)


@pytest.mark.parametrize(
    "placements",
    [
        (FlatChunks((4,), 0, 2, ((0, 1),)), FlatChunks((6,), 0, 3, ((0, 1),))),
        (FlatChunks((4,), 0, 2, ((0, 1), (2, 3))), FlatChunks((2,), 1, 2, ((0, 1), (2, 3)))),
        (MeshBoxes((4,), (2,), ((0, 0),), ((1, 3),)), MeshBoxes((5,), (2,), ((0, 0),), ((1, 3),))),
        (Whole((1,), (0, 2)), Whole((3, 3), (0, 2))),
        (Boxes((4,), ((3, (ROW,)), (1, ()))), Boxes((4,), ((1, (ROW,)), (3, (ROW,))))),
    ],
)
def test_holders(placements: tuple[Placement, Placement]) -> None:
    for ranks in SETS:
        known = RankSet(ranks)
        for placement in (*placements, *placements):
            assert known.is_all_holders_of(placement) == (placement.ranks == ranks), (placement, ranks)
            assert known.includes_holders_of(placement) == set(placement.ranks).issubset(ranks), (placement, ranks)
