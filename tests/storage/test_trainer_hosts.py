"""Trainers on several machines, whose file system shows late what another machine has done.

There is one machine here. What tells the library of machines is replaced, and so are a rank's looks at files: some names come at
its fourth look only, and in no listing, as clients of network file systems do it that keep names for seconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import unittest
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import check_same, refused
from kit.folders import InFolder
from parameterized import parameterized
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdp_optim
from fsdp_optim import CheckpointError, SaveOptions
from fsdp_optim.checkpoint.trainers import looks as trainer_looks
from fsdp_optim.integrations.hugging_face import accelerator_state, trainer_folder
from fsdp_optim.integrations.hugging_face.settings import Settings
from fsdp_optim.plugins import TrainerFolder
from fsdp_optim.storage.posix import filled, filling, leftovers, small_files, store, trainer_files
from fsdp_optim.testing import run_on_ranks

QUIET = Settings(save_options=SaveOptions(progress=False, durable=False))


@contextlib.contextmanager
def machines(*of_ranks: str) -> Iterator[None]:
    """Each rank is on the machine of this name."""
    with mock.patch.object(store, "this_host", return_value=of_ranks[dist.get_rank()]):
        yield


@contextlib.contextmanager
def shows_late(names: Collection[str], *, on_rank: int, looks: int = 3) -> Iterator[None]:
    """A rank whose client does not show these names at its first looks, and never in a listing."""
    left = dict.fromkeys(names, looks)

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        def looked(path: Any, *args: Any, **kwargs: Any) -> Any:
            name = os.path.basename(path) if isinstance(path, (str, os.PathLike)) else ""
            if left.get(name, 0) > 0:
                left[name] -= 1
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return call(path, *args, **kwargs)

        return looked

    def listed(path: Any = ".", listdir: Callable[..., list[str]] = os.listdir) -> list[str]:
        return [name for name in listdir(path) if name not in left]

    with contextlib.ExitStack() as stack:
        if dist.get_rank() == on_rank:
            for name in ("stat", "lstat", "open"):
                stack.enter_context(mock.patch.object(os, name, late(getattr(os, name))))
            stack.enter_context(mock.patch.object(os, "listdir", listed))
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(2, 2))


# ------------------------------------------------------------------------------------------ save


def saved(
    root: Path, hosts: tuple[str, ...], background: bool, texts: list[dict[str, str]], late: Collection[str]
) -> None:
    """Save a model with the files that each rank has written; rank 0 sees some of them late."""
    options = SaveOptions(progress=False)
    with machines(*hosts), shows_late(late, on_rank=0):
        save = TrainerFolder.begin(f"{root}/checkpoint-2", options)
        with save.writing():
            for name, text in texts[dist.get_rank()].items():
                Path(save.files, name).parent.mkdir(exist_ok=True)
                Path(save.files, name).write_text(text)
        save.commit(net(), None, step=2, background=background)
        fsdp_optim.wait_for_saves()


def never_seen(root: Path, background: bool) -> None:
    def save() -> None:
        saved(root, ("a", "b"), background, [{}, {"rng_state_1.pth": "of 1"}], ["rng_state_1.pth"])

    with mock.patch.object(filling, "VISIBLE_WITHIN", 0.2), mock.patch.object(filling, "has_size", return_value=False):
        refused(
            save, CheckpointError, "checkpoint-2: rng_state_1.pth", "4 bytes", "rank 1", "not visible", "after 0.2 s"
        )


def begun_late(root: Path) -> None:
    """Rank 1 sees the folder of rank 0 at its fourth look."""
    looks, sees = [0], store.sees

    def seen(path: Path) -> bool:
        looks[0] += 1
        return looks[0] > 3 and sees(path)

    with machines("a", "b"), mock.patch.object(store, "sees", seen):
        save = TrainerFolder.begin(f"{root}/checkpoint-2", QUIET.saving())
        save.failure.note(CheckpointError("no more"))
        refused(lambda: save.commit(net(), None, step=2), CheckpointError, "no more")
    check_same("looks", looks[0], 4)


class SaveTest(InFolder):
    def there(self) -> dict[str, str]:
        """The files of the trainer in the checkpoint."""
        files = [file for file in (self.root / "checkpoint-2").rglob("*") if file.is_file()]
        names = {str(file.relative_to(self.root / "checkpoint-2")): file for file in files}
        names_of_library = ("fsdp_optim", "model.safetensors")
        return {name: file.read_text() for name, file in names.items() if not name.startswith(names_of_library)}

    @parameterized.expand([(False,), (True,)])
    def test_files_of_other_machines_are_there_although_no_listing_shows_them(self, background: bool) -> None:
        of_ranks = [{f"rng_state_{rank}.pth": f"of {rank}", "all.txt": f"of {rank}"} for rank in range(3)]
        of_ranks[2] |= {"deep/a.txt": "a"}
        late = ["rng_state_2.pth", "a.txt"]
        run_on_ranks(saved, 3, self.root, ("a", "a", "b"), background, of_ranks, late)
        there = self.there()
        self.assertIn(there.pop("all.txt"), ("of 0", "of 1"))  # of the machine of the lowest rank
        wanted = {f"rng_state_{rank}.pth": f"of {rank}" for rank in range(3)} | {"deep/a.txt": "a"}
        self.assertEqual(there, wanted)
        fsdp_optim.verify(self.root / "checkpoint-2")
        self.check_only("checkpoint-2")

    @parameterized.expand([(False,), (True,)])
    def test_a_file_that_never_comes_is_named_on_all_ranks(self, background: bool) -> None:
        run_on_ranks(never_seen, 2, self.root, background)
        self.check_only()

    def test_a_file_counts_when_its_size_is_the_one_that_was_told(self) -> None:
        file = self.root / "rng_state_1.pth"
        file.write_text("of 1")
        self.assertFalse(small_files.has_size(file, 5))
        self.assertTrue(small_files.has_size(file, 4))
        (self.root / "link").symlink_to("nowhere")
        self.assertEqual(small_files.sizes_in(self.root), {"link": -1, "rng_state_1.pth": 4})
        self.assertTrue(small_files.has_size(self.root / "link", -1))

    def test_the_folder_of_rank_0_may_be_seen_late(self) -> None:
        run_on_ranks(begun_late, 2, self.root)
        self.check_only()


# ------------------------------------------------------------------------------------------ load


def loaded(root: Path, late: Collection[str]) -> list[str]:
    """The calls that a rank makes when the Trainer loads a checkpoint of this library, parts of which rank 1 sees late."""
    path, calls = f"{root}/checkpoint-2", []

    def trainer_of(model: nn.Module) -> Any:
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)
        accelerator = SimpleNamespace(unwrap_model=lambda module, **_: module)
        return SimpleNamespace(
            model=model, model_wrapped=model, optimizer=optim, lr_scheduler=scheduler, accelerator=accelerator
        )

    with machines("a", "b"):
        trainer = trainer_of(net())
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        save = TrainerFolder.begin(path, QUIET.saving())
        with save.writing():
            if dist.get_rank() == 0:
                torch.save(trainer.lr_scheduler.state_dict(), f"{save.files}/scheduler.pt")
        save.commit(trainer.model, trainer.optimizer, step=2)
        with shows_late(late, on_rank=1), mock.patch.object(trainer_folder, "_which_weights", return_value="all"):
            other = trainer_of(net())
            trainer_folder.load_from_checkpoint(lambda *_: calls.append("weights"), other, QUIET, path)
            trainer_folder.load_optimizer_and_scheduler(lambda *_: calls.append("optimizer"), other, QUIET, path)
        calls.append(f"epoch {other.lr_scheduler.last_epoch}")
    return calls


def never_loaded(root: Path) -> None:
    os.makedirs(f"{root}/checkpoint-2", exist_ok=True)
    for name in ("fsdp_optim.json", "trainer_state.json"):
        Path(root, "checkpoint-2", name).touch()
    dist.barrier()
    words = ("rank 1", "trainer_state.json", "not visible", "after 0.2 s")
    hidden = shows_late(["trainer_state.json"], on_rank=1, looks=1000)
    with machines("a", "b"), mock.patch.object(trainer_looks, "VISIBLE_WITHIN", 0.2), hidden:
        path = f"{root}/checkpoint-2"
        refused(lambda: trainer_folder.look_at(path, QUIET, with_optim=False), CheckpointError, *words)
        refused(lambda: trainer_folder.get_last_checkpoint(lambda _: path, QUIET, root), CheckpointError, *words)


def last_checkpoint(root: Path) -> str:
    """The last checkpoint of a folder in which rank 1 does not see the newest one yet."""

    def original(folder: Path) -> str:
        return f"{folder}/{max(os.listdir(folder))}"

    with machines("a", "b"), shows_late(["checkpoint-2"], on_rank=1):
        return Path(trainer_folder.get_last_checkpoint(original, QUIET, root)).name


def by_accelerate(root: Path) -> str:
    """A folder that already exists is refused on all ranks, and all ranks load the newest one."""
    naming = SimpleNamespace(automatic_checkpoint_naming=True, save_on_each_node=False, total_limit=None)
    accelerator = SimpleNamespace(
        project_configuration=naming,
        project_dir=str(root),
        save_iteration=2,
        distributed_type=SimpleNamespace(name="MULTI_CPU"),
        _save_model_state_pre_hook={},
        _models=[net()],
        _optimizers=[],
    )
    with machines("a", "b"), shows_late(["checkpoint_2"], on_rank=1):
        refused(
            lambda: accelerator_state.save_state(print, accelerator, QUIET),
            CheckpointError,
            "checkpoint_2: already exists",
        )
        return Path(accelerator_state.load_state(lambda path: path, accelerator, QUIET)).name


class LoadTest(InFolder):
    @parameterized.expand([("fsdp_optim.json",), ("scheduler.pt",)])
    def test_all_ranks_take_the_branch_of_rank_0(self, late: str) -> None:
        self.assertEqual(run_on_ranks(loaded, 2, self.root, [late]), [["epoch 1"]] * 2)

    def test_a_file_that_never_comes_is_named_on_all_ranks(self) -> None:
        run_on_ranks(never_loaded, 2, self.root)

    def test_all_ranks_resume_from_the_checkpoint_that_rank_0_finds(self) -> None:
        for step in (1, 2):
            (self.root / f"checkpoint-{step}").mkdir()
            (self.root / f"checkpoint-{step}" / "trainer_state.json").touch()
        self.assertEqual(run_on_ranks(last_checkpoint, 2, self.root), ["checkpoint-2"] * 2)

    def test_accelerates_newest_and_next_folder_are_those_of_rank_0(self) -> None:
        for number in (1, 2):
            (self.root / f"checkpoints/checkpoint_{number}").mkdir(parents=True)
        self.assertEqual(run_on_ranks(by_accelerate, 2, self.root), ["checkpoint_2"] * 2)


# ------------------------------------------------------------------------------------------ rotation


def rotation_fails(root: Path) -> None:
    """Rank 0, which removes older checkpoints, cannot list them."""
    trainer = SimpleNamespace(args=SimpleNamespace(should_save=dist.get_rank() == 0))
    setattr(trainer, trainer_folder.ROTATION, trainer_folder.Rotation(root / "checkpoint-3", 1, None))
    broken = mock.patch.object(os, "listdir", side_effect=OSError(errno.EIO, "Input/output error"))
    with broken if dist.get_rank() == 0 else contextlib.nullcontext():
        refused(lambda: trainer_folder._rotate(trainer, QUIET), CheckpointError, "rank 0", "Input/output error")


class RotationTest(InFolder):
    def setUp(self) -> None:
        super().setUp()
        for step in (9, 10, 11):
            (self.root / f"checkpoint-{step}").mkdir()
            os.utime(self.root / f"checkpoint-{step}", (100 - step, 100 - step))  # by a clock that is behind

    def rotate(self, limit: int, best: str | None = None) -> None:
        trainer = SimpleNamespace(args=SimpleNamespace(should_save=True))
        setattr(trainer, trainer_folder.ROTATION, trainer_folder.Rotation(self.root / "checkpoint-11", limit, best))
        trainer_folder._rotate(trainer, QUIET)

    def test_the_lowest_step_goes_first_whatever_the_clocks_say(self) -> None:
        self.rotate(2)
        self.check_only("checkpoint-10", "checkpoint-11")
        self.rotate(1, str(self.root / "checkpoint-10"))
        self.check_only("checkpoint-10", "checkpoint-11")
        self.rotate(1)
        self.check_only("checkpoint-11")

    def test_a_folder_loses_its_name_before_its_files(self) -> None:
        with mock.patch.object(leftovers, "remove_tree"), mock.patch.object(shutil, "rmtree"):  # as if killed then
            self.rotate(2)
        names = {path.name.rpartition("-")[0] for path in self.root.iterdir()}
        self.assertEqual(names, {"checkpoint-9.gone", "checkpoint"})

    def test_a_folder_that_cannot_be_removed_is_warned_about(self) -> None:
        busy = mock.patch.object(filled, "retire", side_effect=OSError(errno.EBUSY, "Device or resource busy"))
        with busy, self.assertLogs("fsdp_optim", "WARNING") as logs:
            self.rotate(2)
        self.assertIn("checkpoint-9 cannot be removed", logs.output[0])
        self.check_only("checkpoint-9", "checkpoint-10", "checkpoint-11")

    def test_an_error_of_rank_0_is_raised_on_all_ranks(self) -> None:
        run_on_ranks(rotation_fails, 2, self.root)


# ------------------------------------------------------------------------------------------ small files


class SmallFilesTest(InFolder):
    @parameterized.expand([(errno.EIO,), (errno.EACCES,), (errno.ESTALE,)])
    def test_a_look_that_fails_is_an_error_and_not_no_file(self, number: int) -> None:
        for look in (small_files.has_file, lambda folder, name: small_files.folders_in(folder)):
            (self.root / "a").touch()
            with mock.patch.object(os, "stat", side_effect=OSError(number, "cannot tell")):
                self.assertRaisesRegex(CheckpointError, "cannot be looked at: cannot tell", look, self.root, "a")

    def test_a_stale_handle_is_looked_at_again(self) -> None:
        (self.root / "a").touch()
        stat, looks = os.stat, [0]

        def stale(path: Any, **kwargs: Any) -> Any:
            looks[0] += 1
            if looks[0] == 1:
                raise OSError(errno.ESTALE, "Stale file handle")
            return stat(path, **kwargs)

        with mock.patch.object(os, "stat", stale):
            self.assertTrue(small_files.has_file(self.root, "a"))
            self.assertFalse(small_files.has_file(self.root, "b"))
            self.assertFalse(small_files.has_file(self.root / "a", "b"))

    def test_several_processes_replace_a_text_at_once(self) -> None:
        file, errors = self.root / "tracker.txt", []
        begin = threading.Barrier(8)

        def write(text: str) -> None:
            try:
                for _ in range(20):
                    begin.wait(30)
                    small_files.replace_text(file, text)
            except Exception as error:
                errors.append(error)
                begin.abort()

        threads = [threading.Thread(target=write, args=(str(number) * 9,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])
        self.assertIn(file.read_text(), [str(number) * 9 for number in range(8)])
        self.check_only("tracker.txt")

    def test_a_copy_beside_is_whole_or_not_there(self) -> None:
        (self.root / "assets").mkdir()
        (self.root / "assets/config.json").write_text("{}")
        (self.root / "place").mkdir()

        def cut_short(source: Path, target: Path) -> None:
            Path(target).write_text("{")
            raise OSError(errno.EIO, "Input/output error")

        refuses = self.assertRaisesRegex(CheckpointError, "Input/output error")
        with mock.patch.object(shutil, "copyfile", cut_short), refuses:
            trainer_files.copy_beside(self.root / "assets", self.root / "place", without=())
        self.assertEqual(os.listdir(self.root / "place"), [])
        self.assertEqual(
            trainer_files.copy_beside(self.root / "assets", self.root / "place", without=()), ["config.json"]
        )
        self.assertEqual((self.root / "place/config.json").read_text(), "{}")


if __name__ == "__main__":
    unittest.main()
