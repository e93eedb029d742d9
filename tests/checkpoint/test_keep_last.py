"""Older checkpoints that go when a new one is complete, and `latest`."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.checkpoints import before_writes
from kit.compare import error_text
from kit.folders import InFolder
from kit.options import as_options
from kit.retention import name_of_step, path_of_step, save_managed
from kit.trained import Trained
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.formats.own import PROBE
from fsdp_optim.storage.posix import leftovers
from fsdp_optim.testing import run_on_ranks

LIMIT = 60.0  # seconds; reached by nothing but a failure


def keep_on_ranks(root: Path) -> list[list[str]]:
    """The files that are there when each save has been waited for."""
    trained, listed = Trained("FSDP2", steps=1), []
    for step in (8, 9, 10, 11):
        save_managed(root, step, trained.model, trained.optim, keep_last=2, durable=True)
        newest = fsdp_optim.latest(root)
        dist.barrier()
        listed.append([newest.name if newest else "", *sorted(entry.name for entry in root.iterdir())])
        dist.barrier()
    return listed


class KeepTest(InFolder):
    def save(self, name: str, **kwargs: Any) -> None:
        model = nn.Linear(3, 2)
        fsdp_optim.save(
            self.root / name, model, torch.optim.SGD(model.parameters()), **as_options(fsdp_optim.SaveOptions, **kwargs)
        )

    def keep(self, step: int, **kwargs: Any) -> None:
        model = nn.Linear(3, 2)
        save_managed(self.root, step, model, torch.optim.SGD(model.parameters()), keep_last=1, **kwargs)

    def test_the_newest_are_kept(self) -> None:
        for listed in run_on_ranks(keep_on_ranks, 2, self.root):
            steps = [(8, 8), (9, 8, 9), (10, 9, 10), (11, 10, 11)]
            self.assertEqual(listed, [[*map(name_of_step, each)] for each in steps])

    def test_what_is_no_checkpoint_is_left_alone(self) -> None:
        (self.root / "logs").mkdir()
        (self.root / "logs" / "model.safetensors").write_bytes(b"mine")
        (self.root / "notes.txt").write_text("mine")
        (self.root / "fsdp_optim.json").write_text("{}")
        for step in (1, 2, 3):
            self.keep(step)
            self.assertEqual(fsdp_optim.latest(self.root), path_of_step(self.root, step))
            self.check_only("logs", "notes.txt", "fsdp_optim.json", name_of_step(step))

    def test_a_save_deletes_nothing_by_itself(self) -> None:
        for name in ("step-1", "step-2", "step-3"):
            self.save(name)
        self.check_only("step-1", "step-2", "step-3")

    def test_a_failed_save_deletes_nothing(self) -> None:
        self.keep(1)

        def fail(file: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with before_writes(fail):
            kind, text = error_text(lambda: self.keep(2))
        self.assertEqual(kind, "CheckpointError", text)
        self.assertEqual(fsdp_optim.latest(self.root), path_of_step(self.root, 1))
        self.assertEqual(fsdp_optim.load(path_of_step(self.root, 1), nn.Linear(3, 2)).world_size, 1)
        self.keep(3)
        self.check_only(name_of_step(3))

    def test_older_ones_are_deleted_last(self) -> None:
        """Whenever something of an old checkpoint goes, the new one is complete."""
        self.keep(1)
        seen: list[Any] = []

        def noting(name: str) -> Any:
            real = getattr(os, name)

            def call(path: Any, *args: Any, **kwargs: Any) -> Any:
                seen.append(fsdp_optim.latest(self.root))
                return real(path, *args, **kwargs)

            return mock.patch.object(os, name, call)

        with noting("unlink"), noting("remove"), noting("rmdir"):
            self.keep(2)
        self.check_only(name_of_step(2))
        self.assertIn(path_of_step(self.root, 2), seen)
        self.assertNotIn(None, seen)

    def test_latest_of_nothing(self) -> None:
        self.assertIsNone(fsdp_optim.latest(self.root / "none"))
        self.assertIsNone(fsdp_optim.latest(self.root))
        (self.root / "folder").mkdir()
        (self.root / "file").write_text("")
        self.assertIsNone(fsdp_optim.latest(str(self.root)))

    def test_a_listing_made_while_a_folder_is_renamed(self) -> None:
        """It may have neither the old name nor the new one."""
        self.save("step-10")
        real, calls = Path.iterdir, itertools.count()

        def torn(path: Path) -> Iterator[Path]:
            is_torn = path == self.root and next(calls) < 5
            return (entry for entry in real(path) if not (is_torn and entry.name == "step-10"))

        names = iter([["step-10.old-0123456789abcdef"]])
        with (
            mock.patch.object(Path, "iterdir", torn),
            mock.patch.object(os, "listdir", side_effect=lambda path: next(names, ["step-10"])),
        ):
            self.assertEqual(fsdp_optim.latest(self.root), self.root / "step-10")

    def test_between_two_names(self) -> None:
        """A checkpoint that is being replaced is there again a moment later."""
        self.save("step-10")
        saving = self.root / "step-10.saving-0123456789abcdef"
        (self.root / "step-10").rename(saving)
        moments = itertools.count()

        def later(seconds: float) -> None:
            if next(moments) == 2:
                saving.rename(self.root / "step-10")

        with mock.patch.object(leftovers.time, "sleep", later):
            path = leftovers.existing(self.root / "step-10", PROBE)
        self.assertEqual(path, self.root / "step-10")
        self.assertTrue((path / "fsdp_optim.json").exists())

    @parameterized.expand(
        ("no manifest", "a broken manifest", "a file is missing", "a file is cut", "still being saved")
    )
    def test_latest_is_complete(self, case: str) -> None:
        for name in ("step-9", "step-10", "step-11"):
            self.save(name)
        self.assertEqual(fsdp_optim.latest(str(self.root)), self.root / "step-11")
        newest = self.root / "step-11"
        if case == "no manifest":
            (newest / "fsdp_optim.json").unlink()
        elif case == "a broken manifest":
            manifest = newest / "fsdp_optim.json"
            manifest.write_text(manifest.read_text()[:-9])
        elif case == "a file is missing":
            (newest / "model.safetensors").unlink()
        elif case == "a file is cut":
            os.truncate(newest / "model.safetensors", (newest / "model.safetensors").stat().st_size - 1)
        else:
            newest.rename(self.root / "step-11.saving-0123456789abcdef")
        latest = fsdp_optim.latest(self.root)
        self.assertEqual(latest, self.root / "step-10")
        self.assertIsInstance(latest, Path)
