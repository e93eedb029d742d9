"""All ranks of a job at one step of a trainer: an error of one of them is raised on all, so that none waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_optim.checkpoint.common.pending import pending
from fsdp_optim.options import CallOptions
from fsdp_optim.transport.agree import agree, all_hear, in_turn
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import world_here

_CALL = CallOptions()


@contextmanager
def meeting(what: str, options: CallOptions) -> Iterator[RankGroup]:
    """All ranks of `options.process_group`, or of the job. An error inside the block is raised on all of them."""
    world, pg = world_here(), options.process_group
    ranks = tuple(range(world.size)) if pg is None else world.ranks_of(pg)
    group = world.group(f"checkpoint of a trainer: {what}", ranks, pg, options.seconds, options.bucket_nbytes)
    with in_turn(group), all_hear(group):
        yield group


def wait_on_all(options: CallOptions = _CALL) -> None:
    """Wait for the save of this process in the background, on all ranks. Called by all ranks of the job.

    In contrast to `fsdp_optim.wait_for_saves`, the error of a save that has failed on some ranks is raised on all of them.

    Args:
        options: `process_group`: fewer ranks than the job's; `timeout`: how long the ranks wait for each other.

    Raises (the same on all ranks):
        CheckpointError: the save of a rank has failed, and its error was not raised before.
        RankTimeoutError: a rank did not come in time.
    """
    with meeting("wait", options) as group:
        settle(group)


def settle(group: RankGroup) -> None:
    """As `wait_on_all`, inside a meeting."""
    failure = Failure()
    with failure:
        pending.settle()
    agree(group, "waited", failure.error)
