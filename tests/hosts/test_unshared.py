"""A path behind which the hosts have different folders is an error on all ranks, for each call, and nothing is left behind.

Each call has a job and a folder of its own, and all jobs run at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from parameterized import parameterized

from hosts.bench import Bench
from hosts.case import BenchTest
from hosts.file_systems import OneKernel, Unshared
from hosts.programs.unshared import FINDING, OPENING, WRITING

pytestmark = pytest.mark.hosts

SAVED = [("nowhere", ()), ("on_host_0", (0,)), ("on_host_1", (1,)), ("on_both", (0, 1))]
"""The hosts on which a checkpoint is at the path before."""


def names(calls: Sequence[object], saved: Sequence[int]) -> list[str]:
    """The names of calls. Those that need a checkpoint are left out where there is none."""
    return [str(call.__name__) for call in calls if saved or call not in OPENING]  # type: ignore[attr-defined]


class UnsharedTest(BenchTest):
    def check(self, bench: Bench, root: str, calls: Sequence[str], saved: Sequence[int]) -> None:
        """Make calls with a folder each in `root`, and use these folders on one host afterwards."""
        folders = [f"{root}/{call}" for call in calls]
        for host in (0, 1):
            bench.hosts[host].command("mkdir", *folders)
        for run in [bench.run("unshared", "prepare", "step-1", *folders, hosts=[host]) for host in saved]:
            run.succeed()
        before = [self.listed(bench, host, root) for host in (0, 1)]
        jobs = {call: bench.run("unshared", call, folder) for call, folder in zip(calls, folders, strict=True)}
        for call, run in jobs.items():
            with self.subTest(call):
                outcomes = [json.loads(text) for text in run.succeed(90)]
                errors = {outcome["error"] for outcome in outcomes}
                self.assertEqual(len(errors), 1, errors)
                self.assertRegex(
                    errors.pop(), rf"ranks 2, 3: (file://)?{root}/{call}.* is another folder than on rank 0"
                )
                wanted = [[2 if call in names(WRITING, [0]) else 0]] * 4
                self.assertEqual([outcome["numbers"] for outcome in outcomes], wanted)
        self.assertEqual([self.listed(bench, host, root) for host in (0, 1)], before)
        for run in [bench.run("unshared", "prepare", "new", *folders, hosts=[host]) for host in (0, 1)]:
            run.succeed()

    def listed(self, bench: Bench, host: int, root: str) -> list[str]:
        """The names of all files below a folder."""
        return sorted(bench.hosts[host].command("find", f"{root}/").split())

    @parameterized.expand(SAVED)
    def test_writing(self, _: str, saved: Sequence[int]) -> None:
        self.check(self.bench(2, Unshared()), "/shared", names(WRITING, saved), saved)

    @parameterized.expand(SAVED)
    def test_reading(self, _: str, saved: Sequence[int]) -> None:
        self.check(self.bench(2, Unshared()), "/shared", names((*FINDING, *OPENING), saved), saved)

    @parameterized.expand(SAVED)
    def test_a_link_that_leads_elsewhere_on_one_host(self, _: str, saved: Sequence[int]) -> None:
        bench = self.bench(2, OneKernel())
        bench.hosts[0].command("mkdir", "/shared/run", "/shared/other")
        for host, folder in enumerate(("/shared/run", "/shared/other")):
            bench.hosts[host].command("ln", "-s", folder, "/tmp/run")
        self.check(bench, "/tmp/run", names((*WRITING[:2], *FINDING[::2], *OPENING), saved), saved)

    def test_a_folder_that_is_nowhere_yet(self) -> None:
        bench = self.bench(2, Unshared())
        for call in ("manager", "resume"):
            for text in bench.run("unshared", call, "/shared/run").succeed(90):
                self.assertIn("ranks 2, 3: /shared/run: ", json.loads(text)["error"])
        self.assertEqual([self.listed(bench, host, "/shared") for host in (0, 1)], [["/shared/"]] * 2)
