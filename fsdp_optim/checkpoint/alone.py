"""A process that saves alone, though it is one of several: it may not know that it belongs to them."""

from __future__ import annotations

import logging
import os

from fsdp_optim.transport.base import RankGroup

log = logging.getLogger("fsdp_optim")


def warn_if_alone(callers: RankGroup, path: str, *, was_told: bool) -> None:
    """Warn of a save by one rank where several processes were launched. `was_told`: the caller gave its process group."""
    if len(callers.ranks) > 1 or was_told:
        return
    if callers.world.is_initialized:
        if callers.world.size > 1:
            log.warning(
                "%s: rank %d saves it alone, as its model lives on no other of the %d ranks. Where others hold the rest of it or "
                "a copy, give process_group= with all of them; else give each rank a path of its own, and process_group= of that "
                "rank",
                path,
                callers.rank,
                callers.world.size,
            )
        return
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdecimal() and int(launched) > 1:
        log.warning(
            "%s: process %s saves it alone, though %s were launched (WORLD_SIZE), because torch.distributed is not initialized. "
            "Where they train together, call init_process_group() first, and give process_group= where the model is not "
            "wrapped; else give each process a path of its own",
            path,
            os.environ.get("RANK", "?"),
            launched,
        )
