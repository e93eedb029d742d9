"""Weights in another floating dtype than they were saved in, and the state values whose dtype follows theirs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fsdp_optim.checkpoint.contents import is_buffer
from fsdp_optim.formats.base import StoredTensor
from fsdp_optim.memory import dtype_named, flatten
from fsdp_optim.state.local import LocalOptim, LocalParam
from fsdp_optim.state.packed import LocalId
from fsdp_optim.view import Handle


def castable(handle: Handle, dtype: str, *, cast: bool) -> bool:
    """Whether what was saved in this dtype may go into this parameter or buffer, whatever its own dtype is.

    Wrappers cast floating buffers in the first forward pass: so one that was saved after it may be widened, which changes no
    value, and one that is loaded after it is cast as the wrapper would.
    """
    param, saved = handle.param, dtype_named(dtype)
    if not (param.is_floating_point() and saved.is_floating_point):
        return False
    return cast or (is_buffer(param) and (handle.cast_by_wrapper or _has_all_of(param.dtype, saved)))


def _has_all_of(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a floating dtype has every number of another."""
    mine, its = torch.finfo(dtype), torch.finfo(other)
    return mine.eps <= its.eps and mine.max >= its.max and mine.tiny * mine.eps <= its.tiny * its.eps


def merged(
    param: LocalParam, flats: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor], rank: int
) -> torch.Tensor:
    """This rank's elements of a live parameter whose originals were saved in several dtypes, or in part."""
    held = flatten(param.handle.weights()).clone()
    for fqn, placement in param.named.placements.items():
        shard = placement.shard_of(rank)
        if fqn not in stored or shard is None:
            continue
        flat = flats[stored[fqn].dtype]
        for block in placement.blocks(shard):
            held[block.offset : block.offset + block.box.numel] = flat[block.offset : block.offset + block.box.numel]
    return held


def state_dtype(
    optim: LocalOptim, param: LocalParam, name: str, saved: torch.dtype, weights: Mapping[str, StoredTensor]
) -> torch.dtype:
    """The dtype that a sharded state value has after a load with `cast=True`.

    Where the weights keep their dtype, so does their state. Else it is what the live optimizer has for this value; one of
    torch.optim without state steps in its parameters' dtype only, so a value that was saved in the weights' follows them.
    Everything else stays what it was: other optimizers may keep fp32 state for bf16 weights.
    """
    before = {dtype_named(weights[fqn].dtype) for fqn in param.named.fqns if fqn in weights}
    now = param.handle.weights().dtype
    if not saved.is_floating_point or before <= {now}:
        return saved
    live = (param.state or {}).get(name)
    if isinstance(live, torch.Tensor):
        return live.dtype if live.dtype.is_floating_point else saved
    is_torchs = bool(optim.classes) and optim.classes[param.group_index].is_of_torch
    return now if is_torchs and before == {saved} else saved


def cast_state(
    optim: LocalOptim, flats: Mapping[LocalId, Mapping[str, torch.Tensor]], weights: Mapping[str, StoredTensor]
) -> dict[LocalId, Mapping[str, torch.Tensor]]:
    """Local tensors of the state, by local id and name, in the dtypes that they are to have."""
    by_id = {param.local_id: param for param in optim.params}
    return {
        local_id: {
            name: flat.to(state_dtype(optim, by_id[local_id], name, flat.dtype, weights))
            for name, flat in values.items()
        }
        for local_id, values in flats.items()
    }
