"""Parameters whose ranks list their own shards: the merge of all lists, or an error for missing elements."""

from __future__ import annotations

import unittest

import pytest

from fsdp_optim import StateError
from fsdp_optim.layout import Block, Box, Boxes, FlatChunks, Whole
from fsdp_optim.state.merged import GlobalState, LiveParam, RankReport
from fsdp_optim.state.merged.merge_reports import merge_reports
from fsdp_optim.state.values import Summary

SHAPE = (6, 2)
SUMMARY = Summary(sharded=(("exp_avg", "float32"),), names=("exp_avg",))


def report(rank: int, *rows: tuple[int, int]) -> RankReport:
    """The report of a rank that has some of the rows, as pairs (first, number)."""
    blocks, offset = [], 0
    for first, num in rows:
        blocks.append(Block(Box((first, 0), (num, 2)), offset))
        offset += num * 2
    placement = Boxes(SHAPE, ((rank, tuple(blocks)),), is_open=True)
    return RankReport("gather", ("w",), (LiveParam(("w",), (placement,), 0, (), True, SUMMARY),), ((),))


def drawn(*reports: RankReport) -> GlobalState:
    return merge_reports([(rank_report, (rank,)) for rank, rank_report in enumerate(reports)])


class OpenShardsTest(unittest.TestCase):
    def test_all_lists_together(self) -> None:
        """One rank has several shards, another rank has none."""
        placement = drawn(report(0, (4, 2), (0, 1)), report(1), report(2, (1, 3))).params["w"].placement
        self.assertEqual([placement.numel_on(rank) for rank in range(4)], [6, 0, 6, 0])
        self.assertIsInstance(placement, Boxes)
        self.assertFalse(isinstance(placement, Boxes) and placement.is_open)

    def test_what_no_rank_lists(self) -> None:
        for missing, said in (
            ((report(0, (2, 4)), report(1)), "w: the elements 0 to 3 of 12 are in no shard that ranks 0, 1 list"),
            ((report(0, (0, 2)), report(1, (3, 3))), "w: the elements 4 to 5 of 12 are in no shard"),
            (
                (report(0, (0, 5)),),
                "w: the elements 10 to 11 of 12 are in no shard that rank 0 lists; give process_group=",
            ),
        ):
            with self.subTest(said), self.assertRaisesRegex(StateError, said):
                drawn(*missing)


def test_a_rank_without_a_parameter_that_it_should_hold() -> None:
    """Each rank tells what it has; a placement names all that should have some."""
    bias = LiveParam(("b",), (Whole((2,), (0, 1)),), 0, (), True, SUMMARY)
    weight = LiveParam(("w",), (FlatChunks((4,), 0, 2, ((0, 1),)),), 0, (), True, SUMMARY)
    both, bias_alone = (
        RankReport("gather", tuple(p.fqns[0] for p in params), params, ((),)) for params in ((bias, weight), (bias,))
    )
    with pytest.raises(StateError, match=r"w: rank 1 should hold a part of this parameter, .*; rank 0 has one"):
        drawn(both, bias_alone)
    assert drawn(both, both).params["w"].placement == weight.placements[0]
