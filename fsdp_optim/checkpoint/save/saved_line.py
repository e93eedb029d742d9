"""The line that a save says when it is complete, on its lowest rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from fsdp_optim.checkpoint.save.job import Job, RankReport
from fsdp_optim.saying import counted, lasted, moved, say

_TIMES, _SECONDS = 2.0, 1.0
"""A rank stands out if it writes for twice as long as the median rank, and for a second longer."""


def say_saved(job: Job, reports: Sequence[RankReport], stall: float | None = None) -> None:
    """Say that a checkpoint is complete. Only the lowest rank of the save speaks.

    Args:
        reports: what each rank has written, in the order of `job.group.ranks`.
        stall: the seconds that the training waited; None for a save that it waits for in any case.
    """
    if not job.leads:
        return
    saved, ranks = job.saved(0), job.group.ranks
    line = f"saved {job.path}: {moved(saved.nbytes, time.monotonic() - job.begun)}"
    line += f", {counted(saved.num_tensors, 'tensor')}, {counted(len(ranks), 'rank')}"
    if stall is not None:
        line += f"; training waited {lasted(stall)}"
    slow = slowest([report.seconds for report in reports])
    if slow is not None:
        position, longest, median = slow
        line += f"; rank {ranks[position]} wrote for {lasted(longest)}, the median rank for {lasted(median)}"
    if saved.absent:
        line += f"; {counted(len(saved.absent), 'parameter')} without optimizer state"
    say(line)


def slowest(seconds: Sequence[float]) -> tuple[int, float, float] | None:
    """Return the position of the rank that wrote longest, its seconds and the median, if it stands out; else None.

    It stands out if it wrote for at least twice as long as the median rank, of two the faster one, and for a second longer.
    """
    if len(seconds) < 2:
        return None
    median, longest = statistics.median_low(seconds), max(seconds)
    if longest < max(_TIMES * median, median + _SECONDS):
        return None
    return seconds.index(longest), longest, median
