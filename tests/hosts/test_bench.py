"""The bench itself: hosts are apart, share what they mount, run programs together, and leave nothing."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest
from parameterized import parameterized

from hosts.bench import PREFIX, Bench, missing
from hosts.case import TICKS, TORCH, BenchTest
from hosts.file_systems import FileSystem, Kit, OneKernel, Unshared
from hosts.gluster import Gluster
from hosts.host import PYTHON_PATH
from hosts.sshfs import Sshfs

pytestmark = pytest.mark.hosts

LEFT = """
import sys, time
from hosts.bench import Bench
from hosts.file_systems import OneKernel
with Bench(1, OneKernel()) as bench:
    print(bench.folder, *(host.pid for host in bench.hosts), flush=True)
    time.sleep(60)
"""


class HostsTest(BenchTest):
    def test_hosts_are_apart(self) -> None:
        bench = self.bench(2, OneKernel())
        first, second = bench.hosts
        self.assertEqual([host.command("hostname").strip() for host in bench.hosts], ["host0", "host1"])
        for folder in ("/tmp", "/dev/shm", "/run"):
            first.command("touch", f"{folder}/only-first")
            self.assertNotIn("only-first", second.command("ls", folder))
        first.start("sleep", "50", log="sleep.log")
        self.until(lambda: "sleep 50" in first.command("ps", "ax"), "the program has not started")
        self.assertNotIn("sleep 50", second.command("ps", "ax"))
        self.assertEqual(len({host.command("cat", "/proc/sys/kernel/random/boot_id") for host in bench.hosts}), 2)
        self.assertEqual(len({os.stat(f"/proc/{host.pid}/ns/ipc").st_ino for host in bench.hosts}), 2)

    def test_hosts_find_this_repository_and_each_other_by_name(self) -> None:
        bench = self.bench(2, OneKernel())
        printed = bench.hosts[1].command(sys.executable, "-c", "import hosts; print(hosts.__file__)")
        self.assertEqual(Path(printed.strip()).parent, Path(__file__).parent)
        names = "import socket; print(socket.gethostbyname('host0'))"
        self.assertEqual(bench.hosts[1].command(sys.executable, "-c", names).strip(), bench.hosts[0].address)

    @parameterized.expand(
        [(fs.name, fs) for fs in (OneKernel(), Gluster(), Sshfs(), Kit())],
        name_func=lambda f, n, p: f"{f.__name__}_{n}",
    )
    def test_a_file_is_read_on_the_other_host(self, _: str, file_system: FileSystem) -> None:
        bench = self.bench(2, file_system)
        bench.hosts[0].command("sh", "-c", "mkdir /shared/run && echo hello > /shared/run/a")
        self.assertEqual(bench.hosts[1].command("cat", "/shared/run/a"), "hello\n")
        self.assertEqual(bench.hosts[0].path("/shared/run/a").read_text(), "hello\n")
        bench.unmount(1)
        self.assertFalse(bench.hosts[1].path("/shared/run").exists())
        bench.mount(1)
        self.assertTrue(bench.hosts[1].path("/shared/run/a").exists())

    def test_hosts_that_share_nothing(self) -> None:
        bench = self.bench(2, Unshared())
        bench.hosts[0].path("/shared/a").touch()
        self.assertEqual(bench.hosts[1].command("ls", "/shared"), "")

    def test_hosts_that_call_themselves_the_same(self) -> None:
        """As containers may: their ranks are told apart all the same."""
        bench = self.bench(2, OneKernel(), hostname="node")
        run = bench.run(self.program(bench, TICKS), ranks_per_host=1, preload=TORCH)
        self.assertEqual([run.host_of(rank) for rank in range(2)], [0, 1])
        self.assertEqual([host.command("hostname") for host in bench.hosts], ["node\n"] * 2)

    def test_two_benches_at_once(self) -> None:
        benches = [self.bench(2, OneKernel()) for _ in range(2)]
        benches[0].hosts[0].path("/shared/a").touch()
        self.assertFalse(benches[1].hosts[0].path("/shared/a").exists())


class EndTest(BenchTest):
    def test_nothing_is_left(self) -> None:
        for is_failure in (False, True):
            bench = Bench(2, OneKernel())
            if reason := missing(bench.file_system):
                self.skipTest(reason)
            with contextlib.suppress(KeyboardInterrupt), bench:
                run = bench.run(self.program(bench, TICKS), preload=TORCH)
                run.wait_for("tick 2")
                pids = [host.pid for host in bench.hosts] + [run.pid(rank) for rank in range(4)]
                bench.delay(10)
                if is_failure:
                    raise KeyboardInterrupt
            self.assertEqual([pid for pid in pids if Path(f"/proc/{pid}").exists()], [])
            self.assertFalse(bench.folder.exists())
            self.assertNotIn(str(bench.folder), Path("/proc/self/mountinfo").read_text())

    def test_what_a_killed_bench_leaves_is_removed_by_the_next(self) -> None:
        if reason := missing(OneKernel()):
            self.skipTest(reason)
        environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
        with subprocess.Popen(
            [sys.executable, "-c", LEFT], stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            folder, pid = process.stdout.readline().split()
            process.kill()
        self.until(lambda: not Path(f"/proc/{pid}").exists(), "the host lives on")
        self.assertTrue(Path(folder).exists())
        self.bench(1, OneKernel())
        self.assertFalse(Path(folder).exists())

    def test_a_bench_that_cannot_start_leaves_nothing(self) -> None:
        class Broken(OneKernel):
            def mount(self, bench: Bench, host: object) -> None:
                raise OSError("no such server")

        if reason := missing(OneKernel()):
            self.skipTest(reason)
        before = set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
        bench = Bench(2, Broken())
        with self.assertRaisesRegex(OSError, "no such server"):
            bench.__enter__()
        self.assertFalse(bench.folder.exists())
        self.assertNotIn(bench.folder, before)


class RunTest(BenchTest):
    def check_all_reduce(self, printed: list[str]) -> None:
        matches = [re.fullmatch(r"rank (\d) of 4 on (host\d), pid \d+: 10\n", text) for text in printed]
        names = [match and match.groups() for match in matches]
        self.assertEqual(names, [("0", "host0"), ("1", "host0"), ("2", "host1"), ("3", "host1")])

    def test_ranks_of_two_hosts_meet(self) -> None:
        bench = self.bench(2, OneKernel())
        for _ in range(2):
            self.check_all_reduce(bench.run("all_reduce", preload=TORCH).succeed())

    @parameterized.expand([("static", []), ("c10d", ["--rdzv-backend=c10d"])])
    def test_torchrun_with_two_nodes(self, _: str, options: list[str]) -> None:
        bench = self.bench(2, OneKernel())
        printed = bench.run("all_reduce", torchrun=options, preload=TORCH).succeed(120)
        self.assertEqual(sorted(re.findall(r"host\d", "".join(printed))), ["host0", "host0", "host1", "host1"])
        self.assertEqual([text.rpartition(": ")[2] for text in printed], ["10\n"] * 4)

    def test_a_run_on_one_of_two_hosts(self) -> None:
        bench = self.bench(2, OneKernel())
        printed = bench.run("all_reduce", ranks_per_host=1, hosts=[1], preload=TORCH).succeed()
        self.assertRegex(printed[0], r"rank 0 of 1 on host1, pid \d+: 1\n")

    def test_a_program_that_fails_is_shown(self) -> None:
        bench = self.bench(2, OneKernel())
        run = bench.run(self.program(bench, "import sys; print('before'); sys.exit('this is why')"), preload=TORCH)
        with self.assertRaisesRegex(AssertionError, r"(?s)\[1, 1, 1, 1\].*rank-3\.err\nthis is why"):
            run.succeed()
        self.assertEqual((run.output(2), run.errors(2)), ("before\n", "this is why\n"))

    def test_a_program_that_does_not_end_is_shown(self) -> None:
        bench = self.bench(1, OneKernel())
        run = bench.run(self.program(bench, TICKS), preload=TORCH)
        run.wait_for("tick 1 ", [1])
        with self.assertRaisesRegex(TimeoutError, "tick 1 of 0"):
            run.wait(0.1)


if __name__ == "__main__":
    unittest.main()
