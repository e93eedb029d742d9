"""Stand-ins for torch's ShardedTensor and DTensor in pickles: the facts about one rank's shards, and nothing else.

torch itself reads a ShardedTensor only on the rank that saved it, inside a process group of the same size. Here any process reads
the shards of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy

from fsdp_optim.foreign.archive.pickle_table import Known
from fsdp_optim.foreign.per_rank.rank_files import ShardStandIn
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.unread import Unread
from fsdp_optim.layout import Box, MeshBoxes, Shape, contiguous_order


class Fields:
    """An object of a pickle: its attributes. `arguments`: those with which its class was called."""

    arguments: tuple[Any, ...]
    fields: dict[str, Any]
    state: Any

    def __new__(cls, *arguments: Any) -> Any:
        made = super().__new__(cls)  # a pickle makes an object without calling __init__
        made.arguments, made.fields, made.state = arguments, {}, None
        return made

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.fields.update(part)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


class ShardedTensorFields(Fields, ShardStandIn):
    """torch's ShardedTensor: (local shards, metadata, process group, sharding spec, rrefs)."""


class DTensorFields(Fields, ShardStandIn):
    """torch's DTensor: `_local_tensor` and `_spec`."""


class GroupFields(Fields):
    """The rank that saved a ShardedTensor, and its world size."""


class ShardFields(Fields):
    """`Shard`, `_StridedShard` of DTensor's placements."""


class ReplicateFields(Fields):
    """`Replicate` of DTensor's placements."""


_MOST_RANKS = 1 << 20
_SHARDED = "torch.distributed._shard"
_PLACES = ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types")


def stand_ins() -> Mapping[str, Callable[..., Any]]:
    """Return the stand-ins for the classes of torch that hold shards, by `module.Class`."""
    group = Known(f"{_SHARDED}.sharded_tensor.api.ShardedTensor.ProcessGroupState", GroupFields, is_stand_in=True)

    def of_class(cls: Any, name: Any) -> Any:
        """Return the class inside of ShardedTensor that its pickles name. Any other attribute stays unread."""
        is_group = isinstance(cls, Known) and cls.call is ShardedTensorFields and name == "ProcessGroupState"
        return group if is_group else Unread(f"getattr({cls!r:.100}, {name!r:.100})")

    return {
        f"{_SHARDED}.sharded_tensor.api.ShardedTensor": ShardedTensorFields,
        group.what: GroupFields,
        "builtins.getattr": of_class,
        f"{_SHARDED}.sharded_tensor.metadata.ShardedTensorMetadata": Fields,
        f"{_SHARDED}.sharded_tensor.metadata.TensorProperties": Fields,
        f"{_SHARDED}.sharded_tensor.metadata.MEM_FORMAT_ENCODING": lambda number=0: number,
        f"{_SHARDED}.sharded_tensor.shard.Shard": Fields,
        f"{_SHARDED}.metadata.ShardMetadata": Fields,
        f"{_SHARDED}.sharding_spec.api.EnumerableShardingSpec": Fields,
        f"{_SHARDED}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec": Fields,
        "torch.distributed.remote_device._remote_device": Fields,
        **{f"torch.distributed.{module}.DTensor": DTensorFields for module in ("tensor", "_tensor", "_tensor.api")},
        "torch.distributed.tensor._api.DTensor": DTensorFields,
        **{
            f"torch.distributed.{module}.{name}": Fields
            for module in ("tensor._dtensor_spec", "_tensor.placement_types", "_tensor._dtensor_spec")
            for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
        },
        "torch.distributed.device_mesh.DeviceMesh": Fields,
        "torch.distributed._tensor.device_mesh.DeviceMesh": Fields,
        "torch.distributed._mesh_layout._MeshLayout": Fields,
        "torch.distributed._mesh_layout._FlatLayout": Fields,
        **{f"{module}.{name}": ShardFields for module in _PLACES for name in ("Shard", "_StridedShard")},
        **{f"{module}.Replicate": ReplicateFields for module in _PLACES},
        **{f"{module}.{name}": Fields for module in _PLACES for name in ("Partial", "_Partial")},
    }


@dataclass(frozen=True)
class TorchShards:
    """One rank's shards of a tensor.

    Attributes:
        shape: the shape of the whole tensor.
        cut: a value that is equal for the shards of one tensor on all its ranks.
        ranks: the ranks that have shards of the tensor, or copies of them.
        boxes: the box of each shard of this rank, with the shard.
        rank: the rank that saved; None if the object does not say it.
        world_size: the number of ranks that saved; 0 if the object does not say it.
    """

    shape: Shape
    cut: Any
    ranks: frozenset[int]
    boxes: tuple[tuple[Box, StoredTensor], ...]
    rank: int | None
    world_size: int = 0


def shards_of(value: Fields, rank: int, numbers: Callable[[StoredTensor], Sequence[int]]) -> TorchShards:
    """Return the shards in a stand-in. `rank`: the rank of the file; `numbers`: reads a tensor of ranks.

    Raises ValueError, TypeError or LookupError for a stand-in that torch does not write.
    """
    return _of_sharded(value) if isinstance(value, ShardedTensorFields) else _of_dtensor(value, rank, numbers)


def _of_sharded(value: Fields) -> TorchShards:
    shards, metadata, group = value.state[0], value.state[1], value.state[2]
    shape = _shape(metadata["size"])
    listed = tuple(_listed(entry) for entry in metadata["shards_metadata"])
    boxes = []
    for shard in shards:
        box, tensor = _listed(shard["metadata"])[0], shard["tensor"]
        _check_local(box, tensor)
        boxes.append((box, tensor))
    ranks = frozenset(rank for _, rank in listed)
    return TorchShards(shape, (shape, listed), ranks, tuple(boxes), group["global_rank"], group["global_world_size"])


def _listed(metadata: Fields) -> tuple[Box, int]:
    """Return the box of a shard, and its rank."""
    rank = metadata["placement"]["_rank"]
    if type(rank) is not int:
        raise ValueError("a shard is on no rank")
    return Box(_shape(metadata["shard_offsets"]), _shape(metadata["shard_sizes"])), rank


def _check_local(box: Box, tensor: Any) -> None:
    if not isinstance(tensor, StoredTensor):
        raise TypeError(f"a shard is a {type(tensor).__name__}, not a tensor")
    if tensor.placement.numel != box.numel or (box.numel and tensor.shape != box.sizes):
        raise ValueError(f"a shard has the shape {list(tensor.shape)}, and its metadata say {list(box.sizes)}")


def _of_dtensor(value: Fields, rank: int, numbers: Callable[[StoredTensor], Sequence[int]]) -> TorchShards:
    spec, local = value["_spec"], value["_local_tensor"]
    meta = spec["tensor_meta"]
    shape = _shape(meta.arguments[0] if meta.arguments else meta["shape"])
    own_rank, mesh_shape, ranks = _mesh(spec["mesh"], rank, numbers)
    if own_rank not in (None, rank):
        return TorchShards(shape, None, frozenset(), (), own_rank)  # the file was renamed; the caller says so
    splits = _splits(shape, mesh_shape, spec["placements"])
    grid = numpy.array(ranks, numpy.int64).reshape(mesh_shape)
    if any(not (numpy.diff(grid, axis=mesh_dim) > 0).all() for mesh_dim, _ in splits):
        raise ValueError(f"the ranks {grid.tolist()} of a mesh do not ascend, which is not supported")
    placement = MeshBoxes(shape, mesh_shape, splits, (ranks,))
    shard = placement.shard_of(rank)
    if shard is None:
        raise ValueError(f"rank {rank} is not on its mesh of the ranks {list(ranks)}")
    boxes: tuple[tuple[Box, StoredTensor], ...] = ()
    if min(placement.holders(shard)) == rank:  # of copies, the lowest rank's count
        _check_local(placement.box(shard), local)
        boxes = ((placement.box(shard), local),)
    return TorchShards(shape, placement, frozenset(ranks), boxes, own_rank)


def _mesh(
    mesh: Fields, rank: int, numbers: Callable[[StoredTensor], Sequence[int]]
) -> tuple[int | None, Shape, tuple[int, ...]]:
    """Return the rank that saved, the shape of its mesh, and the ranks of the mesh, row-major."""
    own = mesh.fields.get("_rank")
    if type(own) is not int and own is not None:
        raise TypeError("the rank of a mesh is no number")
    if isinstance(mesh.fields.get("mesh"), StoredTensor):
        stored = mesh["mesh"]
        return own, stored.shape, tuple(numbers(stored))
    all_ranks = tuple(int(item) for item in mesh["_flatten_rank_map"])
    axes = _axes(mesh["_layout"])
    where = all_ranks.index(own if own is not None else rank)
    # This rank's place in a mesh of part of the ranks says which part it is.
    place = tuple(mesh["_coordinate_on_dim"] or (0,) * len(axes))
    if prod(map(len, axes)) > len(all_ranks):
        raise ValueError(f"a mesh of more ranks than the {len(all_ranks)} of its rank map")
    places = [where - sum(steps[index] for index, steps in zip(place, axes, strict=True))]
    for steps in axes:
        places = [at + step for at in places for step in steps]
    if min(places) < 0:
        raise ValueError("the ranks of a mesh lie outside of its rank map")
    return own, tuple(map(len, axes)), tuple(all_ranks[at] for at in places)


def _axes(layout: Fields) -> list[list[int]]:
    """Return the dimensions of a mesh, each as the steps in the rank map from its first rank to its other ranks."""
    listed = layout.fields.get("axes")
    if listed is not None:
        pairs = [(_flat(axis["shape"]), _flat(axis["stride"])) for axis in listed]
    else:
        shape, stride = layout["shape"], layout["stride"]
        are_nested = isinstance(shape, (tuple, list)) and isinstance(stride, (tuple, list))
        pairs = [
            (_flat(a), _flat(b)) for a, b in (zip(shape, stride, strict=True) if are_nested else [(shape, stride)])
        ]
    axes = []
    for (
        sizes,
        strides,
    ) in pairs:  # several numbers: dimensions that were flattened into one; none: a dimension of size 1
        steps = [0]
        for size, step in zip(sizes, strides, strict=True):
            if len(steps) * size > _MOST_RANKS:
                raise ValueError(f"a mesh of more than {_MOST_RANKS} ranks")
            steps = [at + index * step for at in steps for index in range(size)]
        axes.append(steps)
    return axes


def _flat(numbers: Any) -> Shape:
    """Return the numbers in a number, or in nested tuples of them."""
    if isinstance(numbers, (tuple, list)):
        return tuple(number for item in numbers for number in _flat(item))
    if type(numbers) is not int or not 0 < numbers <= _MOST_RANKS:
        raise ValueError(f"a dimension of a mesh of {numbers!r:.20} ranks")
    return (numbers,)


def _splits(shape: Shape, mesh_shape: Shape, placements: Any) -> tuple[tuple[int, int], ...]:
    """Return the cuts (mesh dimension, dimension) in the order in which torch makes them."""
    splits = []
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, ShardFields):
            fields = {**placement.fields, **dict(zip(("dim",), placement.arguments, strict=False))}
            splits.append((int(fields.get("split_factor", 1)), mesh_dim, int(fields["dim"]) % max(len(shape), 1)))
        elif not isinstance(placement, ReplicateFields):
            raise TypeError("the DTensor is partial: each rank holds its part of a reduction only")
    ordered = [(mesh_dim, dim) for _, mesh_dim, dim in sorted(splits)]
    for dim in {dim for _, dim in ordered}:
        cuts = [(mesh_dim, factor) for factor, mesh_dim, other in splits if other == dim]
        if contiguous_order(cuts, mesh_shape) != [mesh_dim for mesh_dim, other in ordered if other == dim]:
            raise ValueError("the DTensor interleaves rows, which is not supported")
    return tuple(ordered)


def _shape(sizes: Any) -> Shape:
    made = tuple(sizes)
    if not all(type(size) is int and size >= 0 for size in made) or prod(made) >= 1 << 62:
        raise ValueError(f"a shape of {made!r:.100}")
    return made
