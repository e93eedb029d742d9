"""The end of a save in the background: what each rank hears, whatever happens to the others, and what stays in the store."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

from kit.compare import error_text, refused
from kit.scripts import start
from parameterized import parameterized
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fsdp_optim.errors import CheckpointError, RankTimeoutError, StoreLostError
from fsdp_optim.testing import run_on_threads
from fsdp_optim.transport import completion
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.completion import Completion
from fsdp_optim.transport.in_process import InProcessWorld, Shared
from fsdp_optim.transport.job.job_store import JobStore
from fsdp_optim.transport.world import world_here

LIMIT = 20.0  # seconds; reached by nothing but a failure
SOON = 20.0  # seconds in which a process that was killed is noticed, on a busy machine
ENDED, SILENT = "its process has ended", "no sign of life for 20 s"


class Watch:
    """Takes those ranks for lost that the test says, in `lost`."""

    lost: dict[int, str]

    def __init__(self, store: JobStore, ranks: Sequence[int], *, beats: bool) -> None:
        if not beats:
            raise AssertionError("ranks that save beat, and silence must be noticed")
        self._ranks = ranks

    def look(self) -> dict[int, str]:
        return {rank: how for rank, how in self.lost.items() if rank in self._ranks}


class Saves(unittest.TestCase):
    """Ranks of one job, each with a connection of its own, in the hands of a test."""

    def setUp(self) -> None:
        for name, value in (("_GRACE", 5.0), ("_LOOK_FOR_LIFE_EVERY", 0.0), ("_LOOK_EVERY", 0.002), ("Watch", Watch)):
            self.patch(name, value)
        Watch.lost = {}
        self.shared: Shared

    def patch(self, name: str, value: Any) -> None:
        patch = mock.patch.object(completion, name, value)
        patch.start()
        self.addCleanup(patch.stop)

    def joined(self, size: int, timeout: float = LIMIT, ranks: Sequence[int] | None = None) -> list[Completion]:
        self.shared = Shared(size)
        self.shared.store.set_timeout(timedelta(seconds=2))  # for a key that is not there, and is read
        ranks = range(size) if ranks is None else ranks
        made = [self.join(self.group(rank, ranks, timeout)) for rank in ranks]
        self.before = self.num_keys()
        return made

    def group(self, rank: int, ranks: Sequence[int], timeout: float = LIMIT) -> RankGroup:
        return InProcessWorld(self.shared, rank).group("async_save", tuple(ranks), timeout=timeout)

    def join(self, group: RankGroup, name: str = "a") -> Completion:
        made = Completion.join(group, name, f"run/{name}")
        self.addCleanup(made.close)
        return made

    def num_keys(self) -> int:
        return int(self.shared.store.num_keys())

    def check_nothing_left(self, more: int = 0) -> None:
        self.assertEqual(self.num_keys() - self.before, more, "keys are left in the store")

    def together(self, *calls: Callable[[], Any]) -> list[Any]:
        """What calls that are made at once return, or raise, as (class, message)."""
        found: list[Any] = [None] * len(calls)

        def run(index: int) -> None:
            results: list[Any] = []
            error = error_text(lambda: results.append(calls[index]()))
            found[index] = error if error[0] else results[0]

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            self.assertFalse(thread.is_alive(), "a rank hangs")
        return found

    def lead(self, leader: Completion, failed: str | None = None) -> Any:
        """All that the leader does, as a save does it; the reports of the ranks."""
        try:
            if failed is not None:
                raise CheckpointError(failed)
            reports = leader.wait_for_all()
            leader.commit()
        except Exception as error:
            self.all_know = leader.not_saved(str(error))
            raise
        leader.saved()
        return reports

    def ends(self, saves: Sequence[Completion], failed: str | None = None) -> list[Any]:
        """How a save ends on all these ranks, the first of which leads; then they are closed."""
        leader, others = saves[0], saves[1:]
        found = self.together(lambda: self.lead(leader, failed), *(one.wait_for_end for one in others))
        for one in saves:
            one.close()
        return found


class EndTest(Saves):
    def test_all_are_done(self) -> None:
        saves = self.joined(4)
        reports = [b"", b"one", bytes(3), "ä".encode()]
        for one, report in list(zip(saves, reports, strict=True))[::-1]:
            one.done(report)
        self.assertEqual(self.ends(saves), [reports, None, None, None])
        self.check_nothing_left()

    def test_some_ranks_of_a_job(self) -> None:
        saves = self.joined(5, ranks=[1, 3, 4])
        for one in saves:
            one.done(b"%d" % one.group.rank)
        self.assertEqual(self.ends(saves), [[b"1", b"3", b"4"], None, None])
        self.check_nothing_left()

    def test_the_leader_waits_for_each(self) -> None:
        saves = self.joined(3)
        saves[0].done(b"0")
        timers = [threading.Timer(0.05 * rank, saves[rank].done, [b"%d" % rank]) for rank in (1, 2)]
        for timer in timers:
            timer.start()
        self.assertEqual(self.ends(saves), [[b"0", b"1", b"2"], None, None])

    @parameterized.expand([(0,), (1,), (999,), (1000,), (1001,), (200_000,)])
    def test_reports_of_any_length(self, nbytes: int) -> None:
        self.patch("_PART_NBYTES", 1000)
        saves = self.joined(3)
        reports = [os.urandom(nbytes) for _ in saves]
        for one, report in zip(saves, reports, strict=True):
            one.done(report)
        self.assertEqual(self.ends(saves), [reports, None, None])
        self.check_nothing_left()

    def test_a_large_report_goes_in_parts_that_a_store_takes(self) -> None:
        saves = self.joined(2)
        report = bytes(9 << 20)
        saves[0].done(b"")
        with mock.patch.object(JobStore, "set", autospec=True, side_effect=JobStore.set) as puts:
            saves[1].done(report)
        self.assertLessEqual(max(len(call.args[2]) for call in puts.call_args_list), 8 << 20)
        [reports, _] = self.ends(saves)
        self.assertEqual(reports, [b"", report])
        self.check_nothing_left()

    def test_one_failed(self) -> None:
        saves = self.joined(3)
        saves[0].done(b"")
        saves[1].failed("the disk is full")
        saves[2].done(b"")
        self.assertEqual(self.ends(saves), [("CheckpointError", "rank 1: the disk is full")] * 3)
        self.assertTrue(self.all_know)
        self.check_nothing_left()

    def test_nobody_waits_for_the_rest_when_one_failed(self) -> None:
        saves = self.joined(3)
        saves[0].done(b"")
        saves[1].failed("no")
        found = self.together(lambda: self.lead(saves[0]), saves[1].wait_for_end, saves[2].wait_for_end)
        self.assertEqual(found, [("CheckpointError", "rank 1: no")] * 3)
        for one in saves:  # rank 2 has announced nothing
            one.close()
        self.check_nothing_left()

    def test_all_that_failed_are_named(self) -> None:
        self.patch("_MOST_REASONS", 3)
        saves = self.joined(6)
        saves[0].done(b"")
        for one in saves[:0:-1]:
            one.failed(f"no {one.group.rank}")
        found = self.ends(saves)
        self.assertEqual(len(set(found)), 1)
        self.assertEqual(found[0][1].splitlines(), ["rank 3: no 3", "rank 4: no 4", "rank 5: no 5"])
        self.check_nothing_left()

    def test_the_leader_failed(self) -> None:
        saves = self.joined(3)
        saves[0].failed("no")
        for one in saves[1:]:
            one.done(b"x")
        self.assertEqual(self.ends(saves, failed="rank 0: no"), [("CheckpointError", "rank 0: no")] * 3)
        self.check_nothing_left()

    def test_one_is_late(self) -> None:
        saves = self.joined(3, timeout=0.1)
        saves[0].done(b"")
        saves[1].done(b"")
        found = self.ends(saves)
        self.assertEqual([kind for kind, _ in found], ["RankTimeoutError", "CheckpointError", "CheckpointError"])
        self.assertEqual({text for _, text in found}, {"run/a: rank 2 did not finish its part within 0.1 s"})
        self.check_nothing_left()

    def test_the_leader_is_late(self) -> None:
        self.patch("_GRACE", 0.05)
        saves = self.joined(2, timeout=0.05)
        saves[1].done(b"")
        refused(saves[1].wait_for_end, RankTimeoutError, "run/a: rank 0 did not finish", "within 0.05 s")

    @parameterized.expand([(0,), (1,), (2,)])
    def test_one_leaves_without_a_word(self, leaves: int) -> None:
        saves = self.joined(3)
        for one in saves:
            if one.group.rank != leaves:
                one.done(b"x")
        saves[leaves].close()
        rest = [one for one in saves if one.group.rank != leaves]
        calls = [(lambda: self.lead(saves[0])) if one is saves[0] else one.wait_for_end for one in rest]
        found = self.together(*calls)
        for kind, text in found:
            self.assertEqual(kind, "CheckpointError")
            self.assertIn(f"rank {leaves}", text)
            self.assertIn("run/a", text)
            self.assertIn("without a word", text)
        for one in saves:
            one.close()
        self.check_nothing_left()

    def test_all_leave_without_a_word(self) -> None:
        """As when the save that an upload waits for has failed."""
        saves = self.joined(3)
        self.together(*(one.close for one in saves))
        self.check_nothing_left()

    def test_a_rank_that_has_reported_and_does_not_wait(self) -> None:
        saves = self.joined(2)
        saves[1].done(b"1")
        saves[1].close()
        saves[0].done(b"0")
        self.assertEqual(self.ends(saves[:1]), [[b"0", b"1"]])
        self.check_nothing_left()

    def test_two_saves_at_once(self) -> None:
        """As those into a folder, and from there into a bucket."""
        first = self.joined(2)
        second = [self.join(one.group, "b") for one in first]
        first[1].failed("no")
        first[0].done(b"")
        for one in second:
            one.done(b"second")
        self.assertEqual(self.ends(second), [[b"second"] * 2, None])
        self.assertEqual(self.ends(first), [("CheckpointError", "rank 1: no")] * 2)
        self.check_nothing_left()

    def test_many_saves_leave_nothing(self) -> None:
        self.joined(2)
        groups = [self.group(rank, (0, 1)) for rank in (0, 1)]
        for number in range(20):
            saves = [self.join(group, str(number)) for group in groups]
            for one in saves:
                one.done(b"x" * number)
            self.ends(saves)
        self.check_nothing_left()

    def test_alone(self) -> None:
        [one] = self.joined(1)
        one.done(b"mine")
        self.assertEqual(one.wait_for_all(), [b"mine"])
        one.commit()
        one.saved()
        self.assertTrue(one.not_saved("no"))
        one.failed("no")
        one.close()
        self.check_nothing_left()
        self.assertEqual(self.num_keys(), 0)

    def test_it_beats_until_it_is_closed(self) -> None:
        [one, other] = self.joined(2)
        pulse = one.group.world.pulse
        self.assertEqual([pulse._num_holders, other.group.world.pulse._num_holders], [1, 1])
        one.close()
        one.close()
        self.assertEqual([pulse._num_holders, other.group.world.pulse._num_holders], [0, 1])


class LostTest(Saves):
    @parameterized.expand([(ENDED,), (SILENT,)])
    def test_a_rank_is_lost_before_its_part_is_written(self, how: str) -> None:
        self.patch("_GRACE", 10 * LIMIT)  # nobody waits for those that are lost
        saves = self.joined(3)
        saves[0].done(b"")
        saves[1].done(b"")
        Watch.lost = {2: how}
        found = self.ends(saves[:2])
        for kind, text in found:
            self.assertEqual(kind, "CheckpointError")
            self.assertIn("run/a: lost before their parts were written: rank 2: " + how, text)
        self.assertEqual(self.all_know, how == ENDED)
        if how == ENDED:
            self.check_nothing_left()

    def test_a_rank_that_was_done_may_be_lost(self) -> None:
        saves = self.joined(3)
        for one in saves:
            one.done(b"x")
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

    def test_the_report_of_a_rank_that_has_ended_does_not_stay(self) -> None:
        self.patch("_PART_NBYTES", 10)
        saves = self.joined(3)
        for one in saves:
            one.done(b"x" * 100)
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
        for one in saves:
            one.done(b"x")
        Watch.lost = {0: how}
        found = self.together(*(one.wait_for_end for one in saves[1:]))
        for kind, text in found:
            self.assertEqual(kind, "CheckpointError")
            self.assertIn(f"run/a: rank 0: {how}", text)
            self.assertIn("look at its log", text)

    def test_a_leader_that_was_given_up_gives_no_checkpoint_its_name(self) -> None:
        """It was stopped, and goes on."""
        saves = self.joined(3)
        for one in saves:
            one.done(b"x")
        Watch.lost = {0: SILENT}
        found = self.together(*(one.wait_for_end for one in saves[1:]))
        Watch.lost = {}
        with mock.patch.object(JobStore, "multi_get", side_effect=AssertionError("it waits for what is not there")):
            [(kind, text)] = self.ends(saves[:1])
        self.assertEqual(kind, "CheckpointError")
        self.assertEqual({text}, {said for _, said in found})
        self.check_nothing_left()

    def test_a_leader_that_is_lost_while_it_gives_the_checkpoint_its_name(self) -> None:
        """Nobody knows whether it has; nobody says that it has not."""
        saves = self.joined(2)
        for one in saves:
            one.done(b"x")
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
            for one in saves:
                one.done(b"x")
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

            def wait(one: Completion, gate: Any = gate) -> None:
                with contextlib.closing(one):
                    gate.wait()
                    one.wait_for_end()

            Watch.lost = {0: SILENT}
            found = self.together(lead, *(lambda one=one: wait(one) for one in saves[1:]))
            for one in saves:
                one.close()
            self.check_nothing_left()
            said_no = [text for text in found if text and "It may have finished it" not in text[1]]
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
        for one in saves[:3]:
            one.done(b"x")
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
            for one in saves:
                one.done(b"x")
            self.ends(saves[:1])
            self.assertEqual(self.together(*(one.wait_for_end for one in saves[1:])), [None, None])
            self.check_nothing_left()

    def test_it_comes_while_the_leader_ends_its_waiting(self) -> None:
        self.patch("_GRACE", 0.0)
        for _ in range(30):
            saves = self.joined(3)
            for one in saves:
                one.done(b"x")
            self.assertEqual(self.ends(saves)[1:], [None, None])
            self.check_nothing_left()


class StoreTest(Saves):
    @contextlib.contextmanager
    def gone(self) -> Iterator[None]:
        with mock.patch.object(JobStore, "_call", side_effect=StoreLostError("the store is gone")):
            yield

    def test_what_raises_and_what_does_not(self) -> None:
        saves = self.joined(2)
        saves[0].done(b"")
        with self.gone():
            refused(lambda: saves[1].done(b""), StoreLostError, "is gone")
            refused(saves[0].wait_for_all, StoreLostError, "is gone")
            refused(saves[0].commit, StoreLostError, "is gone")
            refused(saves[1].wait_for_end, StoreLostError, "is gone")
            saves[1].failed("no")
            saves[0].saved()
            self.assertFalse(saves[0].not_saved("no"))
            saves[0].close()
            saves[1].close()
        for one in saves:
            self.assertEqual(one.group.world.pulse._num_holders, 0)


def save_on_threads(failing: int | None) -> Any:
    """A save on a thread of its own for each rank, with beats and looks as they are."""
    world = world_here()
    group = world.group("async_save", range(world.size))
    with contextlib.closing(Completion.join(group, "a", "run/a")) as one:
        if world.rank == failing:
            one.failed("no")
        else:
            one.done(b"%d" % world.rank)
        if world.rank:
            return error_text(one.wait_for_end)
        try:
            reports = one.wait_for_all()
            one.commit()
        except CheckpointError as error:
            return one.not_saved(str(error)), str(error)
        one.saved()
        return reports


class ThreadsTest(unittest.TestCase):
    def test_well(self) -> None:
        found = run_on_threads(save_on_threads, 8, None)
        self.assertEqual(found, [[b"%d" % rank for rank in range(8)], *[("", "")] * 7])

    def test_one_failed(self) -> None:
        found = run_on_threads(save_on_threads, 8, 5)
        self.assertEqual(found, [(True, "rank 5: no"), *[("CheckpointError", "rank 5: no")] * 7])


BEATING = """
import signal
from torch.distributed import TCPStore
from fsdp_optim.transport.job.job_store import JobStore
from fsdp_optim.transport.job.pulse import Pulse
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
        other = start(BEATING.format(port=server.port, rank=killed), preload=("torch", "fsdp_optim"))
        try:
            with contextlib.closing(Completion.join(world.group("async_save", (0, 1)), "a", "run/a")) as one:
                one.done(b"")
                deadline = time.monotonic() + LIMIT
                while not world.board.check([f"pulse/{killed}"]):
                    self.assertLess(time.monotonic(), deadline)
                    time.sleep(0.01)
                threading.Timer(0.2, os.kill, [other.pid, signal.SIGKILL]).start()
                begun = time.monotonic()
                refused(lambda: call(one), CheckpointError, f"rank {killed}: its process has ended", *words)
                self.assertLess(time.monotonic() - begun, SOON)
                if not rank:
                    self.assertTrue(one.not_saved("no"))
                    self.assertLess(time.monotonic() - begun, SOON)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other.pid, signal.SIGKILL)
            other.wait(LIMIT)

    def test_a_rank(self) -> None:
        self.check(0, 1, lambda one: one.wait_for_all(), "lost before their parts were written")

    def test_the_leader(self) -> None:
        self.check(1, 0, lambda one: one.wait_for_end(), "finishes the checkpoint")


if __name__ == "__main__":
    unittest.main()
