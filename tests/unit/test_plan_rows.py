"""Blocks of matrices (tensor parallel) meet runs: by arithmetic, and exactly as box by box."""

from __future__ import annotations

import itertools

import pytest

from fsdp_optim.layout import Block, Box, FlatChunks, MeshBoxes, Placement, Run, bounds_of_box
from fsdp_optim.layout.boxes import boxes_of_run
from fsdp_optim.plan import Copy, copies_of, planner
from fsdp_optim.plan.rows import copy_of_part, parts_of


def box_by_box(shape: tuple[int, int], block: Block, run: Run, *, is_from_block: bool) -> list[Copy]:
    """The same copies from the boxes that the run consists of."""
    found, offset = [], run.offset
    for box in boxes_of_run(shape, run.start, run.stop):
        common = block.box.intersect(box)
        if common is not None:
            ends = (block, 1, Block(box, offset), 2) if is_from_block else (Block(box, offset), 1, block, 2)
            found.append(planner._block_copy("w", common, *ends))
        offset += box.numel
    return sorted(found, key=lambda copy: (copy.target_offset, copy.source_offset))


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (5, 2), (1, 5), (4, 1)])
def test_a_block_of_a_matrix_and_a_run_have_the_copies_of_their_boxes(shape: tuple[int, int]) -> None:
    height, width = shape
    tops, lefts = itertools.combinations(range(height + 1), 2), list(itertools.combinations(range(width + 1), 2))
    runs = [Run(start, stop, 7) for start, stop in itertools.combinations(range(height * width + 1), 2)]
    for (top, bottom), (left, right) in itertools.product(tops, lefts):
        block = Block(Box((top, left), (bottom - top, right - left)), 3)
        first, stop = bounds_of_box(shape, block.box)
        if stop - first == block.box.numel:
            continue  # it is a run itself
        for run, is_from_block in itertools.product(runs, (True, False)):
            made = [
                copy_of_part(part, shape, block, "w", 1, 2, is_from_block=is_from_block)
                for part in parts_of(width, block, run)
            ]
            assert made == box_by_box(shape, block, run, is_from_block=is_from_block), (block, run)


def test_a_run_without_elements_has_no_part() -> None:
    assert not list(parts_of(4, Block(Box((0, 1), (3, 2)), 0), Run(5, 5, 0)))


MESHES = [
    MeshBoxes(shape, mesh, splits, (range(mesh[0] * mesh[1]),))
    for shape in ((7, 6), (3, 8), (2, 5))
    for mesh in ((2, 3), (4, 2))
    for splits in (((1, 1), (0, 0)), ((0, 0), (1, 1)), ((1, 0), (0, 1)), ((1, 1),), ((0, 0), (1, 0)), ((0, 1), (1, 1)))
]


@pytest.mark.parametrize("placement", MESHES, ids=str)
def test_no_shard_is_passed_over_and_each_is_a_run_where_it_is_one(placement: MeshBoxes) -> None:
    numel = placement.numel
    held = [
        {i * placement.shape[1] + j for i, j in itertools.product(*map(range, box.offsets, ends))}
        for box in map(placement.box, range(placement.num_shards))
        for ends in [tuple(o + n for o, n in zip(box.offsets, box.sizes, strict=True))]
    ]
    for start, stop in itertools.combinations(range(numel + 1), 2):
        over = list(placement.shards_over(start, stop))
        assert over == sorted(set(over))
        needed = {shard for shard, elements in enumerate(held) if not elements.isdisjoint(range(start, stop))}
        assert needed <= set(over), (start, stop)
        row = placement.shape[1]
        if start // row == (stop - 1) // row and len({dim for _, dim in placement.splits}) == 2:
            assert needed == set(over), (start, stop)  # inside of one row none is looked at in vain
    for shard, elements in enumerate(held):
        run = placement.run(shard)
        if not elements:
            assert run == Run(0, 0, 0)
        elif max(elements) - min(elements) + 1 == len(elements):
            assert run == Run(min(elements), max(elements) + 1, 0)
        else:
            assert run is None
    assert placement.num_replicas == len(placement.holders(0))


@pytest.mark.parametrize("placement", MESHES, ids=str)
def test_both_ends_of_a_plan_agree_on_every_copy(placement: MeshBoxes) -> None:
    """Elements move once, and the two ranks of a copy plan it alike."""
    size = len(placement.ranks)
    chunks: Placement = FlatChunks(placement.shape, 0, -(-placement.numel // size), (range(size),))
    for source, target in ((placement, chunks), (chunks, placement)):
        by_rank = {rank: list(copies_of(source, target, rank=rank)) for rank in range(size)}
        for a, b in itertools.permutations(range(size), 2):
            between = [[c for c in by_rank[r] if (c.source_rank, c.target_rank) == (a, b)] for r in (a, b)]
            assert between[0] == between[1]
        for rank in range(size):
            received = sum(copy.numel for copy in by_rank[rank] if copy.target_rank == rank)
            assert received == target.numel_on(rank)
