"""`CheckpointManager(keep_optim_last=...)`: older checkpoints lose their optimizer, and a run never resumes without one."""

from __future__ import annotations

import shutil
import unittest
from pathlib import Path
from typing import Any

from kit.catalogs import CatalogTest
from kit.checkpoint_damage import garble
from kit.compare import check_same, refused
from kit.managed import Run, steps_in
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import StateError
from fsdp_optim.testing import run_on_ranks


def with_optim(root: Any) -> list[int | None]:
    """The steps of the checkpoints that have their optimizer, the newest first."""
    listed = [info.step for info in fsdp_optim.checkpoints(root) if not info.thinned]
    return [step for step in listed if fsdp_optim.inspect(f"{root}/step-{step:08}").has_optim]


def trained_by_ranks(root: Path) -> list[Any]:
    """Each rank resumes from the same checkpoint, and the leading one thins."""
    run = Run(root, "FSDP2", every=1, keep_optim_last=2)
    with run.manager:
        run.steps(range(1, 5))
    again = Run(root, "FSDP2", every=1, keep_optim_last=2)
    with again.manager:
        return [again.manager.resume(), with_optim(root), steps_in(root)]


class ThinTest(CatalogTest):
    @parameterized.expand([(1,), (2,), (3,), (9,)])
    def test_the_newest_keep_it(self, num: int) -> None:
        run = Run(self.root, "plain", every=1, keep_last=5, keep_optim_last=num)
        with run.manager:
            run.steps(range(1, 8))
        self.assertEqual(steps_in(self.root), [7, 6, 5, 4, 3])
        self.assertEqual(with_optim(self.root), [7, 6, 5, 4, 3][:num])
        for path in self.root.iterdir():
            fsdp_optim.verify(path, progress=False)

    def test_the_best_is_thinned_too(self) -> None:
        run = Run(self.root, "plain", every=1, keep_last=2, keep_best=1, keep_optim_last=1)
        with run.manager:
            run.steps(range(1, 6), {1: 5.0, 2: 1.0, 3: 2.0, 4: 3.0, 5: 4.0}.get)
        self.assertEqual(steps_in(self.root), [5, 4, 2])
        self.assertEqual(with_optim(self.root), [5])
        self.assertEqual([info.metric for info in fsdp_optim.checkpoints(self.root)], [4.0, 3.0, 1.0])

    def test_all_stay_without_another_rule(self) -> None:
        run = Run(self.root, "plain", every=1, keep_optim_last=1)
        with run.manager:
            run.steps(range(1, 5))
        self.assertEqual((steps_in(self.root), with_optim(self.root)), ([4, 3, 2, 1], [4]))

    def test_in_a_bucket(self) -> None:
        root = f"memory://{self.root.name}/run"
        run = Run(root, "plain", every=1, keep_last=3, keep_optim_last=1)
        with run.manager:
            run.steps(range(1, 5))
        self.assertEqual((steps_in(root), with_optim(root)), ([4, 3, 2], [4]))
        again = Run(root, "plain", every=1, keep_last=3, keep_optim_last=1)
        with again.manager:
            self.assertEqual(again.manager.resume(), 4)

    def test_on_ranks(self) -> None:
        results = run_on_ranks(trained_by_ranks, 2, self.root)
        check_same("of both ranks", results, [[4, [4, 3], [4, 3, 2, 1]]] * 2)

    def test_thin_ones_are_removed_like_others(self) -> None:
        """A run that resumes removes those that an earlier run has thinned, when no rule keeps them."""
        run = Run(self.root, "plain", every=1, keep_last=4, keep_optim_last=1)
        with run.manager:
            run.steps(range(1, 5))
        again = Run(self.root, "plain", every=1, keep_last=2, keep_optim_last=1)
        with again.manager:
            self.assertEqual(again.manager.resume(), 4)
            again.steps(range(5, 6))
        self.assertEqual((steps_in(self.root), with_optim(self.root)), ([5, 4], [5]))

    def test_a_damaged_one_does_not_count(self) -> None:
        run = Run(self.root, "plain", every=1, keep_optim_last=2)
        with run.manager:
            run.steps(range(1, 3))
            run.manager.wait()
            garble(self.root / "step-00000002")
            run.steps(range(3, 4))
        self.assertTrue(fsdp_optim.inspect(self.root / "step-00000001").has_optim)

    def test_one_that_is_damaged_behind_its_brief_does_not_count(self) -> None:
        """A listing does not show that; the complete manifest does."""
        run = Run(self.root, "plain", every=1, keep_optim_last=2)
        with run.manager:
            run.steps(range(1, 3))
            run.manager.wait()
            manifest = self.root / "step-00000002" / "fsdp_optim.json"
            text = manifest.read_bytes()
            manifest.write_bytes(text[:-40] + b"x" + text[-39:])
            run.steps(range(3, 4))
            run.manager.wait()
            self.assertTrue(fsdp_optim.inspect(self.root / "step-00000001").has_optim)
            run.steps(range(4, 5))
        self.assertFalse(fsdp_optim.inspect(self.root / "step-00000001").has_optim)

    def test_what_no_manager_made_keeps_it(self) -> None:
        run = Run(self.root, "plain", every=1, keep_optim_last=1)
        with run.manager:
            run.steps(range(1, 2))
            run.manager.wait()
            shutil.copytree(self.root / "step-00000001", self.root / "kept")
            run.steps(range(2, 4))
        self.assertTrue(fsdp_optim.inspect(self.root / "kept").has_optim)

    def test_resume_passes_thin_ones_by(self) -> None:
        run = Run(self.root, "plain", every=1)
        with run.manager:
            run.steps(range(1, 5))
        for step in (3, 4):
            fsdp_optim.thin(self.root / f"step-0000000{step}")
        again = Run(self.root, "plain", every=1)
        with again.manager, self.assertLogs("fsdp_optim", "WARNING") as log:
            self.assertEqual(again.manager.resume(), 2)
            refused(lambda: again.manager.rollback(3), StateError, "step-00000003", "was thinned")
        (line,) = [line for line in log.output if "thinned" in line]
        self.assertIn("step-00000004 was thinned", line)
        self.assertIn("continues from", line)
        self.assertIn("step-00000002", line)
        plain = Run(self.root, "plain", every=1)
        with plain.manager:
            restored = fsdp_optim.resume(self.root, plain.model, plain.optim, state=None)
            assert restored is not None
            self.assertEqual(restored.step, 2)
            weights = fsdp_optim.resume(self.root, plain.model)
            assert weights is not None
            self.assertEqual(weights.step, 4)

    def test_an_older_thin_one_is_nothing_to_say(self) -> None:
        run = Run(self.root, "plain", every=1, keep_optim_last=1)
        with run.manager:
            run.steps(range(1, 4))
        again = Run(self.root, "plain", every=1)
        with again.manager, self.assertNoLogs("fsdp_optim", "WARNING"):
            self.assertEqual(again.manager.resume(), 3)

    def test_only_thin_ones(self) -> None:
        run = Run(self.root, "plain", every=1)
        with run.manager:
            run.steps(range(1, 2))
        fsdp_optim.thin(self.root / "step-00000001")
        again = Run(self.root, "plain", every=1)
        with again.manager:
            refused(again.manager.resume, StateError, "step-00000001", "was thinned")

    def test_wrong_arguments(self) -> None:
        refused(lambda: Run(self.root, "plain", keep_optim_last=0), StateError, "keep_optim_last", "at least 1")
        refused(lambda: Run(self.root, "plain", keep_optim_last=1, weights="none"), StateError, "keep_optim_last")


if __name__ == "__main__":
    unittest.main()
