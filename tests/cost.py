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


def ticks_below(root: int) -> dict[int, int]:
    """Of a process and each of its descendants: its clock ticks, with those of its children that have ended."""
    children, ticks = collections.defaultdict(list), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        children[int(words[1])].append(int(folder.name))
        ticks[int(folder.name)] = sum(map(int, words[11:15]))  # user and system, its own and of its children
    family = [root]
    for pid in family:  # it grows
        family += children[pid]
    return {pid: ticks[pid] for pid in family if pid in ticks}


def seconds_of(root: int) -> float:
    """The processor time of a process and of all its descendants so far, also of those that have ended."""
    now, before = ticks_below(root), dict[int, int]()
    while now.keys() != before.keys():  # what has ended between two reads would be counted nowhere, or twice
        now, before = ticks_below(root), now
    return sum(now.values()) / os.sysconf("SC_CLK_TCK")


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
