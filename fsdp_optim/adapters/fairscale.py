"""fairscale's FullyShardedDataParallel: flat parameters (`flatten_parameters=True`) and single ones (`False`).

Read from the installed source of fairscale 0.4.13. Only this file touches fairscale's private names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from fsdp_optim.adapters.tree import ModuleTree, summoned
from fsdp_optim.errors import WrapperError, counted_noun
from fsdp_optim.layout import FlatChunks, Ranks, ranks_in_order
from fsdp_optim.view import Handle, Original

if TYPE_CHECKING:
    from fairscale.nn.data_parallel import FullyShardedDataParallel
    from fairscale.nn.misc.flatten_params_wrapper import FlatParameter

_MODULE = "fairscale.nn.data_parallel.fully_sharded_data_parallel"
_FLAT_MODULE = "fairscale.nn.misc.flatten_params_wrapper"
WRAPPER_CHILDREN = frozenset({"_fsdp_wrapped_module", "_fpw_module"})


def is_wrapper_child(module: nn.Module, name: str) -> bool:
    """Whether `name` is where fairscale's wrappers keep the module that they wrap."""
    return name in WRAPPER_CHILDREN


def has_cut(param: torch.Tensor) -> bool:
    """Whether fairscale has cut a parameter into shards, or made this flat parameter."""
    flat_module = sys.modules.get(_FLAT_MODULE)
    is_flat = flat_module is not None and isinstance(param, flat_module.FlatParameter)
    return is_flat or bool(getattr(param, "_is_sharded", False))


def handles(tree: ModuleTree) -> Iterator[Handle]:
    """The live parameters of every fairscale FSDP unit in the model; nothing when fairscale is not loaded."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return
    ranks_of: dict[dist.ProcessGroup, Ranks] = {}
    for unit in units(tree):
        group = unit.process_group
        if group not in ranks_of:
            ranks_of[group] = ranks_in_order(dist.get_process_group_ranks(group))
        owned = {id(param) for param in unit.non_shared_params()}  # a shared one belongs to the unit that made it
        for index, param in enumerate(unit.params):
            if id(param) in owned:
                yield _handle(tree, unit, param, index, ranks_of[group])


def rank_sets(tree: ModuleTree) -> Iterator[Ranks]:
    """The global ranks of every unit's process group."""
    groups = {unit.process_group for unit in units(tree)}
    return (dist.get_process_group_ranks(group) for group in groups)


def units(tree: ModuleTree) -> tuple[FullyShardedDataParallel, ...]:
    """fairscale's FSDP units in the order in which fairscale numbers them, those without parameters too."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return ()
    return tuple(m for m in tree.modules if isinstance(m, module.FullyShardedDataParallel))


def cast_buffers(tree: ModuleTree) -> Iterator[torch.Tensor]:
    """Buffers that fairscale casts to a dtype of its own in the first forward pass: all floating ones of its units."""
    return (buffer for unit in units(tree) for buffer in unit.buffers() if buffer.is_floating_point())


def param_order(tree: ModuleTree) -> tuple[torch.Tensor, ...]:
    """The live parameters in the order in which fairscale's own full dict counts them: unit after unit."""
    return tuple(p for unit in units(tree) for p in unit.non_shared_params())


def _handle(tree: ModuleTree, unit: FullyShardedDataParallel, param: nn.Parameter, index: int, ranks: Ranks) -> Handle:
    orig_size, is_sharded = getattr(param, "_orig_size", None), getattr(param, "_is_sharded", None)
    if orig_size is None or is_sharded is None:
        raise WrapperError(
            f"parameter {index} of the unit {tree.path(unit)!r} is not one that fairscale has sharded: "
            "was it replaced after wrapping?"
        )
    numel = orig_size.numel()
    # As fairscale's _get_shard cuts: flatten().chunk(world_size), later chunks short or empty, all padded to the first.
    chunk_numel = -(-numel // len(ranks)) if is_sharded else numel
    num_padded = tuple(chunk_numel - min(max(numel - i * chunk_numel, 0), chunk_numel) for i in range(len(ranks)))
    recorded = unit.numel_padded_per_param[index]
    if recorded != num_padded[unit.rank if is_sharded else 0]:
        raise WrapperError(
            f"rank {dist.get_rank()}: fairscale padded parameter {index} of the unit {tree.path(unit)!r} by "
            f"{counted_noun(recorded, 'element')}, {num_padded[unit.rank]} were expected for "
            f"{counted_noun(numel, 'element')} on {counted_noun(len(ranks), 'rank')}"
        )
    is_summoned = unit.training_state.name == "SUMMON_FULL_PARAMS"  # at its end the whole copies may be put back
    if index < unit._num_flatten_params:
        originals, aliases = _flat_originals(param, chunk_numel, ranks)
        if is_summoned:
            raise summoned(tree.fqn(originals[0].module, originals[0].attribute), "fairscale FSDP")
    else:
        sites = tree.sites_of(param)
        if not sites:
            raise WrapperError(f"parameter {index} of the unit {tree.path(unit)!r} is not in the model any more")
        placement = FlatChunks(tuple(orig_size), 0, chunk_numel, (ranks,))
        originals = (Original(*sites[0], placement),)
        aliases = tuple((0, module, attribute) for module, attribute in sites[1:])
    return Handle(
        param=param,
        originals=originals,
        local_shape=(chunk_numel,) if is_sharded else tuple(orig_size),
        num_padded=num_padded,
        collected=not unit.no_broadcast_optim_state,
        aliases=aliases,
        # while a unit is in use, `data` has all of it, perhaps in half precision
        kept=lambda: _kept(param, tree.fqn(originals[0].module, originals[0].attribute) if is_summoned else ""),
    )


def _kept(param: nn.Parameter, summoned_fqn: str) -> torch.Tensor:
    if summoned_fqn:
        raise summoned(summoned_fqn, "fairscale FSDP")
    shard: torch.Tensor | None = getattr(param, "_fp32_shard", None)
    return shard if shard is not None else param.data


def reshard(tree: ModuleTree) -> None:
    """Let go of whole parameters that a forward pass without a backward has left, so that the next one sees the shards."""
    for unit in units(tree):
        if unit._is_root is not None and any(getattr(p, "_fp32_shard", None) is not None for p in unit.params):
            unit._free_full_params()
            unit._use_fp32_param_shard()
            unit.has_full_params = False


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
        placement = FlatChunks(tuple(shape), start, chunk_numel, (ranks,))
        originals.append(Original(module, attribute, placement, len(originals)))
        start += numel
    aliases = tuple(
        (positions[(shared_module, shared_attribute)], module, attribute)
        for _, _, module, attribute, shared_module, shared_attribute in flat._shared_param_infos
    )
    return tuple(originals), aliases
