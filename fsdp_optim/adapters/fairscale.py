"""fairscale's FullyShardedDataParallel: flat parameters (`flatten_parameters=True`) and single parameters (`False`).

It follows the source of fairscale 0.4.13. Only this file uses fairscale's private names.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from fsdp_optim.adapters.base import Adapter
from fsdp_optim.adapters.tree import ModuleTree, instances_of, is_loaded_class, summoned
from fsdp_optim.errors import WrapperError, counted_noun
from fsdp_optim.layout import Ranks, flat_chunks, ranks_in_order
from fsdp_optim.view import Handle, Original

if TYPE_CHECKING:
    from fairscale.nn.data_parallel import FullyShardedDataParallel
    from fairscale.nn.misc.flatten_params_wrapper import FlatParameter

_MODULE = "fairscale.nn.data_parallel.fully_sharded_data_parallel"
_FLAT_MODULE = "fairscale.nn.misc.flatten_params_wrapper"


class FairscaleAdapter(Adapter):
    """The adapter of fairscale's FSDP units."""

    name = "fairscale FSDP"
    wrapper_parts = frozenset({"_fsdp_wrapped_module", "_fpw_module"})

    def is_present(self) -> bool:
        return _MODULE in sys.modules

    def is_wrapper_child(self, module: nn.Module, name: str) -> bool:
        """Return whether a child is the module inside one of fairscale's two wrappers, not inside a class of the user's own."""
        if name == "_fsdp_wrapped_module":
            return is_loaded_class(module, _MODULE, "FullyShardedDataParallel")
        return name == "_fpw_module" and is_loaded_class(module, _FLAT_MODULE, "FlattenParamsWrapper")

    def has_cut(self, param: torch.Tensor) -> bool:
        flat_module = sys.modules.get(_FLAT_MODULE)
        is_flat = flat_module is not None and isinstance(param, flat_module.FlatParameter)
        return is_flat or bool(getattr(param, "_is_sharded", False))

    def rank_sets(self, tree: ModuleTree) -> Iterator[Ranks]:
        groups = {unit.process_group for unit in tree.listed(_units)}
        return (dist.get_process_group_ranks(group) for group in groups)

    def handles(self, tree: ModuleTree, ranks: tuple[int, ...], claimed: Collection[int]) -> Iterator[Handle]:
        ranks_of: dict[dist.ProcessGroup, Ranks] = {}
        for unit in tree.listed(_units):
            group = unit.process_group
            if group not in ranks_of:
                ranks_of[group] = ranks_in_order(dist.get_process_group_ranks(group))
            owned = {id(param) for param in unit.non_shared_params()}  # a shared parameter belongs to another unit
            for index, param in enumerate(unit.params):
                if id(param) in owned:
                    yield _handle(tree, unit, param, index, ranks_of[group])

    def param_order(self, tree: ModuleTree) -> Iterator[torch.Tensor]:
        return (param for unit in tree.listed(_units) for param in unit.non_shared_params())

    def cast_buffers(self, tree: ModuleTree) -> Iterator[torch.Tensor]:
        """Return all floating point buffers of fairscale's units."""
        return (buffer for unit in tree.listed(_units) for buffer in unit.buffers() if buffer.is_floating_point())

    def reshard(self, tree: ModuleTree) -> None:
        for unit in tree.listed(_units):
            if unit._is_root is not None and any(getattr(p, "_fp32_shard", None) is not None for p in unit.params):
                unit._free_full_params()
                unit._use_fp32_param_shard()
                unit.has_full_params = False


def _units(tree: ModuleTree) -> tuple[FullyShardedDataParallel, ...]:
    """Return fairscale's FSDP units in fairscale's order, including units without parameters."""
    cls = sys.modules[_MODULE].FullyShardedDataParallel
    return tuple(instances_of(tree.modules, cls))


def _handle(tree: ModuleTree, unit: FullyShardedDataParallel, param: nn.Parameter, index: int, ranks: Ranks) -> Handle:
    orig_size, is_sharded = getattr(param, "_orig_size", None), getattr(param, "_is_sharded", None)
    if orig_size is None or is_sharded is None:
        raise WrapperError(
            f"parameter {index} of the unit {tree.path(unit)!r} was not sharded by fairscale: "
            "was the parameter replaced after wrapping?"
        )
    numel = orig_size.numel()
    # fairscale's _get_shard cuts with flatten().chunk(world_size): later chunks may be short or empty, and are padded.
    chunk_numel = -(-numel // len(ranks)) if is_sharded else numel
    num_padded = tuple(chunk_numel - min(max(numel - i * chunk_numel, 0), chunk_numel) for i in range(len(ranks)))
    recorded = unit.numel_padded_per_param[index]
    if recorded != num_padded[unit.rank if is_sharded else 0]:
        raise WrapperError(
            f"rank {dist.get_rank()}: fairscale padded parameter {index} of the unit {tree.path(unit)!r} by "
            f"{counted_noun(recorded, 'element')}, and not by {num_padded[unit.rank]} as version 0.4.13 does for "
            f"{counted_noun(numel, 'element')} on {counted_noun(len(ranks), 'rank')}: use fairscale 0.4.13"
        )
    # The exit of summon_full_params() may write the unsharded copies back, over what a load has written.
    is_summoned = unit.training_state.name == "SUMMON_FULL_PARAMS"
    if index < unit._num_flatten_params:
        originals, aliases = _flat_originals(param, chunk_numel, ranks)
        if is_summoned:
            raise summoned(tree.fqn(originals[0].module, originals[0].attribute), "fairscale FSDP")
    else:
        sites = tree.sites_of(param)
        if not sites:
            raise WrapperError(
                f"parameter {index} of the unit {tree.path(unit)!r} is not in the model any more: was the parameter replaced "
                "after wrapping?"
            )
        placement = flat_chunks(tuple(orig_size), 0, chunk_numel, (ranks,))
        originals = (Original(*sites[0], placement),)
        aliases = tuple((0, module, attribute) for module, attribute in sites[1:])
    return Handle(
        param=param,
        originals=originals,
        local_shape=(chunk_numel,) if is_sharded else tuple(orig_size),
        num_padded=num_padded,
        collected=not unit.no_broadcast_optim_state,
        aliases=aliases,
        # While a unit is in use, `data` has the unsharded parameter, possibly in half precision.
        kept=lambda: _kept(param, tree.fqn(originals[0].module, originals[0].attribute) if is_summoned else ""),
    )


def _kept(param: nn.Parameter, summoned_fqn: str) -> torch.Tensor:
    if summoned_fqn:
        raise summoned(summoned_fqn, "fairscale FSDP")
    shard: torch.Tensor | None = getattr(param, "_fp32_shard", None)
    return shard if shard is not None else param.data


def _flat_originals(
    flat: FlatParameter, chunk_numel: int, ranks: Ranks
) -> tuple[tuple[Original, ...], tuple[tuple[int, nn.Module, str], ...]]:
    originals: list[Original] = []
    positions: dict[tuple[nn.Module, str], int] = {}
    start = 0
    for (_, module, attribute), shape, numel in zip(
        flat._param_infos, flat._param_shapes, flat._param_numels, strict=True
    ):
        positions[(module, attribute)] = len(originals)
        placement = flat_chunks(tuple(shape), start, chunk_numel, (ranks,))
        originals.append(Original(module, attribute, placement, len(originals)))
        start += numel
    aliases = tuple(
        (positions[(shared_module, shared_attribute)], module, attribute)
        for _, _, module, attribute, shared_module, shared_attribute in flat._shared_param_infos
    )
    return tuple(originals), aliases
