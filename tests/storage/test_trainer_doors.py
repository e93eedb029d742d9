"""What `fsdp_optim.plugins` has for the plug-ins of trainers: steps of all ranks, and the folders and files of a trainer."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import check_same, error_text, refused, refused_on_ranks
from kit.folders import InFolder
from parameterized import parameterized
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import fsdp_optim
from fsdp_optim import CallOptions, CheckpointError, SaveOptions, StateError, plugins
from fsdp_optim.storage.base import VISIBLE_WITHIN
from fsdp_optim.storage.posix import FolderWriter
from fsdp_optim.testing import run_on_ranks, run_on_threads, thread_rank

QUIET = SaveOptions(progress=False, durable=False)


class StepsTest(InFolder):
    def test_what_the_lowest_rank_finds_is_what_all_get(self) -> None:
        asked: list[int] = []

        def look() -> Any:
            asked.append(thread_rank())
            return {"newest": ("a", 1)}

        answers = run_on_threads(lambda: plugins.by_lowest("the newest", look), 3)
        self.assertEqual((answers, asked), ([{"newest": ["a", 1]}] * 3, [0]))

    @parameterized.expand([(OSError(5, "Input/output error"), "CheckpointError"), (StateError("no"), "StateError")])
    def test_its_error_is_that_of_all_ranks(self, error: Exception, kind: str) -> None:
        def call() -> tuple[str, str]:
            return error_text(lambda: plugins.by_lowest("the newest", mock.Mock(side_effect=error)))

        errors = run_on_threads(call, 2)
        self.assertEqual({name for name, _ in errors}, {kind})
        self.assertIn("Input/output error" if kind == "CheckpointError" else "no", errors[1][1])

    def test_each_rank_waits_for_its_own_files(self) -> None:
        """A rank that asks for a file which is not there fails all of them, and is named."""
        (self.root / "a.txt").write_text("four")

        def see(of_rank_1: dict[str, int | None]) -> tuple[str, str]:
            sizes: dict[str, int | None] = of_rank_1 if thread_rank() == 1 else {"a.txt": 4}
            return error_text(lambda: plugins.see_files(self.root, sizes))

        with mock.patch("fsdp_optim.checkpoint.trainers.looks.VISIBLE_WITHIN", 0.2):
            self.assertEqual(run_on_threads(see, 2, {"a.txt": None}), [("", "")] * 2)
            for wanted in ({"a.txt": 5}, {"b.txt": None}):
                for kind, text in run_on_threads(see, 2, wanted):
                    self.assertEqual(kind, "CheckpointError")
                    self.assertIn(next(iter(wanted)), text)
                    self.assertIn("rank 1", text)

    def test_the_ranks_of_a_process_group_alone(self) -> None:
        self.assertEqual(run_on_ranks(by_some, 3), [None, "from 1", "from 1"])

    def test_a_save_that_fails_on_one_rank_is_settled_on_all(self) -> None:
        run_on_ranks(settled, 2, self.root)


def by_some() -> str | None:
    some = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    return plugins.by_lowest("the rank", lambda: f"from {dist.get_rank()}", CallOptions(process_group=some))


def settled(root: Path) -> None:
    """A save whose error rank 0 has been told already: rank 1 alone has one that was not raised."""
    failing = mock.patch.object(FolderWriter, "write", side_effect=OSError(28, "No space left on device"))
    model = DistributedDataParallel(nn.Linear(2, 2))
    with failing:
        handle = fsdp_optim.async_save(root / "a", model, options=QUIET)
        if dist.get_rank() == 0:
            refused(handle.wait, CheckpointError, "No space left")
        refused_on_ranks("settled", plugins.wait_on_all, "CheckpointError", "No space left")
    plugins.wait_on_all()  # which has nothing to say any more
    check_same("the folder", [path.name for path in root.iterdir()], [])


class FoldersTest(InFolder):
    def test_a_folder_is_refused_options_that_are_wrong(self) -> None:
        wrong: Any = SaveOptions(max_file_size=0)
        refused(lambda: plugins.TrainerFolder.begin(str(self.root / "a"), wrong), CheckpointError, "max_file_size")
        self.check_only()

    def test_small_files_of_a_folder(self) -> None:
        """A file of the trainer's own stays; those whose names are given go."""
        save = plugins.TrainerFolder.begin(str(self.root / "a"), QUIET)
        with save.writing():
            (save.files / "own.txt").write_text("the trainer's")
            (save.files / "empty.bin").touch()
            save.write("own.txt", b"ours")
            save.write("sign.txt", b"ours")
            save.remove(lambda name: name.endswith(".bin"))
        save.commit(nn.Linear(2, 2), None, step=3)
        texts = {path.name: path.read_text() for path in (self.root / "a").glob("*.txt")}
        self.assertEqual(texts, {"own.txt": "the trainer's", "sign.txt": "ours"})
        self.assertFalse((self.root / "a/empty.bin").exists())
        self.assertEqual(fsdp_optim.inspect(self.root / "a").step, 3)

    def test_a_background_save_that_one_rank_waits_for(self) -> None:
        self.assertEqual(run_on_ranks(commit, 2, self.root), [[True, False]] * 2)

    def test_which_folders_have_a_checkpoint(self) -> None:
        fsdp_optim.save(self.root / "a", nn.Linear(2, 2), options=QUIET)
        (self.root / "b").mkdir()
        answers = {name: plugins.has_checkpoint(self.root / name) for name in "abc"}
        self.assertEqual(answers, {"a": True, "b": False, "c": False})

    def test_a_save_under_way_is_seen(self) -> None:
        seen = []
        write = FolderWriter.write

        def look(self_: Any, *args: Any) -> None:
            seen.append([plugins.is_being_saved(self.root / name) for name in "ab"])
            write(self_, *args)

        with mock.patch.object(FolderWriter, "write", look):
            fsdp_optim.save(self.root / "a", nn.Linear(2, 2), options=QUIET)
        self.assertEqual(seen[0], [True, False])
        self.assertFalse(plugins.is_being_saved(self.root / "a"))

    @parameterized.expand([("",), ("file://",)])
    def test_a_checkpoint_is_removed_and_nothing_else(self, scheme: str) -> None:
        for name in ("a", "b"):
            fsdp_optim.save(f"{scheme}{self.root}/{name}", nn.Linear(2, 2), options=QUIET)
        (self.root / "notes").mkdir()
        with self.assertLogs("fsdp_optim", "INFO") as logs:
            plugins.remove_checkpoint(f"{scheme}{self.root}/a", "it is old")
        self.assertIn("it is old", logs.output[0])
        plugins.remove_checkpoint(f"{scheme}{self.root}/a", "it is old")  # which is gone
        plugins.remove_checkpoint(f"{scheme}{self.root}/notes", "it is none")
        self.assertTrue((self.root / "notes").is_dir())
        self.assertEqual(
            [info.path for info in fsdp_optim.checkpoints(f"{scheme}{self.root}")], [info_path(scheme, self.root)]
        )

    def test_how_long_another_machine_may_be_waited_for(self) -> None:
        for kind, seconds in (("ext4", 0.0), ("nfs4", VISIBLE_WITHIN), ("", VISIBLE_WITHIN)):
            with mock.patch("fsdp_optim.storage.posix.filesystem.filesystem_type", return_value=kind):
                self.assertEqual(plugins.visible_within(self.root), seconds, kind)

    def test_folders_are_listed_anew_where_other_machines_have_them(self) -> None:
        (self.root / "a").mkdir()
        (self.root / "b.txt").touch()
        for kind, times in (("ext4", 0), ("nfs4", 1)):
            with (
                mock.patch("fsdp_optim.storage.posix.filesystem.filesystem_type", return_value=kind),
                mock.patch("fsdp_optim.storage.posix.small_files.refresh") as refresh,
            ):
                self.assertEqual(plugins.folders_in(self.root), ["a"])
                self.assertEqual(refresh.call_count, times, kind)


def info_path(scheme: str, root: Path) -> Path | str:
    return f"{scheme}{root}/b" if scheme else root / "b"


def commit(root: Path) -> list[bool]:
    """Whether the folder is there when `commit` returns: where one rank waits for it, and where none does."""
    are_there = []
    hold = mock.patch("fsdp_optim.checkpoint.save.background.finish", side_effect=CheckpointError("held"))
    for name, waiting in (("a", [1]), ("b", [])):
        save = plugins.TrainerFolder.begin(f"{root}/{name}", QUIET)
        model = DistributedDataParallel(nn.Linear(2, 2))
        with hold if name == "b" else contextlib.nullcontext():
            save.commit(model, None, background=dist.get_rank() not in waiting)
            are_there.append(Path(root, name).is_dir())
            if name == "b":
                refused_on_ranks("held", plugins.wait_on_all, "CheckpointError", "held")
    return are_there


class RankStateTest(InFolder):
    def test_random_states_come_back(self) -> None:
        states = plugins.random_states()
        drawn = [random.random(), torch.rand(3)]
        plugins.set_random_states(states)
        check_same("the next numbers", [random.random(), torch.rand(3)], drawn)

    def test_names_and_modules_inside_wrappers(self) -> None:
        model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
        wrapped = torch.compile(model)
        names = [name for name, _ in wrapped.named_parameters()]
        self.assertNotEqual(names, ["0.weight", "0.bias"])
        self.assertEqual([plugins.clean_name(wrapped, name) for name in names], ["0.weight", "0.bias"])
        self.assertIs(plugins.module_inside(wrapped), model)
        self.assertIsNone(plugins.module_inside(model))
