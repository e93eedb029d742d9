"""The claim of a save on its folder: who writes it, and whether that process may still be alive. It outlives the job.

A held lock proves life, wherever it is seen. A free lock proves death only on a file system of one machine: network file systems
may have no locks, or keep them on one host, or lose them. There a process of this machine is looked up, and a process of another
machine counts as dead when nothing in the folder was written for an hour, by the clock of the file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from fsdp_optim.machine import identity_of_process, is_gone, is_neighbour
from fsdp_optim.storage.posix.beacon import beacon_above
from fsdp_optim.storage.posix.files import close_quietly
from fsdp_optim.storage.posix.filesystem import is_of_one_machine, this_host

LOCK = "owner.lock"
"""The file of the claim, in the folder that is being written."""

DEAD_AFTER = 3600.0
"""Seconds without a write after which a save of another machine is dead."""

_ATTEMPTS, _AGAIN = 10, 0.01  # times, seconds
_MOST_NBYTES = 1024
LOCKED = "locked"


def claim(folder: Path) -> int:
    """Claim a new folder for this process; return the descriptor of its lock. Raises OSError."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_claim(folder, is_locked=_hold(lock))
    except BaseException:
        close_quietly(lock)
        raise
    return lock


def write_claim(folder: Path, *, is_locked: bool) -> None:
    """Write into a claim its machine and mount, this process, and whether it has the lock. Raises OSError."""
    text = f"{this_host(folder)}\n{identity_of_process()}\n{LOCKED if is_locked else ''}"
    (folder / LOCK).write_text(text)  # opened anew and closed, so that other machines see it


def _hold(lock: int) -> bool:
    """Take the lock of a new folder; return whether there are locks. A save that looks for leftovers may hold it briefly."""
    for _ in range(_ATTEMPTS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_AGAIN)
        except OSError:
            return False
        else:
            return True
    raise FileNotFoundError(errno.ENOENT, "another save took the new folder for a leftover")


@dataclass(frozen=True)
class _ClaimState:
    """A claim as another process sees it. `was_free`: whether its lock could be taken; None: there are no locks here."""

    host: str
    identity: str
    is_locked: bool
    was_free: bool | None


def is_held(folder: Path) -> bool:
    """Return whether the process that writes a folder may be alive.

    A claim that is not a regular file is not a save's, and its folder is left alone.
    """
    one_machine = is_of_one_machine(folder)
    try:
        claim = _look(folder)
    except FileNotFoundError:
        # On a network file system it may exist, and not be visible to this machine yet.
        return not one_machine and _written_lately(folder)
    except OSError:
        return True
    if claim is None or claim.was_free is False:
        return True
    if one_machine and claim.was_free:
        return False
    if is_gone(claim.identity):
        return False
    if is_neighbour(claim.identity):  # alive: only a lock that it had, and has released, shows that it no longer writes
        return not (claim.is_locked and claim.was_free and claim.host == this_host(folder))
    return _written_lately(folder)


def is_of_this_machine(folder: Path) -> bool:
    """Return whether the process that has begun to write a folder is of this machine, on the same mount."""
    try:
        text = (folder / LOCK).read_text(errors="replace")
    except OSError:
        return False
    return text.partition("\n")[0] == this_host(folder)


def _look(folder: Path) -> _ClaimState | None:
    """Return the claim in a folder; None if it is no regular file. Raises OSError."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            return None
        was_free: bool | None = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            was_free = False
        except OSError:
            was_free = None
        text = os.pread(lock, _MOST_NBYTES, 0).decode(errors="replace")
    finally:
        close_quietly(lock)
    host, identity, locked, *_ = *text.split("\n"), "", "", ""
    return _ClaimState(host, identity, locked == LOCKED, was_free)


def _written_lately(folder: Path) -> bool:
    """Return whether anything in a folder was written within the last hour, by the clock of its file system. True if unknown."""
    now = _clock_of(folder.parent)
    return now is None or now - _last_written(folder) < DEAD_AFTER


def _clock_of(folder: Path) -> float | None:
    """Return the time by which a folder's file system dates files, in seconds since the epoch; None if nothing can be written."""
    try:
        with beacon_above(folder) as file:
            return os.stat(file).st_mtime
    except OSError:
        return None


def _last_written(folder: Path) -> float:
    """Return the time of the latest change in a folder, in seconds since the epoch."""
    times = [0.0]
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):  # the file was removed meanwhile
            times.append(path.stat().st_mtime)
    return max(times)
