"""The abilities of the file system below a folder: sparse files, and files that several machines write at once."""

from __future__ import annotations

import functools
import os
import re
import secrets
import socket
from pathlib import Path
from typing import NamedTuple

_PROBE_NBYTES = 1 << 20
_BLOCK_NBYTES = 512  # of st_blocks

# On these file systems several machines can write to one file at once, each its own bytes, and nothing is lost: one machine has
# a page of it at a time, or (GlusterFS) each write goes to the server as it is. An NFS client may write back a page as it knows
# it, over the bytes that another machine has written into it; file systems in user space over an object store may keep a copy of
# the file on each machine, and the last machine that closes it wins.
_SHARED = frozenset({"lustre", "gpfs", "ceph", "wekafs", "gfs2", "ocfs2", "fuse.glusterfs"})
_OF_ONE_MACHINE = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "overlay", "ramfs"}
)
WRITTEN_IN_PLACE = _SHARED | _OF_ONE_MACHINE


@functools.cache
def _unique_name() -> str:
    """Return a string that only this process has."""
    return secrets.token_hex(8)


def this_host(folder: Path) -> str:
    """Return a string for this machine since its last boot and for the mount below the folder, which need not exist yet.

    Containers with the same string see each other's locks and bytes. Where a machine has no boot id, its name is not enough:
    containers on two machines may have the same name. The folder is not looked up: a network file system would keep for a time
    that a folder which another machine is about to make is not there.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = f"{socket.gethostname()} {_unique_name()}"
    return f"{machine} {_mount_of(folder).device}"


def is_of_one_machine(folder: Path) -> bool:
    """Return whether no other machine can have the file system of a folder mounted, so that locks and names are seen at once."""
    return filesystem_type(folder) in _OF_ONE_MACHINE


def has_sparse_files(folder: Path) -> bool:
    """Return whether a file can get its final length before its bytes are written, at no cost."""
    probe = folder / "probe"
    try:
        with probe.open("wb") as file:
            file.truncate(_PROBE_NBYTES)
            blocks = os.fstat(file.fileno()).st_blocks
        probe.unlink()
    except OSError:  # the writes themselves will report the problem
        return True
    return blocks * _BLOCK_NBYTES < _PROBE_NBYTES


def filesystem_type(folder: Path) -> str:
    """Return the Linux name of the file system below a folder: `ext4`, `nfs4`, `fuse.gcsfuse`; "" where it is unknown."""
    try:
        return _mount_of(Path(os.path.realpath(folder))).kind  # Path.resolve() has RuntimeError for a link to itself
    except OSError:
        return ""


class _Mount(NamedTuple):
    """A mount as Linux lists it. `device`: its numbers, the same for all processes that share the mount."""

    where: str = ""
    kind: str = ""
    device: str = ""


def _mount_of(place: Path) -> _Mount:
    """Return the mount that a path is on by its text; an empty `_Mount` where it is unknown."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return _Mount()
    mounts = [_Mount()]
    for line in lines:
        before, _, after = line.partition(" - ")
        words = before.split()
        mounted = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), words[4]))
        if place == mounted or mounted in place.parents:
            mounts.append(_Mount(str(mounted), after.split()[0], words[2]))
    return max(reversed(mounts), key=lambda mount: len(mount.where))  # of two mounts on one path, the later one counts
