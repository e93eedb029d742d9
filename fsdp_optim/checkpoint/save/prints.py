"""The fingerprints of a save: of the live values, before anything is sent, cast or written, so that they prove all of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fsdp_optim.checkpoint.common.printing import PrintEnd, fingerprint_from, prints_in
from fsdp_optim.checkpoint.save.job import Job, RankReport
from fsdp_optim.checkpoint.save.trace import Trace
from fsdp_optim.errors import counted_noun, shortened
from fsdp_optim.move import End, move
from fsdp_optim.prints import LocalSums
from fsdp_optim.transport.failure import Failure

log = logging.getLogger("fsdp_optim")


def add_prints(job: Job, live: End, trace: Trace, failure: Failure) -> bytes:
    """Return the sums over this rank's elements for its report; empty if the save has no fingerprints. No communication."""
    if not job.options.fingerprint:
        return b""
    budget = job.group.budget.share(2, "windows of values that are not contiguous, and rows of them")
    end = PrintEnd(job.printed, job.group.rank, budget, job.group.world.plans)
    with trace.span("fingerprint"):
        move(job.printed, live, end, job.group, budget, failure)
        return end.sums().to_bytes() if failure.error is None else b""


def joined_prints(job: Job, reports: Sequence[RankReport]) -> bytes:
    """Return the fingerprints as JSON, on the leader; empty if the save has none."""
    if not job.options.fingerprint or job.leader is None:
        return b""
    if job.cast:
        cast = sorted({value.fqn for value in job.cast.values()})
        log.warning(
            "no fingerprints are kept of %s that the save casts: %s", counted_noun(len(cast), "weight"), shortened(cast)
        )
    total = LocalSums.zeros(len(job.printed), 0)
    for report in reports:
        total += LocalSums.from_bytes(report.sums, len(job.printed), 0)
    names = job.leader.names
    prints = {
        (half, names.get(fqn, fqn) if half != "state" else fqn, name): value
        for (half, fqn, name), value in prints_in(total, job.printed).items()
    }
    return fingerprint_from({**prints, **job.leader.prints}, names.values()).to_json().encode()
