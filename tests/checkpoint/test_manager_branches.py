"""A manager's run after a rollback, a kill, and a moment in which a checkpoint could not be read: its own history stays."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

from kit.catalogs import LOG, CatalogTest, unreadable
from kit.managed import Run, steps_in

from fsdp_optim.checkpoint.catalog.retention import ManagedSave


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
        self.assertEqual(steps_in(self.root), [50, 40, 30, 20, 10])
        third = self.run_of()
        with third.manager:
            self.assertEqual(third.manager.resume(), 50)

    def test_a_moment_at_the_resume_is_no_other_run(self) -> None:
        """Every save of the run is made, and counts what could not be read then."""
        first = self.run_of()
        with first.manager:
            self.save(first, 10, 20, 30)
        second = Run(self.root, "plain", every=10, keep_last=2)
        with second.manager:
            with unreadable("step-00000030", number=5), self.assertLogs(LOG, "WARNING"):
                self.assertEqual(second.manager.resume(on_damage="previous"), 20)
            self.save(second, 21, 22)
        self.assertEqual(steps_in(self.root), [22, 21])

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
        self.assertEqual(steps_in(self.root), [12, 11, 10])


if __name__ == "__main__":
    unittest.main()
