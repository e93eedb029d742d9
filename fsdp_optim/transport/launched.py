"""The ranks that a launcher (torchrun) has started: joined where the program does not do it, and missed where one saves alone."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import torch.distributed as dist

from fsdp_optim.transport.base import RankGroup


@contextlib.contextmanager
def launched_ranks() -> Iterator[int]:
    """Yield this process's rank. Processes that a launcher has started are the default group inside the context."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if dist.is_initialized() or not launched.isdecimal() or int(launched) <= 1:
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


log = logging.getLogger("fsdp_optim")


def warn_if_alone(group: RankGroup, path: str, *, has_group: bool) -> None:
    """Warn if one rank saves alone although several were launched. `has_group`: the caller gave process_group=."""
    if len(group.ranks) > 1 or has_group:
        return
    if group.world.is_initialized:
        if group.world.size > 1:
            log.warning(
                "%s: rank %d saves alone, because no other of the %d ranks shares its model. If others hold the rest or a "
                "copy of the model, give process_group= with all of them; else give each rank a path of its own, and "
                "process_group= with that rank only",
                path,
                group.rank,
                group.world.size,
            )
        return
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdecimal() and int(launched) > 1:
        log.warning(
            "%s: process %s saves alone although %s were launched (WORLD_SIZE), because torch.distributed is not initialized. "
            "If they train together, call init_process_group() first, and give process_group= if the model is not "
            "wrapped; else give each process a path of its own",
            path,
            os.environ.get("RANK", "?"),
            launched,
        )
