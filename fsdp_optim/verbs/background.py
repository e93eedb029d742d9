"""async_save: copy this rank's part to host memory, and write it while training goes on. No collective runs in the background.

The ranks agree on the end through the folder: each leaves a note when it is done or has failed; the rank that made the
folder finishes it when all are done, and leaves a note where that failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace

import torch
from torch import nn

from fsdp_optim.errors import CheckpointError, FsdpOptimError, RankTimeoutError
from fsdp_optim.formats.files import write_file
from fsdp_optim.formats.marker import read_marker
from fsdp_optim.memory import empty
from fsdp_optim.state.local import Optimizers
from fsdp_optim.transport.agree import agree, all_hear
from fsdp_optim.transport.collective import Failure
from fsdp_optim.verbs.contents import Tensor
from fsdp_optim.verbs.filing import Move, staged
from fsdp_optim.verbs.pending import SaveHandle, pending
from fsdp_optim.verbs.save import (
    Job,
    abandoned_on_failure,
    begin,
    encode_note,
    finish,
    log_saved,
    write_extras,
)
from fsdp_optim.verbs.save_options import Saved, SaveOptions

_DONE, _FAILED = "done-", "failed-"
_LOOK_EVERY = 0.02  # seconds
_FAREWELL = 10.0  # seconds for the others to see a failure, before the folder goes

Snapshot = list[tuple[Move, torch.Tensor | None]]


def async_save(
    path: str | os.PathLike[str], model: nn.Module, optim: Optimizers | None, options: SaveOptions
) -> SaveHandle:
    """Copy the state, start writing, return."""
    job = begin(path, model, optim, options)
    with all_hear(job.callers), abandoned_on_failure(job):
        failure = Failure()
        snapshot: Snapshot = []
        try:
            snapshot = _copied(
                [(move, job.flat(move.tensor)) for move in job.moves if move.is_direct and job.has(move)]
            )
        except Exception as error:
            failure.note(error)
        for batch in staged(job.callers, [move for move in job.moves if not move.is_direct], job.flat, failure):
            snapshot += batch
        agree(job.callers, b"copied", failure.error, fatal=failure.fatal)
    later = replace(job, flat=_not_any_more)  # nothing of the training is kept alive, or read later
    handle = SaveHandle(job.path, lambda: _write(later, snapshot))
    pending.begin(handle)
    return handle


def _not_any_more(tensor: Tensor) -> torch.Tensor:
    raise CheckpointError(f"{tensor.key}: is read after it was copied")


def _copied(parts: Snapshot) -> Snapshot:
    """The same tensors in host memory of their own; tensors that share a local one share its copy."""
    copies: dict[tuple[int, int], torch.Tensor] = {}
    made: Snapshot = []
    for move, flat in parts:
        if flat is None:
            continue
        key = (flat.data_ptr(), flat.nbytes)
        if key not in copies or not flat.nbytes:
            twin = empty((flat.numel(),), flat.dtype, torch.device("cpu"))
            if flat.is_cuda:
                twin = torch.empty(flat.numel(), dtype=flat.dtype, pin_memory=True)
            copies[key] = twin.copy_(flat, non_blocking=flat.is_cuda)
        made.append((move, copies[key]))
    if any(flat is not None and flat.is_cuda for _, flat in parts):
        torch.cuda.synchronize()
    return made


def _write(job: Job, snapshot: Snapshot) -> Saved:
    """In the background: write this rank's part, then wait for the others through the folder."""
    writer = job.writer()
    try:
        write_extras(job)
        writer.write(snapshot)
        snapshot.clear()
        if job.options.durable:
            writer.sync()
        write_file(
            job.folder / f"{_DONE}{job.callers.rank}.part", encode_note(job, writer), durable=job.options.durable
        )
        os.rename(job.folder / f"{_DONE}{job.callers.rank}.part", job.folder / f"{_DONE}{job.callers.rank}")
    except BaseException as error:
        _leave_note(job, error)
        if job.leads:
            _give_up(job, error)
        raise
    finally:
        writer.close()
    if job.leads:
        _lead(job)
    else:
        _follow(job)
    log_saved(job)
    return job.saved(writer.nbytes)


def _leave_note(job: Job, error: BaseException) -> None:
    text = json.dumps([job.callers.rank, type(error).__name__, str(error)]).encode()
    with contextlib.suppress(OSError):
        (job.folder / f"{_FAILED}{job.callers.rank}.part").write_bytes(text)
        os.rename(job.folder / f"{_FAILED}{job.callers.rank}.part", job.folder / f"{_FAILED}{job.callers.rank}")


def _lead(job: Job) -> None:
    """Wait for all ranks, and finish the checkpoint."""
    try:
        waiting = set(job.callers.ranks)
        deadline = time.monotonic() + job.callers.timeout
        while waiting:
            failed = _failure_of(job)
            if failed is not None:
                raise failed
            waiting = {rank for rank in waiting if not (job.folder / f"{_DONE}{rank}").exists()}
            if waiting and time.monotonic() > deadline:
                raise RankTimeoutError(
                    f"{job.path}: rank {min(waiting)} did not finish its part within {job.callers.timeout:g} s"
                )
            if waiting:
                time.sleep(_LOOK_EVERY)
        notes = [job.folder / f"{_DONE}{rank}" for rank in job.callers.ranks]
        contents = [note.read_bytes() for note in notes]
        for note in notes:
            note.unlink()
        finish(job, contents)
    except BaseException as error:
        _give_up(job, error)
        raise


def _give_up(job: Job, error: BaseException) -> None:
    """Tell the other ranks; when they have seen it, or had the time, remove the folder."""
    _leave_note(job, error)
    deadline = time.monotonic() + _FAREWELL
    while time.monotonic() < deadline and job.folder.exists():
        if all((job.folder / f"{_FAILED}{rank}").exists() for rank in job.callers.ranks):
            break
        time.sleep(_LOOK_EVERY)
    if job.staging is not None:
        job.staging.abandon()


def _failure_of(job: Job) -> FsdpOptimError | None:
    for rank in job.callers.ranks:
        note = job.folder / f"{_FAILED}{rank}"
        if note.exists():
            who, kind, text = json.loads(note.read_bytes())
            return CheckpointError(f"rank {who}: {text if kind == 'CheckpointError' else f'{kind}: {text}'}")
    return None


def _follow(job: Job) -> None:
    """Wait until the rank that made the folder has given it its name, or a rank has failed."""
    deadline = time.monotonic() + job.callers.timeout
    while job.folder.exists():
        failed = _failure_of(job)
        if failed is not None:
            _leave_note(job, failed)  # seen
            raise failed
        if time.monotonic() > deadline:
            raise RankTimeoutError(
                f"{job.path}: rank {job.callers.ranks[0]} did not finish it within {job.callers.timeout:g} s"
            )
        time.sleep(_LOOK_EVERY)
    if read_marker(job.path).said.get("token") != job.folder.name:
        raise CheckpointError(f"{job.path}: {job.folder} went away before it was finished")
