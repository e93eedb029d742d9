"""The last step of a call that loads an optimizer on all ranks: all load their shards, or none keeps a new state."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_optim.results import Incompatible
from fsdp_optim.state.live.local_dict import Shard
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.load_state import Before, LoadableOptimizer, load_shard


def load_on_all(
    group: RankGroup,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    shard: Shard | list[Shard],
    keep: Sequence[str] = (),
    before: Before | None = None,
) -> Incompatible:
    """Load the optimizer on all ranks. If one fails, the optimizers of all ranks get back their previous state.

    `before`: the state before the load, of a caller who may restore it later too.
    """
    before = before or Before([*optim] if isinstance(optim, (list, tuple)) else [optim])  # type: ignore[list-item]
    failure, incompatible = Failure(), Incompatible()
    with failure:  # on an error, load_shard itself restores the optimizer of this rank
        incompatible = load_shard(optim, shard, keep, logs=group.rank == group.ranks[0])
    # No rank keeps its new state unless all have loaded: ranks with different states would train on without an error.
    try:
        agree(group, "optimizer loaded", failure.error)
    except BaseException:
        if failure.error is None:
            before.put_back()
        raise
    return incompatible
