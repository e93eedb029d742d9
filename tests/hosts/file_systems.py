"""What the hosts of a bench find at /shared: one folder of this machine, folders of their own, or a file system of the kit.

Those that are served over the network are in `hosts.gluster` and `hosts.sshfs`.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hosts import namespaces
from hosts.host import Host
from hosts.shared_fs.mounting import command, why_not

if TYPE_CHECKING:
    from hosts.bench import Bench

SHARED = "/shared"
"""The mount point, the same on all hosts."""


class FileSystem:
    """One way to fill /shared. `serve` is called once, then `mount` for each host; all ends with the hosts.

    `needs_server`: the bench has one more host, `bench.server`, which has no ranks.
    """

    name = ""
    needs_server = False

    def missing(self) -> str:
        """Why this cannot be tried here; empty where it can."""
        return ""

    def serve(self, bench: Bench) -> None:
        """Start what serves all hosts."""

    def mount(self, bench: Bench, host: Host) -> None:
        """Mount the file system on a host."""
        raise NotImplementedError

    def unmount(self, host: Host) -> None:
        """Take the file system from a host, also where files in it are open or its server is gone."""
        host.command("umount", "--lazy", SHARED)


class OneKernel(FileSystem):
    """One folder of this machine on all hosts: the kernel shows each of them all at once."""

    name = "one kernel"

    def serve(self, bench: Bench) -> None:
        (bench.folder / "shared").mkdir()

    def mount(self, bench: Bench, host: Host) -> None:
        host.command("mount", "--bind", "/bench/shared", SHARED)


class Unshared(FileSystem):
    """A folder of its own on each host, as where a path is on local disks by mistake."""

    name = "unshared"

    def mount(self, bench: Bench, host: Host) -> None:
        (bench.folder / f"local-{host.name}").mkdir(exist_ok=True)
        host.command("mount", "--bind", f"/bench/local-{host.name}", SHARED)


class Kit(FileSystem):
    """The file system of `hosts.shared_fs`: a process for each host, all above one folder.

    `switches`: what it does as network file systems may (`hosts.shared_fs.switches`), the same on all hosts.
    """

    def __init__(self, *switches: str) -> None:
        self.switches = switches
        self.name = " ".join(["kit", *switches])

    def missing(self) -> str:
        return why_not()

    def serve(self, bench: Bench) -> None:
        (bench.folder / "backing").mkdir()

    def mount(self, bench: Bench, host: Host) -> None:
        log = f"{host.name}-shared_fs.log"
        words = command("/bench/backing", SHARED, *self.switches)
        process = host.start(*words, log=log)
        wait_for_mount(host, bench.folder / log, process.poll)


def wait_for_mount(host: Host, log: Path, has_ended: object = None, timeout: float = 30.0) -> None:
    """Wait until /shared is mounted on a host. Raises `OSError` with the text of a log where it is not.

    `has_ended`: a function that gives something else than None where the process that mounts has ended.
    """
    end = time.monotonic() + timeout
    while SHARED not in namespaces.mount_points(host.pid):
        if time.monotonic() > end or (callable(has_ended) and has_ended() is not None):
            raise OSError(f"{host.name}: {SHARED} is not mounted: {log.read_text(errors='replace')}")
        time.sleep(0.01)


def missing_fuse() -> str:
    """Why there can be no FUSE mounts here; empty where there can be."""
    return "" if Path("/dev/fuse").exists() else "there is no /dev/fuse"


def missing_programs(package: str, *programs: str) -> str:
    """The programs that are not installed, and the package that has them; empty where all are."""
    absent = [program for program in programs if shutil.which(program) is None]
    return f"{', '.join(absent)} of the package {package} missing" if absent else ""
