"""Saves let go of paths: that of a save that failed in the background, and folders that a manager removes."""

from __future__ import annotations

import os
import shutil
import tempfile
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.compare import check_refused, check_same, error_text
from kit.retention import name_of_step, save_managed
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.checkpoint.common.pending import Pending
from fsdp_optim.checkpoint.save import background
from fsdp_optim.checkpoint.save.job import Job
from fsdp_optim.formats.own import OURS
from fsdp_optim.storage.posix import FolderDirectory, leftovers
from fsdp_optim.testing import run_on_ranks


def failing(*args: Any) -> None:
    raise CheckpointError("the disk went away")


FAILURES: dict[str, tuple[Any, str]] = {
    "at its end": (background, "finish"),
    "while it is written": (Job, "start"),
    "before it begins": (Pending, "begin"),
}


def failed_in_the_background(root: str, first: int) -> dict[str, list[tuple[str, str]]]:
    """One rank's save fails; then the other, which does not know of it, saves to the same path, and so does the first again."""
    told: dict[str, list[tuple[str, str]]] = {}
    groups = [dist.new_group([rank]) for rank in (0, 1)]
    own_group, model = groups[dist.get_rank()], nn.Linear(2, 2)
    for name, (owner, attribute) in FAILURES.items():
        path, said = Path(root, name), ("", "")
        if dist.get_rank() == first:
            with mock.patch.object(owner, attribute, failing):
                said = error_text(
                    lambda path=path: fsdp_optim.async_save(
                        path, model, options=fsdp_optim.SaveOptions(process_group=own_group)
                    ).wait()
                )
        dist.barrier()
        again = ("", "")
        if dist.get_rank() != first:
            again = error_text(
                partial(fsdp_optim.save, path, model, options=fsdp_optim.SaveOptions(process_group=own_group))
            )
        dist.barrier()
        third = Path(root, f"{name}, alone")
        if dist.get_rank() == first:
            with mock.patch.object(owner, attribute, failing):
                error_text(
                    lambda third=third: fsdp_optim.async_save(
                        third, model, options=fsdp_optim.SaveOptions(process_group=own_group)
                    ).wait()
                )
            fsdp_optim.async_save(third, model, options=fsdp_optim.SaveOptions(process_group=own_group)).wait()
        told[name] = [said, again]
        dist.barrier()
    return told


class Events:
    """The order of renames, flushes of folders and removals."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def recorded(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            self.found.append((name, Path(path).name))
            return real(path, *args, **kwargs)

        return call


class LetGoTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = Path(temporary.name, "run")

    @parameterized.expand([(0,), (1,)])
    def test_the_path_of_a_save_that_failed(self, first: int) -> None:
        errors = run_on_ranks(failed_in_the_background, 2, str(self.root), first)
        for name in FAILURES:
            check_refused(name, [errors[first][name][0]], "CheckpointError", "the disk went away")
            check_same(f"{name}: another rank saves there", errors[1 - first][name][1], ("", ""))
            check_same("there", sorted(path.name for path in self.root.glob(f"{name}*")), [name, f"{name}, alone"])

    def keep(self, step: int, keep_last: int) -> None:
        save_managed(self.root, step, nn.Linear(2, 2), keep_last=keep_last)

    def test_a_new_name_is_on_the_disk_before_its_folder_is_emptied(self) -> None:
        self.keep(1, 2)
        self.keep(2, 2)
        events, rename = Events(), Path.rename
        with (
            mock.patch.object(Path, "rename", events.recorded("rename", rename)),
            mock.patch.object(leftovers, "sync_folder", events.recorded("flush", leftovers.sync_folder)),
            mock.patch.object(shutil, "rmtree", events.recorded("remove", shutil.rmtree)),
        ):
            self.keep(3, 1)
        last = events.found.index(("rename", name_of_step(2)))
        kinds = [name for name, _ in events.found[last - 1 :]]
        check_same("order", kinds, ["rename", "rename", "flush", "remove", "remove"])
        check_same("what is flushed", events.found[-3], ("flush", "run"))
        check_same("what is there", os.listdir(self.root), [name_of_step(3)])

    def test_a_new_name_that_is_not_on_the_disk(self) -> None:
        """Then nothing is emptied; the next save does it."""
        self.keep(1, 2)
        self.keep(2, 2)
        real, calls = leftovers.sync_folder, []

        def fails_at_last(path: Path) -> None:
            calls.append(path)
            if any(".gone-" in name for name in os.listdir(path)):
                raise OSError(5, "Input/output error")
            real(path)

        with (
            mock.patch.object(leftovers, "sync_folder", fails_at_last),
            self.assertLogs("fsdp_optim", "WARNING") as told,
        ):
            self.keep(3, 1)
        self.assertRegex(told.output[-1], "is not removed yet.*Input/output error")
        gone = [path for path in self.root.iterdir() if ".gone-" in path.name]
        check_same("whole", [(path / "fsdp_optim.json").exists() for path in gone], [True, True])
        check_same(
            "no checkpoint",
            [Path(checkpoint.base).name for checkpoint in FolderDirectory(self.root, OURS.probe).complete()],
            [name_of_step(3)],
        )
        self.keep(4, 2)
        check_same("gone", sorted(os.listdir(self.root)), [name_of_step(3), name_of_step(4)])
