"""A host that is killed, cut off, or stopped, in each phase of a save: the others hear it, and nothing is mixed or lost.

Every value of save 2 is 2. The phases of one call are tried at the same time, by a job each, in folders of their own.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from parameterized import parameterized

from hosts.bench import Bench
from hosts.case import BenchTest
from hosts.file_systems import FileSystem, Kit
from hosts.gluster import Gluster
from hosts.runs import Run

pytestmark = pytest.mark.hosts

RANKS = ("0,1", "2,3")
"""The ranks of each host. Rank 0 leads, and serves the store."""

AT_THE_LEADER = ("finishing", "commit", "manifest", "renames", "committed")
PHASES = ("begun", "writing", "written", "waits", *AT_THE_LEADER)
"""As in `programs/lost.py`. `waits`: the host that is not lost is at `written`, and the lost one waits for it."""

SHORT = 4.0
"""Seconds after which a silent rank or store counts as lost in these tests."""

CASES = [(f"{call}_without_host_{host}", call, host) for call in ("save", "async_save") for host in (0, 1)]
LINES = dict[str, Any]


class _Lost:
    """Jobs of two hosts, one for each phase, that are stopped in their second save; `host` is about to be lost."""

    def __init__(
        self,
        test: BenchTest,
        bench: Bench,
        call: str,
        host: int,
        phases: Sequence[str],
        lost_after: float,
        timeout: float,
    ) -> None:
        self.test, self.bench, self.call, self.host, self.phases = test, bench, call, host, phases
        self.lost, self.others = ([int(rank) for rank in RANKS[side].split(",")] for side in (host, 1 - host))
        self.patience = lost_after + 60.0
        environment = {"LOST_AFTER": str(lost_after), "TIMEOUT": str(timeout)}
        self.held: dict[str, str] = {}
        self.jobs: dict[str, Run] = {}
        for phase in phases:
            self.held[phase] = RANKS[1 - host] if phase == "waits" else RANKS[host]
            if phase in AT_THE_LEADER:
                self.held[phase] = "0"
            bench.hosts[0].path(f"/shared/{phase}").mkdir()
            words = ["save", call, "written" if phase == "waits" else phase, self.held[phase], f"/shared/{phase}"]
            self.jobs[phase] = bench.run("lost", *words, environment=environment)
        for run in self.jobs.values():
            run.wait_for("saved 1")
            (run.folder / "armed").touch()
        for phase, run in self.jobs.items():
            run.wait_for("at ", [int(rank) for rank in self.held[phase].split(",")])

    @property
    def any_job(self) -> Run:
        return next(iter(self.jobs.values()))

    def let_go(self, *, of_lost: bool) -> None:
        """Let those that are held continue, on the host that is lost, or on the other one."""
        for phase, run in self.jobs.items():
            if of_lost == (self.held[phase][0] in RANKS[self.host]):
                (run.folder / "go").touch()

    def outcomes(self, ranks: Sequence[int]) -> dict[str, list[LINES]]:
        """What these ranks have heard of the save, by phase."""
        for run in self.jobs.values():
            run.wait_for('{"at"', ranks, self.patience)
        return {phase: [told(run, rank)[0] for rank in ranks] for phase, run in self.jobs.items()}

    def on(self, hosts: Sequence[int], program: str) -> dict[str, LINES]:
        """What a job on these hosts finds, by phase."""
        run = self.bench.run("lost", program, *(f"/shared/{phase}" for phase in self.phases), hosts=hosts)
        run.succeed(90)
        return {line["folder"]: line for line in told(run, 0)}

    def is_saved(self, phase: str) -> bool:
        """Whether save 2 is complete when the host is lost, or the host that is left completes it."""
        if self.host == 0:
            return phase == "committed"
        return phase == "waits" or phase in AT_THE_LEADER

    def check_others(self) -> None:
        """The ranks of the other host have heard who is lost, where they have not heard that the save has ended well."""
        for phase, outcomes in self.outcomes(self.others).items():
            for rank, outcome in zip(self.others, outcomes, strict=True):
                with self.test.subTest(phase, rank=rank):
                    self.test.assertTrue(outcome["ours"], outcome)
                    if not outcome["error"]:
                        self.test.assertTrue(self.is_saved(phase), "half a save has ended well")
                    elif self.host == 0:
                        self.test.assertIn(self.bench.hosts[0].address, outcome["text"])
                        self.test.assertIn("ranks 0, 1", outcome["text"])
                    else:
                        self.test.assertIn("ranks 2, 3", outcome["text"])

    def check_goes_on(self, *, may_write: bool) -> None:
        """A job on the other host alone continues. `may_write`: the lost host lives, and its files are left alone."""
        for phase, report in self.on([1 - self.host], "resume").items():
            with self.test.subTest(phase):
                number = 2 if self.is_saved(phase) else 1
                self.test.assertEqual(report["numbers"], [number], report)
                kept = {name for name in report["before"] if ".saving-" in name}
                if may_write:
                    self.test.assertLessEqual(kept, set(report["after"]))
                if may_write and self.host == 0 and phase not in ("begun", "waits", "committed"):
                    self.test.assertTrue(kept, "the lost host has nothing that it may write")

    def check_comes_back(self) -> None:
        """The ranks that were lost hear it, unless they have saved all."""
        for phase, outcomes in self.outcomes(self.lost).items():
            names = {path.name for path in self.bench.hosts[1 - self.host].path(f"/shared/{phase}").iterdir()}
            for rank, outcome in zip(self.lost, outcomes, strict=True):
                with self.test.subTest(phase, rank=rank):
                    self.test.assertTrue(outcome["ours"], outcome)
                    if not outcome["error"] and phase != "renames":
                        self.test.assertIn("step-2", names)

    def end(self) -> None:
        """Let all jobs end; each rank that lives comes to its end."""
        for run in self.jobs.values():
            (run.folder / "over").touch()
        for run in self.jobs.values():
            for code in run.wait(self.patience):
                self.test.assertIn(code, (0, -9), run.report())

    def check_whole(self, hosts: Sequence[int]) -> None:
        """Each checkpoint has the values of one save, and the newest is that of the job that has gone on."""
        for phase, report in self.on(hosts, "look").items():
            with self.test.subTest(phase):
                self.test.assertEqual(report["incomplete"], [])
                self.test.assertEqual(Path(report["newest"]).name, "step-9", report)
                for name, number in report["numbers"].items():
                    numbers = {1, 2} if phase == "renames" and "step-1" in name else {number_in(name)}
                    self.test.assertIn(number, numbers, report)


def told(run: Run, rank: int) -> list[LINES]:
    """What a rank has told as JSON."""
    return [json.loads(line) for line in run.output(rank).splitlines() if line.startswith("{")]


def number_in(name: str) -> int:
    """The number of a checkpoint by its name."""
    match = re.match(r"step-(\d+)", name)
    assert match is not None
    return int(match[1])


class LostCase(BenchTest):
    """Tests with jobs that lose a host."""

    def jobs(
        self,
        call: str,
        host: int,
        file_system: FileSystem | None = None,
        phases: Sequence[str] = PHASES,
        lost_after: float = SHORT,
        timeout: float = 120.0,
    ) -> _Lost:
        """Jobs about to lose a host. Their file system knows locks on one host only, as network file systems may."""
        bench = self.bench(2, file_system or Kit("--locks", "local"))
        return _Lost(self, bench, call, host, phases, lost_after, timeout)


class LostTest(LostCase):
    @parameterized.expand(CASES)
    def test_killed(self, _: str, call: str, host: int) -> None:
        jobs = self.jobs(call, host)
        jobs.any_job.kill_host(host)
        jobs.let_go(of_lost=False)
        jobs.check_others()
        jobs.check_goes_on(may_write=False)
        jobs.end()
        jobs.check_whole([1 - host])

    @parameterized.expand(CASES)
    def test_cut_off(self, _: str, call: str, host: int) -> None:
        """The lost host is held until its link is there again."""
        jobs = self.jobs(call, host)
        jobs.bench.cut(host)
        jobs.let_go(of_lost=False)
        jobs.check_others()
        jobs.check_goes_on(may_write=True)
        jobs.bench.heal(host)
        jobs.let_go(of_lost=True)
        jobs.check_comes_back()
        jobs.end()
        jobs.check_whole([0, 1])

    @parameterized.expand(CASES)
    def test_cut_off_and_goes_on_alone(self, _: str, call: str, host: int) -> None:
        """The lost host continues while its link is cut: both hosts take the other one for lost."""
        jobs = self.jobs(call, host)
        jobs.bench.cut(host)
        jobs.let_go(of_lost=False)
        jobs.let_go(of_lost=True)
        for phase, outcomes in jobs.outcomes(range(4)).items():
            for rank, outcome in enumerate(outcomes):
                with self.subTest(phase, rank=rank):
                    self.assertTrue(outcome["ours"], outcome)
                    names = {path.name for path in jobs.bench.hosts[0].path(f"/shared/{phase}").iterdir()}
                    self.assertTrue(outcome["error"] or phase == "renames" or "step-2" in names, outcome)
        jobs.on([1 - host], "resume")
        jobs.bench.heal(host)
        jobs.end()
        jobs.check_whole([0, 1])

    @parameterized.expand(CASES)
    def test_stopped(self, _: str, call: str, host: int) -> None:
        jobs = self.jobs(call, host)
        jobs.any_job.stop_host(host)
        jobs.let_go(of_lost=False)
        jobs.check_others()
        jobs.check_goes_on(may_write=True)
        jobs.any_job.continue_host(host)
        jobs.let_go(of_lost=True)
        jobs.check_comes_back()
        jobs.end()
        jobs.check_whole([0, 1])


class BetweenCallsTest(LostCase):
    @parameterized.expand(CASES)
    def test_killed_before_the_call(self, _: str, call: str, host: int) -> None:
        """A rank that is in no call may train for hours: that it is gone shows at the timeout, or by what training does."""
        jobs = self.jobs(call, host, phases=("before",), timeout=12.0)
        jobs.any_job.kill_host(host)
        jobs.let_go(of_lost=False)
        for outcome in jobs.outcomes(jobs.others)["before"]:
            self.assertTrue(outcome["error"])
            self.assertRegex(
                outcome["text"], "ranks 0, 1" if host == 0 else "rank 2, rank 3 did not arrive within 12 s"
            )
        jobs.check_goes_on(may_write=False)
        jobs.end()
        jobs.check_whole([1 - host])


class MountLostTest(LostCase):
    @parameterized.expand(CASES)
    @pytest.mark.slow
    def test_lost_with_its_mount(self, _: str, call: str, host: int) -> None:
        jobs = self.jobs(call, host, Gluster())
        jobs.bench.lose(host)
        jobs.let_go(of_lost=False)
        jobs.check_others()
        jobs.check_goes_on(may_write=False)
        jobs.end()
        jobs.check_whole([1 - host])


class RealNumbersTest(LostCase):
    @parameterized.expand([(0,), (1,)])
    @pytest.mark.slow
    def test_seconds(self, host: int) -> None:
        """With the library's own limits, all hear it within half a minute and some seconds."""
        jobs = self.jobs("async_save", host, phases=("begun", "writing"), lost_after=20.0)
        jobs.any_job.stop_host(host)
        begun = time.time()
        jobs.check_others()
        latest = max(outcome["at"] for outcomes in jobs.outcomes(jobs.others).values() for outcome in outcomes)
        self.assertLess(latest - begun, 60)
        jobs.check_goes_on(may_write=True)
        jobs.any_job.continue_host(host)
        jobs.let_go(of_lost=True)
        jobs.check_comes_back()
        jobs.end()
        jobs.check_whole([0, 1])


TORCHRUN = (
    "--nnodes=1:2",
    "--max-restarts=3",
    "--rdzv-backend=c10d",
    "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3",
)


class TorchrunTest(BenchTest):
    @pytest.mark.slow
    def test_the_launcher_goes_on_without_a_killed_host(self) -> None:
        """The first start after it may fail: the launcher may still wait for the other host."""
        bench = self.bench(2, Kit("--locks", "local"))
        bench.hosts[0].path("/shared/run").mkdir()
        environment = {"LOST_AFTER": str(SHORT), "TIMEOUT": "10"}
        run = bench.run("lost", "train", "/shared/run", "60", torchrun=TORCHRUN, environment=environment)
        run.wait_for("step 20\n", [0], 90)
        run.kill_host(1)
        run.wait_for("done", [0, 1], 180)
        self.until(lambda: run.codes[0] == 0, "the launcher has not ended")
        starts = told(run, 0)
        self.assertEqual((starts[0]["ranks"], starts[0]["first"]), (4, 1))
        self.assertEqual(starts[-1]["ranks"], 2)
        self.assertGreaterEqual(starts[-1]["first"], 18)
        look = bench.run("lost", "look", "/shared/run", hosts=[0])
        look.succeed()
        numbers = told(look, 0)[0]["numbers"]
        self.assertEqual(numbers, {f"step-{step}": step for step in numbers.values()})
        self.assertEqual(sorted(numbers.values())[-3:], [58, 59, 60])
