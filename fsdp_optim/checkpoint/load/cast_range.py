"""Elements that were read, before a load with `cast=True` writes them into a dtype of less range: none may become infinite."""

from __future__ import annotations

from collections.abc import Collection

from fsdp_optim.checkpoint.common.casting import check_range, elements_of, is_narrower
from fsdp_optim.checkpoint.common.contents import is_buffer
from fsdp_optim.checkpoint.common.trees import key_of
from fsdp_optim.checkpoint.load.targets import Weights
from fsdp_optim.checkpoint.load.tree_targets import TreeTargets
from fsdp_optim.tensors.memory import dtype_named


def check_weights(weights: Weights) -> None:
    """Raise StateError for a number of a weight that would become infinite in the model.

    Without `cast=True` nothing becomes smaller but buffers that the wrapper itself casts; these are as it casts them.
    """
    rank = weights.local.view.rank
    for param in weights.local.optim.params:
        handle = param.handle
        if is_buffer(handle.param) and handle.cast_by_wrapper:
            continue
        for fqn, placement in param.named.placements.items():
            stored, shard = weights.stored.get(fqn), placement.shard_of(rank)
            if stored is None or shard is None or stored.dtype not in weights.memory.get(param.local_id, {}):
                continue
            saved = dtype_named(stored.dtype)
            if is_narrower(handle.weights_dtype, saved):
                flat = weights.memory[param.local_id][stored.dtype]
                blocks = [elements_of(flat, block) for block in placement.blocks(shard)]
                check_range(f"{fqn} on rank {rank}", blocks, saved, handle.weights_dtype)


def check_trees(trees: TreeTargets, keys: Collection[str]) -> None:
    """Raise the same for the tensors of trees that are filled in place. `keys`: theirs."""
    for param in trees.local.optim.params:
        fqn = param.named.fqns[0]
        if key_of(fqn) in keys:
            flat = trees.flats[param.local_id]
            check_range(f"{fqn} on rank {trees.local.view.rank}", [flat], flat.dtype, param.handle.weights_dtype)
