"""Files of a trainer that a checkpoint's folder gets in the moment in which it gets its name."""

from __future__ import annotations

import contextlib
import os
import unittest
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import error_text, refused
from kit.folders import InFolder
from torch import nn

import fsdp_optim
from fsdp_optim import CallOptions, CheckpointError, LoadOptions, SaveOptions, View
from fsdp_optim.checkpoint.common import seen_by_all as sharing
from fsdp_optim.integrations.hugging_face import trainer_folder
from fsdp_optim.integrations.hugging_face.folders import is_outdated, is_sharded_by_accelerate, optimizer_inside
from fsdp_optim.integrations.hugging_face.settings import Settings
from fsdp_optim.plugins import TrainerFolder
from fsdp_optim.storage.posix import FolderWriter, folder, store
from fsdp_optim.testing import run_on_ranks

OURS = {"fsdp_optim.json", "model.safetensors", "model.safetensors.sums", "extra"}


class TrainerFolderTest(InFolder):
    def save(
        self,
        files: dict[str, str],
        path: str = "checkpoint-2",
        between: Callable[[], object] = lambda: None,
        background: bool = False,
    ) -> Path:
        """Save a model, with these files of a trainer; `between` is called when the files are there."""
        save = TrainerFolder.begin(f"{self.root}/{path}", SaveOptions(progress=False), is_outdated=is_outdated)
        with save.writing():
            for name, text in files.items():
                Path(save.files, name).parent.mkdir(exist_ok=True)
                Path(save.files, name).write_text(text)
        between()
        save.commit(nn.Linear(2, 2), None, step=2, background=background)
        fsdp_optim.wait_for_saves()
        return save.path

    def there(self, path: str = "checkpoint-2") -> dict[str, str]:
        """The files at a path besides those of a save."""
        files = [file for file in Path(self.root, path).rglob("*") if file.is_file()]
        texts = {str(file.relative_to(self.root / path)): file for file in files}
        return {name: file.read_text() for name, file in sorted(texts.items()) if name not in OURS}

    def test_files_and_folders_are_beside_the_weights(self) -> None:
        for background in (False, True):
            self.save({"config.json": "{}", "tokens/a.txt": "a"}, f"checkpoint-{background}", background=background)
            self.assertEqual(self.there(f"checkpoint-{background}"), {"config.json": "{}", "tokens/a.txt": "a"})
            fsdp_optim.verify(self.root / f"checkpoint-{background}")
        self.check_only("checkpoint-False", "checkpoint-True")

    def test_nothing_has_the_name_before_all_is_there(self) -> None:
        self.save({"config.json": "{}"}, between=lambda: self.assertFalse((self.root / "checkpoint-2").exists()))

    def test_a_second_save_replaces_the_files_of_the_first(self) -> None:
        """Of the others those stay that somebody else has put there, and not what the trainer wrote for other ranks."""
        self.save({"scheduler.pt": "1", "rng_state_0.pth": "1", "rng_state_1.pth": "1", "trainer_state.json": "1"})
        Path(self.root, "checkpoint-2", "notes.txt").write_text("mine")
        self.save({"scheduler.pt": "2", "rng_state.pth": "2", "trainer_state.json": "2"})
        wanted = {"scheduler.pt": "2", "rng_state.pth": "2", "trainer_state.json": "2", "notes.txt": "mine"}
        self.assertEqual(self.there(), dict(sorted(wanted.items())))
        self.check_only("checkpoint-2")

    def test_a_checkpoint_of_the_trainer_itself_is_replaced(self) -> None:
        old = ("optimizer.pt", "pytorch_model_fsdp_0/.metadata", "optimizer_0/__0_0.distcp", "model.safetensors")
        for name in (*old, "model-00001-of-00002.safetensors", "pytorch_model.bin", "notes.txt", "logs/a.txt"):
            path = self.root / "checkpoint-2" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("old")
        self.save({"config.json": "{}"})
        self.assertEqual(self.there(), {"config.json": "{}", "logs/a.txt": "old", "notes.txt": "old"})
        fsdp_optim.verify(self.root / "checkpoint-2")
        self.check_only("checkpoint-2")

    def test_what_is_written_at_the_path_during_the_save_is_kept(self) -> None:
        def write() -> None:
            os.mkdir(self.root / "checkpoint-2")
            (self.root / "checkpoint-2" / "card.md").write_text("a callback's")

        self.save({"config.json": "{}"}, between=write)
        self.assertEqual(self.there(), {"card.md": "a callback's", "config.json": "{}"})

        def write_late(path: Path) -> None:  # when the files were carried over, and before the old folder goes
            (self.root / "checkpoint-2" / "late.txt").write_text("late")
            sync(path)

        self.there()
        Path(self.root, "checkpoint-2", "fsdp_optim.json").unlink()  # now it is the trainer's
        sync = folder._sync_folders
        with mock.patch.object(folder, "_sync_folders", write_late):
            self.save({"config.json": "new"})
        self.assertEqual(self.there(), {"card.md": "a callback's", "config.json": "new", "late.txt": "late"})

    def test_a_file_with_the_name_of_one_of_ours_is_refused_and_the_earlier_checkpoint_stays(self) -> None:
        self.save({"config.json": "{}"})
        kind, message = error_text(lambda: self.save({"optim.safetensors": "", "model.safetensors": ""}))
        self.assertEqual(kind, "CheckpointError")
        self.assertIn("model.safetensors", message)
        fsdp_optim.verify(self.root / "checkpoint-2")
        self.check_only("checkpoint-2")

    def test_after_a_failure_nothing_is_left(self) -> None:
        def full(self: FolderWriter, name: str, pieces: object, offset: int) -> None:
            raise fsdp_optim.CheckpointError("No space left on device")

        self.save({"config.json": "{}"}, "checkpoint-1")
        for background in (False, True):
            with mock.patch.object(FolderWriter, "write", full):
                told = error_text(lambda at=background: self.save({"config.json": "{}"}, background=at))
            self.assertEqual(told[0], "CheckpointError")
            self.assertIn("No space left on device", told[1])
            self.check_only("checkpoint-1")
        save = TrainerFolder.begin(f"{self.root}/checkpoint-2", SaveOptions(progress=False))
        with save.writing():
            raise OSError(28, "No space left on device")
        told = error_text(lambda: save.commit(nn.Linear(2, 2), None, step=2))
        self.assertEqual(told[0], "CheckpointError")
        self.assertIn("checkpoint-2: OSError: [Errno 28] No space left on device", told[1])
        self.check_only("checkpoint-1")
        save = TrainerFolder.begin(f"{self.root}/checkpoint-2", SaveOptions(progress=False))
        with save.writing():
            raise KeyboardInterrupt
        with self.assertRaises(KeyboardInterrupt):  # where the other ranks are told
            save.commit(nn.Linear(2, 2), None, step=2)
        self.check_only("checkpoint-1")

    def test_leftovers_of_the_dead_go_and_files_of_the_living_stay(self) -> None:
        dead = self.root / "checkpoint-1.new-0123456789abcdef"
        dead.mkdir()
        (dead / "owner.lock").touch()
        (dead / "config.json").touch()
        living = TrainerFolder.begin(f"{self.root}/checkpoint-3", SaveOptions(progress=False))
        self.save({"config.json": "{}"})
        self.check_only("checkpoint-2", living.files.name)
        with living.writing():
            Path(living.files, "config.json").write_text("{}")
        living.commit(nn.Linear(2, 2), None, step=3)
        self.check_only("checkpoint-2", "checkpoint-3")

    def test_a_file_and_a_link_at_the_path_are_refused(self) -> None:
        (self.root / "checkpoint-2").write_text("a file")
        self.assertEqual(error_text(lambda: self.save({}))[0], "CheckpointError")
        (self.root / "elsewhere").mkdir()
        (self.root / "checkpoint-3").symlink_to(self.root / "elsewhere")
        self.assertEqual(error_text(lambda: self.save({}, "checkpoint-3"))[0], "CheckpointError")
        self.check_only("checkpoint-2", "checkpoint-3", "elsewhere")
        self.assertEqual(os.listdir(self.root / "elsewhere"), [])


def begin_apart(root: Path) -> None:
    """Rank 1 does not see the folder that rank 0 makes."""
    unseen = mock.patch.object(store, "sees", return_value=False)
    with unseen if dist.get_rank() == 1 else contextlib.nullcontext(), mock.patch.object(sharing, "SEEN_WITHIN", 0.1):
        words = ("rank 1", "checkpoint-2.new-", "which rank 0 has made", "on a file system that their machines share")
        refused(
            lambda: TrainerFolder.begin(f"{root}/checkpoint-2", SaveOptions(progress=False)), CheckpointError, *words
        )


class RanksTest(InFolder):
    def test_a_folder_that_not_all_ranks_see(self) -> None:
        run_on_ranks(begin_apart, 2, self.root)
        self.check_only()


HALVES = View("up", "(a + b) c", {"gate": "a c", "more": "b c"})


class SettingsTest(unittest.TestCase):
    def test_every_setting_reaches_the_calls(self) -> None:
        call: dict[str, Any] = {
            "timeout": 7,
            "bucket_nbytes": 4096,
            "on_replica_mismatch": "lowest_rank",
            "views": [HALVES],
        }
        saving, loading = SaveOptions(durable=False, **call), LoadOptions(cast=True, **call)
        settings = Settings(save_options=saving, load_options=loading)
        self.assertEqual((settings.saving(), settings.loading()), (saving, loading))
        self.assertEqual(settings.loading({"": "model."}), replace(loading, rename={"": "model."}))
        self.assertEqual(settings.calling(), CallOptions(**call))


class FoldersTest(InFolder):
    def test_which_folders_are_sharded_ones_of_accelerate(self) -> None:
        def there(*names: str) -> tuple[bool, bool]:
            path = self.root / "-".join(names)
            for name in names:
                (path / name).mkdir(parents=True)
                (path / name / ".metadata").touch()
            with_optim, without = (
                is_sharded_by_accelerate(str(path), with_optim=asks_for_optim) for asks_for_optim in (True, False)
            )
            return with_optim, without

        model, optim = "pytorch_model_fsdp_0", "optimizer_0"
        self.assertEqual(there(model, optim), (True, True))
        self.assertEqual(there(model), (False, True))
        self.assertEqual(there(optim), (False, False))
        self.assertEqual(there(model, optim, "pytorch_model_fsdp_1"), (False, False), "one of two models")

    def test_the_last_checkpoint_is_by_its_number(self) -> None:
        """A folder without the trainer's state is passed over, and only then."""
        for step in (9, 10, 11):
            (self.root / f"checkpoint-{step}").mkdir()
            (self.root / f"checkpoint-{step}" / "trainer_state.json").touch()

        def last(name: str | None) -> str:
            path = f"{self.root}/{name}" if name is not None else None
            return str(trainer_folder.get_last_checkpoint(lambda folder: path, Settings(), self.root)).rpartition("/")[
                2
            ]

        self.assertEqual(last("checkpoint-11"), "checkpoint-11")
        (self.root / "checkpoint-11" / "trainer_state.json").unlink()
        with self.assertLogs("fsdp_optim", "WARNING") as logs:
            self.assertEqual(last("checkpoint-11"), "checkpoint-10")
        self.assertIn("checkpoint-11 has no trainer_state.json", logs.output[0])
        self.assertEqual(last(None), "None")


class WrappedTest(unittest.TestCase):
    def test_the_model_and_the_optimizer_inside_their_wrappers(self) -> None:
        class AcceleratedOptimizer:
            def __init__(self, optimizer: Any) -> None:
                self.optimizer = optimizer

        model = nn.Linear(2, 2)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        twice = AcceleratedOptimizer(AcceleratedOptimizer(optim))
        self.assertIs(optimizer_inside(twice), optim)
        for wrapped, wanted in ((model, model), (nn.DataParallel(model), model)):
            trainer = SimpleNamespace(model=model, model_wrapped=wrapped)
            self.assertIs(trainer_folder.model_of(trainer), wanted)


if __name__ == "__main__":
    unittest.main()
