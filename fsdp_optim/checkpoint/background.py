"""async_save: copy this rank's part to host memory, and write it while training goes on. No collective runs in the background.

The ranks agree on the end through the store (`Completion`): each says when it is done or has failed; the rank that began the save
finishes it when all are done, and says how that ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import ExitStack, closing

from torch import nn

from fsdp_optim.checkpoint.pending import SaveHandle, pending
from fsdp_optim.checkpoint.progress import Progress
from fsdp_optim.checkpoint.results import Saved
from fsdp_optim.checkpoint.runs import Runs, copied
from fsdp_optim.checkpoint.save import (
    Job,
    abandoned_on_failure,
    begin,
    encode_note,
    finish,
    log_saved,
)
from fsdp_optim.checkpoint.stores import Place
from fsdp_optim.checkpoint.writing import Writer
from fsdp_optim.errors import CheckpointError, RankTimeoutError
from fsdp_optim.formats.base import Format
from fsdp_optim.formats.ours import OURS
from fsdp_optim.move import Slice, move
from fsdp_optim.options import SaveOptions
from fsdp_optim.state.local import Optimizers
from fsdp_optim.storage.base import Completion
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import calling

Snapshot = list[Runs]
"""This rank's runs in memory of their own, by file, in parts that are let go of one by one"""


def async_save(
    path: Place, model: nn.Module, optim: Optimizers | None, options: SaveOptions, format: Format = OURS
) -> SaveHandle:
    """Copy the state, start writing, return."""
    with ExitStack() as held:
        with calling("async_save", [model], options, options.call, all_of_plain=True) as ((reader,), callers):
            job, live = begin(path, reader, callers, optim, options, format)
            with abandoned_on_failure(job):
                failure = Failure()
                writer = job.hand()
                snapshot: Snapshot = []
                completion: Completion | None = None

                def keep(parts: Sequence[Slice]) -> None:
                    runs = writer.runs_of(parts)
                    snapshot.append(runs if all(part.is_own for part in parts) else copied(runs))

                with failure:
                    completion = held.enter_context(closing(job.completion()))
                move(job.values, live, job.target(keep), job.callers, job.budget, failure)
                agree(job.callers, "copied", failure.error, fatal=failure.fatal)
                if completion is None:  # agree() has raised
                    raise RuntimeError("unreachable: a rank that cannot hear how it ends cannot agree")
                completion.watch()
        held.pop_all()
    del live  # nothing of the training is kept alive, or read later
    handle = SaveHandle(job.path, lambda: _write(job, writer, snapshot, completion))
    try:
        pending.begin(handle)
    except BaseException as error:  # no thread to be had: the others are told through the store
        completion.failed(f"{type(error).__name__}: {error}")
        _let_go(job)
        completion.close()
        raise
    return handle


def _write(job: Job, writer: Writer, snapshot: Snapshot, completion: Completion) -> Saved:
    """In the background: write this rank's part, then hear how it ended."""
    with closing(completion):
        failed: str | None = None
        total, num = job.saved(0).nbytes, len(job.callers.ranks)
        with Progress(job.options.progress, "saving", total, shown=job.leads, alone=False) as progress:
            try:
                job.start(writer)
                while snapshot:
                    writer.write(snapshot.pop(0))
                    progress.up_to(writer.nbytes * num)
                writer.finish()
                completion.done(encode_note(job, writer))
            except Exception as error:
                failed = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
                completion.failed(failed)
            finally:
                writer.discard()
            if job.leads:
                _lead(job, completion, failed)
            else:
                completion.wait_for_end(failed)
            progress.done()
    log_saved(job)
    return job.saved(writer.nbytes)


def _lead(job: Job, completion: Completion, failed: str | None) -> None:
    """Wait for all ranks, and finish the checkpoint; tell all of them how it ended. `failed`: why this rank did."""
    try:
        if failed is not None:
            raise CheckpointError(f"rank {job.callers.rank}: {failed}")
        finish(job, completion.wait_for_all())
    except Exception as error:
        ours = isinstance(error, (CheckpointError, RankTimeoutError))
        text = str(error) if ours else f"rank {job.callers.rank}: {type(error).__name__}: {error}"
        completion.not_saved(text)
        _let_go(job)
        raise CheckpointError(text) from error
    completion.saved()


def _let_go(job: Job) -> None:
    """Remove what a save that has failed wrote, and let others have its path. Raises nothing: it has failed already."""
    if job.staging is not None:
        job.staging.abandon()
    if job.claim is not None:
        with contextlib.suppress(Exception):  # the store may have gone with the rank that keeps it
            job.claim.release()
