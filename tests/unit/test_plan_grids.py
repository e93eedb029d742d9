"""Plans of parameters that are cut along several dimensions: in bulk, and exactly as box by box and element by element."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from kit import oracle
from kit.cases import some
from kit.layouts import Layout, named

from fsdp_optim.layout import (
    Block,
    Boxes,
    BoxTable,
    FlatChunks,
    FlatRuns,
    MeshBoxes,
    Placement,
    Run,
    Shape,
    StridedBoxes,
    Whole,
    boxes_of_run,
)
from fsdp_optim.plan import (
    Copy,
    CopyTable,
    Plans,
    Request,
    copies_into,
    copies_of,
    has_from,
    num_into,
    planner,
    rank_plan,
)


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (1, 5), (4, 1), (2, 3, 4), (3, 1, 2, 2)])
def test_a_table_cuts_runs_into_the_same_boxes_as_one_run(shape: Shape) -> None:
    runs = [Run(start, stop, 7) for start, stop in itertools.combinations(range(int(np.prod(shape)) + 1), 2)]
    table = BoxTable.of_runs(*(np.array([getattr(run, name) for run in runs]) for name in ("start", "stop", "offset")))
    cut = table.as_boxes(shape)
    assert cut.owners is not None
    cut, owners = cut.rows(some := np.flatnonzero((cut.lows < cut.highs).all(axis=0))), cut.owners[some]
    corners = list(zip(cut.lows.T.tolist(), cut.highs.T.tolist(), strict=True))
    wanted = [boxes_of_run(shape, run.start, run.stop) for run in runs]
    ends = [[o + n for o, n in zip(box.offsets, box.sizes, strict=True)] for boxes in wanted for box in boxes]
    assert corners == [(list(box.offsets), end) for box, end in zip(itertools.chain(*wanted), ends, strict=True)]
    assert owners.tolist() == [number for number, boxes in enumerate(wanted) for _ in boxes]


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
        assert placement.bounds(shard) == ((min(elements), max(elements) + 1) if elements else None)
        if not elements:
            assert run == Run(0, 0, 0)
        elif max(elements) - min(elements) + 1 == len(elements):
            assert run == Run(min(elements), max(elements) + 1, 0)
        else:
            assert run is None
    assert placement.num_replicas == len(placement.holders(0))


def grids(shape: Shape) -> dict[str, Placement]:
    """Cuts along several dimensions, with uneven and empty parts, replicas, one rank, and nested and interleaved cuts."""
    first, last = 0, len(shape) - 1
    here, few, many = (range(1),), (range(6),), (range(24),)
    return {
        "columns, then rows": MeshBoxes(shape, (3, 2), ((1, last), (0, first)), few),
        "rows, then columns": MeshBoxes(shape, (3, 2), ((0, first), (1, last)), few),
        "other ranks": MeshBoxes(shape, (3, 2), ((1, last), (0, first)), ((5, 3, 1, 0, 2, 4),)),
        "many empty": MeshBoxes(shape, (6, 4), ((1, last), (0, first)), many),
        "columns of replicas": MeshBoxes(shape, (2, 3), ((1, last),), few),
        "replicas beside tensor parallel": MeshBoxes(shape, (2, 3, 4), ((2, last), (1, first)), many),
        "two replicas": MeshBoxes(shape, (3, 2), ((1, last), (0, first)), (range(6), range(6, 12))),
        "nested rows": MeshBoxes(shape, (3, 2), ((0, first), (1, first)), few),
        "nested columns": MeshBoxes(shape, (3, 4), ((1, last), (0, last)), (range(12),)),
        "nested around rows": MeshBoxes(shape, (2, 3, 2), ((0, last), (1, first), (2, last)), (range(12),)),
        "middle": MeshBoxes(shape, (3, 2), ((0, last // 2), (1, last)), few),
        "interleaved rows": StridedBoxes(shape, (3, 2), ((0, first), (1, last)), few, (2, 1)),
        "interleaved columns": StridedBoxes(shape, (2, 3), ((0, last), (1, first)), few, (3, 1)),
        "interleaved runs": StridedBoxes(shape, (2, 5), ((0, last // 2), (1, first)), (range(10),), (2, 1)),
        "nested in one part": MeshBoxes(shape, (6, 1), ((0, first), (1, first)), few),
        "nested in six parts": MeshBoxes(shape, (1, 6), ((0, last), (1, last)), few),
        "one part of the rows": MeshBoxes(shape, (6, 1), ((0, last), (1, first)), few),
        "replicas of one part": MeshBoxes(shape, (2, 1, 3), ((0, first), (1, first)), few),
        "one rank": MeshBoxes(shape, (1, 1), ((0, first), (1, last)), here),
    }


def others(shape: Shape) -> dict[str, Placement]:
    """What grids are gathered into, saved as, or loaded into."""
    numel = int(np.prod(shape))
    edges = [numel * i // 7 for i in range(8)]
    boxes = [box for start, stop in itertools.pairwise(edges) for box in boxes_of_run(shape, start, stop)]
    return {
        "whole": Whole(shape, (2, 0), 3),
        "chunks": FlatChunks(shape, 0, -(-numel // 6), (range(6),)),
        "many chunks": FlatChunks(shape, 0, -(-numel // 24), (range(24),)),
        "chunks of a flat parameter": FlatChunks(shape, 5, -(-(numel + 9) // 7), (range(7),)),
        "replicas of chunks": FlatChunks(shape, 0, -(-numel // 4), (range(4), range(4, 8)), own_tensor=True),
        "rows": MeshBoxes(shape, (5,), ((0, 0),), (range(5),)),
        "grid": MeshBoxes(shape, (2, 4), ((0, 0), (1, len(shape) - 1)), (range(8),)),
        "runs": FlatRuns(shape, tuple(edges[:-1]), tuple(edges[1:]), (6, 5, 4, 3, 2, 1, 0)),
        "boxes": Boxes(shape, tuple((rank, (Block(box, 0),)) for rank, box in enumerate(boxes))),
    }


SHAPES: list[Shape] = [(7, 6), (3, 8), (13, 2), (5, 8, 3), (2, 3, 2, 4)]
CASES = [(name, shape) for shape in SHAPES for name in grids(shape)]
SOON, LATER = some(CASES, every=4)


@pytest.mark.parametrize(("name", "shape"), [*SOON, *(pytest.param(*case, marks=pytest.mark.slow) for case in LATER)])
def test_a_grid_is_planned_in_bulk_as_one_by_one_and_element_by_element(name: str, shape: Shape) -> None:
    grid = grids(shape)[name]
    for other in others(shape).values():
        for source, target in ((grid, other), (other, grid)):
            whole = check_plan(source, target)
            for rank in {0, 3, 5, max(source.ranks), max(target.ranks)}:
                own_copies = [copy for copy in whole if rank in (copy.source_rank, copy.target_rank)]
                in_bulk = planned(source, target, rank, fewest=0)
                assert isinstance(in_bulk, CopyTable)
                assert in_bulk.are_runs == all(copy.is_run for copy in in_bulk)
                assert list(in_bulk) == list(planned(source, target, rank, fewest=10**9))
                assert sorted(in_bulk, key=str) == sorted(own_copies, key=str)
                assert {between: [c for c in in_bulk if ends(c) == between] for between in map(ends, own_copies)} == {
                    between: [c for c in own_copies if ends(c) == between] for between in map(ends, own_copies)
                }, "both ranks plan the copies between them in the same order"
                for index, copy in enumerate(in_bulk):
                    assert in_bulk[index] == copy == in_bulk[index - len(in_bulk)]
                rows = [(*ends(c), c.numel, c.source_offset, c.target_offset, None if c.is_run else c) for c in in_bulk]
                assert list(in_bulk.rows()) == rows
                assert num_into(in_bulk, rank) == target.numel_on(rank)
                assert has_from(in_bulk, rank) == any(copy.source_rank == rank for copy in own_copies)


def ends(copy: Copy) -> tuple[int, int]:
    """The two ranks of a copy."""
    return copy.source_rank, copy.target_rank


def planned(source: Placement, target: Placement, rank: int, *, fewest: int) -> Sequence[Copy]:
    """The copies of a rank, in bulk from `fewest` pairs of shards on."""
    with mock.patch.multiple(planner, RUNS_FROM=fewest, BOXES_FROM=fewest):
        copies = copies_of(source, target, rank=rank, replica=5)
        received = [copy for copy in copies if copy.target_rank == rank]
        assert list(copies_into(source, target, rank, 5)) == received
    return copies


def check_plan(source: Placement, target: Placement) -> Sequence[Copy]:
    """The copies of all ranks, executed element by element."""
    layouts = [Layout({"": placement}) for placement in (source, target)]
    before, wanted = (oracle.local_arrays(layout, {"": 1}) for layout in layouts)
    copies = copies_of(source, target, replica=5)
    after = oracle.execute(named("", copies), before, wanted)
    assert {key: array.tolist() for key, array in after.items()} == {
        key: array_wanted.tolist() for key, array_wanted in wanted.items()
    }
    return copies


@pytest.mark.parametrize("shape", [(40, 24), (8, 16, 6)])
def test_many_copies_of_a_grid_are_a_table(shape: Shape) -> None:
    """The default limits: the recipient of a gather, and a rank that writes long runs."""
    grid = MeshBoxes(shape, (8, 4), ((1, len(shape) - 1), (0, 0)), (range(32),))
    for target in (Whole(shape, (0,)), FlatChunks(shape, 0, -(-grid.numel // 32), (range(32),))):
        for source, to in ((grid, target), (target, grid)):
            copies = copies_of(source, to, rank=0)
            assert isinstance(copies, CopyTable)
            assert copies == planned(source, to, 0, fewest=10**9)


def requests_of(shapes: Sequence[Shape], ranks: Sequence[int]) -> list[Request]:
    """Many requests of many kinds, in an order in which those of one kind are far apart."""
    requests = []
    for number, (shape, rank) in enumerate(itertools.product(shapes, ranks)):
        more = {
            "rows, then columns of two parts": MeshBoxes(shape, (2, 3), ((0, 0), (1, len(shape) - 1)), (range(6),)),
            "the first two dimensions": MeshBoxes(shape, (3, 2), ((0, 0), (1, 1)), (range(6),)),
            "chunks in own tensors": replace(others(shape)["chunks of a flat parameter"], own_tensor=True),
            "whole on one rank": Whole(shape, (2,)),
        }
        every = [*grids(shape).values(), *more.values()]
        for grid, other in itertools.product(every, [*others(shape).values(), *more.values()]):
            replica = number + len(requests)
            requests += [Request(grid, other, rank, replica, number % 4 > 0), Request(other, grid, rank, replica)]
    return requests


@pytest.mark.parametrize("together", [300, 10**9])
def test_parameters_of_one_kind_are_planned_together_as_one_by_one(together: int) -> None:
    requests = [
        *requests_of([(7, 6), (3, 8), (13, 2), (1, 5)], (0,)),
        *requests_of([(8, 6), (9, 1)], (3,)),
        *requests_of([(5, 8, 3), (2, 3, 4)], (3,)),
    ]
    requests += requests[::7]
    with mock.patch.multiple(planner, RUNS_FROM=10**9, BOXES_FROM=10**9):
        wanted = [singly(request) for request in requests]
    with (
        mock.patch.multiple(planner, BOXES_FROM=0),
        mock.patch.object(rank_plan, "PAIRS_TOGETHER", together),
        mock.patch.object(planner, "copies_of_kind", wraps=planner.copies_of_kind) as at_once,
    ):
        plans = list(Plans(10**9).each(requests))
    for request, planned, copies in zip(requests, plans, wanted, strict=True):
        assert list(planned) == list(copies), request
        assert (planned.receives, planned.num_wanted) == (
            request.target.shard_of(request.rank) is not None,
            request.target.numel_on(request.rank),
        )
        if isinstance(planned.copies, CopyTable):
            assert planned.copies.are_runs == all(copy.is_run for copy in copies)
            columns = planned.copies.columns
            assert columns.base is None or columns.base.size == columns.size, "no plan keeps the memory of others"
    assert any(len(call.args[0]) > 1 for call in at_once.call_args_list)


def singly(request: Request) -> Sequence[Copy]:
    """The copies of a request, planned for themselves."""
    source, target, rank, replica, sends = request
    return (
        copies_of(source, target, rank=rank, replica=replica) if sends else copies_into(source, target, rank, replica)
    )


@pytest.mark.parametrize(("rank", "together"), [(0, 5 * 32), (99, 5)], ids=["recipient", "no pairs"])
def test_plans_are_made_together_for_some_requests_at_a_time(rank: int, together: int) -> None:
    """A grid of 4 x 8 ranks has 32 pairs of shards on the recipient, and a request takes room also without pairs."""
    asked, part = [], rank == 0

    def requests() -> Iterator[Request]:
        for size in range(40, 80):
            asked.append(size)
            shape = (size, 24)
            yield Request(MeshBoxes(shape, (8, 4), ((1, 1), (0, 0)), (range(32),)), Whole(shape, (0,)), rank)

    with mock.patch.object(rank_plan, "PAIRS_TOGETHER", together):
        plans = Plans().each(requests())
        for number in (5, 10):
            assert next(plans).num_filled == (35 + number) * 24 * part
            assert asked == list(range(40, 40 + number))
            nums_filled = [next(plans).num_filled for _ in range(4)]
            assert nums_filled == [size * 24 * part for size in range(36 + number, 40 + number)]


def test_a_layer_of_a_grid_is_planned_at_once() -> None:
    """The default limits: a rank's part of a save and of a load of parameters of many shapes."""
    shapes = [(40 + 8 * number, 24 + 4 * (number % 3)) for number in range(30)]
    grids_of = [MeshBoxes(shape, (8, 4), ((1, 1), (0, 0)), (range(32),)) for shape in shapes]
    chunks = [FlatChunks(shape, 0, -(-shape[0] * shape[1] // 32), (range(32),)) for shape in shapes]
    requests = [Request(*pair, 17) for pair in zip(grids_of, chunks, strict=True)]
    requests += [Request(*pair, 17) for pair in zip(chunks, grids_of, strict=True)]
    with mock.patch.object(planner, "copies_of_kind", wraps=planner.copies_of_kind) as at_once:
        plans = list(Plans().each(requests))
    assert [len(call.args[0]) for call in at_once.call_args_list] == [30, 30]
    assert [list(planned) for planned in plans] == [list(singly(request)) for request in requests]


def test_a_request_is_hashed_a_few_times() -> None:
    """Hashing a placement takes as long as some of what is done for it: to look for a plan here and there, and to keep it."""
    shapes = [(number,) for number in range(10, 90)]
    requests = [Request(FlatChunks(shape, 0, 30, (range(4),)), Whole(shape, (0,)), 0) for shape in shapes]
    plans = Plans()
    with mock.patch.object(FlatChunks, "__hash__", autospec=True, side_effect=FlatChunks.__hash__) as hashed:
        made = list(plans.each([*requests, *requests[:20]]))
        assert hashed.call_count <= 4 * len(requests) + 20
        hashed.reset_mock()
        again = list(plans.each(requests))
        assert hashed.call_count <= 4 * len(requests)
    assert all(map(operator.is_, again, made))
    assert all(map(operator.is_, made[80:], made))


def test_listed_boxes_that_are_runs_are_planned_alike_by_a_rank_with_many_pairs_and_by_one_with_few() -> None:
    boxes = others((5, 8, 3))["boxes"]
    chunks = others((5, 8, 3))["chunks of a flat parameter"]
    for source, target in ((boxes, chunks), (chunks, boxes)):
        for few, many in itertools.product(boxes.ranks, chunks.ranks):
            plans = [copies_of(source, target, rank=rank) for rank in (few, many)]
            between = [[copy for copy in copies if {few, many} == set(ends(copy))] for copies in plans]
            assert between[0] == between[1]
