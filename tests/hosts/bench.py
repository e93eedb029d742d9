"""A bench of several hosts on this machine, which share a file system, run programs, and have faults.

    with Bench(2, Gluster()) as bench:
        run = bench.run("all_reduce", ranks_per_host=2)
        run.wait_for("ready")
        bench.cut(1)

Each host has a network, mounts, a hostname, IPC and processes of its own, with an empty /tmp and /dev/shm. All see this
machine's files, the folder of the bench at /bench, and the file system at /shared. With the test's process all ends.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kit import forked

from hosts.clocks import missing_clocks, other_clock
from hosts.file_systems import FileSystem
from hosts.holder import OWN
from hosts.host import LINK, PYTHON_PATH, Host, missing_namespaces
from hosts.launched import HOST, RUN
from hosts.network import Network
from hosts.runs import Run

PROGRAMS = Path(__file__).parent / "programs"
PREFIX = "fsdp-optim-bench-"

ENTER = """
from hosts.entered import run_in_host
run_in_host(*{order!r})
"""


class Bench:
    """`num_hosts` hosts, and one more that serves the file system where that has a server.

    `clock_offsets`: seconds by which the clock of a host is ahead, by its number. Monotonic clocks are not changed, nor those
    of processes that are not started by `run`. `hostname`: one that all hosts have, as containers may; they have their own
    without it. Each has its own id of the boot.
    """

    server: Host

    def __init__(
        self,
        num_hosts: int,
        file_system: FileSystem,
        clock_offsets: Mapping[int, float] | None = None,
        hostname: str = "",
    ) -> None:
        self.num_hosts, self.file_system = num_hosts, file_system
        self.hostname = hostname
        self.clock_offsets = dict(clock_offsets or {})
        self.hosts: list[Host] = []
        self.runs: list[Run] = []
        self._all: list[Host] = []
        self._network: Network | None = None

    def __enter__(self) -> Bench:
        remove_leftovers()
        self.folder, self._lock = _new_folder()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        names = [f"host{number}" for number in range(self.num_hosts)]
        names += ["server"] if self.file_system.needs_server else []
        addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (self.folder / "names").write_text("\n".join(lines) + "\n")
        ground = Host("ground", "", self.folder)
        self._all.append(ground)
        for name, address in addresses.items():
            self._all.append(Host(name, address, self.folder, ground, self.hostname))
        self.hosts = self._all[1 : 1 + self.num_hosts]
        if self.file_system.needs_server:
            self.server = self._all[-1]
        self._network = Network(ground, self._all[1:])
        self.file_system.serve(self)
        for number in range(self.num_hosts):
            self.mount(number)

    def close(self) -> None:
        """End all, and remove the folder. May be called again."""
        if self._network is not None:
            self._network.close()
        for host in reversed(self._all):  # the server, whose clients then have nothing to wait for, before them
            host.close()
        for run in self.runs:
            run.end()
        self._all, self._network = [], None
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ------------------------------------------------------------------------------------------ programs

    def run(
        self,
        program: str | Path,
        *arguments: str,
        ranks_per_host: int = 2,
        hosts: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        torchrun: Sequence[str] | None = None,
        preload: Sequence[str] = forked.TRAINING,
    ) -> Run:
        """Start a program on hosts, by default on all: a path, in the bench's folder too, or the name of one of
        `hosts/programs`.

        By default each rank is forked from a process that has torch imported, with the variables that torchrun sets; rank 0
        has the store. `torchrun`: options of torchrun, which then starts a node on each of the hosts, and real processes for
        ranks; an empty list has them meet at the first host's address, by the static rendezvous.
        `preload`: modules that forked ranks find imported; those on a host whose clock is another import all by themselves.
        """
        numbers = list(range(self.num_hosts) if hosts is None else hosts)
        folder = self.folder / f"run-{len(self.runs)}"
        folder.mkdir()
        words = [self._in_host(program), *arguments]
        job = _Job(self, folder, words, numbers, ranks_per_host, environment or {}, preload)
        starters = job.start_ranks() if torchrun is None else job.start_nodes(torchrun)
        run = Run(self.hosts, len(numbers) * ranks_per_host, folder, starters)
        self.runs.append(run)
        return run

    def _in_host(self, program: str | Path) -> str:
        """The path of a program on a host."""
        if isinstance(program, str) and "/" not in program:
            return str(PROGRAMS / f"{program}.py")
        path = Path(program).resolve()
        return str(Path("/bench", path.relative_to(self.folder)) if path.is_relative_to(self.folder) else path)

    # ------------------------------------------------------------------------------------------ faults

    def cut(self, host: int) -> None:
        """Lose all that a host sends and gets, its mount's traffic included, without an error on that host."""
        self._net.cut(host)

    def heal(self, host: int) -> None:
        """Join a host again that was cut off."""
        self._net.heal(host)

    def delay(self, milliseconds: float, bandwidth: float | None = None) -> None:
        """Let each round trip between two hosts, the server included, take so many milliseconds longer.

        `bandwidth`: bytes in a second that each host can send, and as many that it can receive. `delay(0)` ends both.
        """
        self._net.delay(milliseconds, bandwidth)

    def lose(self, host: int) -> None:
        """Lose a host for good: its link, all its programs, and what serves its mounts."""
        self.cut(host)
        self.hosts[host].signal_programs(9, mount=True)

    def unmount(self, host: int) -> None:
        """Take the file system from a host."""
        self.file_system.unmount(self.hosts[host])

    def mount(self, host: int) -> None:
        """Mount the file system on a host again."""
        self.file_system.mount(self, self.hosts[host])
        self.hosts[host].serve_mounts()

    @property
    def _net(self) -> Network:
        assert self._network is not None
        return self._network


class _Job:
    """What is the same for all processes of one run."""

    def __init__(
        self,
        bench: Bench,
        folder: Path,
        words: Sequence[str],
        numbers: Sequence[int],
        ranks_per_host: int,
        environment: Mapping[str, str],
        preload: Sequence[str],
    ) -> None:
        self._bench, self._folder, self._words, self._preload = bench, folder, words, preload
        self._numbers, self._ranks_per_host = numbers, ranks_per_host
        self._master = (bench.hosts[numbers[0]].address, 29500 + len(bench.runs))
        self._environment = {
            **os.environ,
            "PYTHONPATH": PYTHON_PATH,
            "TMPDIR": "/tmp",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": LINK,
            "TP_SOCKET_IFNAME": LINK,
            RUN: f"/bench/{folder.name}",
            **environment,
        }

    def start_ranks(self) -> dict[str, forked.Started]:
        """Start all ranks, by the variables alone."""
        each = self._ranks_per_host
        common = {"MASTER_ADDR": self._master[0], "MASTER_PORT": self._master[1], "LOCAL_WORLD_SIZE": each}
        common |= {"WORLD_SIZE": each * len(self._numbers), "GROUP_WORLD_SIZE": len(self._numbers)}
        starters = {}
        for node, number in enumerate(self._numbers):
            for local in range(each):
                rank = node * each + local
                own = {**common, "RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": node}
                starters[f"rank-{rank}"] = self._start(number, f"rank-{rank}", ["hosts.launched", *self._words], own)
        return starters

    def start_nodes(self, options: Sequence[str]) -> dict[str, forked.Started]:
        """Start torchrun on all hosts."""
        starters = {}
        for node, number in enumerate(self._numbers):
            where = ["--node-rank", str(node), "--master-addr", self._master[0], "--master-port", str(self._master[1])]
            if any(option.startswith(("--rdzv-backend", "--rdzv_backend")) for option in options):
                where = ["--rdzv-endpoint", f"{self._master[0]}:{self._master[1]}", "--rdzv-id", self._folder.name]
            where += ["--local-addr", self._bench.hosts[number].address]
            nodes = (
                [] if any(option.startswith("--nnodes") for option in options) else [f"--nnodes={len(self._numbers)}"]
            )
            words = [*nodes, f"--nproc-per-node={self._ranks_per_host}", *where, *options, "-m", "hosts.launched"]
            command = ["torch.distributed.run", *words, *self._words]
            starters[f"node-{node}"] = self._start(number, f"node-{node}", command, {})
        return starters

    def _start(self, number: int, name: str, words: Sequence[str], own: Mapping[str, object]) -> forked.Started:
        offset = self._bench.clock_offsets.get(number, 0.0)
        own = {**own, HOST: number}
        environment = {**self._environment, **{key: str(value) for key, value in own.items()}}
        clock = other_clock(offset) if offset else {}
        order = (self._bench.hosts[number].pid, str(self._folder), name, list(words), clock)
        return forked.start(ENTER.format(order=order), preload=self._preload, environment=environment)


def missing(file_system: FileSystem, with_clocks: bool = False) -> str:
    """Why a bench with a file system cannot be made here; empty where it can. `with_clocks`: with hosts whose clocks differ."""
    reason = (missing_clocks() if with_clocks else "") or _missing_namespaces() or file_system.missing()
    hidden = next((own for own in OWN if Path(__file__).is_relative_to(own)), "")
    return reason or (f"this repository is below {hidden}, which each host has for itself" if hidden else "")


_missing_namespaces = functools.cache(missing_namespaces)


def _new_folder() -> tuple[Path, int]:
    """A new folder for a bench, and the open file that locks it as long as the process lives."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # nobody has taken it for a leftover before it was locked
            return folder, lock
        os.close(lock)


def remove_leftovers() -> None:
    """Remove the folders of benches whose process was killed; all else of them has ended with it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError:
            continue  # it goes away, or is not ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # its bench is in use
        finally:
            os.close(lock)
