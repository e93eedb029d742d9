"""The process that owns a claim: named so that another process on the same machine can see that it is dead."""

from __future__ import annotations

import os
from pathlib import Path

_START = 19  # of the fields of /proc/<pid>/stat behind the name: the time at which the process began


def this_process() -> str:
    """The machine since its last boot, its name space of processes, this process and the time at which it began.

    "unknown" where the system does not say them.
    """
    started = _started(os.getpid())
    return f"{_machine()} {os.getpid()} {started}" if started is not None else "unknown"


def is_gone(owner: str) -> bool:
    """Whether the process that `this_process` has named is dead for sure. False where it is on another machine."""
    machine, _, process = owner.partition(" ")
    pid, _, started = process.partition(" ")
    if not pid.isdigit() or machine != _machine():
        return False
    return _started(int(pid)) != started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "unknown"


def _started(pid: int) -> str | None:
    """None: there is no such process, or it has ended and waits for its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[_START] if fields and fields[0] not in ("Z", "X") and len(fields) > _START else None
