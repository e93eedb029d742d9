"""async_save: copy this rank's part to host memory, and write it while training goes on. No collective runs in the background.

The ranks agree on the end through notes in the folder: each leaves one when it is done or has failed; the rank that made the
folder finishes it when all are done, and says how that ended in a note that all hold open.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fsdp_optim.errors import CheckpointError, RankTimeoutError
from fsdp_optim.formats.files import write_file
from fsdp_optim.formats.marker import read_marker
from fsdp_optim.formats.standing import is_there, may_be_there
from fsdp_optim.move import Part, move
from fsdp_optim.state.local import Optimizers
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import calling
from fsdp_optim.verbs.notes import HeldNote, WatchedNote
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

_DONE, _FAILED, _SEEN, _OUTCOME, _PART = "done-", "failed-", "seen-", "outcome", ".part"
_SAVED, _NOT_SAVED = "saved", "not saved: "
_NO_REASON = "failed, and could not write down why: look at its log"
_LOOK_EVERY = 0.02  # seconds
_LOOK_FOR_LIFE_EVERY = 0.5  # seconds; each look is a lock
_LOOKS = 100  # for what a rank on another machine has renamed
_MOST_WATCHED = 256  # ranks whose lives the leader watches: each costs a descriptor
_FAREWELL = 10.0  # seconds for the others to see a failure, before the folder goes

Snapshot = list[Runs]
"""This rank's runs in memory of their own, by file, in parts that are let go of one by one"""


@dataclass(frozen=True)
class Notes:
    """What this rank may have to say, and what it hears: `mine` why it failed, `outcome` how it ended.

    `others`: by rank, on the leader, what some of the others may have to say. `held`: closes all of them.
    """

    mine: HeldNote
    outcome: HeldNote | WatchedNote
    others: Mapping[int, WatchedNote]
    held: ExitStack


def async_save(
    path: str | os.PathLike[str], model: nn.Module, optim: Optimizers | None, options: SaveOptions
) -> SaveHandle:
    """Copy the state, start writing, return."""
    with ExitStack() as held:
        with calling("async_save", [model], options, options.call, all_of_plain=True) as ((reader,), callers):
            job, live = begin(path, reader, callers, optim, options)
            with abandoned_on_failure(job):
                failure = Failure()
                writer = job.writer()
                snapshot: Snapshot = []
                mine: HeldNote | None = None
                outcome: HeldNote | WatchedNote | None = None

                def keep(parts: Sequence[Part]) -> None:
                    runs = writer.runs_of(parts)
                    snapshot.append(runs if all(part.is_own for part in parts) else copied(runs))

                with failure:
                    mine = held.enter_context(closing(HeldNote(job.folder / f"{_FAILED}{job.callers.rank}{_PART}")))
                    if job.leads:
                        outcome = held.enter_context(closing(HeldNote(job.folder / _OUTCOME)))
                move(job.values, live, job.target(keep), job.callers, job.callers.budget, failure)
                agree(job.callers, "copied", failure.error, fatal=failure.fatal)
                if mine is None:  # agree() has raised
                    raise RuntimeError("unreachable: a rank without a note cannot agree")
                others = {}
                if outcome is None:
                    outcome = held.enter_context(closing(WatchedNote(job.folder / _OUTCOME)))
                else:
                    for rank in job.callers.ranks[1 : _MOST_WATCHED + 1]:
                        note = WatchedNote(job.folder / f"{_FAILED}{rank}{_PART}")
                        others[rank] = held.enter_context(closing(note))
        notes = Notes(mine, outcome, others, held.pop_all())
    del live  # nothing of the training is kept alive, or read later
    handle = SaveHandle(job.path, lambda: _write(job, writer, snapshot, notes))
    try:
        pending.begin(handle)
    except BaseException as error:  # no thread to be had: the others are told through the folder
        _give_up(job, notes, f"{type(error).__name__}: {error}")
        _let_go(job)
        notes.held.close()
        raise
    return handle


def _write(job: Job, writer: Writer, snapshot: Snapshot, notes: Notes) -> Saved:
    """In the background: write this rank's part, then hear how it ended."""
    with notes.held:
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
                _give_up(job, notes, failed)
            finally:
                writer.discard()
            if isinstance(notes.outcome, HeldNote):
                _lead(job, notes.outcome, notes.others, failed)
            else:
                _follow(job, notes.outcome, failed)
            progress.done()
    log_saved(job)
    return job.saved(writer.nbytes)


def _give_up(job: Job, notes: Notes, text: str) -> None:
    """Tell why this rank cannot do its part."""
    notes.mine.write(text)
    if isinstance(notes.outcome, HeldNote):
        notes.outcome.write(f"{_NOT_SAVED}rank {job.callers.rank}: {text}")
    with contextlib.suppress(OSError):
        os.rename(notes.mine.path, job.folder / f"{_FAILED}{job.callers.rank}")


def _leave_note(job: Job, name: str, content: bytes) -> None:
    """A file of the folder that is there whole or not at all."""
    write_file(job.folder / f"{name}{_PART}", content, durable=False)
    os.rename(job.folder / f"{name}{_PART}", job.folder / name)


def _lead(job: Job, outcome: HeldNote, others: Mapping[int, WatchedNote], failed: str | None) -> None:
    """Wait for all ranks, and finish the checkpoint; tell all of them how it ended. `failed`: why this rank did."""
    try:
        if failed is not None:
            raise CheckpointError(f"rank {job.callers.rank}: {failed}")
        finish(job, _notes(job, others))
    except Exception as error:
        ours = isinstance(error, (CheckpointError, RankTimeoutError))
        text = str(error) if ours else f"rank {job.callers.rank}: {type(error).__name__}: {error}"
        outcome.write(f"{_NOT_SAVED}{text}")
        deadline = time.monotonic() + _FAREWELL
        unseen = set(job.callers.ranks[1:])
        while unseen and time.monotonic() < deadline and may_be_there(job.folder):
            seen = {rank for rank in unseen if _is_seen(job.folder / f"{_SEEN}{rank}")}
            unseen -= seen | {rank for rank in unseen if rank in others and others[rank].is_dead()}
            time.sleep(_LOOK_EVERY)
        _let_go(job)
        raise CheckpointError(text) from error
    outcome.write(_SAVED)  # whoever holds it open reads it, wherever the folder is taken now


def _is_seen(note: Path) -> bool:
    """Whether a note is there; what cannot be told is not seen yet."""
    with contextlib.suppress(OSError):
        return is_there(note)
    return False


def _let_go(job: Job) -> None:
    """Remove the folder of a save that has failed, and let others have its path. Raises nothing: it has failed already."""
    if job.staging is not None:
        job.staging.abandon()
    if job.claim is not None:
        with contextlib.suppress(Exception):  # the store may have gone with the rank that keeps it
            job.claim.release()


def _notes(job: Job, others: Mapping[int, WatchedNote]) -> list[bytes]:
    """What all ranks say when they are done. Raises CheckpointError with the reasons of those that failed, and names the dead."""
    deadline, for_life = time.monotonic() + job.callers.timeout, 0.0
    paths = {rank: job.folder / f"{_DONE}{rank}" for rank in job.callers.ranks}
    waiting = set(job.callers.ranks)
    while waiting:
        if not may_be_there(job.folder):
            raise CheckpointError(f"{job.path}: {job.folder} went away while it was written")
        dead: list[int] = []
        if time.monotonic() >= for_life:
            dead = [rank for rank in sorted(waiting) if rank in others and others[rank].is_dead()]
            for_life = time.monotonic() + _LOOK_FOR_LIFE_EVERY
        failed = [rank for rank in job.callers.ranks if _is_seen(job.folder / f"{_FAILED}{rank}")]
        if failed:
            reasons = [(rank, (job.folder / f"{_FAILED}{rank}").read_text().strip()) for rank in failed]
            raise CheckpointError("\n".join(f"rank {rank}: {text or _NO_REASON}" for rank, text in reasons))
        waiting = {rank for rank in waiting if not _is_seen(paths[rank])}
        gone = [rank for rank in dead if rank in waiting]  # its lock was free, and it has left no note
        if gone:
            raise CheckpointError(f"{job.path}: rank {gone[0]} ended before it had written its part: look at its log")
        if waiting and time.monotonic() > deadline:
            raise RankTimeoutError(
                f"{job.path}: rank {min(waiting)} did not finish its part within {job.callers.timeout:g} s"
            )
        if waiting:
            time.sleep(_LOOK_EVERY)
    contents = [path.read_bytes() for path in paths.values()]
    for path in (*paths.values(), *job.folder.glob(f"{_FAILED}*{_PART}"), job.folder / _OUTCOME):
        path.unlink(missing_ok=True)
    return contents


def _is_still_there(job: Job, failed: str | None) -> bool:
    """Whether the folder is there. What cannot be told is, unless this rank has failed: it need not hear how that ended."""
    try:
        return is_there(job.folder)
    except OSError as error:
        if failed is not None:
            raise CheckpointError(f"rank {job.callers.rank}: {failed}") from error
        return True


def _follow(job: Job, outcome: WatchedNote, failed: str | None) -> None:
    """Wait until the rank that made the folder says how it ended, or has given the folder its name.

    `failed`: why this rank could not do its part.
    """
    deadline = time.monotonic() + 2 * job.callers.timeout + _FAREWELL  # the leader gives up first
    for_life = time.monotonic()
    while _is_still_there(job, failed):
        leader_is_dead = False
        if time.monotonic() >= for_life:
            leader_is_dead = outcome.is_dead()
            for_life = time.monotonic() + _LOOK_FOR_LIFE_EVERY
        if _has_ended(job, outcome):
            return
        if leader_is_dead and may_be_there(job.folder):
            text = f"{job.path}: rank {job.callers.ranks[0]}, which finishes it, ended before it had: look at its log"
            with contextlib.suppress(OSError):  # for those on machines where its lock is not seen
                (job.folder / _OUTCOME).write_text(f"{_NOT_SAVED}{text}")
            raise CheckpointError(text)
        if time.monotonic() > deadline:
            raise RankTimeoutError(
                f"{job.path}: rank {job.callers.ranks[0]} did not finish it within {job.callers.timeout:g} s"
            )
        time.sleep(_LOOK_EVERY)
    for _ in range(_LOOKS):
        if _has_ended(job, outcome):
            return
        with contextlib.suppress(OSError):
            os.listdir(job.path.parent)  # a network file system then asks again whether the path is there
            if read_marker(job.path).said.get("token") == job.folder.name:
                return
        time.sleep(_LOOK_EVERY)
    raise CheckpointError(f"{job.path}: {job.folder} went away while it was written")


def _has_ended(job: Job, outcome: WatchedNote) -> bool:
    """Whether the checkpoint is there. Raises CheckpointError where it never will be."""
    text = outcome.text()
    if text.startswith(_NOT_SAVED):
        with contextlib.suppress(OSError):
            (job.folder / f"{_SEEN}{job.callers.rank}").touch()
        raise CheckpointError(text.removeprefix(_NOT_SAVED))
    return text == _SAVED
