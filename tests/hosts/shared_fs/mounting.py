"""Starting and ending mounts of the shared file system from a test."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hosts.shared_fs.serving import MOUNTED

TESTS = Path(__file__).parents[2]
PATIENCE = 20.0  # seconds


def command(backing: str | os.PathLike[str], mount: str | os.PathLike[str], *switches: str) -> list[str]:
    """The program that mounts `backing` at the empty folder `mount`, in the foreground, run with `environment()`."""
    return [sys.executable, "-m", "hosts.shared_fs", os.fspath(backing), os.fspath(mount), *switches]


def environment() -> dict[str, str]:
    """This process's environment, with the folder of the tests on the path of Python."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class Mount:
    """One host's mount. `inside`: words before every command (`ip netns exec ...`, `nsenter ...`) that run it on that host."""

    def __init__(self, backing: Path, at: Path, switches: Sequence[str] = (), inside: Sequence[str] = ()) -> None:
        self.at, self.inside = at, list(inside)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        program = [*self.inside, *command(backing, at, *switches)]
        self.process = subprocess.Popen(
            program, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors
        )
        assert self.process.stdout is not None
        self._is_mounted = self.process.stdout.readline().strip() == MOUNTED.encode()
        if not self._is_mounted:
            self.close()
            raise OSError(f"{' '.join(program)} did not mount: {self.errors}")

    @property
    def errors(self) -> str:
        """What the process has written to its standard error: nothing, unless the kit has a mistake."""
        if self._errors.closed:
            return self._last_errors
        return os.pread(self._errors.fileno(), 1 << 16, 0).decode(errors="replace")

    def kill(self) -> None:
        """End the process as a power cut does: the folder stays mounted, and every call in it fails with ENOTCONN."""
        self._signal(signal.SIGKILL)
        self.process.wait(PATIENCE)

    def _signal(self, number: int) -> None:
        """Signal the file system itself: the words of `inside` may run it as a child, and keep signals from it."""
        pid = self.process.pid
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                pid = int(children[0])
            os.kill(pid, number)

    def cut_off(self) -> None:
        """From now on every call in the folder waits, as where a server cannot be reached, until `reach_again`."""
        self._signal(signal.SIGSTOP)

    def reach_again(self) -> None:
        """The calls that wait continue."""
        self._signal(signal.SIGCONT)

    def _unmount(self) -> None:
        for options in ([], ["-l"]):
            program = [*self.inside, "umount", *options, os.fspath(self.at)]
            if not subprocess.run(program, stderr=subprocess.DEVNULL, check=False).returncode:
                return

    def close(self) -> None:
        """Unmount, lazily where files are open, and end the process. Can be called twice."""
        if self._errors.closed:
            return
        self.reach_again()
        if self._is_mounted:
            self._unmount()
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:  # a process still has a file open
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._last_errors = self.errors
        self._errors.close()


@contextmanager
def mounted(
    backing: str | os.PathLike[str],
    *switches: str,
    at: str | os.PathLike[str] | None = None,
    inside: Sequence[str] = (),
) -> Iterator[Path]:
    """A host's mount of `backing` while the block runs, at the empty folder `at` (a temporary one of its own without). Root only.

    AssertionError at the end where the file system's process has met a mistake of its own.
    """
    with tempfile.TemporaryDirectory(prefix="shared_fs_") as folder:
        mount = Mount(Path(backing), Path(at or folder), switches, inside)
        try:
            yield mount.at
        finally:
            mount.close()
        assert not mount.errors, mount.errors


@functools.cache
def why_not() -> str:
    """Why this machine cannot mount the file system, for the reason of a skipped test; "" if it can."""
    if sys.platform != "linux":
        return "FUSE of Linux only"
    if os.geteuid():
        return "only root can mount"
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    try:
        with tempfile.TemporaryDirectory() as backing, mounted(backing):
            return ""
    except OSError as raised:
        return str(raised).strip().splitlines()[-1]
