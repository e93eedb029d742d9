"""One mount in this process: the parts put together."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from hosts.shared_fs.connection import ALWAYS, Connection
from hosts.shared_fs.files import Files
from hosts.shared_fs.folders import Folders
from hosts.shared_fs.locks import Locks
from hosts.shared_fs.nodes import Nodes
from hosts.shared_fs.protocol import Call, Can
from hosts.shared_fs.switches import Switches

MOUNTED = "mounted"
"""The line on the standard output once the mount is there."""


def serve(backing: Path, mount: Path, switches: Switches) -> None:
    """Show `backing` at `mount` until it is unmounted. SIGTERM and SIGINT unmount it. OSError where it cannot be mounted."""
    os.umask(0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a descriptor for each file that the kernel knows
    nodes = Nodes(backing, switches)
    locks_here = 0 if switches.locks == "local" else Can.POSIX_LOCKS | Can.FLOCK_LOCKS
    connection = Connection(mount, ALWAYS | locks_here)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: connection.unmount())
    folders = Folders(nodes)
    files = Files(nodes, folders, connection.forget_attributes)
    locks = Locks(nodes, files.descriptor, connection.reply)
    files.owner_closed = locks.closed
    print(MOUNTED, flush=True)
    handlers = {**folders.handlers(), **files.handlers(), **locks.handlers(), int(Call.DESTROY): lambda _: None}
    connection.serve(handlers)
