"""The end of a save in the background: what each rank hears, whatever happens to the others."""

from __future__ import annotations

import contextlib
import os
import threading
import unittest
from collections.abc import Iterator
from unittest import mock

from kit.compare import refused
from kit.ends_of_saves import Saves
from parameterized import parameterized

from fsdp_optim import RankTimeoutError
from fsdp_optim.errors import StoreLostError
from fsdp_optim.transport.job import JobStore


class EndTest(Saves):
    def test_all_are_done(self) -> None:
        saves = self.joined(4)
        reports = [b"", b"one", bytes(3), "ä".encode()]
        for save, report in list(zip(saves, reports, strict=True))[::-1]:
            save.done(report)
        self.assertEqual(self.ends(saves), [reports, None, None, None])
        self.check_nothing_left()

    def test_some_ranks_of_a_job(self) -> None:
        saves = self.joined(5, ranks=[1, 3, 4])
        for save in saves:
            save.done(b"%d" % save.group.rank)
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
        for save, report in zip(saves, reports, strict=True):
            save.done(report)
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
        errors = self.together(lambda: self.lead(saves[0]), saves[1].wait_for_end, saves[2].wait_for_end)
        self.assertEqual(errors, [("CheckpointError", "rank 1: no")] * 3)
        for save in saves:  # rank 2 has announced nothing
            save.close()
        self.check_nothing_left()

    def test_all_that_failed_are_named(self) -> None:
        self.patch("_MOST_REASONS", 3)
        saves = self.joined(6)
        saves[0].done(b"")
        for save in saves[:0:-1]:
            save.failed(f"no {save.group.rank}")
        errors = self.ends(saves)
        self.assertEqual(len(set(errors)), 1)
        self.assertEqual(errors[0][1].splitlines(), ["rank 3: no 3", "rank 4: no 4", "rank 5: no 5"])
        self.check_nothing_left()

    def test_the_leader_failed(self) -> None:
        saves = self.joined(3)
        saves[0].failed("no")
        for save in saves[1:]:
            save.done(b"x")
        self.assertEqual(self.ends(saves, failed="rank 0: no"), [("CheckpointError", "rank 0: no")] * 3)
        self.check_nothing_left()

    def test_one_is_late(self) -> None:
        saves = self.joined(3, timeout=0.1)
        saves[0].done(b"")
        saves[1].done(b"")
        errors = self.ends(saves)
        self.assertEqual([kind for kind, _ in errors], ["RankTimeoutError", "CheckpointError", "CheckpointError"])
        self.assertEqual({text for _, text in errors}, {"run/a: rank 2 did not finish its part within 0.1 s"})
        self.check_nothing_left()

    def test_the_leader_is_late(self) -> None:
        self.patch("_GRACE", 0.05)
        saves = self.joined(2, timeout=0.05)
        saves[1].done(b"")
        refused(saves[1].wait_for_end, RankTimeoutError, "run/a: rank 0 did not finish", "within 0.05 s")

    @parameterized.expand([(0,), (1,), (2,)])
    def test_one_leaves_without_a_word(self, leaves: int) -> None:
        saves = self.joined(3)
        for save in saves:
            if save.group.rank != leaves:
                save.done(b"x")
        saves[leaves].close()
        rest = [save for save in saves if save.group.rank != leaves]
        calls = [(lambda: self.lead(saves[0])) if save is saves[0] else save.wait_for_end for save in rest]
        errors = self.together(*calls)
        for kind, text in errors:
            self.assertEqual(kind, "CheckpointError")
            self.assertIn(f"rank {leaves}", text)
            self.assertIn("run/a", text)
            self.assertIn("without a word", text)
        for save in saves:
            save.close()
        self.check_nothing_left()

    def test_all_leave_without_a_word(self) -> None:
        """As when the save that an upload waits for has failed."""
        saves = self.joined(3)
        self.together(*(save.close for save in saves))
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
        second = [self.join(save.group, "b") for save in first]
        first[1].failed("no")
        first[0].done(b"")
        for save in second:
            save.done(b"second")
        self.assertEqual(self.ends(second), [[b"second"] * 2, None])
        self.assertEqual(self.ends(first), [("CheckpointError", "rank 1: no")] * 2)
        self.check_nothing_left()

    def test_many_saves_leave_nothing(self) -> None:
        self.joined(2)
        groups = [self.group(rank, (0, 1)) for rank in (0, 1)]
        for number in range(20):
            saves = [self.join(group, str(number)) for group in groups]
            for save in saves:
                save.done(b"x" * number)
            self.ends(saves)
        self.check_nothing_left()

    def test_alone(self) -> None:
        [save] = self.joined(1)
        save.done(b"mine")
        self.assertEqual(save.wait_for_all(), [b"mine"])
        save.commit()
        save.saved()
        self.assertTrue(save.not_saved("no"))
        save.failed("no")
        save.close()
        self.check_nothing_left()
        self.assertEqual(self.num_keys(), 0)

    def test_it_beats_until_it_is_closed(self) -> None:
        [save, other] = self.joined(2)
        pulse = save.group.world.pulse
        self.assertEqual([pulse._num_holders, other.group.world.pulse._num_holders], [1, 1])
        save.close()
        save.close()
        self.assertEqual([pulse._num_holders, other.group.world.pulse._num_holders], [0, 1])


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
        for save in saves:
            self.assertEqual(save.group.world.pulse._num_holders, 0)


if __name__ == "__main__":
    unittest.main()
