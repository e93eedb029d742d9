"""GlusterFS as a file system of the bench: one volume of one brick on the server's host, a mount by FUSE on each other host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hosts.file_systems import SHARED, FileSystem, missing_fuse, missing_programs
from hosts.host import Host

if TYPE_CHECKING:
    from hosts.bench import Bench

VOLUME = "files"

DAEMON = """volume management
    type mgmt/glusterd
    option working-directory /bench/gluster/daemon
    option transport-type socket
    option transport.address-family inet
    option transport.socket.keepalive-time 10
    option transport.socket.keepalive-interval 2
    option transport.socket.read-fail-log off
end-volume
"""


class Gluster(FileSystem):
    """`settings`: options of the volume, as `gluster volume set` takes them; by default all are as Debian's package has them."""

    needs_server = True

    def __init__(self, *settings: tuple[str, str], mount_options: Sequence[str] = ()) -> None:
        self.settings, self.mount_options = settings, mount_options
        self.name = " ".join(["GlusterFS", *(f"{key}={value}" for key, value in settings), *mount_options])

    def missing(self) -> str:
        programs = missing_programs("glusterfs-server", "glusterd", "gluster", "glusterfs", "mount.glusterfs")
        return programs or missing_fuse()

    def serve(self, bench: Bench) -> None:
        server, folder = bench.server, bench.folder / "gluster"
        for name in ("daemon", "brick", "log"):
            (folder / name).mkdir(parents=True)
        (folder / "daemon.vol").write_text(DAEMON)
        self._own_folders(server)
        daemon = ("--volfile=/bench/gluster/daemon.vol", "--log-file=/bench/gluster/log/daemon.log")
        server.start("glusterd", "--no-daemon", *daemon, "--pid-file=/run/glusterd.pid", log="glusterd.log")
        self._wait_for_daemon(server)
        commands = [
            ["create", VOLUME, f"{server.name}:/bench/gluster/brick", "force"],
            *(["set", VOLUME, key, value] for key, value in self.settings),
            ["start", VOLUME],
        ]
        for words in commands:
            server.command("gluster", "--mode=script", "volume", words[0], *words[1:])

    def mount(self, bench: Bench, host: Host) -> None:
        self._own_folders(host)
        options = [f"log-file=/bench/gluster/log/{host.name}.log", *self.mount_options]
        server = f"{bench.server.name}:/{VOLUME}"
        host.command("mount", "-t", "glusterfs", "-o", ",".join(options), server, SHARED)

    @staticmethod
    def _own_folders(host: Host) -> None:
        """The package's folders with files of a cluster and with logs are the bench's in its hosts."""
        for path, own in (("/var/lib/glusterd", "daemon"), ("/var/log/glusterfs", "log")):
            host.command("mount", "--bind", f"/bench/gluster/{own}", path)

    @staticmethod
    def _wait_for_daemon(server: Host) -> None:
        for _ in range(200):
            if server.path("/run/glusterd.socket").exists():
                break
            time.sleep(0.05)
