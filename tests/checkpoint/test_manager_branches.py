"""A manager's run after a rollback, a kill, and a moment in which a checkpoint could not be read: its own history stays."""

from __future__ import annotations

import errno
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from kit.catalogs import LOG, CatalogTest, failing_reads, unreadable
from kit.checkpoint_damage import flip_a_weight
from kit.compare import check_same
from kit.managed import Run, steps_in
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.checkpoint.catalog.retention import ManagedSave
from fsdp_optim.testing import run_on_ranks


class BranchTest(CatalogTest):
    def run_of(self, **options: Any) -> Run:
        return Run(self.root, "plain", every=10, keep_last=5, **options)

    def save(self, run: Run, *steps: int) -> None:
        for step in steps:
            run.manager.save(step)
            run.manager.wait()

    def test_the_run_keeps_its_own_history(self) -> None:
        first = self.run_of()
        with first.manager:
            self.save(first, 10, 20, 30, 40)
            first.manager.rollback(to=10)
            with mock.patch.object(ManagedSave, "remove_outdated"):  # as where the job is killed before it removes
                self.save(first, 15)
        self.assertEqual(steps_in(self.root), [15, 40, 30, 20, 10])
        second = self.run_of()
        with second.manager:
            with unreadable("step-00000015", number=5):
                self.assertEqual(second.manager.resume(on_damage="previous"), 40)
            self.save(second, 50)
        self.assertEqual(steps_in(self.root), [50, 15, 40, 30, 20, 10], "15 could not be read, so this run leaves it")
        third = self.run_of()
        with third.manager:
            self.assertEqual(third.manager.resume(), 50)

    def test_a_moment_at_the_resume_is_no_other_run(self) -> None:
        """Every save of the run is made; what could not be read then neither counts nor goes."""
        first = self.run_of()
        with first.manager:
            self.save(first, 10, 20, 30)
        second = Run(self.root, "plain", every=10, keep_last=2)
        with second.manager:
            with unreadable("step-00000030", number=5), self.assertLogs(LOG, "WARNING"):
                self.assertEqual(second.manager.resume(on_damage="previous"), 20)
            self.save(second, 21, 22)
        self.assertEqual(steps_in(self.root), [22, 21, 30])

    def test_it_may_still_be_unreadable_when_the_run_saves(self) -> None:
        first = self.run_of()
        with first.manager:
            self.save(first, 10, 20)
        second = self.run_of()
        with second.manager:
            with unreadable("step-00000020", number=5), self.assertLogs(LOG, "WARNING"):
                self.assertEqual(second.manager.resume(on_damage="previous"), 10)
                self.save(second, 11)
            self.save(second, 12)
        self.assertEqual(steps_in(self.root), [12, 20, 11, 10])
        third = self.run_of()
        with third.manager:
            self.assertEqual(third.manager.resume(), 12)
            self.save(third, 13)
        self.assertEqual(steps_in(self.root), [13, 12, 11, 10], "this run could read 20, whose steps were taken back")


class UnreadDataTest(CatalogTest):
    """A resume goes back over a checkpoint whose data cannot be read just now; its manifest can be. It may be intact."""

    def setUp(self) -> None:
        super().setUp()
        run = Run(self.root, "plain", every=1)
        with run.manager:
            run.steps(range(1, 4))

    def back_to_2(self, number: int = errno.EIO, **options: Any) -> Run:
        run = Run(self.root, "plain", every=1, **options)
        with failing_reads("step-00000003/model.safetensors", number), self.assertLogs(LOG, "WARNING"):
            self.assertEqual(run.manager.resume(on_damage="previous"), 2)
        return run

    @parameterized.expand([("EIO",), ("ESTALE",), ("EACCES",), ("ETIMEDOUT",)])
    def test_it_stays(self, number: str) -> None:
        run = self.back_to_2(getattr(errno, number))
        with run.manager:
            run.manager.save(4)
            run.manager.save(5)
        self.assertEqual(steps_in(self.root), [5, 4, 3, 2, 1])
        fsdp_optim.verify(self.root / "step-00000003")

    def test_it_neither_counts_nor_is_thinned(self) -> None:
        run = self.back_to_2(keep_last=2, keep_optim_last=1)
        with run.manager:
            run.manager.save(4)
            run.manager.save(5)
        thinned = {checkpoint.step: checkpoint.thinned for checkpoint in fsdp_optim.checkpoints(self.root)}
        self.assertEqual(thinned, {5: False, 4: True, 3: False})

    def test_the_run_replaces_it_when_it_has_made_its_step_again(self) -> None:
        run = self.back_to_2(keep_last=1)
        with run.manager:
            run.steps([3])
            run.manager.wait()
            self.assertEqual(steps_in(self.root), [3])
            run.steps([4])
        self.assertEqual(steps_in(self.root), [4], "that one is the run's own")

    def test_it_is_like_the_others_where_the_run_continues_from_it_after_all(self) -> None:
        run = self.back_to_2(keep_last=1)
        with run.manager:
            self.assertEqual(run.manager.resume(), 3)
            run.steps([4])
        self.assertEqual(steps_in(self.root), [4])

    def test_a_damaged_one_goes(self) -> None:
        flip_a_weight(self.root / "step-00000003")
        run = Run(self.root, "plain", every=1)
        with run.manager:
            self.assertEqual(run.manager.resume(on_damage="previous"), 2)
            run.manager.save(4)
        self.assertEqual(steps_in(self.root), [4, 2, 1])

    @parameterized.expand([("all_ranks", "model.safetensors"), ("one_rank", "extra/rank-00001.safetensors")])
    def test_on_several_ranks(self, _: str, name: str) -> None:
        root = self.root / "run"
        run_on_ranks(save_on_ranks, 2, root)
        run_on_ranks(go_back_on_ranks, 2, root, name)
        self.assertEqual(steps_in(root), [4, 3, 2])


def save_on_ranks(root: Path) -> None:
    run = Run(root, "FSDP2", every=1)
    with run.manager:
        run.steps([2, 3])


def go_back_on_ranks(root: Path, name: str) -> None:
    """The lowest rank removes; what it needs to know, another rank may have seen."""
    run = Run(root, "FSDP2", every=1)
    with run.manager:
        with failing_reads(f"step-00000003/{name}"):
            check_same("went back to", run.manager.resume(on_damage="previous"), 2)
        run.manager.save(4)


if __name__ == "__main__":
    unittest.main()
