"""Hosts that are far from each other: the values are right, and calls take no longer than their round trips do."""

from __future__ import annotations

import re
import unittest

import pytest
from kit.round_trips import OF_OPERATION
from parameterized import parameterized

from hosts.case import TORCH, BenchTest
from hosts.file_systems import FileSystem, OneKernel
from hosts.gluster import Gluster

pytestmark = pytest.mark.hosts

LONG = 280.0  # seconds
BANDWIDTH = 100e6  # bytes in a second
AT_MOST = 3  # times the round trips to the store, and
CONSTANT = 10.0  # seconds, for all else

OPERATIONS = """
import os, time
from datetime import timedelta
from torch.distributed import TCPStore

rank, folder = int(os.environ["RANK"]), os.environ["BENCH_RUN"]
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0, timedelta(seconds=60), False)
calls = {
    "set": lambda: store.set("key", "1"),
    "append": lambda: store.append("more", "1"),
    "get": lambda: store.get("key"),
    "multi_get": lambda: store.multi_get(["key", "key"]),
    "check": lambda: store.check(["key"]),
    "add": lambda: store.add("number", 1),
    "compare_set": lambda: store.compare_set("key", "no", "no"),
    "delete_key": lambda: store.delete_key("none"),
    "wait": lambda: store.wait(["key"], timedelta(seconds=5)),
}
if rank:
    for name, call in calls.items():
        for _ in range(5):
            store.check(["key"])  # what was sent before has come
            begun = time.monotonic()
            call()
            print(f"{name} {time.monotonic() - begun:.4f}", flush=True)
    store.set("through", "")
store.wait(["through"], timedelta(seconds=60))
"""


class FarTest(BenchTest):
    @parameterized.expand([(10, OneKernel()), (50, OneKernel()), (10, Gluster()), (50, Gluster())])
    def test_calls(self, milliseconds: int, file_system: FileSystem) -> None:
        bench = self.bench(2, file_system)
        bench.delay(milliseconds, BANDWIDTH)
        outputs = bench.run("far", "/shared/far").succeed(LONG)
        longest: dict[str, list[tuple[float, int]]] = {}
        for output in outputs:
            order: dict[str, int] = {}
            for call, seconds, trips in re.findall(r"took (.*): ([\d.]+) s, (\d+)", output):
                rounds = longest.setdefault(call, [])
                at = order[call] = order.get(call, -1) + 1
                if at == len(rounds):
                    rounds.append((0.0, 0))
                rounds[at] = max(rounds[at][0], float(seconds)), max(rounds[at][1], int(trips))
        print(f"\n{milliseconds} ms between hosts, 100 MB/s, {file_system.name}:")
        for call, rounds in longest.items():
            print(f"  {call}: {', '.join(f'{seconds:.2f}' for seconds, _ in rounds)} s")
            for seconds, trips in rounds if isinstance(file_system, OneKernel) else ():
                self.assertLess(seconds, trips * milliseconds / 1000 * AT_MOST + CONSTANT, call)
        self.assertIn("resume", longest)

    def test_operations_of_the_store_take_the_round_trips_that_are_counted(self) -> None:
        bench = self.bench(2, OneKernel())
        bench.delay(50)
        output = bench.run(self.program(bench, OPERATIONS), ranks_per_host=1, preload=TORCH).succeed(100)[1]
        for name, wanted in OF_OPERATION.items():
            shortest = min(float(seconds) for seconds in re.findall(rf"^{name} ([\d.]+)$", output, re.MULTILINE))
            with self.subTest(name):
                self.assertGreaterEqual(shortest, wanted * 0.05)
                self.assertLess(shortest, (wanted + 0.8) * 0.05)


if __name__ == "__main__":
    unittest.main()
