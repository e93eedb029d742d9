"""Files: attributes, reading, writing, room on the disk."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from hosts.shared_fs import protocol
from hosts.shared_fs.connection import Handler, libc
from hosts.shared_fs.folders import Folders
from hosts.shared_fs.nodes import Node, Nodes
from hosts.shared_fs.protocol import Call, Opened, Request, Set
from hosts.shared_fs.versions import Version, Versions

KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
ZEROS = bytes(protocol.MAX_WRITE)


@dataclass
class OpenFile:
    """A file that is open: a descriptor of the backing file for each, which its locks belong to."""

    fd: int
    node: Node
    is_writer: bool
    version: Version | None = None  # with `--close-to-open`


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class Files:
    """Answers the requests about what files contain. `changed` makes the kernel ask for the attributes of a node again."""

    def __init__(self, nodes: Nodes, folders: Folders, changed: Callable[[int], None]) -> None:
        self.nodes, self.switches, self.folders, self.changed = nodes, nodes.switches, folders, changed
        self.owner_closed: Callable[[int, int], None] = lambda node, owner: None
        self._handles = itertools.count(1)
        self._open: dict[int, OpenFile] = {}

    def handlers(self) -> dict[int, Handler]:
        """By call."""
        calls: dict[Call, Handler] = {
            Call.GETATTR: self.getattr, Call.SETATTR: self.setattr, Call.OPEN: self.open, Call.CREATE: self.create,
            Call.READ: self.read, Call.WRITE: self.write, Call.FLUSH: self.flush, Call.RELEASE: self.release,
            Call.FSYNC: self.fsync, Call.FALLOCATE: self.fallocate, Call.LSEEK: self.lseek, Call.STATFS: self.statfs,
        }  # fmt: skip
        return {int(call): handler for call, handler in calls.items()}

    def descriptor(self, handle: int) -> int:
        """An open file's own descriptor of the backing file."""
        return self._open[handle].fd

    def _attributes(self, node: Node) -> bytes:
        whole, part = protocol.seconds(self.switches.cache_seconds)
        return protocol.ATTRIBUTES_FOR.pack(whole, part, 0) + self.nodes.attributes(node)

    def getattr(self, request: Request) -> bytes:
        """What `stat` shows."""
        return self._attributes(self.nodes.get(request.node))

    def setattr(self, request: Request) -> bytes:
        """Change size, mode, owner or times."""
        node = self.nodes.get(request.node)
        fields = request.unpack(protocol.SETATTR)
        valid, handle, size, mode, uid, gid = (fields[index] for index in (0, 2, 3, 11, 13, 14))
        if valid & Set.MODE:
            os.chmod(node.path, mode & 0o7777)
        if valid & (Set.UID | Set.GID):
            os.chown(node.path, uid if valid & Set.UID else -1, gid if valid & Set.GID else -1)
        if valid & Set.SIZE:
            fd = self._open[handle].fd if valid & Set.FH else node.reopen(os.O_WRONLY)
            try:
                self._resize(node, fd, size)
            finally:
                if not valid & Set.FH:
                    os.close(fd)
        if valid & (Set.ATIME | Set.MTIME):
            self._set_times(node, valid, fields)
        return self._attributes(node)

    def _set_times(self, node: Node, valid: int, fields: tuple[int, ...]) -> None:
        before, times = os.fstat(node.fd), []
        kinds = (
            (Set.ATIME, Set.ATIME_NOW, 5, 8, before.st_atime_ns),
            (Set.MTIME, Set.MTIME_NOW, 6, 9, before.st_mtime_ns),
        )
        for given, now, whole, part, old in kinds:
            if not valid & given:
                times.append(old)
            elif valid & now:
                times.append(time.time_ns())
            else:  # the client's time is kept as it is: the server shows what it was given
                times.append(fields[whole] * 10**9 + fields[part] - round(self.switches.clock * 1e9))
        os.utime(node.path, ns=(times[0], times[1]))

    def _resize(self, node: Node, fd: int, size: int) -> None:
        old = os.fstat(fd).st_size
        if node.versions is not None:
            node.versions.resize(size, fd)
        else:
            os.ftruncate(fd, size)
        while not self.switches.sparse and old < size:
            old += os.pwrite(fd, ZEROS[: size - old], old)

    def open(self, request: Request) -> bytes:
        """Open a file that exists."""
        node = self.nodes.get(request.node)
        flags = request.unpack(protocol.OPEN_IN)[0]
        return self._opened(node, node.reopen(self._flags(flags)), flags)

    def _flags(self, flags: int) -> int:
        if self.switches.close_to_open:  # what is written goes to the backing file later, to its place
            flags &= ~os.O_APPEND
        return flags & ~os.O_DIRECT

    def create(self, request: Request) -> bytes:
        """Make and open a file."""
        folder, name = self.nodes.get(request.node), request.names(protocol.CREATE_IN.size)[0]
        flags, mode, _, _ = request.unpack(protocol.CREATE_IN)
        fd = os.open(name, self._flags(flags) | os.O_CREAT | os.O_NOFOLLOW, mode & 0o7777, dir_fd=folder.fd)
        node = self.folders.made(request, folder, name)
        return self.nodes.entry(node) + self._opened(node, fd, flags)

    def _opened(self, node: Node, fd: int, flags: int) -> bytes:
        opened = OpenFile(fd, node, is_writer=flags & os.O_ACCMODE != os.O_RDONLY)
        if self.switches.close_to_open:
            opened.version = self._version(opened)
        with self.nodes.lock:
            node.opens += 1
        handle = next(self._handles)
        self._open[handle] = opened
        if self.switches.cache_seconds and not self.switches.close_to_open:
            return protocol.OPEN_OUT.pack(handle, Opened.KEEP_CACHE, 0)  # bytes are as old as attributes
        return protocol.OPEN_OUT.pack(handle, Opened.DIRECT_IO | Opened.PARALLEL_DIRECT_WRITES, 0)

    def _version(self, opened: OpenFile) -> Version:
        node = opened.node
        with self.nodes.lock:
            node.versions = node.versions or Versions(node.path)
        try:
            version = node.versions.open()
        except OSError:  # no room for a copy
            os.close(opened.fd)
            raise
        self.changed(node.number)
        return version

    def read(self, request: Request) -> memoryview:
        """Bytes of a file; fewer only at its end."""
        handle, offset, size, _, _, _, _ = request.unpack(protocol.READ_WRITE)
        self.nodes.get(request.node)
        opened = self._open[handle]
        fd = opened.version.fd if opened.version else opened.fd
        done = 0
        while done < size:
            count = os.preadv(fd, [request.scratch[done:size]], offset + done)
            if not count:
                break
            done += count
        return request.scratch[:done]

    def write(self, request: Request) -> bytes:
        """Write bytes."""
        handle, offset, size, _, _, _, _ = request.unpack(protocol.READ_WRITE)
        data = request.body[protocol.READ_WRITE.size :][:size]
        node = self.nodes.get(request.node)
        versions = node.versions
        done = versions.write(data, offset) if versions else os.pwrite(self._open[handle].fd, data, offset)
        return protocol.WRITE_OUT.pack(done, 0)

    def flush(self, request: Request) -> bytes:
        """A descriptor is closed; others of the same open file may stay."""
        node = self.nodes.any(request.node)
        handle, _, _, owner = request.unpack(protocol.FLUSH_IN)
        self.owner_closed(node.number, owner)
        if self._open[handle].is_writer:
            self._publish(node)
        return b""

    def _publish(self, node: Node) -> None:
        if node.versions is not None and node.versions.has_unpublished:
            self.nodes.get(node.number)
            node.versions.publish()

    def release(self, request: Request) -> bytes:
        """An open file is closed."""
        opened = self._open.pop(request.unpack(protocol.RELEASE_IN)[0])
        node = opened.node
        if opened.version is not None and node.versions is not None:
            node.versions.close(opened.version)
        os.close(opened.fd)
        with self.nodes.lock:
            node.opens -= 1
        self.folders.closed(node)
        return b""

    def fsync(self, request: Request) -> bytes:
        """Flush a file to the disk, and to the other mounts."""
        node = self.nodes.get(request.node)
        handle, flags, _ = request.unpack(protocol.FSYNC_IN)
        self._publish(node)
        (os.fdatasync if flags & 1 else os.fsync)(self._open[handle].fd)
        return b""

    def fallocate(self, request: Request) -> bytes:
        """Reserve room, or what else the backing file system can."""
        handle, offset, length, mode, _ = request.unpack(protocol.FALLOCATE_IN)
        node, fd = self.nodes.get(request.node), self._open[handle].fd
        is_other = mode & ~KEEP_SIZE
        if not self.switches.fallocate or (is_other and (node.versions is not None or not self.switches.sparse)):
            raise _error(errno.EOPNOTSUPP)
        if node.versions is not None and not mode & KEEP_SIZE:
            node.versions.resize(max(os.fstat(fd).st_size, node.versions.shown(os.fstat(fd))[0], offset + length), fd)
        if libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)):
            raise _error(ctypes.get_errno())
        return b""

    def lseek(self, request: Request) -> bytes:
        """Where data or a hole begins."""
        handle, offset, whence, _ = request.unpack(protocol.LSEEK_IN)
        if not self.switches.sparse:
            raise _error(errno.ENOSYS)
        self.nodes.get(request.node)
        opened = self._open[handle]
        return protocol.ONE.pack(os.lseek(opened.version.fd if opened.version else opened.fd, offset, whence))

    def statfs(self, request: Request) -> bytes:
        """Room on the disk."""
        room = os.statvfs(self.nodes.get(request.node).path)
        counts = (room.f_blocks, room.f_bfree, room.f_bavail, room.f_files, room.f_ffree)
        return protocol.STATFS_OUT.pack(*counts, room.f_bsize, room.f_namemax, room.f_frsize, 0)
