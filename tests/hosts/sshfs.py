"""sshfs as a file system of the bench: a folder of the server's host, which each other host mounts over ssh."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from hosts.file_systems import SHARED, FileSystem, missing_fuse, missing_programs, wait_for_mount
from hosts.host import Host

if TYPE_CHECKING:
    from hosts.bench import Bench

DAEMON = """HostKey /bench/ssh/host_key
AuthorizedKeysFile /bench/ssh/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
Subsystem sftp internal-sftp
"""

OPTIONS = ("reconnect", "ServerAliveInterval=5", "ServerAliveCountMax=3")
"""What its manual advises, so that a mount survives a server that was away, and ends calls where it stays away."""


class Sshfs(FileSystem):
    """`options`: those of sshfs; the file system keeps attributes for 20 seconds by itself."""

    needs_server = True

    def __init__(self, *options: str) -> None:
        self.options = options
        self.name = " ".join(["sshfs", *options])

    def missing(self) -> str:
        programs = missing_programs("openssh-server", "sshd", "ssh-keygen") or missing_programs("sshfs", "sshfs")
        return programs or missing_fuse()

    def serve(self, bench: Bench) -> None:
        folder = bench.folder / "ssh"
        (folder / "files").mkdir(parents=True)
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        public = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"{bench.server.name},{bench.server.address} {public}")
        (folder / "sshd_config").write_text(DAEMON)
        bench.server.command("mkdir", "-p", "/run/sshd")
        daemon = bench.server.command("which", "sshd").strip()  # it must be called by its whole path
        bench.server.start(daemon, "-D", "-e", "-f", "/bench/ssh/sshd_config", log="sshd.log")

    def mount(self, bench: Bench, host: Host) -> None:
        keys = (
            "IdentityFile=/bench/ssh/user_key",
            "UserKnownHostsFile=/bench/ssh/known_hosts",
            "ConnectionAttempts=20",
        )
        options = ",".join([*OPTIONS, *keys, *self.options])
        log = f"{host.name}-sshfs.log"
        source = f"root@{bench.server.name}:/bench/ssh/files"
        process = host.start("sshfs", "-f", "-o", options, source, SHARED, log=log)
        wait_for_mount(host, bench.folder / log, process.poll)
