"""One host of a bench: its namespaces as long as they last, what runs in it, and the way to its files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
PYTHON_PATH = os.pathsep.join([str(TESTS), str(REPOSITORY)])
LINK = "eth0"
"""The name of a host's network interface, in the host."""


class Host:
    """Namespaces of their own, with the network interface `LINK` once the bench has joined them.

    `folder`: the folder of the bench, which is /bench in the host. `ground`: the host whose root it has; None for the first one.
    `hostname`: what it calls itself, if not its name.
    """

    pid: int
    """Its first process, as outside the host."""

    def __init__(self, name: str, address: str, folder: Path, ground: Host | None = None, hostname: str = "") -> None:
        self.name, self.address, self.folder = name, address, folder
        self._of_mount: set[int] = set()
        self._started: list[subprocess.Popen[bytes]] = []
        kept = [str(REPOSITORY), sys.prefix, sys.base_prefix, sysconfig.get_path("purelib")]
        order = {
            "name": name,
            "hostname": hostname or name,
            "ground": ground.pid if ground else 0,
            "folder": str(folder),
            "keep": sorted(set(kept)),
        }
        command = [sys.executable, "-m", "hosts.holder", json.dumps(order)]
        environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
        with open(folder / f"{name}.log", "wb") as log:
            self._holder = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert self._holder.stdout is not None
        answer = self._holder.stdout.readline()
        if not answer:
            self.close()
            raise OSError(f"{name} did not start: {(folder / f'{name}.log').read_text()}")
        self.pid = int(answer)
        self._processes = os.readlink(f"/proc/{self.pid}/ns/pid")

    def close(self) -> None:
        """End all processes of the host, its mounts and its network. May be called again."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.close()
        for process in (self._holder, *self._started):
            self._wait_for_end(process)

    # ------------------------------------------------------------------------------------------ commands and files

    def path(self, name: str) -> Path:
        """A file of the host, as a path of the test's own: `path("/shared/run")` is what a process there finds at that name."""
        return Path(f"/proc/{self.pid}/root", name.lstrip("/"))

    def words(self, *command: str) -> list[str]:
        """What a process outside must call to run a command in the host."""
        return ["nsenter", "--target", str(self.pid), *(f"--{kind}" for kind in NSENTER), "--", *command]

    def command(
        self, *command: str, timeout: float = 60.0, environment: Mapping[str, str] | None = None, check: bool = True
    ) -> str:
        """Run a command in the host until it ends; what it printed.

        It is killed after `timeout` seconds. Raises `OSError` with its output where it fails, unless `check` is False.
        """
        words = self.words("timeout", "--signal=KILL", str(timeout), *command)
        done = subprocess.run(
            words, env=_environment(environment), capture_output=True, text=True, timeout=timeout + 30, check=False
        )
        if check and done.returncode:
            raise OSError(f"{self.name}: {' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def start(
        self, *command: str, log: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command in the host, which ends with the host. `log`: the file in the bench's folder for its output."""
        with open(self.folder / log, "ab") as file:
            return self._start(command, file, environment, options)

    def _start(
        self,
        command: Sequence[str],
        log: IO[bytes],
        environment: Mapping[str, str] | None,
        options: Mapping[str, Any],
    ) -> subprocess.Popen[bytes]:
        options = {"stdin": subprocess.DEVNULL, "stdout": log, **options}
        self._started.append(
            subprocess.Popen(
                self.words(*command), stderr=log, env=_environment(environment), start_new_session=True, **options
            )
        )
        return self._started[-1]

    # ------------------------------------------------------------------------------------------ processes

    def processes(self) -> dict[int, int]:
        """The processes in the host but the first: their ids outside the host, and inside."""
        pids = {}
        for entry in os.scandir("/proc"):
            if not entry.name.isdecimal() or int(entry.name) == self.pid:
                continue
            try:
                if os.readlink(f"{entry.path}/ns/pid") == self._processes:
                    status = Path(entry.path, "status").read_text()
                    if "\nState:\tZ" not in status:
                        pids[int(entry.name)] = int(status.split("\nNSpid:")[1].split("\n")[0].split()[-1])
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has ended, or is none of a bench
        return pids

    def programs(self) -> dict[int, int]:
        """As `processes`, without those that serve the mounts of the host."""
        return {outside: inside for outside, inside in self.processes().items() if not self._serves_mount(outside)}

    def _serves_mount(self, pid: int) -> bool:
        return pid in self._of_mount or _parent(pid) in self._of_mount

    def serve_mounts(self) -> None:
        """What runs now serves the host's mounts, and is not meant where programs are stopped or killed."""
        self._of_mount = set(self.processes())

    def signal_programs(self, number: int, mount: bool = False) -> None:
        """Send a signal to all programs of the host. `mount`: to the processes that serve its mounts too."""
        for _ in range(3):  # what is forked meanwhile is found by the next round
            pids = self.processes() if mount else self.programs()
            for pid in pids:
                _send(pid, number)
            if number == signal.SIGCONT:
                self._continue_started()
            if not pids:
                break

    def _wait_for_end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a process that ends with the host. Raises `subprocess.TimeoutExpired` where the kernel cannot end it."""
        for _ in range(60):
            self._continue_started()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
                return
        process.wait(0.5)

    def _continue_started(self) -> None:
        """Let those continue that wait outside for a command: nsenter stops itself where its command is stopped."""
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)


NSENTER = ("mount", "uts", "ipc", "net", "pid")


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHON_PATH, "TMPDIR": "/tmp", **(more or {})}


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended meanwhile


def _parent(pid: int) -> int:
    """The id of a process's parent; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def missing_namespaces() -> str:
    """Why there can be no hosts here; empty where there can be."""
    if not sys.platform.startswith("linux"):
        return "hosts are namespaces of Linux"
    if os.geteuid() != 0:
        return "hosts need root"
    for program in ("ip", "nsenter", "unshare", "timeout"):
        if shutil.which(program) is None:
            return f"hosts need the program {program}"
    done = subprocess.run(
        ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"namespaces are refused here: {done.stderr.strip()}"
    return "" if hasattr(os, "pidfd_open") else "this Python has no os.pidfd_open"
