"""The end of a save in the background where ranks are lost, late or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

from kit.compare import error_text, refused
from kit.ends_of_saves import LIMIT, Saves, Watch
from kit.forked import LIBRARY, start
from parameterized import parameterized
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fsdp_optim import CheckpointError
from fsdp_optim.testing import run_on_threads
from fsdp_optim.transport import Completion, world_here
from fsdp_optim.transport.in_process import InProcessWorld, Shared
from fsdp_optim.transport.job import JobStore

SOON = 20.0  # seconds in which a process that was killed is noticed, on a busy machine
ENDED, SILENT = "its process has ended", "no sign of life for 20 s"


class LostTest(Saves):
    @parameterized.expand([(ENDED,), (SILENT,)])
    def test_a_rank_is_lost_before_its_part_is_written(self, how: str) -> None:
        self.patch("_GRACE", 10 * LIMIT)  # nobody waits for those that are lost
        saves = self.joined(3)
        saves[0].done(b"")
        saves[1].done(b"")
        Watch.lost = {2: how}
        errors = self.ends(saves[:2])
        for kind, text in errors:
            self.assertEqual(kind, "CheckpointError")
            self.assertIn("run/a: lost before their parts were written: rank 2: " + how, text)
        self.assertEqual(self.all_know, how == ENDED)
        if how == ENDED:
            self.check_nothing_left()

    def test_a_rank_that_was_done_may_be_lost(self) -> None:
        saves = self.joined(3)
        for save in saves:
            save.done(b"x")
        Watch.lost = {2: ENDED}
        self.assertEqual(self.ends(saves[:2]), [[b"x"] * 3, None])

    def test_a_rank_that_was_done_is_lost_while_others_write(self) -> None:
        saves = self.joined(3)
        saves[0].done(b"x")
        saves[2].done(b"x")
        Watch.lost = {2: ENDED}
        timer = threading.Timer(0.1, saves[1].done, [b"x"])
        timer.start()
        self.assertEqual(self.ends(saves[:2]), [[b"x"] * 3, None])

    def test_a_rank_that_fails_and_ends_while_the_leader_looks(self) -> None:
        """Its own reason is told, not that it is lost."""
        saves = self.joined(3)
        saves[0].done(b"")
        saves[1].done(b"")

        class Meanwhile(Watch):
            def look(self) -> dict[int, str]:
                if not self.lost:
                    saves[2].failed("its disk is full")
                    Watch.lost = {2: ENDED}
                return super().look()

        self.patch("Watch", Meanwhile)
        self.assertEqual(self.together(lambda: self.lead(saves[0])), [("CheckpointError", "rank 2: its disk is full")])

    def test_the_report_of_a_rank_that_has_ended_does_not_stay(self) -> None:
        self.patch("_PART_NBYTES", 10)
        saves = self.joined(3)
        for save in saves:
            save.done(b"x" * 100)
        Watch.lost = {2: ENDED}
        self.assertEqual(self.ends(saves[:2])[1], None)
        self.check_nothing_left()

    def test_a_rank_that_has_read_the_outcome_and_ended_is_one_not_two(self) -> None:
        """The outcome stays for a rank that has not read it yet."""
        self.patch("_GRACE", 0.3)
        saves = self.joined(3)
        saves[1].failed("no")

        def read_and_end() -> None:
            try:
                saves[1].wait_for_end()
            finally:
                Watch.lost = {1: ENDED}

        no = ("CheckpointError", "rank 1: no")
        self.assertEqual(self.together(lambda: self.lead(saves[0]), read_and_end), [no, no])
        self.assertFalse(self.all_know, "rank 2 does not know it")
        self.assertEqual(self.together(saves[2].wait_for_end), [no])

    @parameterized.expand([(ENDED,), (SILENT,)])
    def test_the_leader_is_lost(self, how: str) -> None:
        saves = self.joined(3)
        for save in saves:
            save.done(b"x")
        Watch.lost = {0: how}
        errors = self.together(*(save.wait_for_end for save in saves[1:]))
        for kind, text in errors:
            self.assertEqual(kind, "CheckpointError")
            self.assertIn(f"run/a: rank 0: {how}", text)
            self.assertIn("look at its log", text)

    def test_a_leader_that_was_given_up_gives_no_checkpoint_its_name(self) -> None:
        """It was stopped, and continues."""
        saves = self.joined(3)
        for save in saves:
            save.done(b"x")
        Watch.lost = {0: SILENT}
        errors = self.together(*(save.wait_for_end for save in saves[1:]))
        Watch.lost = {}
        with mock.patch.object(JobStore, "multi_get", side_effect=AssertionError("it waits for what is not there")):
            [(kind, text)] = self.ends(saves[:1])
        self.assertEqual(kind, "CheckpointError")
        self.assertEqual({text}, {said for _, said in errors})
        self.check_nothing_left()

    def test_a_leader_that_is_lost_while_it_gives_the_checkpoint_its_name(self) -> None:
        """Nobody knows whether it has; nobody says that it has not."""
        saves = self.joined(2)
        for save in saves:
            save.done(b"x")
        saves[0].wait_for_all()
        saves[0].commit()
        Watch.lost = {0: SILENT}
        refused(saves[1].wait_for_end, CheckpointError, "rank 0", "It may have finished it", "fsdp_optim.latest")
        saves[1].close()
        Watch.lost = {}
        saves[0].saved()
        saves[0].close()
        self.check_nothing_left()

    def test_one_decision(self) -> None:
        """Whoever is faster: the leader that commits, or the others that give it up."""
        for _ in range(30):
            saves = self.joined(4)
            for save in saves:
                save.done(b"x")
            gate, committed = threading.Barrier(4), list[bool]()

            def lead(leader: Completion = saves[0], gate: Any = gate, committed: Any = committed) -> None:
                leader.wait_for_all()
                gate.wait()
                try:
                    leader.commit()
                except CheckpointError as error:
                    leader.not_saved(str(error))
                    raise
                committed.append(True)
                leader.saved()

            def wait(save: Completion, gate: Any = gate) -> None:
                with contextlib.closing(save):
                    gate.wait()
                    save.wait_for_end()

            Watch.lost = {0: SILENT}
            errors = self.together(lead, *(lambda save=save: wait(save) for save in saves[1:]))
            for save in saves:
                save.close()
            self.check_nothing_left()
            said_no = [text for text in errors if text and "It may have finished it" not in text[1]]
            if committed:
                self.assertEqual(said_no, [], "it is there, and a rank says that it is not")
            else:
                self.assertEqual(len(said_no), 4, "it is not there, and a rank does not know that")


class LateTest(Saves):
    """A rank that was cut off comes back when the leader does not wait any more."""

    def setUp(self) -> None:
        super().setUp()
        self.patch("_GRACE", 0.05)

    @parameterized.expand([(True,), (False,)])
    def test_it_reads_how_the_save_has_ended(self, well: bool) -> None:
        saves = self.joined(4)
        for save in saves[:3]:
            save.done(b"x")
        saves[3].done(b"x") if well else saves[3].failed("no")
        error = None if well else ("CheckpointError", "rank 3: no")
        first = self.ends(saves[:2])
        self.assertEqual(first[1], error)
        self.assertEqual(self.together(saves[2].wait_for_end), [error])
        saves[2].close()
        self.assertEqual(self.together(saves[3].wait_for_end), [error])
        saves[3].close()
        self.check_nothing_left()

    def test_it_announces_its_part_when_the_save_has_failed(self) -> None:
        self.patch("_PART_NBYTES", 10)
        for announce in ("done", "failed", "close"):
            with self.subTest(announce):
                saves = self.joined(3)
                saves[0].done(b"")
                saves[1].done(b"")
                Watch.lost = {2: SILENT}
                self.assertIn("rank 2", self.ends(saves[:2])[1][1])
                self.assertFalse(self.all_know)
                Watch.lost = {}
                if announce == "done":
                    saves[2].done(b"x" * 100)
                elif announce == "failed":
                    saves[2].failed("too late")
                if announce != "close":
                    refused(saves[2].wait_for_end, CheckpointError, "lost before their parts were written: rank 2")
                saves[2].close()
                self.check_nothing_left()

    def test_the_last_two_read_at_once(self) -> None:
        for _ in range(30):
            saves = self.joined(3)
            for save in saves:
                save.done(b"x")
            self.ends(saves[:1])
            self.assertEqual(self.together(*(save.wait_for_end for save in saves[1:])), [None, None])
            self.check_nothing_left()

    def test_it_comes_while_the_leader_ends_its_waiting(self) -> None:
        self.patch("_GRACE", 0.0)
        for _ in range(30):
            saves = self.joined(3)
            for save in saves:
                save.done(b"x")
            self.assertEqual(self.ends(saves)[1:], [None, None])
            self.check_nothing_left()


def save_on_threads(failing: int | None) -> Any:
    """A save on a thread of its own for each rank, with beats and looks as they are."""
    world = world_here()
    group = world.group("async_save", range(world.size))
    with contextlib.closing(Completion.join(group, "a", "run/a")) as save:
        if world.rank == failing:
            save.failed("no")
        else:
            save.done(b"%d" % world.rank)
        if world.rank:
            return error_text(save.wait_for_end)
        try:
            reports = save.wait_for_all()
            save.commit()
        except CheckpointError as error:
            return save.not_saved(str(error)), str(error)
        save.saved()
        return reports


class ThreadsTest(unittest.TestCase):
    def test_well(self) -> None:
        results = run_on_threads(save_on_threads, 8, None)
        self.assertEqual(results, [[b"%d" % rank for rank in range(8)], *[("", "")] * 7])

    def test_one_failed(self) -> None:
        results = run_on_threads(save_on_threads, 8, 5)
        self.assertEqual(results, [(True, "rank 5: no"), *[("CheckpointError", "rank 5: no")] * 7])


BEATING = """
import signal
from torch.distributed import TCPStore
from fsdp_optim.transport.job import JobStore
from fsdp_optim.transport.job import Pulse
pulse = Pulse(JobStore(lambda: TCPStore("127.0.0.1", {port}, is_master=False, wait_for_workers=False)), {rank}, 2)
pulse.introduce()
with pulse.beating():
    signal.pause()
"""


class KilledTest(unittest.TestCase):
    """The other rank is a process, and is killed."""

    def check(self, rank: int, killed: int, call: Callable[[Completion], Any], *words: str) -> None:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world = InProcessWorld(Shared(2), rank)
        world.board = world.pulse.store = JobStore(lambda: server)
        other = start(BEATING.format(port=server.port, rank=killed), preload=LIBRARY)
        try:
            with contextlib.closing(Completion.join(world.group("async_save", (0, 1)), "a", "run/a")) as save:
                save.done(b"")
                deadline = time.monotonic() + LIMIT
                while not world.board.check([f"pulse/{killed}"]):
                    self.assertLess(time.monotonic(), deadline)
                    time.sleep(0.01)
                threading.Timer(0.2, os.kill, [other.pid, signal.SIGKILL]).start()
                begun = time.monotonic()
                refused(lambda: call(save), CheckpointError, f"rank {killed}: its process has ended", *words)
                self.assertLess(time.monotonic() - begun, SOON)
                if not rank:
                    self.assertTrue(save.not_saved("no"))
                    self.assertLess(time.monotonic() - begun, SOON)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other.pid, signal.SIGKILL)
            other.wait(LIMIT)

    def test_a_rank(self) -> None:
        self.check(0, 1, lambda save: save.wait_for_all(), "lost before their parts were written")

    def test_the_leader(self) -> None:
        self.check(1, 0, lambda save: save.wait_for_end(), "finishes the checkpoint")


if __name__ == "__main__":
    unittest.main()
