"""DTensor: torch's fully_shard (FSDP2, HSDP), tensor parallel, both together, any DTensor on any mesh."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_optim.adapters.base import Adapter, Place
from fsdp_optim.adapters.dtensor_handle import DTensorHandle
from fsdp_optim.adapters.tree import ModuleTree, instances_of
from fsdp_optim.adapters.uneven import check_held, own_part, placed, says_its_part
from fsdp_optim.layout import Boxes, OnMesh, Ranks, Shape
from fsdp_optim.layout import Placement as Where
from fsdp_optim.layout.once import once_each
from fsdp_optim.tensors.dtensors import (
    Grid,
    check_cut,
    grid_of,
    is_dtensor,
    is_loaded,
    local_of,
)
from fsdp_optim.tensors.memory import flatten
from fsdp_optim.view import Handle, Original

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

    def stand_ins(self, modules: Collection[nn.Module]) -> Mapping[Place, torch.Tensor]:
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
                yield DTensorHandle.like(*alike[kind][1:], param, sites)
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
            yield DTensorHandle.like(like, placement, param, sites)

    def buffer(self, tree: ModuleTree, fqn: str, value: torch.Tensor) -> Handle | None:
        """Return the Handle of a DTensor buffer, as in a tensor parallel module."""
        if not is_dtensor(value):
            return None
        grid = tree.once(grid_of, value.device_mesh)
        return _handle(value, _place(fqn, value, grid), [(tree.root, fqn)], grid)

    def is_sharded_value(self, value: torch.Tensor) -> bool:
        return is_dtensor(value)

    def read_sharded_values(self, values: Sequence[tuple[str, Any]]) -> list[tuple[Where, torch.Tensor]]:
        grid, read = once_each(grid_of), list[tuple[Where, torch.Tensor]]()
        alike: dict[tuple[object, ...], Where] = {}
        for fqn, value in values:
            described, local = value._spec, local_of(value)
            order = getattr(described, "shard_order", None)
            kind = described.mesh, described.placements, value.shape, local.shape, order
            is_its_own = says_its_part(value, local)  # as no other value is cut
            place = alike.get(kind) if not is_its_own else None
            if place is None:
                place = _place(fqn, value, grid(described.mesh))
                if not is_its_own:
                    alike[kind] = place
            read.append((place, flatten(local.detach())))
        return read

    def reshard(self, tree: ModuleTree) -> None:
        loaded = sys.modules.get(_FULLY_SHARD_MODULE)
        if loaded is not None:
            for module in instances_of(tree.modules, loaded.FSDPModule):
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


def _sharded_params(modules: Collection[nn.Module]) -> dict[Place, torch.Tensor]:
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


def _params_of_fsdp(modules: Collection[nn.Module]) -> Iterator[Any]:
    """Yield the parameters of fully_shard, as torch describes them."""
    loaded = sys.modules.get(_FULLY_SHARD_MODULE)
    if loaded is None:
        return
    for module in instances_of(modules, loaded.FSDPModule):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch < 2.11 has one group at most
        for group in groups if groups is not None else filter(None, [state._fsdp_param_group]):
            yield from group.fsdp_params


def _params(tree: ModuleTree) -> list[tuple[DTensor, list[tuple[nn.Module, str]]]]:
    return [(param, sites) for param, sites in tree.params() if is_dtensor(param)]
