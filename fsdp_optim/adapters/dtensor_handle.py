"""The Handle of a DTensor parameter: which state values are cut like it, and how others lie on its mesh."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import OnMesh, Shape, cut_named, cut_of
from fsdp_optim.layout import Placement as Where
from fsdp_optim.tensors.dtensors import (
    Grid,
    check_cut,
    dtensor,
    dtensor_cut_like,
    dtensor_like,
    grid_of,
    is_dtensor,
    local_of,
    order_of_its_own,
    placement_of,
)
from fsdp_optim.tensors.memory import flatten, in_shape, is_plain, map_container
from fsdp_optim.view import Handle, LocalPart, is_written_as_now, writing_into

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_MODULE = "torch.distributed.tensor"


@dataclass(frozen=True, kw_only=True)
class DTensorHandle(Handle):
    """The Handle of a DTensor parameter; state values are DTensors on the same mesh with the same placements."""

    mesh: DeviceMesh
    grid: Grid
    spec: tuple[Placement, ...]
    shape: Shape
    fsdp_dims: frozenset[int] | None = None
    fitting: dict[int, object] = field(default_factory=dict, compare=False, repr=False)  # by id, alike specs

    def weights(self) -> torch.Tensor:
        if self.kept is not None or not is_dtensor(self.param):
            return super().weights()
        # Detaching the DTensor itself would go through its dispatcher, which takes longer.
        return dtensor_cut_like(local_of(self.param).detach(), self.param)

    def as_value(self) -> torch.Tensor:
        # Making a DTensor without gradients takes long, and each parameter would need one.
        return self.param if self.kept is None and is_dtensor(self.param) else super().as_value()

    def install(self, flat: torch.Tensor) -> None:
        if is_dtensor(self.param):
            with writing_into(self.param):
                local_of(self.param).copy_(in_shape(flat, self.local_shape))

    def filled(self) -> torch.Tensor | None:
        param = self.param
        if not is_dtensor(param) or type(self).install is not DTensorHandle.install:
            return None
        local = local_of(param)
        return local if is_plain(local) and is_written_as_now(local) else None

    def held(self, value: torch.Tensor) -> torch.Tensor | None:
        if id(getattr(value, "_spec", None)) in self.fitting:  # nearly always
            local = getattr(value, "_local_tensor", None)
            if type(local) is torch.Tensor and local.shape == self.local_shape:
                return local.detach() if local.requires_grad else local
        if not is_dtensor(value):
            return super().held(value)
        if not self.is_held(value):
            return None
        local = local_of(value)
        return local.detach() if local.requires_grad else local

    def is_held(self, value: torch.Tensor) -> bool:
        if not is_dtensor(value):
            return super().is_held(value)
        spec = value._spec  # one look, where its properties would be three
        if id(spec) not in self.fitting:
            is_alike = spec.placements == self.spec and spec.shape == self.shape
            if not is_alike or (spec.mesh is not self.mesh and spec.mesh != self.mesh) or not self._is_in_order(spec):
                return False
            self.fitting[id(spec)] = spec  # the reference keeps the id unique
        local = local_of(value)
        return is_plain(local) and (local.shape == self.local_shape or not (local.numel() or self.local_numel))

    def _is_in_order(self, spec: Any) -> bool:
        """Return whether a dimension that several mesh dimensions cut is cut in the order in which the parameter is."""
        order = order_of_its_own(spec) if len(self.spec) > 1 else None
        return order is None or (is_dtensor(self.param) and order == order_of_its_own(self.param._spec))

    @property
    def takes_shaped(self) -> bool:
        return type(self).from_local is DTensorHandle.from_local

    def from_local(self, flat: torch.Tensor) -> torch.Tensor:
        if is_dtensor(self.param) and local_of(self.param).shape == self.local_shape:
            return dtensor_like(flat, self.param)
        return self._dtensor(in_shape(flat, self.local_shape), self.spec, self.shape)

    @cached_property
    def sort(self) -> tuple[object, ...]:
        # Parameters that are cut alike share one placement object, which is made for a mesh, its placements and a shape.
        ids = [id(original.placement) for original in self.originals]
        return type(self), *ids, id(self.mesh), self.shape, self.local_shape

    def sort_of(self, value: object) -> object:
        if type(value) is torch.Tensor or not is_dtensor(value):
            return super().sort_of(value)
        local = value._local_tensor
        # A DTensor of another dtype than its local tensor is refused (`is_usual_dtensor`).
        return id(value._spec), local.dtype, type(local), local.shape

    def placement_of(self, value: torch.Tensor) -> Where | None:
        if not is_dtensor(value) or not is_plain(local_of(value)):
            return None
        return self._checked(f"{self.originals[0].attribute}: a state value of shape {list(value.shape)}", value)

    @property
    def marks(self) -> bool:
        return True

    def is_marked(self, value: torch.Tensor) -> bool:
        return is_dtensor(value)

    def place_like(self, shape: Shape, cut: str = "") -> Where | None:
        if not isinstance(self.originals[0].placement, OnMesh):
            return None  # the parameter is cut as no rule says
        like = self._placed(shape, self._spec_like(shape))
        saved = cut_named(cut)
        if saved is None or saved[1] == like.cuts or (saved[1] and saved[0] != self.mesh.ndim):
            return like
        if any(len(cut) > 2 or cut[0] >= self.mesh.ndim or cut[1] >= len(shape) for cut in saved[1]):
            return like
        placement = self._placed(shape, self._spec_cut(saved[1]))
        return placement if placement.cuts == saved[1] else like

    def placed_local(self, value: torch.Tensor) -> torch.Tensor:
        return flatten(local_of(value)) if is_dtensor(value) else super().placed_local(value)

    def from_placed(self, flat: torch.Tensor, placement: Where) -> torch.Tensor:
        if not isinstance(placement, OnMesh):
            return super().from_placed(flat, placement)
        held = placement.local_shape(placement.shard_of(torch.distributed.get_rank()) or 0)
        return self._dtensor(flat.view(held), self._spec_of(placement), placement.shape)

    def unwrap(self, value: object) -> object:
        if is_dtensor(value):
            where = self._checked(f"{self.originals[0].attribute}: a DTensor in an opaque state value", value)
            return LocalPart(local_of(value), cut_of(where), tuple(value.shape))
        return map_container(value, self.unwrap)

    def rewrap(self, value: object) -> object:
        if not isinstance(value, LocalPart):
            return map_container(value, self.rewrap)
        _, cuts = cut_named(value.cut) or (0, ())
        like = self._spec_like(value.shape)
        is_same_cut = self._placed(value.shape, like).cuts == cuts
        return self._dtensor(value.local, like if is_same_cut else self._spec_cut(cuts), value.shape)

    def _placed(self, shape: Shape, spec: tuple[Placement, ...], mesh: DeviceMesh | None = None) -> OnMesh:
        """Return the placement of a state value, which is cut as the parameter is if it has the same placements."""
        grid = self.grid if mesh is None or mesh is self.mesh or mesh == self.mesh else grid_of(mesh)
        return placement_of("a state value", shape, grid, spec, self.fsdp_dims)

    def _checked(self, what: str, value: DTensor) -> OnMesh:
        """Return the placement of a state value. Raises WrapperError for one that is cut as no rule of torch says."""
        where = self._placed(tuple(value.shape), value.placements, value.device_mesh)
        check_cut(what, value, where)
        return where

    def _spec_like(self, shape: Shape) -> tuple[Placement, ...]:
        """Return the DTensor placements for a value of another shape: a dimension of the parameter's size is cut as there."""
        replicate = sys.modules[_MODULE].Replicate()
        same = [len(shape) == len(self.shape) and a == b for a, b in zip(shape, self.shape, strict=False)]
        return tuple(
            p if getattr(p, "dim", None) is not None and any(same) and same[p.dim] else replicate  # type: ignore[attr-defined]
            for p in self.spec
        )

    def _spec_of(self, placement: OnMesh) -> tuple[Placement, ...]:
        """Return the DTensor placements for a value with a Placement."""
        like = self._spec_like(placement.shape)
        return like if self._placed(placement.shape, like).cuts == placement.cuts else self._spec_cut(placement.cuts)

    def _spec_cut(self, cuts: tuple[tuple[int, ...], ...]) -> tuple[Placement, ...]:
        if any(len(cut) > 2 for cut in cuts):
            raise WrapperError(
                f"a state value was cut in interleaved groups ({cuts}), and its parameter is not: load into a model with "
                "the same tensor parallel placements"
            )
        tensor, dims = sys.modules[_MODULE], {cut[0]: cut[1] for cut in cuts}
        return tuple(tensor.Shard(dims[d]) if d in dims else tensor.Replicate() for d in range(self.mesh.ndim))

    def _dtensor(self, local: torch.Tensor, spec: tuple[Placement, ...], shape: Shape) -> torch.Tensor:
        return dtensor(local, self.mesh, spec, shape)
