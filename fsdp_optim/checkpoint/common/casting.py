"""Casts. At a load: weights to the model's floating dtype, and state values whose dtype follows the dtype of the weights.

At a save: weights to the dtype in which they are saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch

from fsdp_optim.checkpoint.common.contents import SavedValue, is_buffer
from fsdp_optim.errors import CheckpointError, StateError, counted_noun
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.layout import Block
from fsdp_optim.move import Slice
from fsdp_optim.state.dicts.packed import LocalId
from fsdp_optim.state.live.local import LocalOptim, LocalParam
from fsdp_optim.tensors.memory import dtype_name, dtype_named, flatten
from fsdp_optim.view import Handle

_PART = 1 << 20  # elements that are looked at together


def castable(handle: Handle, dtype: str, *, cast: bool) -> bool:
    """Return whether a tensor that was saved in `dtype` may be loaded into this parameter or buffer of another dtype.

    Wrappers cast floating buffers in the first forward pass. So a buffer that was saved after that pass may be widened, which
    changes no value, and a buffer that is loaded after that pass is cast as the wrapper casts it.
    """
    param, saved = handle.param, dtype_named(dtype)
    if not can_convert(saved, param.dtype):
        return False
    return cast or (is_buffer(param) and (handle.cast_by_wrapper or _has_all_of(param.dtype, saved)))


@lru_cache(maxsize=256)
def can_convert(before: torch.dtype, after: torch.dtype) -> bool:
    """Return whether both dtypes are floating, and torch converts the first to the second: never where numbers are packed."""
    if not (before.is_floating_point and after.is_floating_point):
        return False
    try:
        torch.empty(1, dtype=after, device="cpu").copy_(torch.zeros(1, dtype=torch.float64, device="cpu").to(before))
    except RuntimeError:  # torch says so of dtypes that it cannot convert; NotImplementedError is such an error
        return False
    return True


def check_range(what: str, flats: Iterable[torch.Tensor], before: torch.dtype, after: torch.dtype) -> None:
    """Raise StateError for numbers in tensors of a dtype that would become infinite, or other ones, in a dtype of less range."""
    if not is_narrower(after, before):
        return
    number = sum(_num_too_large(flat, after) for flat in flats)
    if number:
        raise StateError(
            f"{what}: {counted_noun(number, 'element')} of its {dtype_name(before)} elements would become infinite in "
            f"{dtype_name(after)}, whose largest number is {torch.finfo(after).max:g}; nothing was loaded: load into "
            f"{dtype_name(before)}, or into another dtype that has these numbers"
        )


def is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether the largest number of a floating dtype is below that of another one that torch can convert to it."""
    return dtype != other and can_convert(other, dtype) and torch.finfo(dtype).max < torch.finfo(other).max


def _num_too_large(flat: torch.Tensor, dtype: torch.dtype) -> int:
    """Return how many finite numbers a conversion would round to more than the largest number of a dtype."""
    info, number = torch.finfo(dtype), 0
    limit = info.max + 2.0 ** (math.frexp(info.max)[1] - 1) * info.eps / 2  # half a step above
    for part in torch.split(flat.detach().reshape(-1), _PART) if flat.numel() else ():
        wide = part.float() if part.itemsize == 1 else part  # of fewer bits there are no comparisons
        low, high = torch.aminmax(wide)  # takes no memory
        if not (-limit < low and high < limit):  # or one is NaN
            number += int(((wide.abs() >= limit) & ~wide.isinf()).sum())
    return number


def cast_part(value: SavedValue | None, part: Slice) -> Slice:
    """Cast elements to the dtype in which they are saved. `value`: the saved value; None: the elements are saved as they are.

    Raises CheckpointError for a number that becomes infinite.
    """
    if value is None:
        return part
    if part.flat is None:
        return part._replace(value=value)
    cast = part.flat.detach().to(value.dtype)
    if torch.finfo(value.dtype).max < torch.finfo(part.flat.dtype).max:
        too_large = int((cast.isinf() & ~part.flat.isinf()).sum())
        if too_large:
            raise CheckpointError(
                f"{value.fqn}: {counted_noun(too_large, 'element')} of its {dtype_name(part.flat.dtype)} elements would "
                f"become infinite in {dtype_name(value.dtype)}: save with another weights_dtype, or without one"
            )
    return Slice(value, part.cut, cast, part.start, is_own=True)


def nbytes_to_cast(before: torch.dtype, after: torch.dtype) -> int:
    """Return the bytes of memory that a cast takes per element: the new element, its magnitude, and four truth values."""
    return after.itemsize + max(before.itemsize, after.itemsize) + 4


def _has_all_of(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a floating dtype can represent every number of another floating dtype."""
    info, other_info = torch.finfo(dtype), torch.finfo(other)
    has_range = info.max >= other_info.max and info.tiny * info.eps <= other_info.tiny * other_info.eps
    return info.eps <= other_info.eps and has_range


def merged(
    param: LocalParam, flats: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor], rank: int
) -> torch.Tensor:
    """Merge this rank's elements of a live parameter whose originals were saved in several dtypes, or not all saved."""
    weights = param.handle.weights()
    local = param.handle.local(weights)
    held = (flatten(weights) if local is None else local).clone()
    for fqn, placement in param.named.placements.items():
        shard = placement.shard_of(rank)
        if fqn not in stored or shard is None:
            continue
        flat = flats[stored[fqn].dtype]
        for block in placement.blocks(shard):
            elements_of(held, block).copy_(elements_of(flat, block))
    return held


def elements_of(flat: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the elements of a Block of a 1-D local tensor, in whose memory they are."""
    return flat.as_strided(block.box.sizes, block.local_strides, flat.storage_offset() + block.offset)


def state_dtype(
    optim: LocalOptim, param: LocalParam, name: str, saved: torch.dtype, weights: Mapping[str, StoredTensor]
) -> torch.dtype:
    """Return the dtype of a sharded state value after a load with `cast=True`.

    If the weights keep their dtype, the state does too. Otherwise the value gets the dtype that the live optimizer has for it. An
    optimizer of torch.optim without state steps in the dtype of its parameters, so a value with the saved dtype of the weights
    follows the weights. All other values keep their dtype, because other optimizers may keep fp32 state for bf16 weights.
    """
    before = {dtype_named(weights[fqn].dtype) for fqn in param.named.fqns if fqn in weights}
    now = param.handle.weights_dtype
    if not saved.is_floating_point or before <= {now}:
        return saved
    live = (param.state or {}).get(name)
    if isinstance(live, torch.Tensor):
        return live.dtype if can_convert(saved, live.dtype) else saved
    is_torchs = bool(optim.classes) and optim.classes[param.group_index].is_of_torch
    return now if is_torchs and before == {saved} and can_convert(saved, now) else saved


def cast_state(
    optim: LocalOptim, flats: Mapping[LocalId, Mapping[str, torch.Tensor]], weights: Mapping[str, StoredTensor]
) -> dict[LocalId, Mapping[str, torch.Tensor]]:
    """Return local state tensors, by local id and name, in the dtypes that `state_dtype` gives.

    Raises StateError for a number that would become infinite.
    """
    by_id = {param.local_id: param for param in optim.params}
    cast: dict[LocalId, Mapping[str, torch.Tensor]] = {}
    for local_id, values in flats.items():
        param = by_id[local_id]
        dtypes = {name: state_dtype(optim, param, name, flat.dtype, weights) for name, flat in values.items()}
        for name, flat in values.items():
            check_range(f"{param.named.fqns[0]}: {name}", [flat], flat.dtype, dtypes[name])
        cast[local_id] = {name: flat.to(dtypes[name]) for name, flat in values.items()}
    return cast
