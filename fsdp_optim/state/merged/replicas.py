"""What replicas are compared by, and the error for replicas that differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_optim.errors import StateError, counted_noun, shortened
from fsdp_optim.state.live.local import LocalParam
from fsdp_optim.state.values.same import Incomparable, fingerprint_of, fold_of, is_folded
from fsdp_optim.view import Handle

NAME_OF = (
    ". If these are different parameters under one name (experts, say), give name_of=, a function (fqn, rank) -> name "
    "that tells them apart"
)
STATE, ELEMENTS = "state", "elements"
"""The compared content: an optimizer's state (errors name the values), or the elements of a model."""

_EXAMPLE = " (BatchNorm statistics of each rank, for example)"


def print_of_value(param: LocalParam, name: str, rank: int) -> str:
    """Return a fingerprint of this rank's part of one state value. Raises StateError for a value that cannot be compared."""
    value = param.state[name] if param.state is not None else None
    try:
        if not isinstance(value, torch.Tensor):
            return fingerprint_of(value)
        held = elements_of(param.handle, value, rank)
        return fold_of(held) if is_folded(held) else fingerprint_of(held)
    except Incomparable as error:
        raise StateError(
            f"{param.named.fqns[0]}: {name!r} of its state must be equal on the ranks that hold the same part of the "
            f"parameter, and cannot be compared: {error}: store plain values or tensors in the optimizer's state"
        ) from None


def elements_of(handle: Handle, value: torch.Tensor, rank: int) -> torch.Tensor:
    """Return this rank's elements of a value that is cut like the parameter, without padding; any other value unchanged."""
    held = handle.held(value)
    return value if held is None else without_padding(handle, held, rank)


def without_padding(handle: Handle, held: torch.Tensor, rank: int) -> torch.Tensor:
    """Return this rank's elements of a value that is cut like the parameter, from what `Handle.held` gives."""
    if not any(handle.num_padded):
        return held
    shard = handle.originals[0].placement.shard_of(rank)
    return held if shard is None else held[: len(held) - handle.num_padded[shard]]


def is_cut_among_replicas(handle: Handle, value: object, rank: int) -> bool:
    """Return whether ranks with the same shard of the parameter hold different shards of a value."""
    if not isinstance(value, torch.Tensor) or not handle.is_marked(value) or handle.is_held(value):
        return False
    where, placement = handle.placement_of(value), handle.originals[0].placement
    shard = placement.shard_of(rank)
    if where is None or shard is None:
        return False
    return len({where.shard_of(holder) for holder in placement.holders(shard)}) > 1


def not_replicas(
    fqn: str, what: str, ranks: tuple[int, ...], others: tuple[int, ...], more: Sequence[str] = ()
) -> StateError:
    """Return the error for two ranks whose elements of one shard differ.

    `what`: the names of the state values, or ELEMENTS; `more`: other parameters whose replicas differ.
    """
    is_state = what != ELEMENTS
    shown = f"; {counted_noun(len(more), 'more parameter')} like it: {shortened(more)}" if more else ""
    return StateError(
        f"{fqn}: its {what} {'is' if is_state else 'are'} not the same on {format_ranks(ranks)} and {format_ranks(others)}, "
        f"which hold the same part of it, so they are not replicas{shown}{NAME_OF}; if the replicas of this model may "
        f"differ{'' if is_state else _EXAMPLE}, give on_replica_mismatch='lowest_rank', which takes those of the lowest rank"
    )


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Return `rank 3`, `ranks 0, 1, 2`, `ranks 0..511`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}..{ranks[-1]}"
    return f"ranks {shortened(ranks)}"
