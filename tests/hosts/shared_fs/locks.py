"""flock and fcntl locks of one mount: taken on the backing files, where they meet those of the other mounts, or refused."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable

from hosts.shared_fs import protocol
from hosts.shared_fs.connection import Handler
from hosts.shared_fs.nodes import Nodes
from hosts.shared_fs.protocol import Call, Request

BETWEEN_TRIES = 0.002  # seconds; waiting this way, a request can be interrupted
FLOCK = struct.Struct("@hhqqi4x")  # `struct flock`
END = (1 << 63) - 1
REFUSED = {"none": errno.ENOLCK, "nosys": errno.ENOSYS}


class Locks:
    """Answers the requests for locks. `descriptor_of` gives an open handle's own descriptor of the backing file."""

    def __init__(
        self, nodes: Nodes, descriptor_of: Callable[[int], int], reply: Callable[[int, bytes, int], None]
    ) -> None:
        self.nodes, self.descriptor_of, self.reply = nodes, descriptor_of, reply
        self.error = REFUSED.get(nodes.switches.locks, 0)
        self._lock = threading.Lock()
        self._descriptors: dict[tuple[int, int], int] = {}  # by node and owner: an owner's locks of a file
        self._waiting: dict[int, threading.Event] = {}  # by request; set when it is interrupted

    def handlers(self) -> dict[int, Handler]:
        """By call."""
        calls = {Call.GETLK: self.test, Call.SETLK: self.take, Call.SETLKW: self.wait, Call.INTERRUPT: self.interrupt}
        return {int(call): handler for call, handler in calls.items()}

    def _descriptor(self, number: int, owner: int) -> int:
        with self._lock:
            fd = self._descriptors.get((number, owner))
            if fd is None:
                node = self.nodes.get(number)
                try:
                    fd = node.reopen(os.O_RDWR)
                except OSError:  # a folder, or a disk that cannot be written
                    fd = node.reopen(os.O_RDONLY)
                self._descriptors[number, owner] = fd
            return fd

    def closed(self, number: int, owner: int) -> None:
        """An owner closes one of its descriptors of a file: it loses all its fcntl locks of that file."""
        with self._lock:
            fd = self._descriptors.pop((number, owner), None)
        if fd is not None:
            os.close(fd)

    def test(self, request: Request) -> bytes:
        """Which lock of another owner is in the way."""
        self._refuse()
        _, owner, start, end, kind, _, _, _ = request.unpack(protocol.LOCK)
        fd = self._descriptor(request.node, owner)
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, self._flock(kind, start, end))
        held_kind, _, begin, length, _ = FLOCK.unpack(answer)
        return protocol.LOCK_OUT.pack(begin, begin + length - 1 if length else END, held_kind, 0)

    @staticmethod
    def _flock(kind: int, start: int, end: int) -> bytes:
        return FLOCK.pack(kind, os.SEEK_SET, start, 0 if end >= END else end - start + 1, 0)

    def _refuse(self) -> None:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))

    def take(self, request: Request) -> bytes:
        """Take or give back a lock, or EAGAIN."""
        self._refuse()
        handle, owner, start, end, kind, _, flags, _ = request.unpack(protocol.LOCK)
        if flags & protocol.LOCK_IS_FLOCK:
            self.nodes.get(request.node)
            operations = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX, fcntl.F_UNLCK: fcntl.LOCK_UN}
            fcntl.flock(self.descriptor_of(handle), operations[kind] | fcntl.LOCK_NB)
        else:
            fd = self._descriptor(request.node, owner)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, self._flock(kind, start, end))
        return b""

    def wait(self, request: Request) -> bytes | None:
        """Take a lock, at once or on a thread of its own."""
        interrupted = self._waiting[request.unique] = threading.Event()
        try:
            answer = self.take(request)
        except BlockingIOError:
            request.body = memoryview(bytes(request.body))  # the reading thread uses its buffer again
            threading.Thread(target=self._wait, args=(request, interrupted), daemon=True).start()
            return None
        except OSError:
            del self._waiting[request.unique]
            raise
        del self._waiting[request.unique]
        return answer

    def _wait(self, request: Request, interrupted: threading.Event) -> None:
        error: int | None = errno.EAGAIN
        while error == errno.EAGAIN:
            if interrupted.wait(BETWEEN_TRIES):
                error = errno.EINTR
                break
            try:
                self.take(request)
                error = 0
            except OSError as raised:
                error = raised.errno
        del self._waiting[request.unique]
        self.reply(request.unique, b"", error or 0)

    def interrupt(self, request: Request) -> bytes | None:
        """A signal for a process that waits. EAGAIN, which has the kernel ask again, where the request is not waiting yet."""
        waiting = self._waiting.get(request.unpack(protocol.ONE)[0])
        if waiting is None:
            time.sleep(BETWEEN_TRIES)
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        waiting.set()
        return None
