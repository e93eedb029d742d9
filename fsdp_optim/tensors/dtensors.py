"""DTensors: where their elements live, as cuts in the order in which they were made, and their local tensors.

A DTensor records how it is cut, whatever it belongs to: a parameter of fully_shard, state of a parameter that is no
DTensor, a number in a param group. Nothing here imports DTensor or makes a collective call.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import (
    MeshBoxes,
    OnMesh,
    Ranks,
    Shape,
    StridedBoxes,
    contiguous_order,
    ranks_in_order,
    row_major_strides,
)
from fsdp_optim.tensors.elements import is_usual
from fsdp_optim.tensors.memory import is_plain, laid_out_like

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_MODULE = "torch.distributed.tensor"


def is_loaded() -> bool:
    """Return whether DTensor is loaded in this process."""
    return _MODULE in sys.modules


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, without importing DTensor."""
    cls: Any = type(value)
    return cls is not torch.Tensor and _is_dtensor_class(cls)  # each value is asked about more than once


@functools.lru_cache(maxsize=256)
def _is_dtensor_class(cls: Any) -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and issubclass(cls, module.DTensor)


def local_of(value: DTensor) -> torch.Tensor:
    """Return the local tensor, without autograd, which would cost ten times as much."""
    local = value._local_tensor
    if type(local) is torch.Tensor:
        return local
    with torch.no_grad():  # to_local may have to wait for a collective operation
        return value.to_local()


def dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    spec: tuple[Placement, ...],
    shape: Shape,
    strides: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Return the DTensor with a local tensor. `strides`: of the unsharded tensor; None: row-major."""
    value: torch.Tensor = sys.modules[_MODULE].DTensor.from_local(
        local,
        mesh,
        spec,
        run_check=False,
        shape=torch.Size(shape),
        stride=row_major_strides(shape) if strides is None else strides,
    )
    return value


def dtensor_cut_like(local: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return the DTensor with a local tensor, cut as `like` is: the same mesh, placements, shape and strides.

    Where the dtype is the same too, the two share their spec, as torch's own operations let them: `from_local` would make a new
    one, and takes ten times as long.
    """
    spec = like._spec
    cls = sys.modules[_MODULE].DTensor
    if type(like) is cls and spec.tensor_meta is not None and spec.tensor_meta.dtype == local.dtype:
        # Without `__init__`, which does nothing, and asks torch's compiler first.
        value: torch.Tensor = cls.__new__(cls, local, spec, requires_grad=False)
        return value
    return dtensor(local, like.device_mesh, like.placements, tuple(like.shape), like.stride())


def is_usual_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor with an ordinary local tensor of its own dtype, which is no part of a sum."""
    if not is_dtensor(value):
        return False
    local = value._local_tensor
    return is_usual(local) and local.dtype is value.dtype and not is_partial(value)


def is_partial(value: DTensor) -> bool:
    """Return whether each rank holds only its part of a reduction."""
    placements, usual = value._spec.placements, _usual_cuts()
    if len(placements) == 1:
        return type(placements[0]) not in usual and placements[0].is_partial()
    return any(type(each) not in usual and each.is_partial() for each in placements)


@functools.cache
def _usual_cuts() -> frozenset[type[Placement]]:
    """Return the classes of placements in torch that are never partial. To call `is_partial()` for each DTensor would be slow."""
    module = sys.modules[_MODULE]
    return frozenset([module.Shard, module.Replicate])


def is_complete(value: DTensor) -> bool:
    """Return whether this rank has the complete tensor: it is replicated, or alone on every mesh dimension that cuts it."""
    sizes = value.device_mesh.shape
    return value.device_mesh.get_coordinate() is not None and all(
        placement.is_replicate() or (size == 1 and not placement.is_partial())
        for placement, size in zip(value.placements, sizes, strict=True)
    )


def placement_of_value(value: torch.Tensor) -> OnMesh | None:
    """Return where the elements of a state value live that records it; None for any other value."""
    if not is_dtensor(value) or not is_plain(local_of(value)):
        return None
    where = placement_of("a state value", tuple(value.shape), grid_of(value.device_mesh), value.placements)
    check_cut(f"a state value of shape {list(value.shape)}", value, where)
    return where


CHUNK_LIST = "__create_chunk_list__"
"""The method by which a local tensor says where its elements are, whatever the placements say (Megatron-FSDP)."""


def check_cut(fqn: str, value: DTensor, placement: OnMesh) -> None:
    """Raise WrapperError where a DTensor is cut in another way than torch cuts, as far as this rank can see.

    `placement`: where its elements are by torch's own rules.
    """
    check_order(fqn, value._spec)
    rank, held = value.device_mesh.get_rank(), local_of(value)
    shard = placement.shard_of(rank)
    if shard is None:
        return
    computed = placement.local_shape(shard)
    if computed != tuple(held.shape) and (held.numel() or prod(computed)):
        raise WrapperError(
            f"{fqn}: the local tensor on rank {rank} has shape {list(held.shape)}, and "
            f"{value.placements} on the mesh {value.device_mesh.mesh.tolist()} give {list(computed)}: make the DTensor with "
            "distribute_tensor, on a mesh whose ranks ascend, or give the local tensor the method __create_chunk_list__, which "
            "says where its elements are"
        )
    if held.numel() and hasattr(held, CHUNK_LIST):
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in getattr(held, CHUNK_LIST)()]
        bounds = [(block.box.offsets, block.box.sizes) for block in placement.blocks(shard)]
        if chunks != bounds:
            raise WrapperError(
                f"{fqn}: the chunk list of the local tensor on rank {rank} has the offsets and sizes {chunks}, and "
                f"{value.placements} on the mesh {value.device_mesh.mesh.tolist()} give {bounds}: redistribute it to Replicate "
                "or to the placements of its parameter first"
            )


def check_order(fqn: str, spec: Any) -> None:
    """Raise WrapperError where one dimension of a DTensor is cut over several of the mesh in another order than torch's.

    Such an order is on the spec (`shard_order`) or on the mesh (`_shard_order`, of Megatron-FSDP): local shapes do not show it.
    """
    other = order_of_its_own(spec)
    if other is not None:
        dim, order = other
        raise WrapperError(
            f"{fqn}: dimension {dim} of this DTensor is cut over the dimensions {order} of its mesh, in this order, and "
            f"not in torch's order {sorted(order)}: redistribute the DTensor to placements that cut each dimension "
            "once, or give the local tensor the method __create_chunk_list__, which says where its elements are"
        )


def order_of_its_own(spec: Any) -> tuple[int, list[int]] | None:
    """Return a dimension of a DTensor that is cut over several mesh dimensions in another order than torch's, and the order."""
    by_dim: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(spec.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            by_dim.setdefault(dim, []).append(mesh_dim)
    if len(by_dim) == sum(map(len, by_dim.values())):
        return None  # nearly always
    sizes, of_mesh = spec.mesh.shape, getattr(spec.mesh, "_shard_order", None)
    of_spec = {entry.tensor_dim: entry.mesh_dims for entry in getattr(spec, "shard_order", None) or ()}
    for dim, mesh_dims in by_dim.items():
        for given in (of_spec.get(dim), of_mesh):
            order = [mesh_dim for mesh_dim in given or mesh_dims if mesh_dim in mesh_dims and sizes[mesh_dim] > 1]
            if order != sorted(order):
                return dim, order
    return None


def dtensor_like(flat: torch.Tensor, live: DTensor) -> torch.Tensor:
    """Return the DTensor of these local elements, 1-D, with mesh and placements of `live`."""
    return dtensor_cut_like(laid_out_like(flat, local_of(live)), live)


def as_local(where: str, value: Any) -> Any:
    """Return a value without DTensors, also inside containers: complete DTensors become their local tensors.

    Raises WrapperError, which names the value as `where`, for a DTensor of which this rank has only a part. Nothing is
    redistributed, because that is a collective call, which not all ranks may make.
    """
    if is_dtensor(value):
        if not is_complete(value):
            raise WrapperError(
                f"{where} is a DTensor with the placements {value.placements} on a mesh of shape "
                f"{list(value.device_mesh.shape)}, of which each rank has only a part: store .full_tensor() of the DTensor (and "
                ".item() of a number), or .redistribute() it to Replicate"
            )
        return local_of(value).detach()
    if type(value) is dict:
        return {key: as_local(f"{where}[{key!r}]", item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([as_local(f"{where}[{index}]", item) for index, item in enumerate(value)])
    return value


@dataclass(frozen=True, eq=False)
class Grid:
    """The ranks of a mesh, read once, because `DeviceMesh.mesh` builds a new tensor at each access."""

    ranks: torch.Tensor
    _in_order: dict[frozenset[int], Ranks] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        return tuple(self.ranks.shape)

    def in_order(self, split_dims: frozenset[int] = frozenset()) -> Ranks:
        """Return the ranks in the order in which DTensor numbers the shards along `split_dims`."""
        known = self._in_order.get(split_dims)
        if known is None:
            known = self._in_order[split_dims] = _numbered(self.ranks, split_dims)
        return known


def grid_of(mesh: DeviceMesh) -> Grid:
    """Return the ranks of a mesh."""
    return Grid(mesh.mesh)


def placement_of(
    fqn: str, shape: Shape, grid: Grid, placements: tuple[Placement, ...], fsdp_dims: frozenset[int] | None = None
) -> OnMesh:
    """Return where a DTensor's elements live.

    `fsdp_dims`: of a parameter of fully_shard, the dimensions of the mesh over which fully_shard has cut it. fully_shard cuts
    the tensor that tensor parallel has left, so these come last. None: unknown, or none.
    """
    by_dim: dict[int, list[tuple[int, int]]] = {}
    for mesh_dim, placement in enumerate(placements):
        if placement.is_partial():
            raise WrapperError(
                f"{fqn}: the placement of this DTensor is {placement}, so each rank holds only its part of a reduction: "
                "redistribute the DTensor to Replicate or Shard first"
            )
        if not placement.is_replicate():
            dim = getattr(placement, "dim", None)
            if dim is None:
                raise WrapperError(
                    f"{fqn}: the placement {placement} of this DTensor is not supported: redistribute the DTensor to Replicate "
                    "or Shard first"
                )
            by_dim.setdefault(dim % max(len(shape), 1), []).append((mesh_dim, _split_factor(placement)))
    ordered: list[tuple[int, int, int]] = []
    for dim, cuts in by_dim.items():
        in_order = _cuts_in_order(cuts, grid.shape, fsdp_dims)
        if in_order is None:
            raise WrapperError(
                f"{fqn}: {placements} on the mesh {grid.shape} is what fully_shard makes of interleaved rows, and "
                "what distribute_tensor makes of whole ones, with the elements in different places: pass the root module that "
                "fully_shard has wrapped, or redistribute the DTensor to Replicate or Shard first"
            )
        ordered += [(mesh_dim, dim, factor) for mesh_dim, factor in in_order]
    if all(factor == 1 for _, _, factor in ordered):
        splits = _as_sorted(ordered, placements)
        return MeshBoxes(shape, grid.shape, splits, (grid.in_order(frozenset(d for d, _ in splits)),))
    splits = tuple((mesh_dim, dim) for mesh_dim, dim, _ in ordered)
    ranks = grid.in_order(frozenset(mesh_dim for mesh_dim, _ in splits))
    return StridedBoxes(shape, grid.shape, splits, (ranks,), tuple(factor for _, _, factor in ordered))


_Cuts = list[tuple[int, int]]
"""(mesh dimension, split factor) of the cuts of one dimension of a tensor. A factor over 1 interleaves."""


def _cuts_in_order(cuts: _Cuts, mesh_shape: Shape, fsdp_dims: frozenset[int] | None) -> _Cuts | None:
    """Return the cuts of one dimension of a tensor, in the order in which they were made; None where that is not known.

    `_StridedShard` has two meanings. Where the factors fit, they give the order of contiguous cuts. Else the placements are
    in order, and a factor is the number of groups of rows of which every rank has a part.
    """
    order = contiguous_order(cuts, mesh_shape)
    if order is not None:
        return [(mesh_dim, 1) for mesh_dim in order]
    if fsdp_dims is None:
        first, *others = cuts
        rest = prod(mesh_shape[mesh_dim] for mesh_dim, _ in others)
        return None if others and rest > 1 and first[1] == rest else cuts
    by_others = [cut for cut in cuts if cut[0] not in fsdp_dims]
    by_fsdp = [(mesh_dim, 1) for mesh_dim, _ in cuts if mesh_dim in fsdp_dims]
    order = contiguous_order(by_others, mesh_shape)
    return [*([(mesh_dim, 1) for mesh_dim in order] if order is not None else by_others), *by_fsdp]


def _as_sorted(ordered: list[tuple[int, int, int]], placements: tuple[Placement, ...]) -> tuple[tuple[int, int], ...]:
    """Return the splits sorted by factor where the order inside each dimension allows it, so that equal cuts compare equal."""
    splits = [(mesh_dim, dim) for mesh_dim, dim, _ in ordered]
    by_factor = sorted(splits, key=lambda split: (_split_factor(placements[split[0]]), split[0]))
    dims = {dim for _, dim in splits}
    keeps_order = all([s for s in splits if s[1] == dim] == [s for s in by_factor if s[1] == dim] for dim in dims)
    return tuple(by_factor if keeps_order else splits)


def _split_factor(placement: Placement) -> int:
    """Return the number of parts that other mesh dimensions make before the cut of this placement; over 1 for `_StridedShard`."""
    return int(getattr(placement, "split_factor", 1))


def _numbered(grid: torch.Tensor, split_dims: frozenset[int]) -> Ranks:
    """Return the ranks of a mesh, row-major, in the order in which DTensor numbers the shards along `split_dims`.

    DTensor numbers shards by group rank in the process group of each mesh line, and torch sorts the ranks of a group: on a
    mesh whose ranks do not ascend, that order differs from the order in the mesh.
    """
    if all(bool((grid.diff(dim=dim) > 0).all()) for dim in split_dims):
        return ranks_in_order(grid.flatten().tolist())
    places = torch.meshgrid(*(torch.arange(size, device=grid.device) for size in grid.shape), indexing="ij")
    coordinates = torch.stack(
        [grid.argsort(dim=d).argsort(dim=d) if d in split_dims else places[d] for d in range(grid.ndim)], dim=-1
    )
    numbered = torch.full_like(grid, -1)
    numbered[coordinates.reshape(-1, grid.ndim).unbind(-1)] = grid.flatten()
    if bool((numbered < 0).any()):
        raise WrapperError(
            f"the mesh {grid.tolist()} has its ranks in an order in which torch gives two ranks the same shard: make the mesh "
            "with ascending ranks"
        )
    return ranks_in_order(numbered.flatten().tolist())
