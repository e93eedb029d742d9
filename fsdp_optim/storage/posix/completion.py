"""The means by which ranks that save in the background learn how the save ends: small files, called notes, in the folder.

`done-<rank>`: the rank has written its part. `failed-<rank>`: the rank cannot write its part, and the reason. `outcome`: how the
save ended; all ranks hold this note open, and so can read the outcome after the folder was renamed. `seen-<rank>`: the rank has
read in `outcome` that the save failed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from fsdp_optim.errors import CheckpointError, RankTimeoutError
from fsdp_optim.storage.base import Completion, Judge
from fsdp_optim.storage.posix.files import write_file
from fsdp_optim.storage.posix.looks import is_there, may_be_there, token_of
from fsdp_optim.storage.posix.notes import HeldNote, WatchedNote

_DONE, _FAILED, _SEEN, _OUTCOME, _PART = "done-", "failed-", "seen-", "outcome", ".part"
_SAVED, _NOT_SAVED = "saved", "not saved: "
_NO_REASON = "failed, and could not write down why: look at the log of that rank"
_LOOK_EVERY = 0.02  # seconds
_LOOK_FOR_LIFE_EVERY = 0.5  # seconds; each look takes a lock
_LOOKS = 100  # times, for a folder that a rank on another machine has renamed
_MOST_WATCHED = 256  # ranks that the leader watches: each costs a file descriptor
_GRACE = 10.0  # seconds in which the other ranks can see a failure, before the folder is removed


class FolderCompletion(Completion):
    """The completion of a background save for one rank.

    Args:
        path, folder: the path of the checkpoint, and the folder in which it is written. The name of the folder is the token.
        rank, ranks: this rank, and all ranks of the save with the leader first.
        timeout: the seconds to wait for other ranks.
    """

    def __init__(
        self, path: Path, folder: Path, judge: Judge[Any], rank: int, ranks: Sequence[int], timeout: float
    ) -> None:
        self._path, self._folder, self._judge = path, folder, judge
        self._rank, self._ranks, self._timeout = rank, ranks, timeout
        self._others: dict[int, WatchedNote] = {}
        self._watched_outcome: WatchedNote | None = None
        self._outcome: HeldNote | None = None
        with ExitStack() as held:
            self._mine = held.enter_context(closing(HeldNote(folder / f"{_FAILED}{rank}{_PART}")))
            if rank == ranks[0]:
                self._outcome = held.enter_context(closing(HeldNote(folder / _OUTCOME)))
            self._held = held.pop_all()

    def watch(self) -> None:
        if self._outcome is None:
            self._watched_outcome = self._held.enter_context(closing(WatchedNote(self._folder / _OUTCOME)))
            return
        for rank in self._ranks[1 : _MOST_WATCHED + 1]:
            note = WatchedNote(self._folder / f"{_FAILED}{rank}{_PART}")
            self._others[rank] = self._held.enter_context(closing(note))

    def close(self) -> None:
        self._held.close()

    def done(self, content: bytes) -> None:
        name = f"{_DONE}{self._rank}"  # renamed, so that readers see the whole note or none
        write_file(self._folder / f"{name}{_PART}", content, durable=False)
        os.rename(self._folder / f"{name}{_PART}", self._folder / name)

    def failed(self, why: str) -> None:
        self._mine.write(why)
        if self._outcome is not None:
            self._outcome.write(f"{_NOT_SAVED}rank {self._rank}: {why}")
        with contextlib.suppress(OSError):
            os.rename(self._mine.path, self._folder / f"{_FAILED}{self._rank}")

    def wait_for_all(self) -> list[bytes]:
        deadline, for_life = time.monotonic() + self._timeout, 0.0
        paths = {rank: self._folder / f"{_DONE}{rank}" for rank in self._ranks}
        waiting = set(self._ranks)
        while waiting:
            if not may_be_there(self._folder):
                raise CheckpointError(f"{self._path}: {self._folder} went away during the save")
            dead: list[int] = []
            if time.monotonic() >= for_life:
                dead = [rank for rank in sorted(waiting) if self._is_dead(rank)]
                for_life = time.monotonic() + _LOOK_FOR_LIFE_EVERY
            self._check_failed()
            waiting = {rank for rank in waiting if not _is_seen(paths[rank])}
            gone = [rank for rank in dead if rank in waiting]  # the lock was free, and there is no note
            if gone:
                raise CheckpointError(
                    f"{self._path}: rank {gone[0]} died before it had written its part: look at the log of rank {gone[0]}"
                )
            if waiting and time.monotonic() > deadline:
                raise RankTimeoutError(
                    f"{self._path}: rank {min(waiting)} did not finish its part within {self._timeout:g} s"
                )
            if waiting:
                time.sleep(_LOOK_EVERY)
        contents = [path.read_bytes() for path in paths.values()]
        for path in (*paths.values(), *self._folder.glob(f"{_FAILED}*{_PART}"), self._folder / _OUTCOME):
            path.unlink(missing_ok=True)
        return contents

    def _is_dead(self, rank: int) -> bool:
        return rank in self._others and self._others[rank].is_dead()

    def _check_failed(self) -> None:
        """Raise CheckpointError with the reasons of the ranks that failed."""
        failed = [rank for rank in self._ranks if _is_seen(self._folder / f"{_FAILED}{rank}")]
        if failed:
            reasons = [(rank, (self._folder / f"{_FAILED}{rank}").read_text().strip()) for rank in failed]
            raise CheckpointError("\n".join(f"rank {rank}: {text or _NO_REASON}" for rank, text in reasons))

    def saved(self) -> None:
        if self._outcome is not None:
            self._outcome.write(_SAVED)  # ranks that hold the note open can read it wherever the folder is

    def not_saved(self, why: str) -> bool:
        if self._outcome is not None:
            self._outcome.write(f"{_NOT_SAVED}{why}")
        deadline = time.monotonic() + _GRACE
        unseen = set(self._ranks[1:])
        while unseen and time.monotonic() < deadline and may_be_there(self._folder):
            seen = {rank for rank in unseen if _is_seen(self._folder / f"{_SEEN}{rank}")}
            unseen -= seen | {rank for rank in unseen if self._is_dead(rank)}
            time.sleep(_LOOK_EVERY)
        return not unseen

    def wait_for_end(self, failed: str | None) -> None:
        deadline = time.monotonic() + 2 * self._timeout + _GRACE  # the leader gives up first
        for_life = time.monotonic()
        while self._is_still_there(failed):
            leader_is_dead = False
            if time.monotonic() >= for_life:
                leader_is_dead = self._watched_outcome is not None and self._watched_outcome.is_dead()
                for_life = time.monotonic() + _LOOK_FOR_LIFE_EVERY
            if self._has_ended():
                return
            if leader_is_dead and may_be_there(self._folder):
                text = f"{self._path}: rank {self._ranks[0]}, which finishes the checkpoint, died: look at the log of that rank"
                with contextlib.suppress(OSError):  # for ranks on machines that do not see the lock
                    (self._folder / _OUTCOME).write_text(f"{_NOT_SAVED}{text}")
                raise CheckpointError(text)
            if time.monotonic() > deadline:
                raise RankTimeoutError(
                    f"{self._path}: rank {self._ranks[0]} did not finish the checkpoint within {self._timeout:g} s"
                )
            time.sleep(_LOOK_EVERY)
        for _ in range(_LOOKS):
            if self._has_ended():
                return
            with contextlib.suppress(OSError):
                os.listdir(self._path.parent)  # makes a network file system look up the path anew
                if token_of(self._path, self._judge) == self._folder.name:
                    return
            time.sleep(_LOOK_EVERY)
        raise CheckpointError(f"{self._path}: {self._folder} went away during the save")

    def _is_still_there(self, failed: str | None) -> bool:
        """Whether the folder is there. Where the system cannot tell: True, or CheckpointError if this rank has failed itself."""
        try:
            return is_there(self._folder)
        except OSError as error:
            if failed is not None:
                raise CheckpointError(f"rank {self._rank}: {failed}") from error
            return True

    def _has_ended(self) -> bool:
        """Whether the checkpoint is there. Raises CheckpointError if the save has failed."""
        text = self._watched_outcome.text() if self._watched_outcome is not None else ""
        if text.startswith(_NOT_SAVED):
            with contextlib.suppress(OSError):
                (self._folder / f"{_SEEN}{self._rank}").touch()
            raise CheckpointError(text.removeprefix(_NOT_SAVED))
        return text == _SAVED


def _is_seen(note: Path) -> bool:
    """Whether a note is there; False where the system cannot tell."""
    with contextlib.suppress(OSError):
        return is_there(note)
    return False
