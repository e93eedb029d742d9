"""In which order the placements of a DTensor cut a dimension, where `_StridedShard` only encodes that order."""

from __future__ import annotations

import pytest

from fsdp_optim.foreign.per_rank.torch_shards import ShardFields, _splits
from fsdp_optim.layout import contiguous_order

Cuts = list[tuple[int, int]]

ORDERS: list[tuple[tuple[int, ...], Cuts, list[int] | None]] = [
    ((2,), [(0, 1)], [0]),
    ((2, 3), [(0, 1), (1, 1)], [0, 1]),
    ((2, 3), [(0, 3), (1, 1)], [1, 0]),  # fully_shard over tensor parallel
    ((4, 3, 2), [(0, 2), (1, 2), (2, 1)], [2, 0, 1]),
    ((2, 3, 2), [(0, 6), (1, 2), (2, 1)], [2, 1, 0]),
    ((2,), [(0, 2)], None),  # fused rows under tensor parallel
    ((2, 2), [(0, 1), (1, 2)], None),  # torch cuts by the first mesh dimension, and interleaves what is left
    ((2, 2), [(0, 2), (1, 2)], None),
    ((2, 3), [(0, 2), (1, 1)], None),
]


@pytest.mark.parametrize(("mesh_shape", "cuts", "order"), ORDERS)
def test_order(mesh_shape: tuple[int, ...], cuts: Cuts, order: list[int] | None) -> None:
    assert contiguous_order(cuts, mesh_shape) == order


@pytest.mark.parametrize(("mesh_shape", "cuts", "order"), ORDERS)
def test_dtensors_in_files_of_ranks(mesh_shape: tuple[int, ...], cuts: Cuts, order: list[int] | None) -> None:
    placements = []
    for _, factor in cuts:
        placement = ShardFields()
        placement.fields = {"dim": 0, "split_factor": factor}
        placements.append(placement)
    if order is None:
        with pytest.raises(ValueError, match="interleaves"):
            _splits((24, 5), mesh_shape, placements)
    else:
        assert _splits((24, 5), mesh_shape, placements) == tuple((mesh_dim, 0) for mesh_dim in order)
