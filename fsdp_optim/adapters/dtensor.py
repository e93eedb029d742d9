"""DTensor: torch's fully_shard (FSDP2, HSDP), tensor parallel, both together, any DTensor on any mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp_optim.adapters.tree import ModuleTree
from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import MeshBoxes, Ranks, Shape, ranks_in_order
from fsdp_optim.view import Handle, Original

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_MODULE = "torch.distributed.tensor"


def rank_sets(tree: ModuleTree) -> Iterator[Ranks]:
    """The global ranks of the mesh of every DTensor parameter."""
    meshes = {param.device_mesh for param, _ in _params(tree)}
    return (_ranks(mesh) for mesh in meshes)


def handles(tree: ModuleTree) -> Iterator[Handle]:
    """Every DTensor parameter of the model; nothing when DTensor is not loaded."""
    for param, sites in _params(tree):
        fqn = tree.fqn(*sites[0])
        placement = placement_of(fqn, tuple(param.shape), param.device_mesh, param.placements)
        yield DTensorHandle(
            param=param,
            originals=(Original(*sites[0], placement),),
            local_shape=tuple(param.to_local().shape),
            aliases=tuple((0, module, attribute) for module, attribute in sites[1:]),
            mesh=param.device_mesh,
            spec=param.placements,
            shape=tuple(param.shape),
        )


def placement_of(fqn: str, shape: Shape, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> MeshBoxes:
    """Where a DTensor's elements live."""
    splits = []
    for mesh_dim, placement in enumerate(placements):
        if placement.is_partial():
            raise WrapperError(f"{fqn}: {placement} is a sum that is not made yet, which no optimizer state can follow")
        if not placement.is_replicate():
            dim = getattr(placement, "dim", None)
            if dim is None:
                raise WrapperError(f"{fqn}: {placement} is a placement that is not known here")
            splits.append((_is_strided(placement), mesh_dim, dim % max(len(shape), 1)))
    # fully_shard over tensor parallel: its mesh dimension comes first, but cuts what tensor parallel has left.
    order = tuple((mesh_dim, dim) for _, mesh_dim, dim in sorted(splits))
    return MeshBoxes(shape, tuple(mesh.mesh.shape), order, (_ranks(mesh),))


def _is_strided(placement: Placement) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _ranks(mesh: DeviceMesh) -> Ranks:
    return ranks_in_order(mesh.mesh.flatten().tolist())


def _params(tree: ModuleTree) -> Iterator[tuple[DTensor, list[tuple[nn.Module, str]]]]:
    module = sys.modules.get(_MODULE)
    if module is not None:
        for param, sites in tree.params():
            if isinstance(param, module.DTensor):
                yield param, sites


@dataclass(frozen=True, kw_only=True)
class DTensorHandle(Handle):
    """A DTensor parameter: its state values are DTensors on the same mesh with the same placements."""

    mesh: DeviceMesh
    spec: tuple[Placement, ...]
    shape: Shape

    def local(self, value: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(value, sys.modules[_MODULE].DTensor):
            return super().local(value)
        sharded: DTensor = value
        alike = sharded.device_mesh == self.mesh and tuple(sharded.placements) == tuple(self.spec)
        return sharded.to_local().detach().reshape(-1) if alike and tuple(value.shape) == self.shape else None

    def from_local(self, flat: torch.Tensor) -> torch.Tensor:
        module = sys.modules[_MODULE]
        local = flat.view(self.local_shape)
        param: DTensor = self.param
        made: torch.Tensor = module.DTensor.from_local(
            local, self.mesh, self.spec, run_check=False, shape=param.shape, stride=param.stride()
        )
        return made
