"""What this process asks of its machine: which process it is, so that others can see whether it is gone, and its connections."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_ENDED = ("Z", "X")  # states of a process that has ended, of proc(5)
_STATE, _START = 0, 19  # places in /proc/<pid>/stat, counted from the word behind the name


_PROBES = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Of a connection on which nothing is sent: seconds before the first probe, seconds between probes, probes."""


def identity_of_process(pid: int | None = None) -> str:
    """A string for this process, or another one of the same PID namespace, that no other process has; a pid is given again.

    `<boot> <PID namespace> <pid> <start>`. Empty where the process is gone, and on systems without /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        pid = os.getpid() if pid is None else pid
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if words[_STATE] in _ENDED else f"{boot} {namespace} {pid} {words[_START]}"


def is_neighbour(identity: str) -> bool:
    """Whether a process with this identity is, or was, one that this process could see: same boot, same PID namespace."""
    words, mine = identity.split(), identity_of_process().split()
    return len(words) == len(mine) == 4 and words[:2] == mine[:2]


def is_gone(identity: str) -> bool:
    """Whether the process with this identity has surely ended; False where this process cannot tell."""
    words = identity.split()
    if not is_neighbour(identity) or not words[2].isdecimal() or not os.access("/proc/1/stat", os.R_OK):
        return False  # of another machine, or a process of another user would look as if it were gone (hidepid)
    return identity_of_process(int(words[2])) != identity


def connections_to(port: int) -> Iterator[int]:
    """The file descriptors of this process that are TCP connections to a port, of any host. None on systems without /proc."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return
    for fd in map(int, names):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with _as_socket(fd) as connection:
                    is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    peer_port = connection.getpeername()[1] if is_internet else None
                if peer_port == port:
                    yield fd


@contextlib.contextmanager
def _as_socket(fd: int) -> Iterator[socket.socket]:
    """A socket object for a file descriptor, which stays open."""
    made = socket.socket(fileno=os.dup(fd))
    try:
        yield made
    finally:
        made.close()


def limit_silence(fd: int, seconds: float) -> bool:
    """Let a TCP connection fail when its other end has not answered for some seconds, instead of a quarter of an hour.

    Returns whether the other end is on this host.
    """
    with contextlib.suppress(OSError), _as_socket(fd) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (*_PROBES, ("TCP_USER_TIMEOUT", int(seconds * 1000))):
            if hasattr(socket, name):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return bool(connection.getsockname()[0] == connection.getpeername()[0])
    return False
