"""async_save: copy this rank's part to host memory, and write the copy while training continues. No collective in the background.

The ranks agree on the end of the save through the rendezvous store (`Completion`): each announces that it is done or has failed.
The leader finishes the checkpoint when all are done, and announces the result.
"""

from __future__ import annotations

import contextlib
import logging
import time
from contextlib import ExitStack, closing

from fsdp_optim.checkpoint.catalog.retention import ManagedSave
from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.local_extents import ExtentsByFile, is_all_of, snapshot_of
from fsdp_optim.checkpoint.common.pending import SaveHandle, pending
from fsdp_optim.checkpoint.common.progress import Progress
from fsdp_optim.checkpoint.common.seen_by_all import SEEN_WITHIN, is_there, waited_for
from fsdp_optim.checkpoint.common.stores import Place
from fsdp_optim.checkpoint.save.begin import begin
from fsdp_optim.checkpoint.save.finish import finish
from fsdp_optim.checkpoint.save.job import Job, RankReport, abandoned_on_failure, encode_written
from fsdp_optim.checkpoint.save.prints import add_prints
from fsdp_optim.checkpoint.save.saved_line import say_saved
from fsdp_optim.checkpoint.save.trace import BACKGROUND, Trace
from fsdp_optim.checkpoint.save.writing import RankWriter
from fsdp_optim.errors import CheckpointError, FsdpOptimError, StoreLostError
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.move import Taken, move
from fsdp_optim.options import Model
from fsdp_optim.results.calls import SaveResult
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.completion import Completion
from fsdp_optim.transport.failure import RANK_ERRORS, Failure
from fsdp_optim.verbs.call import collective_call

log = logging.getLogger("fsdp_optim")

Snapshot = list[ExtentsByFile]
"""Copies of this rank's extents in host memory, in parts that are freed one by one."""


def async_save(
    path: Place,
    model: Model,
    optim: Optimizers | None,
    options: SaveArguments,
    format: Format | None = None,
    managed: ManagedSave | None = None,
    *,
    begun: float | None = None,
    alone: bool = False,
) -> SaveHandle:
    """Copy the state, start the writing thread, and return. Called by all ranks of the model.

    `format` None: the format of the options. `managed`: the additions of a CheckpointManager. `begun`: the time of
    `time.monotonic` since which the training waits; None: since now. `alone`: this rank makes the call by itself, for a model
    without a wrapper.
    """
    begun = time.monotonic() if begun is None else begun
    # The completion is opened before the ranks agree, so that no rank returns while another one cannot announce its end.
    with ExitStack() as held:
        with collective_call("async_save", [model], options, options.call, all_of_plain=not alone) as (
            (reader,),
            group,
        ):
            trace = Trace(options.trace)
            with trace.span("plan"):
                job, live = begin(path, reader, group, optim, options, format=format, managed=managed)
            with abandoned_on_failure(job):
                failure = Failure()
                writer = job.rank_writer(trace)
                snapshot: Snapshot = []
                sums = b""
                completion: Completion | None = None

                def keep(taken: Taken) -> None:
                    extents = writer.extents_of(taken)
                    snapshot.append(extents if is_all_of(extents, taken) else snapshot_of(extents))

                with failure:
                    completion = held.enter_context(closing(job.completion()))
                with failure:
                    sums = add_prints(job, live, trace, failure)
                with trace.span("copy"):
                    move(job.moved, live, job.target(keep), job.group, job.budget, failure)
                agree(job.group, "snapshot", failure.error, fatal=failure.fatal)
                if completion is None:  # agree() has raised
                    raise RuntimeError("unreachable: a rank without a completion has failed, and cannot agree")
        held.pop_all()
    del live  # so that the background neither reads the live tensors nor keeps them alive
    owner = managed.known if managed is not None else None
    stall = time.monotonic() - begun
    trace.add("stall", begun)
    trace.track = BACKGROUND
    handle = SaveHandle(
        job.path, lambda: _write(job, writer, snapshot, stall, completion, sums), logs_waits=job.leads, owner=owner
    )
    try:
        pending.begin(handle)
    except BaseException as error:  # no thread could be started: the other ranks learn this through the store
        completion.failed(f"{type(error).__name__}: {error}")
        _clean_up(job)
        completion.close()
        raise
    return handle


def _write(
    job: Job, writer: RankWriter, snapshot: Snapshot, stall: float, completion: Completion, sums: bytes
) -> SaveResult:
    """Write this rank's part in the background, and wait for the end of the save.

    `stall`: the seconds that training waited. `sums`: those of fingerprints.
    """
    reports: list[RankReport] = []
    with closing(completion):
        failed: str | None = None
        total, num = job.saved(0).nbytes, len(job.group.ranks)
        with Progress(job.options.progress, "saving", total, shown=job.leads, alone=False) as progress:
            try:
                with writer.timed("create"):
                    job.start(writer.store_writer)
                while snapshot:
                    writer.write(snapshot.pop(0))
                    progress.up_to(writer.nbytes * num)
                writer.finish()
                completion.done(encode_written(job, writer, writer.seconds, writer.trace.spans, sums))
            except RANK_ERRORS as error:
                failed = _why(job, error)
                completion.failed(failed)
            finally:
                writer.discard()
            if job.leads:
                reports = _lead(job, completion, failed, writer.trace)
            else:
                _wait(job, completion)
            progress.done()
    writer.trace.write(job.group.ranks, [report.spans for report in reports])
    say_saved(job, reports, stall)
    return job.saved(writer.nbytes)


def _why(job: Job, error: BaseException) -> str:
    """Return the error of this rank's part, for the other ranks."""
    if isinstance(error, StoreLostError):
        return _lost(job, error)
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _lost(job: Job, error: StoreLostError) -> str:
    return f"rank {job.group.rank}: {job.group.turn.call} of {job.path}: {error}"


def _wait(job: Job, completion: Completion) -> None:
    """Wait for the end of the save, on a rank that does not lead it.

    Where the rendezvous store is gone, the checkpoint itself shows that the save has succeeded: it has the token of this save.
    """
    try:
        completion.wait_for_end()
    except StoreLostError as error:
        if not waited_for(lambda: is_there(job.store, job.format, job.token), SEEN_WITHIN):
            text = f"{_lost(job, error)}; this rank does not know how the save has ended"
            raise CheckpointError(text) from error
        log.warning("%s is complete, though %s", job.path, error)


def _lead(job: Job, completion: Completion, failed: str | None, trace: Trace) -> list[RankReport]:
    """Wait for all ranks, finish the checkpoint, and announce the result. `failed`: the reason why this rank failed, or None.

    Returns the reports of the ranks.
    """
    try:
        if failed is not None:
            raise CheckpointError(f"rank {job.group.rank}: {failed.removeprefix(f'rank {job.group.rank}: ')}")
        try:
            written = completion.wait_for_all()
            with trace.span("commit"):
                reports = finish(job, written, completion.commit)
        except StoreLostError as error:
            raise CheckpointError(_lost(job, error)) from error
    except RANK_ERRORS as error:
        is_own_error = isinstance(error, FsdpOptimError)
        text = str(error) if is_own_error else f"rank {job.group.rank}: {type(error).__name__}: {error}"
        all_have_stopped = completion.not_saved(text)
        _clean_up(job, late=not all_have_stopped)
        raise CheckpointError(text) from error
    completion.saved()
    return reports


def _clean_up(job: Job, *, late: bool = True) -> None:
    """Remove the files of a failed save, and release the claim on its path. Raises nothing, because an error is on its way."""
    if job.leader is not None:
        job.leader.staging.abandon(late=late)
        with contextlib.suppress(StoreLostError):
            job.leader.claim.release()
