"""DTensor: torch's fully_shard (FSDP2, HSDP), tensor parallel, both together, any DTensor on any mesh."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_optim.adapters.base import Adapter, Place
from fsdp_optim.adapters.tree import ModuleTree
from fsdp_optim.adapters.uneven import check_held, own_part, placed, says_its_part
from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import Boxes, OnMesh, Ranks, Shape, cut_named, cut_of
from fsdp_optim.layout import Placement as Where
from fsdp_optim.layout.once import once_each
from fsdp_optim.tensors.dtensors import (
    Grid,
    check_cut,
    dtensor,
    dtensor_cut_like,
    dtensor_like,
    grid_of,
    is_dtensor,
    is_loaded,
    local_of,
    placement_of,
)
from fsdp_optim.tensors.memory import flatten, is_plain, map_container
from fsdp_optim.view import Handle, LocalPart, Original, writing_into

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
        return is_loaded()

    def rank_sets(self, tree: ModuleTree) -> Iterator[Ranks]:
        """Return the ranks of the mesh of every DTensor parameter."""
        specs = {id(spec): spec for spec in [param._spec for param, _ in tree.listed(_params)]}
        meshes = {id(spec.mesh): spec.mesh for spec in specs.values()}
        return (tree.once(grid_of, mesh).in_order() for mesh in meshes.values())

    def kind(self, tree: ModuleTree) -> str:
        """Return "FSDP2", "HSDP" or "sharded DTensors", or several of them, by how the parameters lie on their meshes."""
        fsdp_dims, kinds = tree.listed(_fsdp_dims), set()
        cuts = {(param._spec.placements, fsdp_dims.get(id(param))) for param, _ in tree.listed(_params)}
        for placements, of_fsdp in cuts:
            dims = of_fsdp or frozenset()
            cut = {dim for dim, placement in enumerate(placements) if not placement.is_replicate()}
            if dims:
                kinds.add("FSDP2" if dims <= cut else "HSDP")
            if cut - dims:
                kinds.add("sharded DTensors")
        return " and ".join(sorted(kinds)) or "DTensors"

    def stand_ins(self, modules: Iterable[nn.Module]) -> Mapping[Place, torch.Tensor]:
        return _sharded_params(modules)

    def handles(self, tree: ModuleTree, ranks: tuple[int, ...], claimed: Collection[int]) -> Iterator[Handle]:
        placements: dict[
            tuple[DeviceMesh, tuple[Placement, ...], Shape, frozenset[int] | None],
            tuple[OnMesh | Boxes, dict[object, dict[str, Any]]],
        ] = {}
        alike: dict[tuple[int, Shape, frozenset[int] | None], tuple[object, dict[str, Any], OnMesh | Boxes]] = {}
        fsdp_dims = tree.listed(_fsdp_dims)
        for param, sites in tree.listed(_params):
            if id(param) in claimed:
                continue
            described = param._spec  # one look, where its properties would be three
            local, last = local_of(param), fsdp_dims.get(id(param))
            if says_its_part(param, local):
                place = own_part(tree.fqn(*sites[0]), param)
                yield _handle(param, place, sites, tree.once(grid_of, described.mesh), last, empty_is_skipped=True)
                continue
            kind = id(described), local.shape, last  # equal parameters share their spec
            if kind in alike:
                yield _handle_like(*alike[kind][1:], param, sites)
                continue
            mesh, spec, shape = described.mesh, described.placements, tuple(param.shape)
            known = placements.get((mesh, spec, shape, last))
            if known is None:
                where = placed(tree.fqn(*sites[0]), shape, tree.once(grid_of, mesh), spec, last)
                known = placements[mesh, spec, shape, last] = where, {}
            placement, checked = known
            held = local.shape
            seen = held if len(spec) < 2 else (held, getattr(described, "shard_order", None))
            like = checked.get(seen)
            if like is None:
                _check(tree.fqn(*sites[0]), param, placement)
                handle = _handle(param, placement, sites[:1], tree.once(grid_of, mesh), last)
                like = checked[seen] = {**vars(handle), "sort": handle.sort}
            alike[kind] = described, like, placement  # the reference keeps the id unique
            yield _handle_like(like, placement, param, sites)

    def buffer(self, tree: ModuleTree, fqn: str, value: torch.Tensor) -> Handle | None:
        """Return the Handle of a DTensor buffer, as in a tensor parallel module."""
        if not is_dtensor(value):
            return None
        grid = tree.once(grid_of, value.device_mesh)
        return _handle(value, _place(fqn, value, grid), [(tree.root, fqn)], grid)

    def is_sharded_value(self, value: torch.Tensor) -> bool:
        return is_dtensor(value)

    def read_sharded_value(self, fqn: str, value: Any) -> tuple[Where, torch.Tensor]:
        return _place(fqn, value, grid_of(value.device_mesh)), flatten(value.to_local())

    def reshard(self, tree: ModuleTree) -> None:
        loaded = sys.modules.get(_FULLY_SHARD_MODULE)
        if loaded is not None:
            for module in tree.modules:
                if isinstance(module, loaded.FSDPModule):
                    module.reshard()


def _handle(
    param: DTensor,
    placement: OnMesh | Boxes,
    sites: list[tuple[nn.Module, str]],
    grid: Grid,
    fsdp_dims: frozenset[int] | None = None,
    *,
    empty_is_skipped: bool = False,
) -> DTensorHandle:
    """Return the Handle. `empty_is_skipped`: the wrapper gives no gradient to a rank without elements."""
    held = local_of(param).shape
    return DTensorHandle(
        param=param,
        originals=(Original(*sites[0], placement),),
        local_shape=tuple(held),
        aliases=tuple((0, module, attribute) for module, attribute in sites[1:]),
        skipped=empty_is_skipped and not held.numel() and bool(placement.numel),
        mesh=param.device_mesh,
        grid=grid,
        spec=param.placements,
        shape=placement.shape,
        fsdp_dims=fsdp_dims,
    )


def _handle_like(
    like: Mapping[str, Any], placement: OnMesh | Boxes, param: DTensor, sites: list[tuple[nn.Module, str]]
) -> DTensorHandle:
    """Return the Handle of a parameter that is cut as another one is. `like`: the attributes of that one's Handle.

    A frozen dataclass sets each of its attributes by a call, which would take most of the time of reading a parameter.
    """
    handle = DTensorHandle.__new__(DTensorHandle)
    attributes = vars(handle)
    attributes.update(like)
    attributes["param"], attributes["originals"] = param, (Original(*sites[0], placement),)
    if len(sites) > 1:
        attributes["aliases"] = tuple((0, module, attribute) for module, attribute in sites[1:])
    return handle


def _place(fqn: str, value: DTensor, grid: Grid) -> OnMesh | Boxes:
    """Return where the elements of a DTensor are that is no parameter."""
    if says_its_part(value, local_of(value)):
        return own_part(fqn, value)
    placement = placed(fqn, tuple(value.shape), grid, value.placements)
    _check(fqn, value, placement)
    return placement


def _check(fqn: str, value: DTensor, placement: OnMesh | Boxes) -> None:
    """Raise WrapperError where this rank's local tensor is not what the placements give it."""
    if isinstance(placement, OnMesh):
        check_cut(fqn, value, placement)
    else:
        check_held(fqn, value, placement)


def _sharded_params(modules: Iterable[nn.Module]) -> dict[Place, torch.Tensor]:
    """Return the sharded parameters of fully_shard, by owner and name.

    After a forward pass without a backward pass, unsharded parameters are registered in place of the sharded parameters, which
    the optimizer holds.
    """
    params: dict[Place, torch.Tensor] = {}
    for param in _params_of_fsdp(modules):
        info, live = param._module_info, _live_param(param)
        params[info.module, info.param_name] = live
        for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            params[shared, name] = live
    return params


def _live_param(param: Any) -> Any:
    """Return the sharded parameter of one of fully_shard's parameters.

    A program may replace it before the first forward pass, in which torch looks for the new one.
    """
    if param.sharded_state._name_ != "SHARDED":
        return param.sharded_param
    module, name = param._module_info.module, param._module_info.param_name
    registered = module._parameters.get(name)  # where nearly all are; a module looks there last
    if registered is None:
        registered = getattr(module, name)
    return registered if is_dtensor(registered) else param.sharded_param


def _fsdp_dims(tree: ModuleTree) -> dict[int, frozenset[int]]:
    """Return, by the id of each sharded parameter of fully_shard, the mesh dimensions over which it is cut or replicated."""
    dims_of = {}
    all_of = once_each(_dims_of)
    for param in _params_of_fsdp(tree.modules):
        dims = getattr(param, "_dp_dim_indices", None)  # of a parameter that had all dimensions of the mesh before
        info = param._module_info
        dims_of[id(tree.stand_ins[info.module, info.param_name])] = all_of(param.mesh_info) if dims is None else dims
    return dims_of


def _dims_of(mesh_info: Any) -> frozenset[int]:
    return frozenset(range(mesh_info.mesh.ndim))


def _params_of_fsdp(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the parameters of fully_shard, as torch describes them."""
    loaded = sys.modules.get(_FULLY_SHARD_MODULE)
    if loaded is None:
        return
    for module in modules:
        if isinstance(module, loaded.FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch < 2.11 has one group at most
            for group in groups if groups is not None else filter(None, [state._fsdp_param_group]):
                yield from group.fsdp_params


def _params(tree: ModuleTree) -> list[tuple[DTensor, list[tuple[nn.Module, str]]]]:
    return [(param, sites) for param, sites in tree.params() if is_dtensor(param)]


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
                local_of(self.param).copy_(flat.view(self.local_shape))

    def held(self, value: torch.Tensor) -> torch.Tensor | None:
        spec = getattr(value, "_spec", None)
        if spec is None or not is_dtensor(value):
            return super().held(value)
        local = value._local_tensor
        is_alike = id(spec) in self.fitting and type(local) is torch.Tensor  # nearly always
        if not is_alike or local.shape != self.local_shape:
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
            if not is_alike or (spec.mesh is not self.mesh and spec.mesh != self.mesh):
                return False
            self.fitting[id(spec)] = spec  # the reference keeps the id unique
        local = local_of(value)
        return is_plain(local) and (local.shape == self.local_shape or not (local.numel() or self.local_numel))

    def from_local(self, flat: torch.Tensor) -> torch.Tensor:
        if is_dtensor(self.param) and local_of(self.param).shape == self.local_shape:
            return dtensor_like(flat, self.param)
        return self._dtensor(flat.view(self.local_shape), self.spec, self.shape)

    @cached_property
    def sort(self) -> tuple[object, ...]:
        # Parameters that are cut alike share one placement object, which is made for a mesh, its placements and a shape.
        ids = [id(original.placement) for original in self.originals]
        return type(self), *ids, id(self.mesh), self.shape, self.local_shape

    def sort_of(self, value: object) -> object:
        if type(value) is torch.Tensor or not is_dtensor(value):
            return super().sort_of(value)
        local = value._local_tensor
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
