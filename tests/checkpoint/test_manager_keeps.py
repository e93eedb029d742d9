"""CheckpointManager: which checkpoints are kept, in a folder and in a bucket."""

from __future__ import annotations

import os
import shutil
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from kit.catalogs import CatalogTest
from kit.catalogs import save as save_plain
from kit.checkpoint_damage import garble, seal, seal_as_it_is, sealed_brief
from kit.checkpoint_format import read_manifest
from kit.checkpoints import before_writes
from kit.compare import check_same, refused
from kit.managed import Run, names_in, steps_in
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.storage.posix import FolderDirectory


class KeepTest(CatalogTest):
    def test_the_rules_together(self) -> None:
        run = Run(self.root, "plain", every=1, keep_last=2, keep_every=4, keep_best=1)
        metrics = {1: 5.0, 2: 1.0, 3: 2.0, 4: 9.0, 5: float("nan"), 6: 3.0, 7: None, 8: 4.0, 9: 6.0}
        with run.manager:
            run.steps(range(1, 10), metrics.get)
        self.assertEqual(steps_in(self.root), [9, 8, 4, 2])
        self.assertEqual([checkpoint.metric for checkpoint in fsdp_optim.checkpoints(self.root)], [6.0, 4.0, 9.0, 1.0])

    def test_the_highest_metric(self) -> None:
        run = Run(self.root, "plain", every=1, keep_best=2, best="max")
        with run.manager:
            run.steps(range(1, 6), {1: 5.0, 2: 9.0, 3: 9.0, 4: 1.0, 5: 2.0}.get)
        self.assertEqual(steps_in(self.root), [5, 3, 2])

    def test_a_multiple_that_the_steps_pass_over_is_reached(self) -> None:
        """A loop that counts in larger steps, or whose count jumps."""
        run = Run(self.root, "plain", every=5)
        with run.manager:
            run.steps((3, 4, 7, 9, 10, 14, 21))
        self.assertEqual(steps_in(self.root), [21, 10, 7])

    def test_what_cannot_be_read_at_the_beginning_of_a_save_without_flushes_stays(self) -> None:
        """A save that has not seen that it will remove anything is not on the disk when it ends: the next one removes it."""
        run = Run(self.root, "plain", every=1, keep_last=1)
        old = self.root / "step-00000001"
        manifest = old / "fsdp_optim.json"

        def show(file: Any) -> None:
            """As soon as tensors are written the older checkpoint can be read again."""
            path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
            if path.endswith("model.safetensors"):
                manifest.write_bytes(good)

        with run.manager:
            run.steps(range(1, 2))
            run.manager.wait()
            good = manifest.read_bytes()
            seal(old, read_manifest(old) | {"version": 99})
            with before_writes(show):
                run.steps(range(2, 3))
                run.manager.wait()
            self.assertEqual(manifest.read_bytes(), good)
            self.assertEqual(steps_in(self.root), [2, 1])
            run.steps(range(3, 4))
        self.assertEqual(steps_in(self.root), [3])

    def test_without_a_rule_all_stay(self) -> None:
        run = Run(self.root, "plain", every=1)
        with run.manager:
            run.steps(range(1, 5))
        self.assertEqual(steps_in(self.root), [4, 3, 2, 1])

    def test_what_no_manager_made_stays(self) -> None:
        """A save by hand, a copy, another name, a folder, a file, a damaged one, a link: none counts, none goes."""
        run = Run(self.root, "plain", every=1, keep_last=2)
        with run.manager:
            run.steps(range(1, 3))
            run.manager.wait()
            save_plain(self.root / "best", run.model, step=1)
            save_plain(self.root / "step-00000000", run.model, step=0)
            save_plain(self.root / "step-9", run.model, step=9)
            shutil.copytree(self.root / "step-00000001", self.root / "kept")
            shutil.copytree(self.root / "step-00000001", self.root / "step-00000007")
            (self.root / "notes").mkdir()
            (self.root / "step-00000005").mkdir()
            (self.root / "step-00000006").write_text("a file")
            (self.root / "step-00000008").symlink_to(self.root / "kept")
            others = set(names_in(self.root)) - {"step-00000001", "step-00000002"}
            run.steps(range(3, 5))
            run.manager.wait()
            self.assertEqual(set(names_in(self.root)), others | {"step-00000003", "step-00000004"})
            garble(self.root / "step-00000003")
            shutil.rmtree(self.root / "step-00000005")
            run.steps(range(5, 6))
            run.manager.wait()
            self.assertIn("step-00000003", names_in(self.root), "a damaged one is neither counted nor removed")
            refused(lambda: run.steps(range(6, 7)), CheckpointError, "step-00000006")
            words = ("step-00000007: already exists, and no CheckpointManager made it",)
            refused(lambda: run.steps(range(7, 8)), CheckpointError, *words)
        self.assertLessEqual(others - {"step-00000005"}, set(names_in(self.root)))

    def test_one_that_cannot_be_loaded_does_not_count(self) -> None:
        run = Run(self.root, "plain", every=1, keep_last=2)
        with run.manager:
            run.steps(range(1, 3))
            run.manager.wait()
            manifest = self.root / "step-00000002" / "fsdp_optim.json"
            text = manifest.read_bytes()
            manifest.write_bytes(text[:-40] + b"x" + text[-39:])  # behind the brief
            run.steps(range(3, 4))
        self.check_only("step-00000001", "step-00000002", "step-00000003")

    @parameterized.expand([("removed", {"keep_last": 1}, 1), ("taken back", {}, 2)])
    def test_nothing_goes_before_the_new_one_is_on_the_disk(self, _: str, rules: dict[str, Any], last: int) -> None:
        """Also with durable=False: what goes may be the only one that is on the disk."""
        run = Run(self.root, "plain", every=1, **rules)
        events: list[str] = []
        real_sync, real_remove = os.fsync, FolderDirectory.remove

        def sync(file: int) -> None:
            if os.readlink(f"/proc/self/fd/{file}").endswith("model.safetensors"):
                events.append("sync")
            real_sync(file)

        def remove(directory: Any, entries: Any, reason: str) -> None:
            events.append("remove")
            real_remove(directory, entries, reason)

        patches = (mock.patch.object(os, "fsync", sync), mock.patch.object(FolderDirectory, "remove", remove))
        with run.manager, patches[0], patches[1]:
            run.steps(range(1, last + 1))
            run.manager.wait()
            self.assertEqual(events, [], "nothing goes, and nothing is flushed")
            if last == 2:
                run.manager.rollback(to=1)
                run.manager.save(3)
            else:
                run.steps([2])
            run.manager.wait()
        self.assertEqual((events[0], events[-1]), ("sync", "remove"))

    def test_a_reader_passes_over_what_a_later_version_records(self) -> None:
        """As readers of earlier versions do with the record of a manager."""
        run = Run(self.root, "plain", every=1)
        with run.manager:
            run.steps([1])
        folder = self.root / "step-00000001"
        manifest = read_manifest(folder)
        self.assertEqual(manifest["brief"]["manager"], {"after": -1, "metric": None})
        more = sealed_brief({**manifest["brief"], "manager": {"after": -1, "metric": None, "more": 1}, "yet more": [2]})
        seal_as_it_is(folder, {**manifest, "brief": more})
        self.assertEqual(Path(str(fsdp_optim.latest(self.root))).name, folder.name)
        again = Run(self.root, "plain")
        with again.manager:
            self.assertEqual(again.manager.resume(), 1)


class BucketTest(unittest.TestCase):
    def test_a_bucket(self) -> None:
        """Save, keep, resume, go back, in a store without renames."""
        root = f"memory://{self.id()}/run"
        run = Run(root, "plain", every=1, keep_last=3)
        with run.manager:
            self.assertEqual(run.manager.resume(), 0)
            run.steps(range(1, 6))
        self.assertEqual(steps_in(root), [5, 4, 3])
        again = Run(root, "plain", every=2, keep_last=3)
        with again.manager:
            self.assertEqual(again.manager.resume(), 5)
            check_same("params", again.everything()["params"], run.everything()["params"])
            again.manager.rollback(to=3)
            again.steps(range(4, 5))
            again.manager.wait()
            self.assertEqual(steps_in(root), [4, 3])


if __name__ == "__main__":
    unittest.main()
