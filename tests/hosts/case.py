"""What tests on a bench have in common."""

from __future__ import annotations

import contextlib
import time
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path

from hosts.bench import Bench, missing
from hosts.file_systems import FileSystem

TORCH = ("torch",)
"""What a program without this library finds imported: the process that it is forked from starts in a second."""

TICKS = """
import os, time
for number in range(10_000):
    print(f"tick {number} of {os.environ['RANK']}", flush=True)
    time.sleep(0.02)
"""
"""A program that runs for minutes, and prints that it does."""


class BenchTest(unittest.TestCase):
    """Tests that make benches of their own."""

    def bench(
        self,
        num_hosts: int,
        file_system: FileSystem,
        clock_offsets: Mapping[int, float] | None = None,
        hostname: str = "",
    ) -> Bench:
        """A bench that ends with the test, which is skipped where there can be none."""
        reason = missing(file_system, with_clocks=bool(clock_offsets))
        if reason:
            self.skipTest(reason)
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        return stack.enter_context(Bench(num_hosts, file_system, clock_offsets, hostname))

    def program(self, bench: Bench, code: str) -> Path:
        """A file with code that `bench.run` can run."""
        path = bench.folder / "program.py"
        path.write_text(code)
        return path

    def until(self, is_true: Callable[[], bool], what: str, timeout: float = 30.0) -> None:
        """Wait until something is true; the test fails with `what` after `timeout` seconds."""
        end = time.monotonic() + timeout
        while not is_true():
            self.assertLess(time.monotonic(), end, what)
            time.sleep(0.01)
