"""Close-to-open: what a mount shows of a file is as of its open, and what it writes is for itself until it is closed."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections.abc import Iterator

STEP = 1 << 20
Stamp = tuple[int, int, int]  # size, mtime and ctime of the backing file


def stamp_of(status: os.stat_result) -> Stamp:
    """What shows that another mount has changed a file."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _parts_with_data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    end = 0
    while end < size:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as raised:
            if raised.errno == errno.ENXIO:  # only a hole follows
                return
            raise
        end = os.lseek(fd, begin, os.SEEK_HOLE)
        yield begin, min(end, size)


def _copy(source: int, target: int, begin: int, end: int) -> None:
    while begin < end:
        data = os.pread(source, min(STEP, end - begin), begin)
        if not data:
            return
        os.pwrite(target, data, begin)
        begin += len(data)


class Version:
    """A private copy of a file's bytes as of one open, with what this mount has written since."""

    def __init__(self, backing: int) -> None:
        self.users = 0
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed by its last user)
        self.fd = self.file.fileno()
        self.stamp: Stamp | None = None
        while True:  # until no other mount has written meanwhile
            status = os.fstat(backing)
            os.ftruncate(self.fd, 0)
            for begin, end in _parts_with_data(backing, status.st_size):
                _copy(backing, self.fd, begin, end)
            os.ftruncate(self.fd, status.st_size)
            if stamp_of(os.fstat(backing)) == stamp_of(status):
                break
        self.stamp, self.mtime_ns = stamp_of(status), status.st_mtime_ns

    @property
    def size(self) -> int:
        """Bytes of the file in this version."""
        return os.fstat(self.fd).st_size


class Versions:
    """The versions of one file on one mount: several where a file that is open has changed elsewhere and is opened anew."""

    def __init__(self, path: str) -> None:
        self._path = path  # of the backing file
        self._all: list[Version] = []
        self._dirty: list[tuple[int, int]] = []
        self._lock = threading.RLock()

    def open(self) -> Version:
        """The version for a new open: that of the backing file now, with what this mount has not published yet."""
        with self._lock:
            if not self._all or self._all[-1].stamp != stamp_of(os.stat(self._path)):
                self.publish()
                backing = os.open(self._path, os.O_RDONLY)
                try:
                    self._all.append(Version(backing))
                finally:
                    os.close(backing)
            self._all[-1].users += 1
            return self._all[-1]

    def close(self, version: Version) -> None:
        """One open of a version ends."""
        with self._lock:
            version.users -= 1
            if not version.users:
                self._all.remove(version)
                version.file.close()
            if not self._all:
                self._dirty.clear()  # of a stale file, which nothing can be written to

    def shown(self, backing: os.stat_result) -> tuple[int, int]:
        """Size in bytes and mtime in nanoseconds of the newest version; of the backing file where none is open."""
        with self._lock:
            if not self._all:
                return backing.st_size, backing.st_mtime_ns
            return self._all[-1].size, self._all[-1].mtime_ns

    def write(self, data: memoryview, offset: int) -> int:
        """Write for this mount alone."""
        with self._lock:
            for version in self._all:
                os.pwrite(version.fd, data, offset)
                version.mtime_ns = time.time_ns()
            begin, end = self._dirty[-1] if self._dirty else (-1, -1)
            if begin <= offset <= end:
                self._dirty[-1] = (begin, max(end, offset + len(data)))
            else:
                self._dirty.append((offset, offset + len(data)))
            return len(data)

    @property
    def has_unpublished(self) -> bool:
        """Something was written that only this mount sees."""
        return bool(self._dirty)

    def publish(self) -> None:
        """Give the backing file what was written here."""
        with self._lock:
            if not self._dirty or not self._all:
                return
            newest = self._all[-1]
            backing = os.open(self._path, os.O_WRONLY)
            try:
                before = stamp_of(os.fstat(backing))
                for begin, end in self._dirty:
                    _copy(newest.fd, backing, begin, end)
                self._dirty.clear()
                self._seen(before, os.fstat(backing))
            finally:
                os.close(backing)

    def _seen(self, before: Stamp, after: os.stat_result) -> None:
        newest = self._all[-1]
        newest.stamp = stamp_of(after) if newest.stamp == before else None  # None: another mount wrote too
        newest.mtime_ns = after.st_mtime_ns

    def resize(self, size: int, backing: int) -> None:
        """The backing file, whose writable descriptor is given, and all versions get a size in bytes."""
        with self._lock:
            self.publish()
            before = stamp_of(os.fstat(backing))
            os.ftruncate(backing, size)
            for version in self._all:
                os.ftruncate(version.fd, size)
            if self._all:
                self._seen(before, os.fstat(backing))
