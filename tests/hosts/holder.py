"""The first process of a host: makes its namespaces, and keeps them until the bench closes its standard input or ends.

    python -m hosts.holder '{"name": "host0", "ground": 1234, "keep": [...]}'   # prints the process id outside the host

It is process 1 of the host's own process namespace. With it the kernel ends all processes of the host, its mounts and its
network, so that a bench that is killed leaves nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hosts import namespaces
from hosts.namespaces import MS_BIND, MS_NODEV, MS_NOSUID, MS_PRIVATE, MS_REC

OWN = ("/tmp", "/dev/shm", "/run")
"""Folders that are empty in each host, and in memory."""


WINDOWS = "4096 131072 33554432"
"""The bytes that a TCP connection may have on its way (least, at first, most): enough for 100 MB/s over 50 ms."""


def main() -> None:
    order = json.loads(sys.argv[1])
    if order["ground"]:
        namespaces.enter(order["ground"], namespaces.NEW_MOUNTS)
    namespaces.leave(namespaces.ALL)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        hold(order, writing)
    os.close(writing)
    if os.read(reading, 1):
        os.write(1, f"{pid}\n".encode())
    os.close(1)
    os.waitpid(pid, 0)


def hold(order: Mapping[str, Any], ready: int) -> None:
    """Process 1: prepare the host, then wait. Nobody waits for its children by name, so the kernel does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    socket.sethostname(order["hostname"])
    namespaces.mount("none", "/", flags=MS_REC | MS_PRIVATE)
    if order["ground"]:
        empty_folders(order["keep"])
    else:
        new_root(order["folder"])
    namespaces.mount("proc", "/proc", "proc", MS_NODEV | MS_NOSUID)
    if order["ground"]:
        own_identity(Path("/bench", f"{order['name']}.identity"))
    for name in ("tcp_rmem", "tcp_wmem"):
        Path("/proc/sys/net/ipv4", name).write_text(WINDOWS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(ready, b"1")
    os.close(ready)
    os.close(1)
    sys.stdin.buffer.read()
    os._exit(0)


def new_root(folder: str) -> None:
    """A root that has all that the machine's root has, and the mount points /bench and /shared.

    `folder`: the folder of the bench, which is /bench from now on.
    """
    new = Path(folder, "root")
    new.mkdir()
    namespaces.mount("tmpfs", str(new), "tmpfs")
    for entry in os.scandir("/"):
        target = new / entry.name
        if entry.is_symlink():
            target.symlink_to(os.readlink(entry.path))
        elif entry.is_dir():
            target.mkdir()
            namespaces.mount(entry.path, str(target), flags=MS_BIND | MS_REC)
        elif entry.is_file():
            target.touch()
            namespaces.mount(entry.path, str(target), flags=MS_BIND)
    for name in ("bench", "shared", "former-root"):
        (new / name).mkdir()
    namespaces.mount(folder, str(new / "bench"), flags=MS_BIND)
    namespaces.become_root(str(new), str(new / "former-root"))
    namespaces.detach("/former-root")
    os.rmdir("/former-root")
    namespaces.mount("/bench/names", "/etc/hosts", flags=MS_BIND)


def own_identity(file: Path) -> None:
    """Let the kernel's id of this boot be the host's own, for programs that tell machines apart by it."""
    file.write_text(f"{uuid.uuid4()}\n")
    namespaces.mount(str(file), "/proc/sys/kernel/random/boot_id", flags=MS_BIND)


def empty_folders(keep: Sequence[str]) -> None:
    """Cover the folders that each host has for itself. `keep`: folders that stay visible in the host."""
    covered = [path for path in keep if path.startswith(tuple(f"{own}/" for own in OWN))]
    kept = {path: os.open(path, os.O_RDONLY) for path in covered}
    for own in OWN:
        namespaces.mount("tmpfs", own, "tmpfs", MS_NODEV | MS_NOSUID, "mode=1777")
    for path, folder in kept.items():
        os.makedirs(path)
        namespaces.mount(f"/proc/self/fd/{folder}", path, flags=MS_BIND | MS_REC)
        os.close(folder)


if __name__ == "__main__":
    main()
