"""The changes that a program makes to the files of a folder, call by call, and the files that a power cut may leave.

The recorder wraps the functions of `os` and `io.open`. The disk is as forgetful as POSIX allows: the bytes of a file are safe
when the file was flushed, and the names in a folder are safe when the folder was flushed. Every other write may be kept, dropped
or kept in part; the other changes of names in a folder are kept up to one of them, in order.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

SECTOR = 512  # bytes that a disk writes whole or not at all

Event = tuple[Any, ...]
"""("create", folder, name, file, kind), ("remove", folder, name), ("rename", folder, name, folder, name),
("link", folder, name, file), ("write", file, offset, bytes), ("truncate", file, size), ("flush", file), ("mark", what, number).
Files and folders are numbers of inodes, which may be used again after a "create"."""

Tree = dict[str, bytes | None]
"""The content of files by path below the folder; None for a folder."""


class Recorder:
    """Records the changes that this process makes below a folder, while `recording()` is entered."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.events: list[Event] = []
        self._lock = threading.RLock()

    def mark(self, what: str, number: int) -> None:
        with self._lock:
            self.events.append(("mark", what, number))

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        around = {"write": self._write, "pwrite": self._write, "writev": self._write, "pwritev": self._write}
        around |= {
            "truncate": self._truncate,
            "ftruncate": self._truncate,
            "fsync": self._flush,
            "fdatasync": self._flush,
        }
        around |= {"mkdir": self._mkdir, "rename": self._rename, "replace": self._rename, "open": self._open}
        around |= {"unlink": self._remove, "remove": self._remove, "rmdir": self._remove}
        around["link"] = self._link
        around |= dict.fromkeys(("symlink", "sendfile", "copy_file_range", "posix_fallocate"), self._unknown)
        with contextlib.ExitStack() as stack:
            for name, wrap in around.items():
                real = getattr(os, name)
                stack.enter_context(
                    mock.patch.object(os, name, functools.wraps(real)(functools.partial(wrap, name, real)))
                )
            stack.enter_context(mock.patch.object(io, "open", functools.partial(self._open_file, io.open)))
            yield self

    def _path(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The absolute path; None for a path outside the folder."""
        if isinstance(path, int):
            where = os.readlink(f"/proc/self/fd/{path}")
        else:
            base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.getcwd()
            where = os.path.normpath(os.path.join(base, os.fspath(path)))
        return where if where == self.root or where.startswith(self.root + os.sep) else None

    def _place(self, path: str) -> tuple[int, str]:
        parent, name = os.path.split(path)
        return os.stat(parent).st_ino, name

    def _open(
        self, name: str, real: Callable[..., int], path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None
    ) -> int:
        where = self._path(path, dir_fd)
        if where is None or not flags & (os.O_CREAT | os.O_TRUNC):
            return real(path, flags, mode, dir_fd=dir_fd)
        with self._lock:
            was_there = os.path.lexists(where)
            fd = real(path, flags, mode, dir_fd=dir_fd)
            ino = os.fstat(fd).st_ino
            if not was_there:
                self.events.append(("create", *self._place(where), ino, "file"))
            elif flags & os.O_TRUNC:
                self.events.append(("truncate", ino, 0))
            return fd

    def _open_file(
        self, real: Callable[..., Any], file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any
    ) -> Any:
        """Make Python's file objects write through the functions above."""
        if not set(mode) & set("wax+") or self._path(file) is None:
            return real(file, mode, buffering, *args, **kwargs)
        flags = {"w": os.O_CREAT | os.O_TRUNC, "x": os.O_CREAT | os.O_EXCL, "a": os.O_CREAT | os.O_APPEND, "r": 0}[
            mode[0]
        ]
        raw = _Raw(file if isinstance(file, int) else os.open(file, flags | os.O_RDWR | os.O_CLOEXEC, 0o666))
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)

    def _write(self, name: str, real: Callable[..., int], fd: int, data: Any, *rest: Any) -> int:
        if self._path(fd) is None:
            return real(fd, data, *rest)
        with self._lock:
            offset = rest[0] if name.startswith("p") else os.lseek(fd, 0, os.SEEK_CUR)
            done = real(fd, data, *rest)
            whole = b"".join(bytes(part) for part in data) if name.endswith("v") else bytes(data)
            self.events.append(("write", os.fstat(fd).st_ino, offset, whole[:done]))
            return done

    def _truncate(self, name: str, real: Callable[..., None], path: Any, length: int) -> None:
        with self._lock:
            real(path, length)
            if self._path(path) is not None:
                self.events.append(("truncate", os.stat(path).st_ino, length))

    def _flush(self, name: str, real: Callable[..., None], fd: int) -> None:
        with self._lock:
            real(fd)
            if self._path(fd) is not None:
                self.events.append(("flush", os.fstat(fd).st_ino))

    def _mkdir(self, name: str, real: Callable[..., None], path: Any, mode: int = 0o777, *, dir_fd: Any = None) -> None:
        where = self._path(path, dir_fd)
        with self._lock:
            real(path, mode, dir_fd=dir_fd)
            if where is not None:
                self.events.append(("create", *self._place(where), os.stat(where).st_ino, "folder"))

    def _rename(self, name: str, real: Callable[..., None], source: Any, target: Any, **fds: Any) -> None:
        source_path, other = self._path(source, fds.get("src_dir_fd")), self._path(target, fds.get("dst_dir_fd"))
        with self._lock:
            places = (
                (*self._place(source_path), *self._place(other))
                if source_path is not None and other is not None
                else None
            )
            real(source, target, **fds)
            if places is not None:
                self.events.append(("rename", *places))

    def _link(self, name: str, real: Callable[..., None], source: Any, target: Any, **how: Any) -> None:
        where = self._path(target)
        with self._lock:
            real(source, target, **how)
            if where is not None:
                self.events.append(("link", *self._place(where), os.lstat(where).st_ino))

    def _remove(self, name: str, real: Callable[..., None], path: Any, *, dir_fd: Any = None) -> None:
        where = self._path(path, dir_fd)
        with self._lock:
            place = self._place(where) if where is not None else None
            real(path, dir_fd=dir_fd)
            if place is not None:
                self.events.append(("remove", *place))

    def _unknown(self, name: str, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"os.{name}: the recorder does not know what a power cut leaves of it")


class _Raw(io.RawIOBase):
    """A file object that writes by `os.write`."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return os.lseek(self._fd, offset, whence)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self._fd, size)
        return size

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


# ------------------------------------------------------------------------------------------- what a power cut leaves


@dataclasses.dataclass
class _File:
    safe: bytes = b""
    pending: list[Event] = dataclasses.field(default_factory=list)

    def flush(self) -> None:
        self.safe = _content(self.safe, self.pending)
        self.pending = []


@dataclasses.dataclass
class _Folder:
    safe: dict[str, int] = dataclasses.field(default_factory=dict)
    pending: list[Event] = dataclasses.field(default_factory=list)

    def flush(self) -> None:
        self.safe = _names(self.safe, self.pending)
        self.pending = []


def _content(data: bytes, events: Sequence[Event]) -> bytes:
    content = bytearray(data)
    for what, _, *rest in events:
        if what == "truncate":
            (size,) = rest
            del content[size:]
            content += bytes(size - len(content))
        else:
            offset, written = rest
            content += bytes(max(offset + len(written) - len(content), 0))
            content[offset : offset + len(written)] = written
    return bytes(content)


def _names(names: dict[str, int], events: Sequence[Event]) -> dict[str, int]:
    names_after = dict(names)
    for what, *rest in events:
        if what == "add":
            names_after[rest[0]] = rest[1]
        elif what == "drop":
            names_after.pop(rest[0], None)
        else:
            names_after[rest[1]] = names_after.pop(rest[0])
    return names_after


@dataclasses.dataclass(frozen=True)
class Choice:
    """A choice of the changes to keep, of those that were not flushed.

    Attributes:
        names: (folder, number of its changes) -> how many of them are kept.
        data: (file, its changes) -> those that are kept, perhaps in part.
    """

    names: Callable[[int, int], int]
    data: Callable[[int, list[Event]], list[Event]]


class Disk:
    """The safe content of the disk, and the changes that were not flushed, after some of the events."""

    def __init__(self, root: Path) -> None:
        """Mark all current content as safe."""
        self._things: dict[int, _File | _Folder] = {}
        self._by_ino: dict[int, int] = {}
        self._last = 0
        self._root = self._add(Path(root))

    def _add(self, path: Path) -> int:
        number = self._number(path.stat().st_ino)
        if path.is_dir():
            self._things[number] = _Folder({entry.name: self._add(entry) for entry in path.iterdir()})
        else:
            self._things[number] = _File(path.read_bytes())
        return number

    def _number(self, ino: int) -> int:
        self._last += 1
        self._by_ino[ino] = self._last
        return self._last

    def apply(self, event: Event) -> None:
        what, *rest = event
        if what == "mark":
            return
        ino, *rest = rest
        thing = self._things[self._by_ino[ino]]
        if what == "flush":
            thing.flush()
        elif what in ("write", "truncate"):
            thing.pending.append((what, ino, *rest))
        elif what == "create":
            name, made, kind = rest
            number = self._number(made)
            self._things[number] = _File() if kind == "file" else _Folder()
            thing.pending.append(("add", name, number))
        elif what == "link":
            name, made = rest
            thing.pending.append(("add", name, self._by_ino[made]))
        elif what == "remove":
            thing.pending.append(("drop", rest[0]))
        elif what == "rename":
            name, other, new = rest
            if other != ino:
                raise AssertionError(f"{name} moves to another folder: a power cut may leave both, or none")
            thing.pending.append(("move", name, new))

    def is_folder(self, ino: int) -> bool:
        return isinstance(self._things[self._by_ino[ino]], _Folder)

    def copy(self) -> Disk:
        return copy.deepcopy(self)

    @property
    def unsafe(self) -> tuple[list[int], list[int]]:
        """The folders and files with changes that were not flushed."""
        pending = {number: thing for number, thing in self._things.items() if thing.pending}
        return [n for n, t in pending.items() if isinstance(t, _Folder)], [
            n for n, t in pending.items() if isinstance(t, _File)
        ]

    def left(self, choice: Choice) -> Tree:
        """The files after a power cut."""
        tree: Tree = {}

        def walk(number: int, path: str) -> None:
            thing = self._things[number]
            if isinstance(thing, _File):
                tree[path] = _content(thing.safe, choice.data(number, thing.pending))
                return
            if path:
                tree[path] = None
            kept = thing.pending[: choice.names(number, len(thing.pending))]
            for name, inside in _names(thing.safe, kept).items():
                walk(inside, f"{path}/{name}" if path else name)

        walk(self._root, "")
        return tree


def all_of(_: int, number: int) -> int:
    return number


def none_of(_: int, number: int) -> int:
    return 0


def every(_: int, events: list[Event]) -> list[Event]:
    return events


def no(_: int, events: list[Event]) -> list[Event]:
    return []


def torn(rng: random.Random) -> Callable[[int, list[Event]], list[Event]]:
    """Keep all of each change, nothing, or some sectors."""

    def choose(_: int, events: list[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            kind = rng.randrange(3)
            if kind == 0:
                kept.append(event)
            elif kind == 1 and event[0] == "write":
                _, ino, offset, data = event
                for begin in range(-(offset % SECTOR), len(data), SECTOR):
                    if rng.random() < 0.5:
                        first = max(begin, 0)
                        kept.append(("write", ino, offset + first, data[first : begin + SECTOR]))
        return kept

    return choose


def choices(disk: Disk, rng: random.Random, at_random: int) -> Iterator[Choice]:
    """The choices to try after some events: all changes, none, files or folders only, one folder alone, random ones."""
    yield Choice(none_of, no)
    yield Choice(all_of, every)
    yield Choice(all_of, no)
    yield Choice(none_of, every)
    yield Choice(all_of, torn(rng))
    folders, _ = disk.unsafe
    for alone in folders if len(folders) > 1 else ():
        yield Choice(lambda folder, number, alone=alone: number if folder == alone else 0, every)  # type: ignore[misc]
        yield Choice(lambda folder, number, alone=alone: 0 if folder == alone else number, every)  # type: ignore[misc]
    for _ in range(at_random):
        yield at_random_choice(rng)


def at_random_choice(rng: random.Random) -> Choice:
    data = rng.choice((every, no, torn(rng), torn(rng)))
    return Choice(
        rng.choice((all_of, lambda _, number: rng.randint(0, number), lambda _, number: rng.randint(0, number))), data
    )


def put(tree: Tree, root: Path) -> None:
    """Write the files into an empty folder."""
    for path, data in tree.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)
