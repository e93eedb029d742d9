"""The connection of one mount with the kernel: mounting, reading requests, sending replies and notices."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from hosts.shared_fs import protocol
from hosts.shared_fs.protocol import Call, Can, Request

Handler = Callable[[Request], "bytes | memoryview | None"]
"""Answers a request with the body of its reply, raises the OSError to reply, or returns None, where it replies elsewhere."""

THREADS = 4
DETACH = 2  # MNT_DETACH
ENDED = (errno.ENODEV, errno.EBADF)
LOST = (errno.ENOENT, errno.EINTR, errno.EAGAIN)  # the request was taken back

libc = ctypes.CDLL(None, use_errno=True)


def _called(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


class Connection:
    """A mount at `at`, with the kernel's flags `can`. Needs root. `serve` must follow at once: the kernel waits for it."""

    def __init__(self, at: Path, can: int) -> None:
        self.at, self.can = at, can
        self.device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self.device},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other"
        options += f",max_read={protocol.MAX_WRITE}"
        made = libc.mount(b"shared_fs", os.fsencode(at), b"fuse.shared_fs", ctypes.c_ulong(0), options.encode())
        _called(made, str(at))

    def unmount(self) -> None:
        """Take the mount away, also while files in it are open."""
        _called(libc.umount2(os.fsencode(self.at), DETACH), str(self.at))

    def serve(self, handlers: dict[int, Handler]) -> None:
        """Answer requests until the file system is unmounted and nothing in it is open any more."""
        threads = [threading.Thread(target=self._work, args=(handlers,), daemon=True) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def reply(self, unique: int, body: bytes | memoryview = b"", error: int = 0) -> None:
        """Answer the request `unique`; nothing where it was taken back meanwhile."""
        header = protocol.HEADER_OUT.pack(protocol.HEADER_OUT.size + len(body), -error, unique)
        try:
            os.writev(self.device, [header, body])
        except OSError as raised:
            if raised.errno not in (*LOST, *ENDED):
                raise

    def forget_attributes(self, node: int) -> None:
        """Tell the kernel to ask for the attributes of a file again."""
        body = protocol.INVALIDATE.pack(node, -1, 0)
        header = protocol.HEADER_OUT.pack(protocol.HEADER_OUT.size + len(body), protocol.INVALIDATE_INODE, 0)
        try:
            os.writev(self.device, [header, body])
        except OSError as raised:
            if raised.errno not in (*LOST, *ENDED):
                raise

    def _work(self, handlers: dict[int, Handler]) -> None:
        buffer, scratch = memoryview(bytearray(protocol.BUFFER)), memoryview(bytearray(protocol.MAX_WRITE))
        while True:
            try:
                length = os.readv(self.device, [buffer])
            except OSError as raised:
                if raised.errno in LOST:
                    continue
                if raised.errno in ENDED:
                    return
                raise
            self._answer(handlers, protocol.parse(buffer[:length], scratch))

    def _answer(self, handlers: dict[int, Handler], request: Request) -> None:
        if request.call == Call.INIT:
            self.reply(request.unique, self._agree(request))
            return
        handler = handlers.get(request.call)
        if handler is None:
            self.reply(request.unique, error=errno.ENOSYS)
            return
        try:
            body = handler(request)
        except OSError as raised:
            self.reply(request.unique, error=raised.errno or errno.EIO)
        except Exception:  # a mistake in the kit: say where, and let the program under test continue
            traceback.print_exc()
            self.reply(request.unique, error=errno.EIO)
        else:
            if body is not None:
                self.reply(request.unique, body)

    def _agree(self, request: Request) -> bytes:
        major, minor, readahead, flags, more = request.unpack(protocol.INIT_IN)
        flags = (flags | more << 32) & self.can
        minor = min(minor, protocol.VERSION[1])
        pages = protocol.MAX_WRITE // os.sysconf("SC_PAGE_SIZE")
        low, high = flags & 0xFFFFFFFF, flags >> 32
        limits = (16, 12, protocol.MAX_WRITE, 1, pages, 0, high)
        return protocol.INIT_OUT.pack(major, minor, readahead, low, *limits)


ALWAYS = (
    Can.ASYNC_READ | Can.BIG_WRITES | Can.AUTO_INVAL_DATA | Can.ASYNC_DIO | Can.PARALLEL_DIROPS | Can.MAX_PAGES
    | Can.INIT_EXT | Can.DIRECT_IO_ALLOW_MMAP
)  # fmt: skip
"""What every mount asks the kernel for."""
