"""What a file system can do that a checkpoint's folder is on: sparse files, and one file written by several machines."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

_PROBE_NBYTES = 1 << 20
_BLOCK_NBYTES = 512  # of st_blocks

# What several machines can write to one file of at once, each its own bytes, and nothing is lost. Others (those in user space
# over an object store above all) may keep a copy of the whole file on each machine, and the last one to close it wins.
_SHARED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "wekafs", "gfs2", "ocfs2", "orangefs", "pvfs2"})
_OF_ONE_MACHINE = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "overlay", "ramfs"}
)
WRITTEN_IN_PLACE = _SHARED | _OF_ONE_MACHINE


def this_host(folder: Path) -> str:
    """A name of this machine since it was started, and of the mount that the folder is on (or will be).

    Containers that share both see each other's locks and bytes.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = socket.gethostname()
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return f"{machine} {place.stat().st_dev}"
    return machine


def has_sparse_files(folder: Path) -> bool:
    """Whether a file can be as long as it will be before it is written, and costs nothing."""
    probe = folder / "probe"
    try:
        with probe.open("wb") as file:
            file.truncate(_PROBE_NBYTES)
            blocks = os.fstat(file.fileno()).st_blocks
        probe.unlink()
    except OSError:  # what is wrong will be said where it is in the way
        return True
    return blocks * _BLOCK_NBYTES < _PROBE_NBYTES


def kind_of(folder: Path) -> str:
    """What Linux calls the file system that a folder is on: `ext4`, `nfs4`, `fuse.gcsfuse`; empty where it does not say."""
    try:
        where = folder.resolve()
        listed = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found = [("", "")]
    for line in listed:
        before, _, after = line.partition(" - ")
        mounted = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split()[4]))
        if where == mounted or mounted in where.parents:
            found.append((str(mounted), after.split()[0]))
    return max(reversed(found), key=lambda one: len(one[0]))[1]  # of two in one place the later hides the other
