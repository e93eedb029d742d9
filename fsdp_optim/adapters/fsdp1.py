"""torch's FullyShardedDataParallel with use_orig_params False (flat parameters) and True (views into flat parameters).

It follows the source of torch 2.13. Only this file uses that wrapper's private names.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp_optim.adapters.base import Adapter, Place
from fsdp_optim.adapters.tree import ModuleTree, instances_of, is_loaded_class, summoned
from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import MeshBoxes, Placement, Ranks, Shape, Whole, flat_chunks, ranks_in_order
from fsdp_optim.tensors.dtensors import dtensor
from fsdp_optim.view import Handle, Original

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._flat_param import FlatParamHandle, ParamInfo

_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"


class FSDP1Adapter(Adapter):
    """The adapter of torch FSDP units that shard, replicate, or do both."""

    name = "torch FSDP"
    wrapper_parts = frozenset({"_fsdp_wrapped_module"})

    def is_present(self) -> bool:
        return _MODULE in sys.modules

    def is_wrapper_child(self, module: nn.Module, name: str) -> bool:
        """Return whether a child is the module inside a FullyShardedDataParallel, not inside a class of the user's own."""
        return name in self.wrapper_parts and is_loaded_class(module, _MODULE, "FullyShardedDataParallel")

    def has_cut(self, param: torch.Tensor) -> bool:
        return bool(getattr(param, "_fsdp_flattened", False))

    def kind(self, tree: ModuleTree) -> str:
        """Return "FSDP1", or "HSDP (FSDP1)" where units are replicated over groups of ranks too."""
        return "HSDP (FSDP1)" if any(_across(unit) is not None for unit in tree.listed(_units)) else "FSDP1"

    def rank_sets(self, tree: ModuleTree) -> Iterator[Ranks]:
        """Return the ranks of every replica of every unit."""
        by_id = {id(replicas): replicas for unit in tree.listed(_units) for replicas in [_replicas(tree, unit)]}
        return (ranks for replicas in by_id.values() for ranks in replicas)

    def stand_ins(self, modules: Collection[nn.Module]) -> Mapping[Place, torch.Tensor]:
        """Return the originals of units that a forward pass with gradients has left unsharded, with torch's views registered."""
        cls = sys.modules[_MODULE].FullyShardedDataParallel
        live: dict[Place, torch.Tensor] = {}
        for unit in instances_of(modules, cls):
            if unit._handle is not None and unit._handle._use_orig_params:
                flat = unit._handle.flat_param
                infos = (*flat._param_infos, *flat._shared_param_infos)
                for info, param in zip(infos, (*(flat._params or ()), *(flat._shared_params or ())), strict=True):
                    if info.module._parameters.get(info.param_name) is not param:
                        live[info.module, info.param_name] = param
        return live

    def handles(self, tree: ModuleTree, ranks: tuple[int, ...], claimed: Collection[int]) -> Iterator[Handle]:
        cuts = _Cuts()
        for unit in tree.listed(_units):
            handle = _handle_of(unit)
            replicas = _replicas(tree, unit)
            # torch turns HYBRID_SHARD over a single rank into NO_SHARD, and then does not keep the replicas equal.
            kept_equal = handle.uses_sharded_strategy or _across(unit) is None
            if handle._use_orig_params:
                yield from _original_handles(tree, handle, replicas, kept_equal, cuts)
            else:
                yield _flat_handle(tree, handle, replicas, kept_equal)

    def cast_buffers(self, tree: ModuleTree) -> Iterator[torch.Tensor]:
        """Yield the floating point buffers of units whose MixedPrecision has a buffer_dtype."""
        cls = sys.modules[_MODULE].FullyShardedDataParallel
        for unit in instances_of(tree.modules, cls):
            if unit.mixed_precision.buffer_dtype is not None:
                yield from (buffer for buffer in unit.buffers() if buffer.is_floating_point())

    def reshard(self, tree: ModuleTree) -> None:
        for unit in tree.listed(_units):
            handle = _handle_of(unit)
            has_shard = hasattr(handle.flat_param, "_local_shard")  # absent before the first use
            if handle.uses_sharded_strategy and has_shard:
                handle.reshard(True)
                handle.post_reshard()  # type: ignore[no-untyped-call]


def _units(tree: ModuleTree) -> Sequence[FullyShardedDataParallel]:
    """Return the units that have parameters themselves."""
    cls = sys.modules[_MODULE].FullyShardedDataParallel
    return [unit for unit in instances_of(tree.modules, cls) if unit._handle is not None]


def _handle_of(unit: FullyShardedDataParallel) -> FlatParamHandle:
    if unit._handle is None:
        raise WrapperError("a torch FSDP unit without parameters has no handle")
    return unit._handle


def _across(unit: FullyShardedDataParallel) -> dist.ProcessGroup | None:
    """Return the group of HYBRID_SHARD's replicas. `vars` avoids the slow lookup of absent attributes in the wrapped module."""
    replicate_group: dist.ProcessGroup | None = vars(unit).get("_inter_node_pg")
    return replicate_group


def _replicas(tree: ModuleTree, unit: FullyShardedDataParallel) -> tuple[Ranks, ...]:
    """Return the ranks of every replica of a unit, each in the order of its shards. Units share their groups."""
    handle = _handle_of(unit)
    return tree.once(_replicas_of, handle.process_group, _across(unit), unit._device_mesh, handle.uses_sharded_strategy)


def _replicas_of(
    group: dist.ProcessGroup, across: dist.ProcessGroup | None, mesh: DeviceMesh | None, is_sharded: bool
) -> tuple[Ranks, ...]:
    shard_ranks = dist.get_process_group_ranks(group)
    if across is None and mesh is not None and mesh.ndim > 1:
        # Without HYBRID_SHARD the unit is cut over the first dimension. The other ranks of the mesh hold it too, as copies.
        columns = mesh.mesh.flatten(1).T.sort(1).values.tolist()
        cut = (
            [ranks_in_order(column) for column in columns]
            if is_sharded
            else [(rank,) for rank in mesh.mesh.flatten().tolist()]
        )
        return tuple(sorted(cut, key=lambda ranks: ranks[0]))
    if not is_sharded:
        if across is not None:  # HYBRID_SHARD over one rank becomes NO_SHARD
            shard_ranks = sorted({*shard_ranks, *dist.get_process_group_ranks(across)})
        return tuple((rank,) for rank in shard_ranks)
    if across is None:
        return (ranks_in_order(shard_ranks),)
    if mesh is not None and mesh.ndim == 2:
        # A process group sorts its ranks, so the order in the mesh does not matter.
        return tuple(sorted((ranks_in_order(sorted(row)) for row in mesh.mesh.tolist()), key=lambda row: row[0]))
    return _grid(shard_ranks, sorted(dist.get_process_group_ranks(across)))


def _grid(row: list[int], column: list[int]) -> tuple[Ranks, ...]:
    """Return the shard groups of all replicas, from the shard group and the replicate group of this rank.

    Two plain groups give only one row and one column of the grid. The other rows are assumed to be shifted copies of this
    row, but only if they cover every rank of the job: then all ranks take part in the call, and a rank with another row raises.

    Raises WrapperError for all other groups.
    """
    here = dist.get_rank()
    replicas = tuple(ranks_in_order([rank - here + other for rank in row]) for other in column)
    if sorted(rank for replica in replicas for rank in replica) != list(range(dist.get_world_size())):
        raise WrapperError(
            f"rank {here}: HYBRID_SHARD on the process groups {row} (shards) and {column} (replicas) does not show the shard "
            f"groups of the other ranks, unless all {dist.get_world_size()} ranks of the job form a grid whose rows are shifted "
            "copies of each other: give FullyShardedDataParallel a device_mesh= with the dimensions (replicate, shard) in place "
            "of process_group="
        )
    return replicas


def _starts(handle: FlatParamHandle) -> tuple[list[int], int]:
    """Return the index in the flat parameter at which each original begins, and the flat parameter's length with alignment."""
    flat = handle.flat_param
    starts, at = [], 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            starts.append(at)
        at += numel
    return starts, at


def _check(tree: ModuleTree, handle: FlatParamHandle) -> None:
    flat = handle.flat_param
    for info, contiguous, extension in zip(flat._param_infos, flat._contiguities, flat._param_extensions, strict=True):
        if contiguous and extension is None:
            continue
        fqn = tree.fqn(info.module, info.param_name)
        if not contiguous:
            raise WrapperError(
                f"{fqn}: this parameter was not contiguous when torch FSDP flattened it, so the flat parameter has the "
                "elements in another order: call .contiguous() on the parameter (or drop channels_last) before wrapping"
            )
        raise WrapperError(f"{fqn}: torch FSDP over tensor parallel is not supported: use fully_shard (FSDP2) instead")


def _is_summoned(handle: FlatParamHandle) -> bool:
    """Return whether the call is made inside `summon_full_params()`, whose exit may write the unsharded copies back."""
    return bool(handle._training_state.name == "SUMMON_FULL_PARAMS")


def _flat_handle(tree: ModuleTree, handle: FlatParamHandle, replicas: tuple[Ranks, ...], synchronized: bool) -> Handle:
    _check(tree, handle)
    flat = handle.flat_param
    if _is_summoned(handle):
        raise summoned(tree.fqn(flat._param_infos[0].module, flat._param_infos[0].param_name), "torch FSDP")
    starts, total = _starts(handle)
    num_shards = len(replicas[0])
    chunk = -(-total // num_shards)
    originals: list[Original] = []
    positions: dict[tuple[nn.Module, str], int] = {}
    for info, shape, start in zip(flat._param_infos, flat._shapes, starts, strict=True):
        positions[info.module, info.param_name] = len(originals)
        originals.append(
            Original(info.module, info.param_name, flat_chunks(tuple(shape), start, chunk, replicas), len(originals))
        )
    return Handle(
        param=flat,
        synchronized=synchronized,
        originals=tuple(originals),
        local_shape=tuple(flat._sharded_size) if handle.uses_sharded_strategy else (total,),
        num_padded=tuple(chunk - min(max(total - i * chunk, 0), chunk) for i in range(num_shards)),
        aliases=tuple(
            (positions[info.prim_module, info.prim_param_name], info.module, info.param_name)
            for info in flat._shared_param_infos
        ),
        kept=lambda: _kept(handle),
    )


def _kept(handle: FlatParamHandle) -> torch.Tensor:
    """Return this rank's chunk, which is not the data of the flat parameter while a unit is in use."""
    flat = handle.flat_param
    shard = getattr(flat, "_local_shard", None)
    return shard if shard is not None and shard.numel() else flat.data


class _Cut(NamedTuple):
    """How an original is cut.

    `local_shape`: of its part on this rank. `skipped`: whether the wrapper skips it here. `part`: where this is in the rank's
    chunk of the flat parameter; None where nothing is sharded.
    """

    placement: Placement
    local_shape: Shape
    skipped: bool = False
    part: slice | None = None


class _Cuts:
    """The cuts of originals, computed once for all originals that are cut alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[Shape, int, int, tuple[Ranks, ...]], _Cut] = {}
        self._complete: dict[tuple[Shape, tuple[Ranks, ...]], _Cut] = {}

    def of(self, shape: Shape, start: int, chunk: int, replicas: tuple[Ranks, ...]) -> _Cut:
        """Return the cut of an original from element `start` of the flat parameter on, in chunks."""
        key = shape, start, chunk, replicas
        known = self._known.get(key)
        if known is None:
            rank, placement = dist.get_rank(), flat_chunks(shape, start, chunk, replicas, True)
            numel = placement.numel_on(rank)
            run = replace(placement, own_tensor=False).run(placement.shard_of(rank) or 0)
            part = slice(run.offset, run.offset + run.stop - run.start)
            known = self._known[key] = _Cut(placement, (numel,), placement.numel > 0 == numel, part)
        return known

    def unsharded(self, shape: Shape, replicas: tuple[Ranks, ...]) -> _Cut:
        """Return the cut of an original that is complete on all ranks."""
        known = self._complete.get((shape, replicas))
        if known is None:
            placement = Whole(shape, tuple(rank for group in replicas for rank in group))
            known = self._complete[shape, replicas] = _Cut(placement, shape)
        return known


def _original_handles(
    tree: ModuleTree, handle: FlatParamHandle, replicas: tuple[Ranks, ...], synchronized: bool, cuts: _Cuts
) -> Iterator[Handle]:
    _check(tree, handle)
    flat = handle.flat_param
    starts, total = _starts(handle)
    chunk = -(-total // len(replicas[0]))
    params: list[torch.Tensor] = list(flat._params or ())
    aliases: dict[tuple[nn.Module, str], list[tuple[int, nn.Module, str]]] = {}
    for other in flat._shared_param_infos:
        place_of_first = other.prim_module, other.prim_param_name
        aliases.setdefault(place_of_first, []).append((0, other.module, other.param_name))
    described = zip(flat._param_infos, flat._shapes, starts, params, strict=True)
    for place, (info, shape, start, param) in enumerate(described):
        if handle.uses_sharded_strategy:
            cut = cuts.of(tuple(shape), start, chunk, replicas)
        else:
            cut = cuts.unsharded(tuple(shape), replicas)
        yield Handle(
            param=param,
            originals=(Original(info.module, info.param_name, cut.placement, place),),
            local_shape=cut.local_shape,
            aliases=tuple(aliases.get((info.module, info.param_name), ())),
            kept=partial(_part_of_chunk, tree, handle, cut.part, info) if cut.part is not None else None,
            skipped=cut.skipped,
            synchronized=synchronized,
        )


def _part_of_chunk(tree: ModuleTree, handle: FlatParamHandle, part: slice, info: ParamInfo) -> torch.Tensor:
    """Return the elements of an original in this rank's chunk; the original's own tensor is unsharded while a unit is in use."""
    if _is_summoned(handle):
        raise summoned(tree.fqn(info.module, info.param_name), "torch FSDP")
    return _kept(handle)[part]


@dataclass(frozen=True, eq=False)
class Chunks:
    """How torch's own sharded dicts cut the parameters of a unit: along the first dimension, over the ranks of its shards.

    `mesh`: that of the unit, for DTensors; None: ShardedTensors of `group`. `is_cut` False: the unit shards nothing.
    """

    replicas: tuple[Ranks, ...]
    group: dist.ProcessGroup
    mesh: DeviceMesh | None
    is_cut: bool

    def placement(self, shape: Shape) -> Placement:
        """Return where a value of the shape of a parameter lives."""
        if not self.is_cut:
            return Whole(shape, tuple(rank for ranks in self.replicas for rank in ranks))
        return MeshBoxes(shape, (len(self.replicas[0]),), ((0, 0),), self.replicas)

    def local_shape(self, shape: Shape) -> Shape:
        """Return the shape of this rank's part of such a value."""
        placement = self.placement(shape)
        shard = placement.shard_of(dist.get_rank())
        return placement.local_shape(shard or 0) if isinstance(placement, MeshBoxes) else shape

    def value(self, local: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Return such a value, with this rank's elements, in the form in which torch's sharded dicts have it."""
        if not self.is_cut:
            return local
        if self.mesh is None:
            return _chunked_tensor(local, shape, self.group)
        tensor = sys.modules["torch.distributed.tensor"]
        replicated = (tensor.Replicate(),) * (self.mesh.ndim - 1)
        return dtensor(local, self.mesh, (*replicated, tensor.Shard(0)), shape)


def chunks_of(model: nn.Module) -> dict[tuple[nn.Module, str], Chunks]:
    """Return how torch's sharded dicts cut each original parameter of FSDP1's units, by its module and name there."""
    cls, by_place = sys.modules[_MODULE].FullyShardedDataParallel, dict[tuple[nn.Module, str], Chunks]()
    for unit in model.modules():
        if not isinstance(unit, cls) or unit._handle is None:
            continue
        handle = _handle_of(unit)
        mesh, is_cut = unit._device_mesh, handle.uses_sharded_strategy
        replicas = _replicas_of(handle.process_group, _across(unit), mesh, is_cut)
        if mesh is not None and is_cut:  # torch's dicts are cut over the last dimension, whatever the strategy
            replicas = tuple(map(ranks_in_order, mesh.mesh.flatten(0, -2).tolist())) if mesh.ndim > 1 else replicas
        chunks = Chunks(replicas, handle.process_group, mesh, is_cut)
        by_place.update(((info.module, info.param_name), chunks) for info in handle.flat_param._param_infos)
    return by_place


def _chunked_tensor(local: torch.Tensor, shape: Shape, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the ShardedTensor with these elements on this rank."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard

    ranks, others = dist.get_process_group_ranks(group), [0] * (len(shape) - 1)
    step, device = -(-shape[0] // len(ranks)), local.device.type
    number = max(1, torch.get_device_module(device).device_count())
    shards = {
        rank: ShardMetadata(
            [start, *others],
            [min(step, shape[0] - start), *shape[1:]],
            f"rank:{rank}/{device}" if device == "cpu" else f"rank:{rank}/{device}:{rank % number}",
        )
        for rank, start in zip(ranks, range(0, shape[0], step or 1), strict=False)
    }
    properties = TensorProperties(dtype=local.dtype, requires_grad=False)
    metadata = ShardedTensorMetadata(list(shards.values()), torch.Size(shape), properties)
    own = [Shard(local, shards[dist.get_rank()])] if dist.get_rank() in shards else []
    value: torch.Tensor = ShardedTensor._init_from_local_shards_and_global_metadata(own, metadata, process_group=group)
    return value
