"""A program that runs on the hosts of a bench, as a test sees it: its ranks, their output, and what is done to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kit.forked import Started

from hosts.host import Host

TAIL = 3000  # characters of each output in an error


class Run:
    """A program on its ranks.

    `folder`: has the files of the run. `starters`: for each process that the bench has started, by its name in the folder,
    the one outside that waits for it; the names are `rank-0` and so on, or those of the nodes (`node-0`) under torchrun.
    """

    def __init__(self, hosts: Sequence[Host], num_ranks: int, folder: Path, starters: dict[str, Started]) -> None:
        self.hosts, self.num_ranks, self.folder = hosts, num_ranks, folder
        self._starters = starters

    # ------------------------------------------------------------------------------------------ its end

    @property
    def codes(self) -> list[int | None]:
        """The exit codes of the ranks, or of the nodes under torchrun: minus the signal for a death, None while one runs."""
        noted = [self.folder / f"{name}.ended" for name in self._starters]
        return [int(path.read_text()) if path.exists() else None for path in noted]

    def wait(self, timeout: float = 60.0) -> list[int]:
        """Wait until all have ended; their exit codes. Raises `TimeoutError` with their output after `timeout` seconds."""
        self.wait_until(lambda: None not in self.codes, timeout, "the program has not ended", of_running=False)
        for started in self._starters.values():
            started.wait()
        return [code for code in self.codes if code is not None]

    def succeed(self, timeout: float = 60.0) -> list[str]:
        """Wait until all have ended well; what each rank printed. Raises `AssertionError` with all output otherwise."""
        if any(self.wait(timeout)):
            raise AssertionError(f"exit codes {self.codes}{self.report()}")
        return [self.output(rank) for rank in range(self.num_ranks)]

    # ------------------------------------------------------------------------------------------ what it says

    def output(self, rank: int) -> str:
        """What a rank has printed up to now."""
        return self._text(f"rank-{rank}.out")

    def errors(self, rank: int) -> str:
        """What a rank has written to its standard error up to now."""
        return self._text(f"rank-{rank}.err")

    def wait_for(self, text: str, ranks: Sequence[int] | None = None, timeout: float = 60.0) -> None:
        """Wait until ranks, by default all, have printed a text. Raises `TimeoutError` with all output."""
        waited = range(self.num_ranks) if ranks is None else ranks
        self.wait_until(
            lambda: all(text in self.output(rank) for rank in waited), timeout, f"no {text!r} on {list(waited)}"
        )

    def wait_until(self, is_true: Callable[[], bool], timeout: float, otherwise: str, of_running: bool = True) -> None:
        """Wait for a condition; `TimeoutError` with `otherwise` and all output after `timeout` seconds.

        `of_running`: the condition cannot become true after all have ended.
        """
        end = time.monotonic() + timeout
        while not is_true():
            has_ended = of_running and None not in self.codes
            if time.monotonic() > end or (has_ended and not is_true()):
                raise TimeoutError(f"{otherwise} after {timeout} s, exit codes {self.codes}{self.report()}")
            time.sleep(0.005)

    def report(self) -> str:
        """The ends of all outputs."""
        texts = {
            path.name: self._text(path.name)
            for path in sorted(self.folder.iterdir())
            if path.suffix in (".out", ".err")
        }
        return "".join(f"\n--- {name}\n{text[-TAIL:]}" for name, text in texts.items() if text)

    def _text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    # ------------------------------------------------------------------------------------------ what is done to it

    def host_of(self, rank: int) -> int:
        """The number in the bench of the host on which a rank runs."""
        return self._announced(rank)["host"]

    def pid(self, rank: int) -> int:
        """The process id of a rank, outside its host."""
        announced = self._announced(rank)
        inside = self.hosts[self.host_of(rank)].programs()
        pids = [outside for outside, pid in inside.items() if pid == announced["pid"]]
        if not pids:
            raise ProcessLookupError(f"rank {rank} has ended")
        return pids[0]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        os.kill(self.pid(rank), number)

    def kill_host(self, host: int) -> None:
        """End all programs of a host at once, by SIGKILL, what torchrun and ranks have started there included."""
        self.hosts[host].signal_programs(signal.SIGKILL)

    def stop_host(self, host: int, mount: bool = False) -> None:
        """Stop all programs of a host. `mount`: what serves its mounts too, as where a virtual machine is paused."""
        self.hosts[host].signal_programs(signal.SIGSTOP, mount)

    def continue_host(self, host: int) -> None:
        """Let all that was stopped on a host continue."""
        self.hosts[host].signal_programs(signal.SIGCONT, mount=True)

    def end(self) -> None:
        """Kill what still runs of it, on all hosts."""
        if None in self.codes:
            for host in self.hosts:
                host.signal_programs(signal.SIGKILL)
        for started in self._starters.values():
            if started.returncode is None:
                with contextlib.suppress(ValueError):  # ended by force, without a code
                    started.wait(10)

    def _announced(self, rank: int) -> dict[str, int]:
        path = self.folder / f"rank-{rank}.json"
        self.wait_until(path.exists, 60.0, f"rank {rank} has not started")
        return dict(json.loads(path.read_text()))
