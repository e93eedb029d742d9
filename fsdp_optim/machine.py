"""Questions to the machine: the identity of this process, by which others see whether it is gone, and its connections."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_ENDED = ("Z", "X")  # states of a process that has ended, of proc(5)
_STATE, _START = 0, 19  # places in /proc/<pid>/stat, counted from the word behind the name
_ADDRESS_NBYTES = 128  # of a sockaddr_storage, of socket(7)

_PROBES = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Of a connection on which nothing is sent: seconds before the first probe, seconds between probes, probes."""


def identity_of_process(pid: int | None = None) -> str:
    """Return a string that no other process has, for this process or another in its PID namespace; pids are reused.

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
    """Return whether this process could see a process with this identity: same boot, same PID namespace."""
    words, own_words = identity.split(), identity_of_process().split()
    return len(words) == len(own_words) == 4 and words[:2] == own_words[:2]


def is_gone(identity: str) -> bool:
    """Return whether the process with this identity has surely ended; False where this process cannot tell."""
    words = identity.split()
    if not is_neighbour(identity) or not words[2].isdecimal() or not os.access("/proc/1/stat", os.R_OK):
        return False  # of another machine, or a process of another user would look as if it were gone (hidepid)
    return identity_of_process(int(words[2])) != identity


def connections_to(port: int) -> Iterator[int]:
    """Yield the file descriptors of this process that are TCP connections to a port, of any host. None on systems without /proc.

    The process looks at its own descriptors: the tables of /proc/net list every socket of the host, and reading them takes
    longer the more memory and connections the host has.
    """
    return (fd for fd in _stream_sockets() if _port_of(fd, "getpeername") == port)


def listens_on(port: int) -> bool:
    """Return whether this process serves a TCP port. False on systems without /proc."""
    return any(_option_of(fd, socket.SO_ACCEPTCONN) and _port_of(fd, "getsockname") == port for fd in _stream_sockets())


def _stream_sockets() -> Iterator[int]:
    with contextlib.suppress(OSError):  # no /proc
        for fd in map(int, os.listdir("/proc/self/fd")):
            if _option_of(fd, socket.SO_TYPE) == socket.SOCK_STREAM:
                yield fd


@functools.cache
def _libc() -> ctypes.CDLL:
    # Not Python's socket objects: one for a connection of other code would change whether its calls wait, where the program
    # has a `socket.setdefaulttimeout`.
    return ctypes.CDLL(None)


def _option_of(fd: int, option: int) -> int:
    """Return an option of a socket; 0 for a file descriptor that is no socket, or was closed meanwhile."""
    value, nbytes = ctypes.c_int(), ctypes.c_uint32(ctypes.sizeof(ctypes.c_int))
    failed = _libc().getsockopt(fd, socket.SOL_SOCKET, option, ctypes.byref(value), ctypes.byref(nbytes))
    return 0 if failed else value.value


def _port_of(fd: int, side: str) -> int | None:
    """Return the port of one side of a socket, `getsockname` or `getpeername`; None where that side is no address of IP."""
    address = ctypes.create_string_buffer(_ADDRESS_NBYTES)
    failed = _libc()[side](fd, address, ctypes.byref(ctypes.c_uint32(_ADDRESS_NBYTES)))
    family, port = struct.unpack_from("=H", address)[0], struct.unpack_from("!H", address, 2)[0]
    return port if not failed and family in (socket.AF_INET, socket.AF_INET6) else None


@contextlib.contextmanager
def _as_socket(fd: int) -> Iterator[socket.socket]:
    """Yield a socket object for a file descriptor, which stays open and unchanged."""
    is_blocking = os.get_blocking(fd)
    connection = socket.socket(fileno=os.dup(fd))
    try:
        os.set_blocking(fd, is_blocking)
        yield connection
    finally:
        connection.close()


def limit_silence(fd: int, seconds: float) -> bool:
    """Let a TCP connection fail when its other end has not answered for some seconds, instead of a quarter of an hour.

    A host that is cut off does not answer. Neither does a stopped process, though its system acknowledges what was sent. Returns
    whether the other end is on this host.
    """
    with contextlib.suppress(OSError), _as_socket(fd) as connection:
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (*_PROBES, ("TCP_USER_TIMEOUT", int(seconds * 1000))):
            if hasattr(socket, name):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return bool(connection.getsockname()[0] == connection.getpeername()[0])
    return False
