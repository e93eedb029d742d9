"""What tests cost in processor time: of pytest, of the ranks, and of all that they start, on Linux.

    python -m tests.cost tests/verbs                 # each file, and the tests that cost most; one process runs them
    python -m tests.cost -n 3 --quick --dist loadfile --no-loadscope-reorder        # the whole, as `make test` runs it

The clock of a busy machine says little. What a file shares is made by the first of its tests, which then costs more.
"""

from __future__ import annotations

import collections
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = "COST_ROOT"
"""The variable with the process whose descendants are counted."""

BECOME_THE_REAPER = 36  # PR_SET_CHILD_SUBREAPER: whose parent has ended is a child of this process, which waits for it
SHOWN = 20


def seconds_of(root: int) -> float:
    """The processor time of a process and of all its descendants so far, of those too that have ended and were waited for."""
    children, ticks = collections.defaultdict(list), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        children[int(words[1])].append(int(folder.name))
        ticks[int(folder.name)] = sum(map(int, words[11:15]))  # user and system, its own and of its children
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        total += ticks.get(pid, 0)
        waiting += children[pid]
    return total / os.sysconf("SC_CLK_TCK")


class Costs:
    """A plug-in of pytest that says what each file and each test has cost."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.by_test: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = seconds_of(self.root)
        try:
            return (yield)
        finally:
            self.by_test[item.nodeid] = seconds_of(self.root) - before

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        by_file: collections.Counter[str] = collections.Counter()
        for name, cost in self.by_test.items():
            by_file[name.partition("::")[0]] += cost  # type: ignore[assignment]
        for title, costs in (
            ("files", by_file.most_common()),
            ("tests", collections.Counter(self.by_test).most_common(SHOWN)),
        ):
            terminalreporter.section(f"processor time of {title}")
            for name, cost in costs:
                terminalreporter.write_line(f"{cost:8.2f} s  {name}")


def pytest_configure(config: pytest.Config) -> None:
    if ROOT in os.environ and not config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(int(os.environ[ROOT])))


def main(arguments: list[str]) -> int:
    """Run pytest, wait for all that it has started, and print what that cost."""
    ctypes.CDLL(None).prctl(BECOME_THE_REAPER, 1, 0, 0, 0)
    environment = {**os.environ, ROOT: str(os.getpid()), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "pytest", "-p", "tests.cost", *arguments], env=environment)
    code = None
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:  # all have ended
            break
        if pid == process.pid:
            code = os.waitstatus_to_exitcode(status)
    times = os.times()
    print(f"{times.children_user:.0f} s user + {times.children_system:.0f} s system, of all processes")
    return 1 if code is None else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
