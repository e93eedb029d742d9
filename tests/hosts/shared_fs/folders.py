"""Names: looking them up, listing, making, renaming and removing them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
import time

from hosts.shared_fs import protocol
from hosts.shared_fs.connection import Handler
from hosts.shared_fs.late import LateRenames
from hosts.shared_fs.nodes import Listing, Name, Node, Nodes
from hosts.shared_fs.protocol import Call, Request

SILLY = ".nfs"


class OpenFolder:
    """A folder that is open, with its entries as of the last time that they were read from the begin."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.entries: list[tuple[str, int, int]] = []


class Folders:
    """Answers the requests about names and folders."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.switches = nodes, nodes.switches
        self.late = LateRenames(nodes.switches.late_renames)
        self._handles = itertools.count(1)
        self._open: dict[int, OpenFolder] = {}

    def handlers(self) -> dict[int, Handler]:
        """By call."""
        calls: dict[Call, Handler] = {
            Call.LOOKUP: self.lookup, Call.FORGET: self.forget, Call.BATCH_FORGET: self.batch_forget,
            Call.READLINK: self.readlink, Call.SYMLINK: self.symlink, Call.MKNOD: self.mknod, Call.MKDIR: self.mkdir,
            Call.UNLINK: self.unlink, Call.RMDIR: self.rmdir, Call.RENAME: self.rename, Call.RENAME2: self.rename2,
            Call.LINK: self.link, Call.OPENDIR: self.opendir, Call.READDIR: self.readdir,
            Call.RELEASEDIR: self.releasedir, Call.FSYNCDIR: self.fsyncdir,
        }  # fmt: skip
        return {int(call): handler for call, handler in calls.items()}

    def lookup(self, request: Request) -> bytes:
        """A name's node. What is missing is kept by the kernel too, where it keeps anything."""
        folder, name = self.nodes.get(request.node), request.names()[0]
        try:
            if self.late.hides(folder, name):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return self.nodes.entry(self.nodes.enter(folder, name))
        except FileNotFoundError:
            if not self.switches.cache_seconds:
                raise
            whole, part = protocol.seconds(self.switches.cache_seconds)
            return protocol.ENTRY.pack(0, 0, whole, 0, part, 0) + bytes(protocol.ATTRIBUTES.size)

    def forget(self, request: Request) -> None:
        """The kernel no longer knows a node."""
        self.nodes.forget(request.node, request.unpack(protocol.ONE)[0])

    def batch_forget(self, request: Request) -> None:
        """The same of many."""
        count, _ = request.unpack(protocol.BATCH_FORGET_IN)
        every = request.body[protocol.BATCH_FORGET_IN.size :][: count * protocol.FORGET_ONE.size]
        for number, lookups in protocol.FORGET_ONE.iter_unpack(every):
            self.nodes.forget(number, lookups)

    def made(self, request: Request, folder: Node, name: str) -> Node:
        """The node of what was just made for a request; it belongs to the process that asked."""
        if request.uid or request.gid:
            os.chown(name, request.uid, request.gid, dir_fd=folder.fd, follow_symlinks=False)
        node = self.nodes.enter(folder, name)
        self._listed(folder, name, node)
        return node

    def readlink(self, request: Request) -> bytes:
        """Where a symbolic link points."""
        return os.fsencode(os.readlink("", dir_fd=self.nodes.get(request.node).fd))

    def symlink(self, request: Request) -> bytes:
        """Make a symbolic link."""
        folder, (name, target) = self.nodes.get(request.node), request.names()
        os.symlink(target, name, dir_fd=folder.fd)
        return self.nodes.entry(self.made(request, folder, name))

    def mknod(self, request: Request) -> bytes:
        """Make a file that is not opened."""
        folder, name = self.nodes.get(request.node), request.names(protocol.MKNOD_IN.size)[0]
        mode, device, _, _ = request.unpack(protocol.MKNOD_IN)
        os.mknod(name, mode, device, dir_fd=folder.fd)
        return self.nodes.entry(self.made(request, folder, name))

    def mkdir(self, request: Request) -> bytes:
        """Make a folder."""
        folder, name = self.nodes.get(request.node), request.names(protocol.MKDIR_IN.size)[0]
        os.mkdir(name, request.unpack(protocol.MKDIR_IN)[0], dir_fd=folder.fd)
        return self.nodes.entry(self.made(request, folder, name))

    def link(self, request: Request) -> bytes:
        """Give a file another name."""
        if not self.switches.links:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        folder, name = self.nodes.get(request.node), request.names(protocol.ONE.size)[0]
        source = self.nodes.get(request.unpack(protocol.ONE)[0])
        os.link(source.path, name, dst_dir_fd=folder.fd, follow_symlinks=True)
        node = self.nodes.enter(folder, name)
        self._listed(folder, name, node)
        return self.nodes.entry(node)

    def unlink(self, request: Request) -> bytes:
        """Remove a file's name; with `--silly-renames` change it while the file is open here."""
        folder, name = self.nodes.get(request.node), request.names()[0]
        with self.nodes.lock:
            node = self.nodes.at(folder, name)
            if node is None or not self._kept_as_silly(node, folder, name):
                os.unlink(name, dir_fd=folder.fd)
            self._removed(node, folder, name)
        return b""

    def _kept_as_silly(self, node: Node, folder: Node, name: str) -> bool:
        if not self.switches.silly_renames or not node.opens:
            return False
        if node.silly is not None:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        silly = SILLY + secrets.token_hex(12)
        os.rename(name, silly, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        node.silly = (folder, silly)
        self._listed(folder, silly, node)
        return True

    def closed(self, node: Node) -> None:
        """A file is no longer open here."""
        with self.nodes.lock:
            silly: Name | None = node.silly
            if silly is None or node.opens:
                return
            folder, name = silly
            with contextlib.suppress(FileNotFoundError):  # another mount was quicker
                os.unlink(name, dir_fd=folder.fd)
            node.silly = None
            self._removed(node, folder, name)

    def rmdir(self, request: Request) -> bytes:
        """Remove an empty folder."""
        folder, name = self.nodes.get(request.node), request.names()[0]
        with self.nodes.lock:
            node = self.nodes.at(folder, name)
            os.rmdir(name, dir_fd=folder.fd)
            self._removed(node, folder, name)
        return b""

    def rename(self, request: Request) -> bytes:
        """Give a file or folder another name or place."""
        return self._rename(request, request.unpack(protocol.ONE)[0], protocol.ONE.size)

    def rename2(self, request: Request) -> bytes:
        """The same with flags, of which the kit has none."""
        number, flags, _ = request.unpack(protocol.RENAME2_IN)
        if flags:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._rename(request, number, protocol.RENAME2_IN.size)

    def _rename(self, request: Request, number: int, offset: int) -> bytes:
        folder, new_folder = self.nodes.get(request.node), self.nodes.get(number)
        name, new_name = request.names(offset)
        with self.nodes.lock:
            node, replaced = self.nodes.at(folder, name), self.nodes.at(new_folder, new_name)
            if replaced is not None and replaced is not node:
                self._kept_as_silly(replaced, new_folder, new_name)
            self.late.mark(folder, name, new_folder, new_name)
            os.rename(name, new_name, src_dir_fd=folder.fd, dst_dir_fd=new_folder.fd)
            if replaced is node and node is not None:
                return b""  # two names of one file: nothing happens
            self._removed(replaced, new_folder, new_name)
            self._removed(node, folder, name)
            if node is not None:
                node.names.add((new_folder, new_name))
                self._listed(new_folder, new_name, node)
            else:
                new_folder.listing = None
        return b""

    def opendir(self, request: Request) -> bytes:
        """Open a folder."""
        folder = self.nodes.get(request.node)
        handle = next(self._handles)
        self._open[handle] = OpenFolder(os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder.fd))
        return protocol.OPEN_OUT.pack(handle, 0, 0)

    def readdir(self, request: Request) -> bytes:
        """As many entries as there is room for."""
        folder = self.nodes.get(request.node)
        number, offset, size, _, _, _, _ = request.unpack(protocol.READ_WRITE)
        handle = self._open[number]
        if offset == 0:
            own = [(".", folder.key[1], stat.S_IFDIR), ("..", folder.key[1], stat.S_IFDIR)]
            handle.entries = own + [(name, *entry) for name, entry in self._listing(folder, handle.fd).items()]
        answer = b""
        for index in range(offset, len(handle.entries)):
            entry = protocol.dirent(*handle.entries[index], index + 1)
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    def _listing(self, folder: Node, fd: int) -> Listing:
        with self.nodes.lock:
            if folder.listing is not None and time.monotonic() < folder.listing[0]:
                return dict(folder.listing[1])
            listing: Listing = {}
            with os.scandir(fd) as entries:
                for entry in entries:
                    if not self.late.hides(folder, entry.name):
                        listing[entry.name] = (entry.inode(), self._kind(entry))
            if self.switches.cache_seconds:
                folder.listing = time.monotonic() + self.switches.cache_seconds, listing
            return dict(listing)

    @staticmethod
    def _kind(entry: os.DirEntry[str]) -> int:
        if entry.is_symlink():
            return stat.S_IFLNK
        return stat.S_IFDIR if entry.is_dir(follow_symlinks=False) else stat.S_IFREG if entry.is_file() else 0

    def _listed(self, folder: Node, name: str, node: Node) -> None:
        """This mount made a name: it sees it at once."""
        with self.nodes.lock:
            if folder.listing is not None:
                status = os.fstat(node.fd)
                folder.listing[1][name] = (status.st_ino, status.st_mode)

    def _removed(self, node: Node | None, folder: Node, name: str) -> None:
        """This mount took a name away; `node` is what had it, if the kernel knows that."""
        if node is not None:
            node.names.discard((folder, name))
        if folder.listing is not None:
            folder.listing[1].pop(name, None)

    def releasedir(self, request: Request) -> bytes:
        """Close a folder."""
        os.close(self._open.pop(request.unpack(protocol.RELEASE_IN)[0]).fd)
        return b""

    def fsyncdir(self, request: Request) -> bytes:
        """Flush a folder's entries to the disk."""
        self.nodes.get(request.node)
        os.fsync(self._open[request.unpack(protocol.FSYNC_IN)[0]].fd)
        return b""
