"""The messages between Linux and a file system in a process (include/uapi/linux/fuse.h), as far as the kit answers them."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

VERSION = (7, 36)
ROOT = 1  # the kernel's number of the root folder
MAX_WRITE = 1 << 20
"""Bytes of the longest read or write that the kernel sends as one request."""
BUFFER = MAX_WRITE + (1 << 16)
"""Bytes of a buffer that holds any request."""


class Call(IntEnum):
    """What the kernel asks for."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    FALLOCATE = 43
    RENAME2 = 45
    LSEEK = 46


class Can:
    """What kernel and file system agree on in INIT (FUSE_* of fuse.h)."""

    ASYNC_READ = 1 << 0
    POSIX_LOCKS = 1 << 1
    BIG_WRITES = 1 << 5
    FLOCK_LOCKS = 1 << 10
    AUTO_INVAL_DATA = 1 << 12
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    INIT_EXT = 1 << 30
    DIRECT_IO_ALLOW_MMAP = 1 << 36


class Opened:
    """How the kernel treats a file that was opened (FOPEN_*)."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    PARALLEL_DIRECT_WRITES = 1 << 6


class Set:
    """What a SETATTR changes (FATTR_*)."""

    MODE, UID, GID, SIZE, ATIME, MTIME, FH, ATIME_NOW, MTIME_NOW = (1 << bit for bit in range(9))


INVALIDATE_INODE = 2  # a notice to the kernel (FUSE_NOTIFY_INVAL_INODE)
LOCK_IS_FLOCK = 1  # FUSE_LK_FLOCK

HEADER_IN = Struct("=IIQQIIIHH")
HEADER_OUT = Struct("=IiQ")
INIT_IN = Struct("=5I")
INIT_OUT = Struct("=4I2HI I2HI28x")
ENTRY = Struct("=4Q2I")
ATTRIBUTES = Struct("=6Q10I")
ATTRIBUTES_FOR = Struct("=QII")  # the seconds and nanoseconds for which the kernel may keep them
SETATTR = Struct("=2I6Q8I")
OPEN_IN = Struct("=2I")
OPEN_OUT = Struct("=QIi")
CREATE_IN = Struct("=4I")
MKNOD_IN = Struct("=4I")
MKDIR_IN = Struct("=2I")
READ_WRITE = Struct("=QQIIQII")
WRITE_OUT = Struct("=II")
RELEASE_IN = Struct("=QIIQ")
FLUSH_IN = Struct("=QIIQ")
FSYNC_IN = Struct("=QII")
FALLOCATE_IN = Struct("=3QII")
LSEEK_IN = Struct("=QQII")
LOCK = Struct("=4Q4I")  # fh, owner, start, end, type, pid, flags, padding
LOCK_OUT = Struct("=2Q2I")
ONE = Struct("=Q")
RENAME2_IN = Struct("=QII")
FORGET_ONE = Struct("=QQ")
BATCH_FORGET_IN = Struct("=II")
STATFS_OUT = Struct("=5Q4I24x")
DIRENT = Struct("=QQII")
INVALIDATE = Struct("=Qqq")


@dataclass
class Request:
    """One request. `scratch` is the reading thread's own, for a reply of up to MAX_WRITE bytes."""

    call: int
    unique: int
    node: int
    uid: int
    gid: int
    body: memoryview
    scratch: memoryview

    def unpack(self, layout: Struct) -> tuple[int, ...]:
        """The fields at the begin of the body."""
        return layout.unpack_from(self.body)

    def names(self, offset: int = 0) -> list[str]:
        """The names, each ended by a zero byte, that follow the first `offset` bytes."""
        return [os.fsdecode(name) for name in bytes(self.body[offset:]).split(b"\0")[:-1]]


def parse(message: memoryview, scratch: memoryview) -> Request:
    """The request in `message`, which is as long as the request."""
    _, call, unique, node, uid, gid, _, _, _ = HEADER_IN.unpack_from(message)
    return Request(call, unique, node, uid, gid, message[HEADER_IN.size :], scratch)


def seconds(value: float) -> tuple[int, int]:
    """Whole seconds and nanoseconds."""
    return divmod(round(value * 1e9), 10**9)


def attributes(of: os.stat_result, size: int, blocks: int, mtime_ns: int, shift_ns: int) -> bytes:
    """`struct fuse_attr` of a file, all of whose times are `shift_ns` later than they are."""
    times = [divmod(ns + shift_ns, 10**9) for ns in (of.st_atime_ns, mtime_ns, of.st_ctime_ns)]
    whole = [second & (1 << 64) - 1 for second, _ in times]
    parts = [nanosecond for _, nanosecond in times]
    owner = (of.st_mode, of.st_nlink, of.st_uid, of.st_gid, of.st_rdev & 0xFFFFFFFF, of.st_blksize, 0)
    return ATTRIBUTES.pack(of.st_ino, size, blocks, *whole, *parts, *owner)


def dirent(name: str, inode: int, kind: int, offset: int) -> bytes:
    """One entry of a listing; `offset` is that of the entry after it, `kind` the file type of a mode."""
    raw = os.fsencode(name)
    entry = DIRENT.pack(inode, offset, len(raw), stat.S_IFMT(kind) >> 12) + raw
    return entry + bytes(-len(entry) % 8)
