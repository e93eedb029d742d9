"""The calls of Linux that make a host: mounts, new namespaces, and the way into those of another process."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

MS_NODEV, MS_NOSUID, MS_BIND, MS_REC, MS_PRIVATE = 4, 2, 4096, 16384, 1 << 18
MNT_DETACH = 2
NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_PIDS, NEW_NETWORK = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
ALL = NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PIDS | NEW_NETWORK
KINDS = {"mnt": NEW_MOUNTS, "uts": NEW_NAMES, "ipc": NEW_IPC, "net": NEW_NETWORK, "pid": NEW_PIDS}


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount; the flag `MS_BIND` shows one folder or file at another place."""
    words = [word.encode() or None for word in (source, target, kind)]
    _checked(_libc().mount(*words, ctypes.c_ulong(flags), options.encode() or None), f"mount {source} at {target}")


def detach(target: str) -> None:
    """Unmount, also where files in it are open."""
    _checked(_libc().umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def become_root(new: str, old: str) -> None:
    """Make the folder `new`, a mount of its own, the root of this mount namespace; the former root is below it at `old`."""
    number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]  # glibc has no function for pivot_root
    _checked(_libc().syscall(ctypes.c_long(number), new.encode(), old.encode()), f"pivot_root {new}")
    os.chdir("/")


def leave(flags: int) -> None:
    """Have new namespaces. That of processes holds for children of this process, not for itself."""
    _checked(_libc().unshare(flags), "unshare")


def enter(pid: int, flags: int = ALL) -> None:
    """Go into namespaces of another process. That of processes holds for children of this process, not for itself."""
    process = os.pidfd_open(pid)
    try:
        _checked(_libc().setns(process, flags), f"enter the namespaces of process {pid}")
    finally:
        os.close(process)


def mount_points(pid: int) -> list[str]:
    """Where something is mounted in the mount namespace of a process."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return [line.split(" ")[4] for line in lines]
