"""Saves, loads and managed runs of two hosts, on each file system that they may share: every value is the oracle's."""

from __future__ import annotations

import signal
import unittest

import pytest
from parameterized import parameterized

from hosts.case import BenchTest
from hosts.file_systems import FileSystem, Kit, OneKernel
from hosts.gluster import Gluster
from hosts.sshfs import Sshfs

pytestmark = pytest.mark.hosts

EVERYTHING = ("save", "background", "manager", "offline")
REAL: tuple[FileSystem, ...] = (OneKernel(), Gluster(), Sshfs())
LIKE_NFS = Kit("--cache-seconds", "3", "--close-to-open", "--stale", "--silly-renames")
KIT = (
    Kit(),
    Kit("--cache-seconds", "3"),
    Kit("--close-to-open"),
    Kit("--stale", "--silly-renames"),
    Kit("--locks", "none"),
    Kit("--locks", "nosys"),
    Kit("--locks", "local"),
    Kit("--no-sparse", "--no-fallocate", "--no-links"),
    Kit("--late-renames", "2"),
    Kit("--clock", "1"),
    LIKE_NFS,
)
LONG = 200.0  # seconds
AGENT = "[k]it.forked"  # the process that runs torchrun; it is forked from a server of scripts


def by_name(file_systems: tuple[FileSystem, ...]) -> list[tuple[str, FileSystem]]:
    return [(file_system.name, file_system) for file_system in file_systems]


class CheckpointsTest(BenchTest):
    @parameterized.expand(by_name((*REAL, *KIT)))
    def test_everything(self, _: str, file_system: FileSystem) -> None:
        bench = self.bench(2, file_system)
        bench.run("checkpoints", "/shared/run", *EVERYTHING).succeed(LONG)
        self.assertEqual(self.leftovers(bench), [])

    @parameterized.expand(by_name((Gluster(), LIKE_NFS)))
    def test_on_another_number_of_hosts(self, _: str, file_system: FileSystem) -> None:
        bench = self.bench(3, file_system)
        bench.run("checkpoints", "/shared/run", "save", "background", hosts=[0, 1]).succeed(LONG)
        bench.run("checkpoints", "/shared/run", "load", hosts=[2]).succeed(LONG)
        bench.run("checkpoints", "/shared/run", "load", "manager", hosts=[2, 0, 1], ranks_per_host=1).succeed(LONG)

    @parameterized.expand(by_name((Gluster(), Sshfs(), LIKE_NFS)))
    def test_a_signal_on_one_host_only(self, _: str, file_system: FileSystem) -> None:
        bench = self.bench(2, file_system)
        run = bench.run("preempted", "/shared/run")
        run.wait_for("step 3")
        run.signal(3, signal.SIGTERM)
        steps = {output.split("stopped at ")[1].split()[0] for output in run.succeed(LONG)}
        self.assertEqual(len(steps), 1, steps)
        again = bench.run("preempted", "/shared/run", "only-resume", hosts=[1, 0]).succeed(LONG)
        self.assertEqual({output.split("resumed at ")[1].split()[0] for output in again}, steps)

    @parameterized.expand(by_name((Kit("--clock", "1"), LIKE_NFS)))
    def test_hosts_whose_clocks_are_minutes_apart(self, _: str, file_system: FileSystem) -> None:
        bench = self.bench(2, file_system, {1: 600.0})
        bench.run("checkpoints", "/shared/run", *EVERYTHING).succeed(LONG)
        bench.run("checkpoints", "/shared/again", "manager", hosts=[1, 0]).succeed(LONG)
        self.assertEqual(self.leftovers(bench), [])

    def test_torchrun_with_two_nodes(self) -> None:
        bench = self.bench(2, LIKE_NFS)
        bench.run("checkpoints", "/shared/run", "background", "manager", torchrun=[]).succeed(LONG)

    def test_a_signal_to_the_agent_of_one_host(self) -> None:
        """torchrun passes it to its ranks; those of the other host save and stop too."""
        bench = self.bench(2, Kit())
        run = bench.run("preempted", "/shared/run", torchrun=["--rdzv-backend=c10d", "--nnodes=2"])
        run.wait_for("step 3", timeout=LONG)
        bench.hosts[1].command("pkill", "-TERM", "-f", AGENT)
        run.wait_for("stopped at", timeout=LONG)
        steps = {run.output(rank).split("stopped at ")[1].split()[0] for rank in range(4)}
        self.assertEqual(len(steps), 1, steps)

    def leftovers(self, bench: object) -> list[str]:
        """What saves have left on the file system, as the first host sees it."""
        root = bench.hosts[0].path("/shared/run")  # type: ignore[attr-defined]
        marks = (".saving-", ".new-", ".old-", ".gone-", ".fsdp_optim-", "owner.lock")
        return sorted(str(path) for path in root.rglob("*") if any(mark in path.name for mark in marks))


if __name__ == "__main__":
    unittest.main()
