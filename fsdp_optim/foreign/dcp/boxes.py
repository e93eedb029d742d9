"""The boxes of chunks: placements of those that are stored, number i of a tensor on rank -1 - i of storage; and of new ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.torch_archives import Chunk
from fsdp_optim.layout import Block, Box, Boxes, FlatRuns, Placement, Shape, Whole

_LEAST_CHUNK, _MOST_CHUNK = 4 << 20, 64 << 20  # bytes, of those that are written


class Cuts:
    """The placements of tensors. Tensors with the same cut share a placement, so that each cut is checked once."""

    def __init__(self) -> None:
        self._made: dict[tuple[Shape, tuple[Chunk, ...]], Placement] = {}

    def placement(self, name: str, shape: Shape, boxes: tuple[Chunk, ...]) -> Placement:
        """Return the placement of a tensor. `name`: for errors. `boxes`: (offsets, sizes) of the chunks that have elements.

        Raises CheckpointError where chunks lie outside of the tensor or overlap, and where elements are in no chunk.
        """
        placement = self._made.get((shape, boxes))
        if placement is None:
            placement = self._made[shape, boxes] = _placement(name, shape, boxes)
        return placement


def _placement(name: str, shape: Shape, boxes: Sequence[Chunk]) -> Placement:
    if not _is_shape(shape):
        raise CheckpointError(f"{name}: has the shape {shape!r}, which is no list of numbers")
    for offsets, sizes in boxes:
        fits = _is_shape(offsets) and _is_shape(sizes) and len(offsets) == len(sizes) == len(shape)
        if not fits or any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
            raise CheckpointError(
                f"{name}: has a chunk at {_listed(offsets)} of the sizes {_listed(sizes)}, outside of its shape {list(shape)}"
            )
    made, by = [Box(*box) for box in boxes], tuple(range(-1, -1 - len(boxes), -1))
    listed = Boxes(shape, tuple((rank, (Block(box, 0),)) for rank, box in zip(by, made, strict=True)))
    _check_disjoint(name, listed)
    gap = listed.gap()
    if gap is not None:
        raise CheckpointError(
            f"{name}: elements [{gap[0]}, {gap[1]}) of {prod(shape)} are in none of its {len(made)} chunks: a part of the "
            "checkpoint is missing"
        )
    if len(made) == 1:
        return Whole(shape, (-1,))
    if all(box.sizes[1:] == shape[1:] for box in made):
        order = sorted(range(len(made)), key=lambda i: made[i].offsets[0])
        row = prod(shape[1:])
        starts = tuple(made[i].offsets[0] * row for i in order)
        stops = tuple((made[i].offsets[0] + made[i].sizes[0]) * row for i in order)
        return FlatRuns(shape, starts, stops, tuple(by[i] for i in order))
    return listed


def _check_disjoint(name: str, listed: Boxes) -> None:
    """Raise CheckpointError where two chunks have a common element."""
    common = listed.overlap
    if common is None and listed.has_replicas:  # the same chunk twice
        (block,) = next(listed.blocks(shard) for shard in range(listed.num_shards) if len(listed.holders(shard)) > 1)
        common = block.box, block.box
    if common is None:
        return
    if not listed.shape:
        raise CheckpointError(f"{name}: has no dimensions, and {len(listed.by_rank)} chunks")
    first, other = common
    raise CheckpointError(
        f"{name}: its chunks at {list(first.offsets)} of the sizes {list(first.sizes)} and at {list(other.offsets)} of "
        f"the sizes {list(other.sizes)} overlap"
    )


def _is_shape(numbers: Any) -> bool:
    return isinstance(numbers, tuple) and all(type(number) is int and number >= 0 for number in numbers)


def _listed(numbers: Any) -> str:
    return str(list(numbers)) if isinstance(numbers, tuple) else repr(numbers)


def chunks_of(shape: Shape, itemsize: int, num_ranks: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield the chunks of a tensor as (offsets, sizes): the rows of each rank, if the tensor is cut along its first dimension.

    A reader needs a complete chunk, so no chunk is large; small chunks are joined, because each has an archive of its own.
    """
    nbytes = prod(shape) * itemsize
    if not shape or not nbytes:
        yield (0,) * len(shape), shape
        return
    row_nbytes = nbytes // shape[0]
    of_rank = -(-shape[0] // num_ranks)
    num = max(-(-of_rank * row_nbytes // _MOST_CHUNK), 1)  # chunks with the rows of a rank
    rows = min(max(-(-of_rank // num), -(-_LEAST_CHUNK // row_nbytes)), shape[0])
    for first in range(0, shape[0], rows):
        yield (first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])
