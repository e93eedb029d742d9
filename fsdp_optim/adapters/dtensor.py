"""DTensor: torch's fully_shard (FSDP2, HSDP), tensor parallel, both together, any DTensor on any mesh."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from fsdp_optim.adapters.base import Adapter, Place
from fsdp_optim.adapters.tree import ModuleTree
from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import MeshBoxes, Ranks, Shape, cut_named, cut_of, ranks_in_order, row_major_strides
from fsdp_optim.layout import Placement as Where
from fsdp_optim.memory import flatten, is_plain, within
from fsdp_optim.view import Handle, LocalPart, Original

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_MODULE = "torch.distributed.tensor"
_FULLY_SHARD_MODULE = "torch.distributed.fsdp"


class DTensorAdapter(Adapter):
    """The adapter of DTensor parameters of any origin, and of modules with fully_shard."""

    name = "DTensor"

    def is_present(self) -> bool:
        return _MODULE in sys.modules

    def rank_sets(self, tree: ModuleTree) -> Iterator[Ranks]:
        """The ranks of the mesh of every DTensor parameter."""
        meshes = {param.device_mesh for param, _ in _params(tree)}
        return (_ranks(mesh) for mesh in meshes)

    def stand_ins(self, modules: Iterable[nn.Module]) -> Mapping[Place, torch.Tensor]:
        return _sharded_params(modules)

    def handles(self, tree: ModuleTree, ranks: tuple[int, ...], claimed: Collection[int]) -> Iterator[Handle]:
        alike: dict[tuple[DeviceMesh, tuple[Placement, ...], Shape], tuple[MeshBoxes, set[Shape]]] = {}
        for param, sites in _params(tree):
            if id(param) in claimed:
                continue
            mesh, spec, shape, held = (
                param.device_mesh,
                param.placements,
                tuple(param.shape),
                tuple(_local_of(param).shape),
            )
            known = alike.get((mesh, spec, shape))
            if known is None:
                known = alike[mesh, spec, shape] = placement_of(tree.fqn(*sites[0]), shape, mesh, spec), set()
            placement, checked = known
            if held not in checked:
                _check_local_shape(tree.fqn(*sites[0]), param, placement)
                checked.add(held)
            yield _handle(param, placement, sites)

    def buffer(self, tree: ModuleTree, fqn: str, value: torch.Tensor) -> Handle | None:
        """The Handle of a DTensor buffer, as in a tensor parallel module."""
        if not is_dtensor(value):
            return None
        placement = placement_of(fqn, tuple(value.shape), value.device_mesh, value.placements)
        return _handle(value, placement, [(tree.root, fqn)])

    def is_sharded_value(self, value: torch.Tensor) -> bool:
        return is_dtensor(value)

    def read_sharded_value(self, fqn: str, value: Any) -> tuple[Where, torch.Tensor]:
        placement = placement_of(fqn, tuple(value.shape), value.device_mesh, value.placements)
        return placement, flatten(value.to_local())

    def reshard(self, tree: ModuleTree) -> None:
        loaded = sys.modules.get(_FULLY_SHARD_MODULE)
        if loaded is not None:
            for module in tree.modules:
                if isinstance(module, loaded.FSDPModule):
                    module.reshard()


def _handle(param: DTensor, placement: MeshBoxes, sites: list[tuple[nn.Module, str]]) -> DTensorHandle:
    return DTensorHandle(
        param=param,
        originals=(Original(*sites[0], placement),),
        local_shape=tuple(_local_of(param).shape),
        aliases=tuple((0, module, attribute) for module, attribute in sites[1:]),
        mesh=param.device_mesh,
        spec=param.placements,
        shape=tuple(param.shape),
    )


def _check_local_shape(fqn: str, param: DTensor, placement: MeshBoxes) -> None:
    """Raise WrapperError where the computed shape of this rank's shard is not that of the DTensor's local tensor."""
    shard = placement.shard_of(torch.distributed.get_rank())
    computed = placement.box(shard).sizes if shard is not None else ()
    held = _local_of(param)
    if shard is not None and computed != tuple(held.shape) and (held.numel() or prod(computed)):
        raise WrapperError(
            f"{fqn}: the local tensor on rank {torch.distributed.get_rank()} has shape {list(held.shape)}, and "
            f"{param.placements} on the mesh {param.device_mesh.mesh.tolist()} give {list(computed)}: make the DTensor with "
            "distribute_tensor"
        )


def _sharded_params(modules: Iterable[nn.Module]) -> dict[Place, torch.Tensor]:
    """The sharded parameters of fully_shard, by owner and name.

    After a forward pass without a backward pass, whole parameters are registered in place of the sharded parameters, which
    the optimizer holds.
    """
    loaded = sys.modules.get(_FULLY_SHARD_MODULE)
    found: dict[Place, torch.Tensor] = {}
    if loaded is None:
        return found
    for module in modules:
        if isinstance(module, loaded.FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch < 2.11 has one group at most
            for group in groups if groups is not None else filter(None, [state._fsdp_param_group]):
                for param in group.fsdp_params:
                    info = param._module_info
                    found[info.module, info.param_name] = param.sharded_param
                    for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                        found[shared, name] = param.sharded_param
    return found


def placement_of(fqn: str, shape: Shape, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> MeshBoxes:
    """Where a DTensor's elements live."""
    splits = []
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
            splits.append((_split_factor(placement), mesh_dim, dim % max(len(shape), 1)))
    # The mesh dimension of fully_shard comes before that of tensor parallel, but fully_shard cuts the parts that tensor
    # parallel has made: the split factor of a strided placement is the number of parts before its cut.
    sizes: Counter[int] = Counter()
    for factor, mesh_dim, dim in sorted(splits):
        if factor > 1 and factor != max(sizes[dim], 1):
            raise WrapperError(
                f"{fqn}: {placements} on the mesh {tuple(mesh.mesh.shape)} interleaves rows, which is not supported: "
                "redistribute the DTensor to Replicate or Shard first"
            )
        sizes[dim] = max(sizes[dim], 1) * mesh.size(mesh_dim)
    order = tuple((mesh_dim, dim) for _, mesh_dim, dim in sorted(splits))
    return MeshBoxes(shape, tuple(mesh.mesh.shape), order, (_ranks(mesh, frozenset(d for d, _ in order)),))


def _split_factor(placement: Placement) -> int:
    """The number of parts that other mesh dimensions make before the cut of this placement; over 1 for `_StridedShard`."""
    return int(getattr(placement, "split_factor", 1))


def _ranks(mesh: DeviceMesh, split_dims: frozenset[int] = frozenset()) -> Ranks:
    """The ranks of a mesh, row-major, in the order in which DTensor numbers the shards along `split_dims`.

    DTensor numbers shards by group rank in the process group of each mesh line, and torch sorts the ranks of a group: on a
    mesh whose ranks do not ascend, that order differs from the order in the mesh.
    """
    grid = mesh.mesh
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


def _params(tree: ModuleTree) -> Iterator[tuple[DTensor, list[tuple[nn.Module, str]]]]:
    module = sys.modules.get(_MODULE)
    if module is not None:
        for param, sites in tree.params():
            if isinstance(param, module.DTensor):
                yield param, sites


@dataclass(frozen=True, kw_only=True)
class DTensorHandle(Handle):
    """The Handle of a DTensor parameter; state values are DTensors on the same mesh with the same placements."""

    mesh: DeviceMesh
    spec: tuple[Placement, ...]
    shape: Shape

    def install(self, flat: torch.Tensor) -> None:
        with torch.inference_mode(mode=self.param.is_inference()), torch.no_grad():
            if is_dtensor(self.param):
                _local_of(self.param).copy_(flat.view(self.local_shape))

    def held(self, value: torch.Tensor) -> torch.Tensor | None:
        if not is_dtensor(value):
            return super().held(value)
        return _local_of(value).detach() if self.is_held(value) else None

    def is_held(self, value: torch.Tensor) -> bool:
        if not is_dtensor(value):
            return super().is_held(value)
        if value.placements != self.spec or value.shape != self.shape:
            return False
        mesh = value.device_mesh
        return (mesh is self.mesh or mesh == self.mesh) and is_plain(_local_of(value))

    def from_local(self, flat: torch.Tensor) -> torch.Tensor:
        return self._dtensor(flat.view(self.local_shape), self.spec, self.shape)

    def placement_of(self, value: torch.Tensor) -> Where | None:
        if not is_dtensor(value) or not is_plain(_local_of(value)):
            return None
        return placement_of("a state value", tuple(value.shape), value.device_mesh, value.placements)

    @property
    def marks(self) -> bool:
        return True

    def is_marked(self, value: torch.Tensor) -> bool:
        return is_dtensor(value)

    def place_like(self, shape: Shape, cut: str = "") -> Where | None:
        like = placement_of("a state value", shape, self.mesh, self._spec_like(shape))
        saved = cut_named(cut)
        if saved is None or saved[1] == like.splits or (saved[1] and saved[0] != self.mesh.ndim):
            return like
        if any(mesh_dim >= self.mesh.ndim or dim >= len(shape) for mesh_dim, dim in saved[1]):
            return like
        made = placement_of("a state value", shape, self.mesh, self._spec_cut(saved[1]))
        return made if made.splits == saved[1] else like

    def placed_local(self, value: torch.Tensor) -> torch.Tensor:
        return flatten(_local_of(value)) if is_dtensor(value) else super().placed_local(value)

    def from_placed(self, flat: torch.Tensor, placement: Where) -> torch.Tensor:
        if not isinstance(placement, MeshBoxes):
            return super().from_placed(flat, placement)
        box = placement.box(placement.shard_of(torch.distributed.get_rank()) or 0)
        return self._dtensor(flat.view(box.sizes), self._spec_of(placement), placement.shape)

    def unwrap(self, value: object) -> object:
        if is_dtensor(value):
            shape = tuple(value.shape)
            where = placement_of("a state value", shape, value.device_mesh, value.placements)
            return LocalPart(_local_of(value), cut_of(where), shape)
        return within(value, self.unwrap)

    def rewrap(self, value: object) -> object:
        if not isinstance(value, LocalPart):
            return within(value, self.rewrap)
        _, splits = cut_named(value.cut) or (0, ())
        like = self._spec_like(value.shape)
        alike = placement_of("a state value", value.shape, self.mesh, like).splits == splits
        return self._dtensor(value.local, like if alike else self._spec_cut(splits), value.shape)

    def _spec_like(self, shape: Shape) -> tuple[Placement, ...]:
        """The DTensor placements for a value of another shape: dimensions of the parameter's sizes are cut like there."""
        replicate = sys.modules[_MODULE].Replicate()
        same = [len(shape) == len(self.shape) and a == b for a, b in zip(shape, self.shape, strict=False)]
        return tuple(
            p if getattr(p, "dim", None) is not None and any(same) and same[p.dim] else replicate  # type: ignore[attr-defined]
            for p in self.spec
        )

    def _spec_of(self, placement: MeshBoxes) -> tuple[Placement, ...]:
        """The DTensor placements for a value with a Placement."""
        like = self._spec_like(placement.shape)
        if placement_of("a state value", placement.shape, self.mesh, like).splits == placement.splits:
            return like
        return self._spec_cut(placement.splits)

    def _spec_cut(self, splits: tuple[tuple[int, int], ...]) -> tuple[Placement, ...]:
        tensor, dims = sys.modules[_MODULE], dict(splits)
        return tuple(tensor.Shard(dims[d]) if d in dims else tensor.Replicate() for d in range(self.mesh.ndim))

    def _dtensor(self, local: torch.Tensor, spec: tuple[Placement, ...], shape: Shape) -> torch.Tensor:
        made: torch.Tensor = sys.modules[_MODULE].DTensor.from_local(
            local, self.mesh, spec, run_check=False, shape=torch.Size(shape), stride=row_major_strides(shape)
        )
        return made


def _local_of(value: DTensor) -> torch.Tensor:
    """The local tensor, without autograd, which would cost ten times as much."""
    local = value._local_tensor
    if type(local) is torch.Tensor:
        return local
    with torch.no_grad():  # to_local may have to wait for a collective operation
        return value.to_local()


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor, without importing DTensor."""
    if type(value) is torch.Tensor:  # most values are plain, and each is asked about more than once
        return False
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)
