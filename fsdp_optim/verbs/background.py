"""async_save: copy this rank's part to host memory, and write it while training goes on. No collective runs in the background.

The ranks agree on the end through the folder: each leaves a note when it is done or has failed; the rank that made the
folder finishes it when all are done, and leaves a note where that failed.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torch import nn

from fsdp_optim.errors import CheckpointError, RankTimeoutError
from fsdp_optim.formats.files import write_file
from fsdp_optim.formats.marker import read_marker
from fsdp_optim.state.local import Optimizers
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.collective import Failure
from fsdp_optim.verbs.call import calling
from fsdp_optim.verbs.contents import Tensor
from fsdp_optim.verbs.filing import staged
from fsdp_optim.verbs.pending import SaveHandle, pending
from fsdp_optim.verbs.progress import Progress
from fsdp_optim.verbs.runs import Runs, copied
from fsdp_optim.verbs.save import (
    Job,
    abandoned_on_failure,
    begin,
    encode_note,
    finish,
    log_saved,
    make_files,
    write_extras,
)
from fsdp_optim.verbs.save_options import Saved, SaveOptions
from fsdp_optim.verbs.writing import Writer

_DONE, _FAILED, _SEEN, _VERDICT = "done-", "failed-", "seen-", "verdict"
_ROOM = 2048  # bytes, for why a rank failed
_LOOK_EVERY = 0.02  # seconds
_LOOKS = 100  # for what a rank on another machine has renamed
_FAREWELL = 10.0  # seconds for the others to see a failure, before the folder goes

Snapshot = list[Runs]
"""This rank's runs in memory of their own, by file, in parts that are let go of one by one"""


def async_save(
    path: str | os.PathLike[str], model: nn.Module, optim: Optimizers | None, options: SaveOptions
) -> SaveHandle:
    """Copy the state, start writing, return."""
    with calling("async_save", [model], options, options.call, all_of_plain=True) as ((reader,), callers):
        job = begin(path, reader, callers, optim, options)
        with abandoned_on_failure(job):
            failure = Failure()
            writer = job.writer()
            snapshot: Snapshot = []
            try:
                _reserve_notes(job)
                for parts in job.direct():
                    snapshot.append(copied(writer.runs_of(parts)))
            except Exception as error:
                failure.note(error)
            for batch in staged(job.callers, [move for move in job.moves if not move.is_direct], job.held, failure):
                try:
                    snapshot.append(writer.runs_of(batch))  # in memory of its own already
                except Exception as error:
                    failure.note(error)
            agree(job.callers, "copied", failure.error, fatal=failure.fatal)
    later = replace(job, held=_not_any_more)  # nothing of the training is kept alive, or read later
    handle = SaveHandle(job.path, lambda: _write(later, writer, snapshot))
    try:
        pending.begin(handle)
    except BaseException as error:  # no thread to be had: the others are told through the folder
        _leave_reason(job, f"{_FAILED}{job.callers.rank}", f"{type(error).__name__}: {error}")
        if job.staging is not None:
            job.staging.abandon()
        raise
    return handle


def _not_any_more(tensor: Tensor) -> NoReturn:
    raise CheckpointError(f"{tensor.key}: is read after it was copied")


def _write(job: Job, writer: Writer, snapshot: Snapshot) -> Saved:
    """In the background: write this rank's part, then hear through the folder how it ended."""
    failed: str | None = None
    total, num = job.saved(0).nbytes, len(job.callers.ranks)
    with Progress(job.options.progress, "saving", total, shown=job.leads, alone=False) as progress:
        try:
            make_files(job.folder, job.own_files)
            write_extras(job)
            while snapshot:
                writer.write(snapshot.pop(0))
                progress.up_to(writer.nbytes * num)
            writer.finish()
            _leave_note(job, f"{_DONE}{job.callers.rank}", encode_note(job, writer))
        except Exception as error:
            failed = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            _leave_reason(job, f"{_FAILED}{job.callers.rank}", failed)
        finally:
            writer.discard()
        if job.leads:
            _lead(job, failed)
        else:
            _follow(job)
        progress.done()
    log_saved(job)
    return job.saved(writer.nbytes)


def _reserve_notes(job: Job) -> None:
    """Make room for what this rank may have to say when the disk is full."""
    try:
        for name in (f"{_FAILED}{job.callers.rank}", *([_VERDICT] if job.leads else [])):
            _overwrite(job.folder / f"{name}.part", "")
    except OSError as error:
        raise CheckpointError(f"{job.folder}: cannot be written: {error.strerror or error}") from error


def _leave_reason(job: Job, name: str, text: str) -> None:
    """Tell why, in the room that was reserved for it."""
    with contextlib.suppress(OSError):
        _overwrite(job.folder / f"{name}.part", text)
    with contextlib.suppress(OSError):
        os.rename(job.folder / f"{name}.part", job.folder / name)


def _overwrite(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb") as file:
        file.write(text.encode()[:_ROOM].ljust(_ROOM))  # in place: a full disk has room for it


def _leave_note(job: Job, name: str, content: bytes) -> None:
    """A file of the folder that is there whole or not at all."""
    write_file(job.folder / f"{name}.part", content, durable=False)
    os.rename(job.folder / f"{name}.part", job.folder / name)


def _lead(job: Job, failed: str | None) -> None:
    """Wait for all ranks, and finish the checkpoint; or tell all of them why not. `failed`: why this rank did."""
    try:
        if failed is not None:
            raise CheckpointError(f"rank {job.callers.rank}: {failed}")
        finish(job, _notes(job))
    except Exception as error:
        ours = isinstance(error, (CheckpointError, RankTimeoutError))
        text = str(error) if ours else f"rank {job.callers.rank}: {type(error).__name__}: {error}"
        _leave_reason(job, _VERDICT, text)
        deadline = time.monotonic() + _FAREWELL
        others = set(job.callers.ranks[1:])
        while others and time.monotonic() < deadline and job.folder.exists():
            others = {rank for rank in others if not (job.folder / f"{_SEEN}{rank}").exists()}
            time.sleep(_LOOK_EVERY)
        if job.staging is not None:
            job.staging.abandon()
        raise CheckpointError(text) from error


def _notes(job: Job) -> list[bytes]:
    """What all ranks say when they are done. Raises CheckpointError with the reasons of those that failed."""
    waiting = set(job.callers.ranks)
    deadline = time.monotonic() + job.callers.timeout
    while waiting:
        if not job.folder.exists():
            raise CheckpointError(f"{job.path}: {job.folder} went away while it was written")
        failed = [rank for rank in job.callers.ranks if (job.folder / f"{_FAILED}{rank}").exists()]
        if failed:
            reasons = [(rank, (job.folder / f"{_FAILED}{rank}").read_text().strip()) for rank in failed]
            raise CheckpointError("\n".join(f"rank {rank}: {text}" for rank, text in reasons))
        waiting = {rank for rank in waiting if not (job.folder / f"{_DONE}{rank}").exists()}
        if waiting and time.monotonic() > deadline:
            raise RankTimeoutError(
                f"{job.path}: rank {min(waiting)} did not finish its part within {job.callers.timeout:g} s"
            )
        if waiting:
            time.sleep(_LOOK_EVERY)
    paths = [job.folder / f"{_DONE}{rank}" for rank in job.callers.ranks]
    contents = [path.read_bytes() for path in paths]
    for path in (*paths, *job.folder.glob(f"{_FAILED}*.part"), job.folder / f"{_VERDICT}.part"):
        path.unlink(missing_ok=True)
    return contents


def _follow(job: Job) -> None:
    """Wait until the rank that made the folder has given it its name, or says why not."""
    deadline = time.monotonic() + 2 * job.callers.timeout + _FAREWELL  # the leader gives up first
    while job.folder.exists():
        with contextlib.suppress(FileNotFoundError):
            text = (job.folder / _VERDICT).read_text().strip()
            with contextlib.suppress(OSError):
                (job.folder / f"{_SEEN}{job.callers.rank}").touch()
            raise CheckpointError(text)
        if time.monotonic() > deadline:
            raise RankTimeoutError(
                f"{job.path}: rank {job.callers.ranks[0]} did not finish it within {job.callers.timeout:g} s"
            )
        time.sleep(_LOOK_EVERY)
    for _ in range(_LOOKS):
        with contextlib.suppress(OSError):
            os.listdir(job.path.parent)  # a network file system then asks again whether the path is there
            if read_marker(job.path).said.get("token") == job.folder.name:
                return
        time.sleep(_LOOK_EVERY)
    raise CheckpointError(f"{job.path}: {job.folder} went away while it was written")
