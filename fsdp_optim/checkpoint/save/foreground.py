"""Save: from a live model and optimizer to full tensors in files. Every rank writes its own bytes."""

from __future__ import annotations

from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.progress import Progress
from fsdp_optim.checkpoint.common.stores import Place
from fsdp_optim.checkpoint.save.begin import begin
from fsdp_optim.checkpoint.save.finish import finish
from fsdp_optim.checkpoint.save.job import Job, RankReport, abandoned_on_failure, encode_written
from fsdp_optim.checkpoint.save.prints import add_prints
from fsdp_optim.checkpoint.save.saved_line import say_saved
from fsdp_optim.checkpoint.save.trace import Trace
from fsdp_optim.checkpoint.save.writing import RankWriter
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.move import End, Taken, move
from fsdp_optim.options import Model
from fsdp_optim.results.calls import SaveResult
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.transport.agree import MeetingResult, agree, all_gather_bytes
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import collective_call


def save(
    path: Place,
    model: Model,
    optim: Optimizers | None,
    options: SaveArguments,
    format: Format | None = None,
    *,
    alone: bool = False,
) -> SaveResult:
    """Write one full checkpoint. Called by all ranks of the model.

    `format` None: the format of the options. `alone`: this rank makes the call by itself, for a model without a wrapper.
    """
    with collective_call("save", [model], options, options.call, all_of_plain=not alone) as ((reader,), group):
        trace = Trace(options.trace)
        with trace.span("plan"):
            job, live = begin(path, reader, group, optim, options, format=format)
        with abandoned_on_failure(job):
            writer = job.rank_writer(trace)
            with Progress(job.options.progress, "saving", job.saved(0).nbytes, shown=job.leads) as progress:
                result, failure = _write(job, live, writer, progress), Failure()
                reports: list[RankReport] = []
                with failure:
                    if job.leads:
                        with trace.span("commit"):
                            reports = finish(job, [result.content_of(rank) for rank in job.group.ranks])
                agree(job.group, "committed", failure.error)
                progress.done()
    trace.write(job.group.ranks, [report.spans for report in reports])
    say_saved(job, reports)
    return job.saved(writer.nbytes)


def _write(job: Job, live: End, writer: RankWriter, progress: Progress) -> MeetingResult:
    """Write this rank's part, and all-gather the results. If a rank fails, all raise its error when all have stopped."""
    failure, sums = Failure(), b""

    def write(taken: Taken) -> None:
        writer.write(writer.extents_of(taken))
        progress.up_to(writer.nbytes * len(job.group.ranks))

    try:
        with failure, writer.timed("create"):
            job.start(writer.store_writer)
        with failure:
            sums = add_prints(job, live, writer.trace, failure)
        with failure, writer.trace.span("transfer"):
            move(job.moved, live, job.target(write, keeps=False), job.group, job.budget, failure)
        with failure:
            if failure.error is None:
                writer.finish()
    finally:
        writer.discard()
    report = encode_written(job, writer, writer.seconds, writer.trace.spans, sums)
    return all_gather_bytes(job.group, "written", report, error=failure.error, fatal=failure.fatal)
