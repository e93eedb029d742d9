"""The receipt of a load: one line, and one warning where ranks are new, both of the lowest rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.load.chosen_models import left_out_models
from fsdp_optim.checkpoint.load.loaded_objects import LoadedObjects
from fsdp_optim.errors import shortened
from fsdp_optim.formats.base.protocols import Reader, rank_extra_name
from fsdp_optim.results.calls import LoadResult
from fsdp_optim.saying import LoadReceipt, counted
from fsdp_optim.transport.base import RankGroup

log = logging.getLogger("fsdp_optim")


def receipt_of(
    result: LoadResult,
    checkpoint: Reader,
    group: RankGroup,
    options: LoadArguments,
    objects: LoadedObjects,
    *,
    nbytes: int,
    begun: float,
    wrapper: str,
) -> LoadReceipt:
    """Return what a load has done.

    Args:
        nbytes: the bytes of the loaded tensors, each counted once.
        begun: the time of `time.monotonic` at which the load began.
        wrapper: the names of the wrappers of the live model; empty without one.
    """
    facts, here = checkpoint.index.facts, len(group.ranks)
    changed = facts.world_size not in (0, here)
    other = facts.wrapper not in ("", wrapper)
    return LoadReceipt(
        where=_place(checkpoint, options),
        ranks=f"{facts.world_size:,} -> {counted(here, 'rank')}" if changed else counted(here, "rank"),
        wrapper=f"{facts.wrapper} -> {wrapper or 'no wrapper'}" if other else wrapper,
        nbytes=nbytes,
        num_tensors=result.num_tensors,
        seconds=time.monotonic() - begun,
        is_verified=options.verify and facts.has_checksums,
        num_random=_num_own(checkpoint, here) if objects.sets_random else 0,
        names=tuple(objects.names_loaded),
        num_absent=len(result.absent),
    )


def _place(checkpoint: Reader, options: LoadArguments) -> str:
    """Return the place of a checkpoint, with the names of the models that were loaded if it has others."""
    where, left_out = checkpoint.index.where, left_out_models(checkpoint, options)
    return f"{where} ({', '.join(options.models.names)}; not {', '.join(left_out)})" if left_out else where


def warn_of_new_ranks(checkpoint: Reader, group: RankGroup, objects: LoadedObjects) -> None:
    """Log one warning, on the lowest rank, if ranks have no values of their own because fewer ranks saved."""
    if group.rank != group.ranks[0]:
        return
    if objects.lacks_random:
        log.warning("the checkpoint has no random states (it was saved with rng=False), so they stay as they are")
    num = _num_own(checkpoint, len(group.ranks))
    new, names = group.ranks[num:], objects.own_names
    if not new or not num:
        return
    kept = [f"state[{name!r}]" for name in names] + (["random states"] if objects.sets_random else [])
    if kept:
        fix = f"; seed {'it' if len(new) == 1 else 'each of them'}" if objects.sets_random else ""
        fix += "; all_ranks of the load's result has the values of the ranks that saved" if names else ""
        log.warning(
            "%s was saved by %s, so %s new: %s own %s%s",
            checkpoint.index.where,
            counted(num, "rank"),
            f"{_listed(new)} {'is' if len(new) == 1 else 'are'}",
            "it keeps its" if len(new) == 1 else "they keep their",
            " and ".join(kept),
            fix,
        )


def _num_own(checkpoint: Reader, most: int) -> int:
    """Return how many of the first ranks have values of their own in a checkpoint."""
    extras = checkpoint.index.extras
    return next((position for position in range(most) if rank_extra_name(position) not in extras), most)


def _listed(ranks: Sequence[int]) -> str:
    """Return `rank 2`, `ranks 2 to 5`, `ranks 2, 5, 9`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {shortened(ranks)}"
