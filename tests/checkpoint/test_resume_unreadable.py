"""Resume where the newest checkpoint cannot be entered, or has lost its manifest: it is named, and can be replaced."""

from __future__ import annotations

import logging
import os
import shutil
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit.catalogs import LOG, CatalogTest, save, unreadable
from kit.checkpoint_format import MANIFEST
from kit.compare import check_same, refused
from kit.folders import as_nobody, can_change, close
from kit.managed import Run, steps_in
from kit.models import filled
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.testing import run_on_threads


def closed(folder: Path) -> Any:
    return unreadable(folder.name)


@contextmanager
def without_manifest(folder: Path) -> Iterator[None]:
    (folder / MANIFEST).unlink()
    yield


TROUBLES = [("closed", closed, "this user may not read it"), ("lost manifest", without_manifest, "is missing")]


class ResumeTest(CatalogTest):
    def setUp(self) -> None:
        super().setUp()
        for step in (5, 10):
            save(self.root / f"step-{step}", filled(step), weights_only=True, step=step)

    @parameterized.expand(TROUBLES)
    def test_the_newest_is_named(self, _: str, trouble: Any, reason: str) -> None:
        model = filled(-1)
        with trouble(self.root / "step-10"):
            words = ("step-10, the newest checkpoint, cannot be loaded", reason, 'on_damage="previous"', "step-5")
            refused(lambda: fsdp_optim.resume(self.root, model), CheckpointError, *words)
            self.assertEqual(float(model.weight.detach()[0, 0]), -1.0)
            with self.assertLogs(LOG, "WARNING"):
                restored = fsdp_optim.resume(self.root, model, on_damage="previous")
            self.assertEqual(restored.step if restored is not None else None, 5)
            listed = [
                (Path(checkpoint.path).name, checkpoint.complete) for checkpoint in fsdp_optim.checkpoints(self.root)
            ]
            self.assertEqual(listed, [("step-10", False), ("step-5", True)])
            with self.assertLogs(LOG, "WARNING") as logs:
                self.check_latest("step-5")
            self.assertIn(reason, "\n".join(logs.output))

    @parameterized.expand(TROUBLES)
    def test_alone_it_is_an_error_too(self, _: str, trouble: Any, reason: str) -> None:
        shutil.rmtree(self.root / "step-5")
        (self.root / "step-10").rename(self.root / "final")
        with trouble(self.root / "final"):
            for on_damage in ("error", "previous"):
                words = ("final", reason, "no other checkpoint that is complete")
                refused(
                    lambda on_damage=on_damage: fsdp_optim.resume(self.root, filled(0), on_damage=on_damage),
                    CheckpointError,
                    *words,
                )

    @parameterized.expand(TROUBLES)
    def test_an_older_one_is_nobodys_business(self, _: str, trouble: Any, __: str) -> None:
        with trouble(self.root / "step-5"):
            restored = fsdp_optim.resume(self.root, filled(0))
        self.assertEqual(restored.step if restored is not None else None, 10)

    def test_a_folder_of_another_name_is_no_checkpoint(self) -> None:
        for name in ("lost+found", "private", ".cache"):
            (self.root / name).mkdir()
        with unreadable("lost+found", "private", ".cache"):
            restored = fsdp_optim.resume(self.root, filled(0))
            self.assertEqual(restored.step if restored is not None else None, 10)
            self.assertEqual(len(fsdp_optim.checkpoints(self.root)), 2)

    def test_one_whose_name_is_like_the_others(self) -> None:
        for step in (5, 10):
            (self.root / f"step-{step}").rename(self.root / f"v{step}")
        with unreadable("v10"):
            refused(lambda: fsdp_optim.resume(self.root, filled(0)), CheckpointError, "v10, the newest checkpoint")

    def test_a_folder_of_another_library_has_lost_nothing(self) -> None:
        (self.root / "step-20").mkdir()
        shutil.copy(self.root / "step-10" / "model.safetensors", self.root / "step-20")
        (self.root / "step-30").mkdir()
        (self.root / "step-30" / "notes.txt").write_text("mine")
        restored = fsdp_optim.resume(self.root, filled(0))
        self.assertEqual(restored.step if restored is not None else None, 10)

    def test_a_save_replaces_what_has_lost_its_manifest(self) -> None:
        (self.root / "step-10" / MANIFEST).unlink()
        (self.root / "step-10" / "notes.txt").write_text("mine")
        refused(lambda: save(self.root / "step-10"), CheckpointError, "already exists")
        save(self.root / "step-10", filled(11), weights_only=True, step=10, overwrite=True)
        model = filled(0)
        fsdp_optim.resume(self.root, model)
        self.assertEqual(float(model.weight.detach()[0, 0]), 11.0)
        self.assertEqual((self.root / "step-10" / "notes.txt").read_text(), "mine")

    def test_a_save_does_not_replace_what_is_no_checkpoint(self) -> None:
        folder = self.root / "step-20"
        folder.mkdir()
        shutil.copy(self.root / "step-10" / "model.safetensors", folder)
        refused(lambda: save(folder, overwrite=True), CheckpointError, "is not a checkpoint")

    def test_a_dcp_checkpoint_without_its_manifest(self) -> None:
        save(self.root / "step-20", step=20, format="dcp")
        (self.root / "step-20" / ".metadata").unlink()
        refused(lambda: fsdp_optim.resume(self.root, filled(0)), CheckpointError, "step-20", ".metadata: is missing")
        save(self.root / "step-20", step=20, format="dcp", overwrite=True)
        self.check_latest("step-20")


class ReasonTest(CatalogTest):
    def test_a_missing_file_is_named_in_the_words_of_load(self) -> None:
        save(self.path, filled(1), weights_only=True)
        (self.path / "model.safetensors").unlink()
        wanted = f"{self.path}/model.safetensors: is missing; the checkpoint is incomplete"
        (checkpoint,) = fsdp_optim.checkpoints(self.root)
        self.assertEqual(checkpoint.reason, wanted)
        refused(lambda: fsdp_optim.resume(self.root, filled(0)), CheckpointError, wanted)
        refused(lambda: fsdp_optim.load(self.path, filled(0)), CheckpointError, wanted)


class ManagerTest(CatalogTest):
    def setUp(self) -> None:
        super().setUp()
        run = Run(self.root, "plain")
        with run.manager:
            run.steps(range(1, 5))
        self.newest = self.root / "step-00000004"

    @parameterized.expand(TROUBLES)
    def test_the_newest_is_named_and_replaced(self, _: str, trouble: Any, reason: str) -> None:
        """Also where it can be read again when the run saves: what was there at the resume is not another run's."""
        run = Run(self.root, "plain")
        with run.manager:
            with trouble(self.newest):
                words = (f"{self.newest}, the newest checkpoint, cannot be loaded", reason, "step-00000002")
                refused(run.manager.resume, CheckpointError, *words)
                self.assertEqual(run.manager.resume(on_damage="previous"), 2)
            run.train(3)
            run.manager.save(3)
            run.manager.wait()
            run.steps([4])
        self.assertEqual(steps_in(self.root), [4, 3, 2])
        again = Run(self.root, "plain")
        with again.manager:
            self.assertEqual(again.manager.resume(), 4)

    def test_another_run_is_still_seen(self) -> None:
        """One that replaces what this run has saved itself, where something could not be read at the resume."""
        run = Run(self.root, "plain")
        with run.manager:
            with closed(self.newest):
                run.manager.resume(on_damage="previous")
            run.steps(range(3, 5))
            run.manager.wait()
            other = Run(self.root, "plain")
            with other.manager:
                other.manager.rollback(to=2)
                other.steps(range(3, 5))
            refused(lambda: run.manager.save(9), CheckpointError, "another run saves into this folder")

    @parameterized.expand(TROUBLES)
    def test_alone_it_is_no_fresh_start(self, _: str, trouble: Any, reason: str) -> None:
        shutil.rmtree(self.root / "step-00000002")
        with trouble(self.newest):
            run = Run(self.root, "plain")
            with run.manager:
                refused(run.manager.resume, CheckpointError, str(self.newest), reason)
            run = Run(self.root, "plain")
            with run.manager:
                refused(lambda: run.steps(range(1, 3)), CheckpointError, "this manager has not resumed")


@unittest.skipUnless(can_change, "only root may become another account")
class AnotherAccountTest(CatalogTest):
    def test_a_manager(self) -> None:
        """As the account that may read nothing of the newest checkpoint, and may not remove it."""
        run = Run(self.root, "plain")
        with run.manager:
            run.steps(range(1, 5))
        newest = self.root / "step-00000004"
        close(newest)
        run = Run(self.root, "plain")
        with run.manager, as_nobody(self.root):
            refused(
                run.manager.resume, CheckpointError, f"{newest}, the newest checkpoint", "this user may not read it"
            )
            self.assertEqual(run.manager.resume(on_damage="previous"), 2)
            run.steps([3])
            with self.assertLogs(LOG, "WARNING") as logs:
                run.steps([4])
                run.manager.wait()
        self.assertIn("which this user may not remove", "\n".join(logs.output))
        (kept,) = self.root.glob("step-00000004.old-*")
        self.assertIn("model.safetensors", os.listdir(kept), "nothing of the other account is lost")
        self.assertEqual(steps_in(self.root), [4, 2])

    def test_resume_and_save(self) -> None:
        for step in (5, 10):
            save(self.root / f"step-{step}", filled(step), weights_only=True, step=step)
        close(self.root / "step-10")
        (self.root / "private").mkdir(mode=0o700)
        with as_nobody(self.root):
            refused(lambda: fsdp_optim.resume(self.root, filled(0)), CheckpointError, "step-10, the newest checkpoint")
            save(self.root / "step-10", filled(11), weights_only=True, step=10, overwrite=True)
            self.check_latest("step-10")
            refused(
                lambda: save(self.root / "private", filled(1), weights_only=True, overwrite=True),
                CheckpointError,
                "private: this user may not read it",
                "so it is not replaced",
            )
        self.assertTrue((self.root / "private").is_dir())


class BucketTest(CatalogTest):
    def setUp(self) -> None:
        import fsspec

        super().setUp()
        self.url, self.memory = f"memory://{self.id()}/run", fsspec.filesystem("memory")
        for step in (5, 10):
            save(f"{self.url}/step-{step}", filled(step), weights_only=True, step=step)  # type: ignore[arg-type]

    def test_a_lost_manifest(self) -> None:
        self.memory.rm(f"/{self.id()}/run/step-10/{MANIFEST}")
        refused(
            lambda: fsdp_optim.resume(self.url, filled(0)),
            CheckpointError,
            "step-10, the newest checkpoint, cannot be loaded",
            f"{MANIFEST}: is missing",
            "step-5",
        )
        restored = fsdp_optim.resume(self.url, filled(0), on_damage="previous")
        self.assertEqual(restored.step if restored is not None else None, 5)
        save(f"{self.url}/step-10", filled(11), weights_only=True, step=10)  # type: ignore[arg-type]
        model = filled(0)
        fsdp_optim.resume(self.url, model)
        self.assertEqual(float(model.weight.detach()[0, 0]), 11.0)

    def test_what_is_no_save(self) -> None:
        self.memory.pipe_file(f"/{self.id()}/run/step-20/model.safetensors", b"mine")
        self.memory.pipe_file(f"/{self.id()}/run/logs/0.txt", b"mine")
        self.assertEqual(len(fsdp_optim.checkpoints(self.url)), 2)


def resume_on_ranks(root: Path) -> None:
    """Only the lowest rank looks; its error is every rank's."""
    model = filled(-1)
    words = ("step-10, the newest checkpoint, cannot be loaded", "is missing")
    refused(lambda: fsdp_optim.resume(root, model), CheckpointError, *words)
    restored = fsdp_optim.resume(root, model, on_damage="previous")
    check_same("step", restored.step if restored is not None else None, 5)
    check_same("value", float(model.weight.detach()[0, 0]), 5.0)
    logging.getLogger(LOG).info("resumed")


class RanksTest(CatalogTest):
    def test_all_ranks_say_the_same(self) -> None:
        for step in (5, 10):
            save(self.root / f"step-{step}", filled(step), weights_only=True, step=step)
        (self.root / "step-10" / MANIFEST).unlink()
        run_on_threads(resume_on_ranks, 2, self.root)


if __name__ == "__main__":
    unittest.main()
