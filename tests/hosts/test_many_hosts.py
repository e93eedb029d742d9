"""Eight hosts of four ranks each: gather, save, load and a managed run, once."""

from __future__ import annotations

import time
import unittest
from pathlib import Path

import pytest
from parameterized import parameterized

from hosts.case import BenchTest
from hosts.file_systems import FileSystem, Kit, OneKernel
from hosts.host import Host

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

HOSTS, RANKS_PER_HOST = 8, 4
LONG = 500.0  # seconds
MOST = 12 << 30  # bytes


class ManyHostsTest(BenchTest):
    @parameterized.expand([(fs.name, fs) for fs in (OneKernel(), Kit("--close-to-open", "--locks", "local"))])
    def test_once(self, _: str, file_system: FileSystem) -> None:
        bench = self.bench(HOSTS, file_system)
        run = bench.run("many", "/shared/many", ranks_per_host=RANKS_PER_HOST)
        most, end = 0, time.monotonic() + LONG
        while None in run.codes and time.monotonic() < end:
            most = max(most, sum(map(memory_of, bench.hosts)))
            time.sleep(1)
        outputs = run.succeed(1)
        print(f"\n{HOSTS * RANKS_PER_HOST} ranks, {file_system.name}: {most / (1 << 30):.1f} GiB\n{outputs[0]}")
        self.assertEqual({output.count("\n") for output in outputs}, {4})
        self.assertLess(most, MOST)


def memory_of(host: Host) -> int:
    """The memory of a host's programs in bytes, each page divided by the number of processes that have it."""
    nbytes = 0
    for pid in host.programs():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        nbytes += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return nbytes


if __name__ == "__main__":
    unittest.main()
