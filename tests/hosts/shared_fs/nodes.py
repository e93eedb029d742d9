"""The files and folders that the kernel knows on one mount, each by a number, and what this mount knows of their names."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from typing import TYPE_CHECKING

from hosts.shared_fs import protocol
from hosts.shared_fs.switches import Switches

if TYPE_CHECKING:
    from hosts.shared_fs.versions import Versions

Key = tuple[int, int]  # device and inode of the backing file
Name = tuple["Node", str]  # a folder, and a name in it
Listing = dict[str, tuple[int, int]]  # inode and mode of each name


def key_of(of: os.stat_result) -> Key:
    """The identity of a backing file."""
    return of.st_dev, of.st_ino


class Node:
    """One file or folder. It holds the backing one open, so that its inode's number is not given to another."""

    def __init__(self, number: int, fd: int, key: Key) -> None:
        self.number, self.fd, self.key = number, fd, key
        self.lookups = 0
        """How often the kernel was told this number; it takes as many back."""
        self.opens = 0
        self.names: set[Name] = set()
        """Where this mount saw it, or put it. Empty when this mount removed it."""
        self.is_stale = False
        self.silly: Name | None = None
        """Its name until it is closed, if it was removed while it was open."""
        self.listing: tuple[float, Listing] | None = None
        """What is shown as its entries until a time of the monotonic clock."""
        self.versions: Versions | None = None

    def __del__(self) -> None:
        os.close(self.fd)

    @property
    def path(self) -> str:
        """A path of the backing file for this process, whatever its name is."""
        return f"/proc/self/fd/{self.fd}"

    def reopen(self, flags: int) -> int:
        """A descriptor of the backing file."""
        return os.open(self.path, flags & ~(os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL))

    def is_where_it_was(self) -> bool:
        """One of its names, and the folder of it, still stands for this file; or this mount itself removed it."""
        if not self.names:
            return True
        for folder, name in list(self.names):
            try:
                status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if key_of(status) == self.key and folder.is_where_it_was():
                return True
        return False


class Nodes:
    """All nodes of a mount. `lock` is held while numbers and names change."""

    def __init__(self, backing: os.PathLike[str], switches: Switches) -> None:
        self.switches = switches
        self.lock = threading.RLock()
        self._numbers = itertools.count(protocol.ROOT)
        self._by_number: dict[int, Node] = {}
        self._by_key: dict[Key, Node] = {}
        self._new(os.open(backing, os.O_PATH | os.O_DIRECTORY))

    def _new(self, fd: int) -> Node:
        node = Node(next(self._numbers), fd, key_of(os.fstat(fd)))
        self._by_number[node.number] = self._by_key[node.key] = node
        return node

    def get(self, number: int) -> Node:
        """The node of a request. ESTALE where `--stale` says that another mount has moved it away."""
        node = self._by_number.get(number)
        if node is None or self.is_stale(node):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return node

    def any(self, number: int) -> Node:
        """The node of a request that also stands for a stale file: closing it, and the like."""
        return self._by_number[number]

    def is_stale(self, node: Node) -> bool:
        """Another mount has renamed or removed it, and `--stale` was given. It is so for good."""
        if self.switches.stale and not node.is_stale and not node.is_where_it_was():
            with self.lock:  # looked at again, for this mount may have been about to rename it
                node.is_stale = not node.is_where_it_was()
        return node.is_stale

    def at(self, folder: Node, name: str) -> Node | None:
        """The node that the backing folder has under a name, if the kernel knows it."""
        try:
            return self._by_key.get(key_of(os.stat(name, dir_fd=folder.fd, follow_symlinks=False)))
        except FileNotFoundError:
            return None

    def enter(self, folder: Node, name: str) -> Node:
        """The node of a name that the kernel is told of now. FileNotFoundError where there is none."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder.fd)
        with self.lock:
            node = self._by_key.get(key_of(os.fstat(fd)))
            if node is None or self.is_stale(node):
                node = self._new(fd)
            else:
                os.close(fd)
            node.lookups += 1
            if node.number != protocol.ROOT:
                node.names.add((folder, name))
            return node

    def forget(self, number: int, lookups: int) -> None:
        """The kernel has forgotten a number as often as said."""
        with self.lock:
            node = self._by_number.get(number)
            if node is None or number == protocol.ROOT:
                return
            node.lookups -= lookups
            if node.lookups <= 0:
                del self._by_number[number]
                if self._by_key.get(node.key) is node:
                    del self._by_key[node.key]

    def attributes(self, node: Node) -> bytes:
        """`struct fuse_attr` as this mount shows the file."""
        status = os.fstat(node.fd)
        size, mtime_ns = status.st_size, status.st_mtime_ns
        if node.versions is not None:
            size, mtime_ns = node.versions.shown(status)
        blocks = status.st_blocks if self.switches.sparse else -(-size // 512)
        return protocol.attributes(status, size, blocks, mtime_ns, round(self.switches.clock * 1e9))

    def entry(self, node: Node) -> bytes:
        """`struct fuse_entry_out`: a number, and what the kernel may keep."""
        whole, part = protocol.seconds(self.switches.cache_seconds)
        return protocol.ENTRY.pack(node.number, 0, whole, whole, part, part) + self.attributes(node)
