"""Who holds a folder that is being written: every verdict, on a file system of one machine and on one of several."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from kit.folders import InFolder
from parameterized import parameterized

from fsdp_optim.formats.own import PROBE
from fsdp_optim.machine import identity_of_process
from fsdp_optim.storage.posix import LOCK, is_held, this_host
from fsdp_optim.storage.posix import claim as claims
from fsdp_optim.storage.posix.claim import DEAD_AFTER, claim, is_of_this_machine, write_claim
from fsdp_optim.storage.posix.leftovers import remove_leftovers

ALIVE, GONE, ELSEWHERE = "alive", "gone", "elsewhere"
LOCAL, SHARED = True, False  # whether the file system is of one machine
FREE, TAKEN, NO_LOCKS = "free", "taken", "no locks"
LONG = 2 * DEAD_AFTER
OTHER = f"other-boot 4026531836 {os.getpid()} 1"


def identity_of(who: str) -> str:
    """The identity of a process that is alive, or was, or is of another machine."""
    if who == ELSEWHERE:
        return OTHER
    words = identity_of_process().split()
    return " ".join(words if who == ALIVE else [*words[:3], "1"])


@contextlib.contextmanager
def file_system(one_machine: bool) -> Iterator[None]:
    with mock.patch.object(claims, "is_of_one_machine", return_value=one_machine):
        yield


@contextlib.contextmanager
def no_locks(number: int = errno.ENOLCK) -> Iterator[None]:
    with mock.patch.object(fcntl, "flock", side_effect=OSError(number, os.strerror(number))):
        yield


class Claimed(InFolder):
    def setUp(self) -> None:
        super().setUp()
        self.folder = self.root / "step.saving-0123456789abcdef"
        self.folder.mkdir()

    def write(self, text: str | bytes) -> None:
        (self.folder / LOCK).write_bytes(text.encode() if isinstance(text, str) else text)

    def begun(self, who: str, *, was_locked: bool = True, host: str | None = None) -> None:
        host = this_host(self.folder) if host is None else host
        self.write(f"{host}\n{identity_of(who)}\n{'locked' if was_locked else ''}")

    def age(self, seconds: float) -> None:
        """Nothing was written for so long, by the clock of the file system."""
        then = time.time() - seconds
        for path in (*self.folder.rglob("*"), self.folder):
            os.utime(path, (then, then), follow_symlinks=False)

    @contextlib.contextmanager
    def lock(self, state: str) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            if state == TAKEN:
                file = held.enter_context((self.folder / LOCK).open("r+"))
                fcntl.flock(file, fcntl.LOCK_EX)
            elif state == NO_LOCKS:
                held.enter_context(no_locks())
            yield

    def check(self, one_machine: bool, wanted: bool) -> None:
        before = sorted(os.listdir(self.root))
        with file_system(one_machine):
            self.assertEqual(is_held(self.folder), wanted)
        self.assertEqual(sorted(os.listdir(self.root)), before, "a look has left something")


# file system, who wrote the claim, whether it had the lock, the lock now, seconds since the last write: held
ROWS = [
    # of one machine: the lock says it all
    *((LOCAL, who, True, TAKEN, age, True) for who in (ALIVE, GONE, ELSEWHERE) for age in (0, LONG)),
    *(
        (LOCAL, who, had, FREE, age, False)
        for who in (ALIVE, GONE, ELSEWHERE)
        for had in (True, False)
        for age in (0, LONG)
    ),
    # without locks, the process
    *((LOCAL, ALIVE, had, NO_LOCKS, age, True) for had in (True, False) for age in (0, LONG)),
    *((LOCAL, GONE, had, NO_LOCKS, age, False) for had in (True, False) for age in (0, LONG)),
    # of several machines: a lock that is seen is life, whoever has it
    *((SHARED, who, True, TAKEN, age, True) for who in (ALIVE, GONE, ELSEWHERE) for age in (0, LONG)),
    # a free one is death only where it was had, and seen on the machine that had it
    (SHARED, ALIVE, True, FREE, 0, False),
    (SHARED, ALIVE, True, FREE, LONG, False),
    (SHARED, ALIVE, False, FREE, 0, True),
    (SHARED, ALIVE, False, FREE, LONG, True),
    *((SHARED, ALIVE, had, NO_LOCKS, age, True) for had in (True, False) for age in (0, LONG)),
    # the process of this machine is gone
    *((SHARED, GONE, had, lock, age, False) for had in (True, False) for lock in (FREE, NO_LOCKS) for age in (0, LONG)),
    # of another machine: the last write
    *((SHARED, ELSEWHERE, had, lock, 0, True) for had in (True, False) for lock in (FREE, NO_LOCKS)),
    *((SHARED, ELSEWHERE, had, lock, LONG, False) for had in (True, False) for lock in (FREE, NO_LOCKS)),
    # without locks anywhere, another boot of this machine is as another machine
    (LOCAL, ELSEWHERE, False, NO_LOCKS, 0, True),
    (LOCAL, ELSEWHERE, False, NO_LOCKS, LONG, False),
]


class HeldTest(Claimed):
    @parameterized.expand(ROWS)
    def test_row(self, one_machine: bool, who: str, had: bool, lock: str, age: float, held: bool) -> None:
        self.begun(who, was_locked=had)
        self.age(age)
        with self.lock(lock):
            self.check(one_machine, held)

    def test_a_lock_that_is_free_on_another_mount_says_nothing(self) -> None:
        self.begun(ALIVE, host="another mount")
        self.check(SHARED, True)

    @parameterized.expand([(errno.ENOLCK,), (errno.ENOSYS,), (errno.EOPNOTSUPP,), (errno.EINVAL,), (errno.EIO,)])
    def test_every_refusal_of_a_lock_is_none(self, number: int) -> None:
        self.begun(GONE)
        with no_locks(number):
            self.check(SHARED, False)
        self.begun(ALIVE)
        with no_locks(number):
            self.check(SHARED, True)

    @parameterized.expand([(-86400.0,), (86400.0,), (600.0,)])
    def test_the_clock_of_this_host_does_not_count(self, off: float) -> None:
        self.begun(ELSEWHERE)
        real = time.time
        for age, held in ((DEAD_AFTER - 60, True), (DEAD_AFTER + 60, False)):
            self.age(age)
            with mock.patch.object(time, "time", side_effect=lambda: real() + off):
                self.check(SHARED, held)

    @parameterized.expand([("model.safetensors",), ("extra/common.safetensors",), ("",)])
    def test_a_write_of_any_file_is_a_sign_of_life(self, name: str) -> None:
        self.begun(ELSEWHERE)
        (self.folder / "extra").mkdir()
        for file in ("model.safetensors", "extra/common.safetensors"):
            (self.folder / file).write_bytes(b"x")
        self.age(LONG)
        self.check(SHARED, False)
        os.utime(self.folder / name)
        self.check(SHARED, True)

    def test_where_nothing_can_be_written_nobody_knows_the_time(self) -> None:
        self.begun(ELSEWHERE)
        self.age(LONG)
        real = os.open

        def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(path, flags, *args, **kwargs)

        with mock.patch.object(os, "open", refuse):
            self.check(SHARED, True)

    def test_a_claim_that_this_process_may_not_open(self) -> None:
        self.begun(GONE)
        real = os.open

        def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
            if os.path.basename(path) == LOCK:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return real(path, *args, **kwargs)

        for one_machine in (LOCAL, SHARED):
            with mock.patch.object(os, "open", refuse):
                self.check(one_machine, True)

    def test_a_look_takes_no_lock_away(self) -> None:
        self.begun(ALIVE)
        for one_machine in (LOCAL, SHARED):
            self.check(one_machine, False)
            with (self.folder / LOCK).open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class OddClaimTest(Claimed):
    """What is no claim of this version."""

    def test_missing(self) -> None:
        """On a file system of several machines it may be there, and not be seen yet."""
        self.check(LOCAL, False)
        self.check(SHARED, True)
        self.age(LONG)
        self.check(SHARED, False)

    @parameterized.expand([("pipe",), ("folder",), ("socket",)])
    def test_no_file(self, kind: str) -> None:
        path = self.folder / LOCK
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            with socket.socket(socket.AF_UNIX) as unix_socket:
                unix_socket.bind(str(path))
        self.age(LONG)
        for one_machine in (LOCAL, SHARED):
            self.check(one_machine, True)

    @parameterized.expand([("a file",), ("nothing",), ("a pipe",)])
    def test_a_link(self, to: str) -> None:
        target = self.root / "target"
        if to == "a file":
            target.write_text(f"{this_host(self.folder)}\n{identity_of(GONE)}\nlocked")
        elif to == "a pipe":
            os.mkfifo(target)
        (self.folder / LOCK).symlink_to(target)
        self.age(LONG)
        for one_machine in (LOCAL, SHARED):
            self.check(one_machine, True)

    @parameterized.expand(
        [
            ("empty", b""),
            ("one line", b"host"),
            ("an older version", b"boot-id 64513 12345"),
            ("a newer version", b"host\nboot 1 2 3\nlocked\nmore\nand more"),
            ("garbage", bytes(range(256)) * 10),
            ("long", b"a" * 100_000),
            ("half", identity_of_process().encode()[:30]),
        ]
    )
    def test_a_text_that_says_nothing(self, _: str, text: bytes) -> None:
        """The lock counts where it does, and then the last write."""
        self.write(text)
        self.check(LOCAL, False)
        self.check(SHARED, True)
        self.age(LONG)
        self.check(SHARED, False)
        with self.lock(TAKEN):
            for one_machine in (LOCAL, SHARED):
                self.check(one_machine, True)

    def test_the_folder_is_gone(self) -> None:
        folder = self.folder
        folder.rmdir()
        with file_system(LOCAL):
            self.assertFalse(is_held(folder))


class WrittenTest(Claimed):
    def test_what_claim_writes(self) -> None:
        lock = claim(self.folder)
        self.addCleanup(os.close, lock)
        host, identity, locked = (self.folder / LOCK).read_text().split("\n")
        self.assertEqual((host, identity, locked), (this_host(self.folder), identity_of_process(), "locked"))
        self.assertTrue(stat.S_ISREG(os.fstat(lock).st_mode))
        self.assertFalse(os.get_inheritable(lock))
        for one_machine in (LOCAL, SHARED):
            self.check(one_machine, True)
        self.assertTrue(is_of_this_machine(self.folder))

    def test_where_there_are_no_locks(self) -> None:
        with no_locks():
            lock = claim(self.folder)
            self.addCleanup(os.close, lock)
            self.check(SHARED, True)
        self.assertEqual((self.folder / LOCK).read_text().split("\n")[2], "")
        self.age(LONG)
        self.check(SHARED, True)  # a lock that is free now, and was never had

    def test_a_folder_is_claimed_once(self) -> None:
        self.addCleanup(os.close, claim(self.folder))
        with self.assertRaises(FileExistsError):
            claim(self.folder)

    def test_a_claim_that_cannot_be_written_leaves_no_lock(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        with (
            mock.patch.object(Path, "write_text", side_effect=OSError(errno.ENOSPC, "full")),
            self.assertRaises(OSError),
        ):
            claim(self.folder)
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_who_takes_a_folder_over_writes_its_own(self) -> None:
        self.begun(ELSEWHERE)
        write_claim(self.folder, is_locked=False)
        self.assertEqual((self.folder / LOCK).read_text(), f"{this_host(self.folder)}\n{identity_of_process()}\n")

    def test_of_this_machine(self) -> None:
        self.assertFalse(is_of_this_machine(self.folder), "there is no claim")
        self.begun(GONE)
        self.assertTrue(is_of_this_machine(self.folder))
        self.begun(ALIVE, host="another machine")
        self.assertFalse(is_of_this_machine(self.folder))


HOLDS = """
import signal, sys
from pathlib import Path
from fsdp_optim.storage.posix.claim import claim
lock = claim(Path(sys.argv[1]))
print("claimed", flush=True)
signal.pause()
"""


class ProcessTest(Claimed):
    """The claim of a real process, before and after it is killed."""

    @parameterized.expand([(LOCAL,), (SHARED,)])
    def test_killed(self, one_machine: bool) -> None:
        command = [sys.executable, "-c", HOLDS, str(self.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                self.assertEqual(process.stdout.readline(), "claimed\n")
                self.check(one_machine, True)
                with no_locks():
                    self.check(one_machine, True)
            finally:
                process.kill()
        with no_locks():
            self.check(one_machine, False)
        self.check(one_machine, False)


class LeftoversTest(Claimed):
    """What a save that begins removes, on a file system of several machines."""

    def removed(self) -> bool:
        with file_system(SHARED):
            remove_leftovers(self.root / "step", PROBE)
        return not self.folder.exists()

    def test_the_folder_of_a_machine_that_was_lost_stays_for_an_hour(self) -> None:
        """It may be cut off only, and continue writing."""
        self.begun(ELSEWHERE)
        (self.folder / "model.safetensors").write_bytes(b"x")
        self.age(DEAD_AFTER - 60)
        self.assertFalse(self.removed())
        self.age(LONG)
        self.assertTrue(self.removed())
        self.assertEqual(os.listdir(self.root), [])

    def test_the_folder_of_a_process_of_this_machine_goes_at_once(self) -> None:
        self.begun(GONE)
        self.assertTrue(self.removed())


if __name__ == "__main__":
    unittest.main()
