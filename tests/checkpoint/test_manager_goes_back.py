"""CheckpointManager: a damaged checkpoint is passed over for the one before it."""

from __future__ import annotations

import signal
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from kit.catalogs import CatalogTest, sequence_of
from kit.checkpoint_damage import flip_a_weight, garble, seal, shorten
from kit.checkpoint_format import read_manifest
from kit.compare import check_same, refused
from kit.managed import Run, closing_all, full_disk, steps_in
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.storage.posix import FolderDirectory


class BackTest(CatalogTest):
    def run_to(self, last: int, resumes: bool = True, **options: Any) -> Run:
        run = Run(self.root, "plain", **options)
        with run.manager:
            run.steps(range((run.manager.resume() if resumes else 0) + 1, last + 1))
        return run

    @parameterized.expand([("short", shorten), ("bit", flip_a_weight), ("garbled", garble)])
    def test_a_damaged_newest_one(self, _: str, damage: Callable[[Path], None]) -> None:
        """It is named; with on_damage="previous" the run continues from the one before it, and saves the step again."""
        self.run_to(6)
        damage(self.root / "step-00000006")
        run = Run(self.root, "plain")
        with run.manager:
            words = (
                "step-00000006, the newest checkpoint",
                'on_damage="previous" loads the one before it',
                "step-00000004",
            )
            refused(run.manager.resume, CheckpointError, *words)
            self.assertEqual(run.manager.resume(on_damage="previous"), 4)
            run.steps(range(5, 8))
        self.assertEqual(steps_in(self.root), [6, 4, 2])
        self.assertEqual(self.run_to(8).manager.should_stop, False)
        self.assertEqual(steps_in(self.root), [8, 6, 4, 2])

    @parameterized.expand([("short", shorten), ("garbled", garble)])
    def test_a_damaged_one_of_steps_that_were_taken_back_goes(self, _: str, damage: Callable[[Path], None]) -> None:
        self.run_to(6)
        damage(self.root / "step-00000006")
        run = Run(self.root, "plain", every=5)
        with run.manager:
            self.assertEqual(run.manager.resume(on_damage="previous"), 4)
            run.steps(range(5, 6))
        self.check_only("step-00000002", "step-00000004", "step-00000005")
        self.run_to(5)  # nothing damaged is in the way

    def test_one_of_a_newer_version_stays_though_its_steps_were_taken_back(self) -> None:
        """This version cannot read it, so it does not know whether it is damaged: it is not removed as such."""
        self.run_to(6)
        run = Run(self.root, "plain", every=1)
        with run.manager:
            run.manager.resume()
            run.manager.rollback(to=4)
            newer = self.root / "step-00000006"
            seal(newer, read_manifest(newer) | {"version": 99})
            run.steps(range(5, 6))
        self.check_only("step-00000002", "step-00000004", "step-00000005", "step-00000006")

    def test_a_run_that_has_not_resumed_touches_nothing(self) -> None:
        self.run_to(4)
        run = Run(self.root, "plain")
        with closing_all(run):
            run.steps(range(1, 2))
            run.train(2)
            words = ("has checkpoints of an earlier run, 2 of them", "manager.resume()", "another folder")
            refused(lambda: run.manager.step(2), CheckpointError, *words)
        self.assertEqual(steps_in(self.root), [4, 2])

    def test_rollback(self) -> None:
        """The steps after it are taken back when the next save is complete, not before."""
        whole = Run(self.root / "whole", "plain")
        with closing_all(whole):
            for step in range(1, 10):
                whole.train(step)
        wanted = whole.everything()
        root = self.root / "run"
        run = Run(root, "plain", every=2)
        with run.manager:
            run.steps(range(1, 9))
            run.manager.wait()
            words = ("has no checkpoint of step 3", "those of the steps 2, 4, 6, 8")
            refused(lambda: run.manager.rollback(3), CheckpointError, *words)
            self.assertEqual(run.manager.rollback(to=4), 4)
            self.assertEqual(steps_in(root), [8, 6, 4, 2])
            run.steps(range(5, 6))
            self.assertEqual(steps_in(root), [8, 6, 4, 2])
            run.steps(range(6, 7))
            run.manager.wait()
            self.assertEqual(steps_in(root), [6, 4, 2], "8 was taken back, 6 was replaced")
            self.assertEqual(sequence_of(root / "step-00000006"), 5)
            run.steps(range(7, 10))
        self.assertEqual(run.losses, whole.losses)
        check_same("everything", run.everything(), wanted)

    def test_a_signal_after_a_rollback_is_heard_at_once(self) -> None:
        """The ranks meet at the first step after it, not at the one that they had agreed on before."""
        run = Run(self.root, "plain", every=20)
        with run.manager:
            run.steps(range(1, 21))
            run.manager.wait()
            run.steps(range(21, 39))
            self.assertEqual(run.manager.rollback(to=20), 20)
            signal.raise_signal(signal.SIGTERM)
            run.steps(range(21, 31))
            self.assertTrue(run.manager.should_stop)
        self.assertEqual(steps_in(self.root), [21, 20])

    def test_the_newest_is_by_sequence_where_a_removal_has_failed(self) -> None:
        """A run that dies between its first save after a rollback and the removals resumes from that save, and cleans up."""
        self.run_to(8)
        run = Run(self.root, "plain", every=1)
        with run.manager, mock.patch.object(FolderDirectory, "remove"):
            run.manager.rollback(to=2)
            run.steps(range(3, 4))
            run.manager.wait()
        self.assertEqual([checkpoint.step for checkpoint in fsdp_optim.checkpoints(self.root)], [3, 8, 6, 4, 2])
        run = Run(self.root, "plain", every=4)
        with run.manager:
            refused(lambda: run.manager.rollback(6), CheckpointError, "those of the steps 2, 3")
            self.assertEqual(run.manager.resume(), 3)
            run.steps(range(4, 5))
        self.assertEqual(steps_in(self.root), [4, 3, 2])

    def test_a_run_that_dies_before_it_saves_again_has_lost_nothing(self) -> None:
        self.run_to(4)
        run = Run(self.root, "plain", every=2)
        with run.manager:
            run.manager.rollback(to=2)
            run.steps(range(3, 4))
        again = Run(self.root, "plain")
        with again.manager:
            self.assertEqual(again.manager.resume(), 4)

    def test_a_save_that_fails_after_a_rollback_removes_nothing(self) -> None:
        self.run_to(6)
        run = Run(self.root, "plain")
        with run.manager:
            run.manager.rollback(to=2)
            with full_disk():
                run.steps(range(3, 5))
                refused(run.manager.wait, CheckpointError, "No space left on device")
            self.assertEqual(steps_in(self.root), [6, 4, 2])
            self.assertEqual(sequence_of(self.root / "step-00000004"), 2)

    def test_the_same_step_is_saved_once(self) -> None:
        run = Run(self.root, "plain")
        with run.manager:
            run.steps(range(1, 3))
            run.manager.save(2)
            run.manager.wait()
            number = sequence_of(self.root / "step-00000002")
            self.assertEqual(run.manager.resume(), 2)
            run.manager.save(2)
        self.assertEqual((number, sequence_of(self.root / "step-00000002")), (1, 1))


if __name__ == "__main__":
    unittest.main()
