"""DTensors that are cut in another way than torch cuts: the two ways in which they say where their elements are.

**A placement with units.** `RaggedShard(dims, local_units)` of veScale, read by its attributes: what the other placements leave
of a tensor on a rank is flattened, row-major, and the ranks of a mesh dimension get consecutive runs of it, in proportion to
`local_units`. Every rank computes the runs of all ranks.

**Each rank's own part.** Megatron-FSDP cuts a buffer of many parameters evenly, so that its DTensors are `Shard(0)` with any
number of rows on a rank. Where they begin is in the chunk list of the local tensor (`update_uneven_dtensor_chunk_metadata`), or
for a live parameter in `megatron_fsdp_slice`. A rank knows its own part only: the ranks exchange their lists when they agree.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import torch

from fsdp_optim.errors import LayoutError, WrapperError
from fsdp_optim.layout import Block, Box, Boxes, MeshBoxes, OnMesh, Shape, boxes_of_run
from fsdp_optim.tensors.dtensors import CHUNK_LIST, Grid, local_of, placement_of

_MODULE = "torch.distributed.tensor"
_SLICE = "megatron_fsdp_slice"


def is_ragged(placement: object) -> bool:
    """Return whether a placement of a DTensor is veScale's RaggedShard, or has its attributes and their meaning."""
    return hasattr(placement, "local_units") and hasattr(placement, "dims")


def placed(
    fqn: str, shape: Shape, grid: Grid, spec: tuple[Any, ...], fsdp_dims: frozenset[int] | None = None
) -> OnMesh | Boxes:
    """Return where a DTensor's elements are by its placements, as `placement_of`, and also with a RaggedShard among them."""
    if not any(map(is_ragged, spec)):
        return placement_of(fqn, shape, grid, spec, fsdp_dims)
    return _ragged(fqn, shape, grid, spec)


def says_its_part(param: torch.Tensor, local: torch.Tensor) -> bool:
    """Return whether a DTensor parameter says itself which part of it this rank has."""
    return hasattr(local, CHUNK_LIST) or (
        hasattr(param, _SLICE) and not all(placement.is_replicate() for placement in param.placements)  # type: ignore[attr-defined]
    )


def own_part(fqn: str, value: Any) -> Boxes:
    """Return where this rank's elements of a DTensor are, as the DTensor says; the other ranks list theirs.

    Raises WrapperError for a part that is not the local tensor.
    """
    local, rank = local_of(value), torch.distributed.get_rank()
    box = _box_of_chunks(fqn, local) if hasattr(local, CHUNK_LIST) else _box_of_slice(fqn, value, local)
    try:
        blocks = (Block(box, 0),) if box.numel else ()
        return Boxes(tuple(value.shape), ((rank, blocks),), is_open=True, apart=True)
    except LayoutError as error:
        raise WrapperError(
            f"{fqn}: the part of this DTensor that rank {rank} says it has is wrong ({error}): call "
            "update_uneven_dtensor_chunk_metadata() of Megatron-FSDP for it again, on all ranks"
        ) from error


def check_held(fqn: str, value: Any, place: OnMesh | Boxes) -> None:
    """Raise WrapperError where this rank has another number of elements than a RaggedShard gives it."""
    rank, held = torch.distributed.get_rank(), local_of(value)
    if place.numel_on(rank) != held.numel():
        raise WrapperError(
            f"{fqn}: the local tensor on rank {rank} has {held.numel()} elements, and {value.placements} give it "
            f"{place.numel_on(rank)}: make the DTensor with the local_units that say how the ranks have cut it"
        )


def _box_of_chunks(fqn: str, local: torch.Tensor) -> Box:
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in getattr(local, CHUNK_LIST)()]
    if not local.numel() and not any(prod(sizes) for _, sizes in chunks):
        return Box((0,), (0,))
    if len(chunks) != 1 or chunks[0][1] != tuple(local.shape):
        raise WrapperError(
            f"{fqn}: on rank {torch.distributed.get_rank()} the chunk list of the local tensor has the offsets and sizes "
            f"{chunks}, and the local tensor has the shape {list(local.shape)}: give it a list of one chunk of this shape"
        )
    return Box(*chunks[0])


def _box_of_slice(fqn: str, value: Any, local: torch.Tensor) -> Box:
    """Return the Box of a parameter for which Megatron-FSDP gives only a row-major range of elements."""
    run, rank = getattr(value, _SLICE), torch.distributed.get_rank()
    start, stop = int(run.start), int(run.stop)
    if not local.numel() and start >= stop:
        return Box((0,), (0,))
    shape = tuple(value.shape)
    row = prod(shape[1:])
    is_rows = shape and tuple(local.shape[1:]) == shape[1:] and not start % row and stop - start == local.numel()
    if not is_rows or tuple(getattr(value, "orig_param", value).shape) != shape:
        raise WrapperError(
            f"{fqn}: on rank {rank} {_SLICE} is {start}:{stop}, and the local tensor has the shape {list(local.shape)}, which "
            f"do not say which part of {list(shape)} it is: call update_uneven_dtensor_chunk_metadata() of Megatron-FSDP for "
            "this DTensor first, on all ranks"
        )
    return Box((start // row, *[0] * (len(shape) - 1)), tuple(local.shape))


def _ragged(fqn: str, shape: Shape, grid: Grid, spec: tuple[Any, ...]) -> Boxes:
    """Return where the elements of a DTensor with a RaggedShard are, on all ranks of its mesh."""
    mesh_dim, placement = _the_ragged(fqn, spec)
    units, dims = tuple(map(int, placement.local_units)), tuple(placement.dims)
    if len(units) != grid.shape[mesh_dim] or min(units) < 0 or not sum(units):
        raise _wrong(fqn, placement, f"has {grid.shape[mesh_dim]} ranks in this dimension of the mesh, not those units")
    if dims != tuple(range(len(dims))) or len(dims) > len(shape):
        raise _wrong(fqn, placement, f"is of shape {list(shape)}, whose first dimensions are not those dims")
    replicate = sys.modules[_MODULE].Replicate()
    outer = placement_of(fqn, shape, grid, tuple(replicate if is_ragged(p) else p for p in spec))
    if not isinstance(outer, MeshBoxes):
        raise _wrong(fqn, placement, "is also cut into interleaved rows")
    by_rank: dict[int, tuple[Block, ...]] = {}
    blocks_of: dict[tuple[int, int], tuple[Block, ...]] = {}
    for place in torch.cartesian_prod(*map(torch.arange, grid.shape)).reshape(-1, len(grid.shape)).tolist():
        rank, number = int(grid.ranks[tuple(place)]), place[mesh_dim]
        shard = outer.shard_of(rank)
        key = (number, 0 if shard is None else shard)
        if key not in blocks_of:
            blocks_of[key] = _blocks(fqn, placement, outer.box(key[1]), units, number)
        by_rank[rank] = blocks_of[key]
    return Boxes(shape, tuple(sorted(by_rank.items())))


def _the_ragged(fqn: str, spec: tuple[Any, ...]) -> tuple[int, Any]:
    """Return the only RaggedShard, and its dimension of the mesh. veScale applies it after all other placements."""
    first, *others = [(mesh_dim, p) for mesh_dim, p in enumerate(spec) if not p.is_replicate()]
    if not is_ragged(first[1]) or any(is_ragged(p) for _, p in others) or hasattr(first[1], "split_factor"):
        raise WrapperError(
            f"{fqn}: the placements {spec} of this DTensor are not supported: a RaggedShard that does not interleave must come "
            "first, and the others be Shard or Replicate, so redistribute the DTensor to such placements first"
        )
    return first


def _blocks(fqn: str, placement: Any, box: Box, units: tuple[int, ...], number: int) -> tuple[Block, ...]:
    """Return the Blocks of one rank: a run of the row-major elements of the Box that the other placements leave."""
    in_dims = prod(box.sizes[: len(placement.dims)]) if placement.dims else box.numel
    if in_dims % sum(units):
        raise _wrong(fqn, placement, f"has {in_dims} elements in these dims on a rank, which the units do not divide")
    unit = box.numel // sum(units)
    at = sum(units[:number]) * unit
    blocks: list[Block] = []
    offset = 0
    for part in boxes_of_run(box.sizes, at, at + units[number] * unit):
        blocks.append(
            Block(Box(tuple(a + b for a, b in zip(part.offsets, box.offsets, strict=True)), part.sizes), offset)
        )
        offset += part.numel
    return tuple(blocks)


def _wrong(fqn: str, placement: object, why: str) -> WrapperError:
    return WrapperError(
        f"{fqn}: the placement {placement} of this DTensor does not fit, because it {why}: redistribute the DTensor to Replicate "
        "or Shard first"
    )
