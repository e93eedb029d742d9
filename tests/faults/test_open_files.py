"""No file stays open, whatever fails: each call of the system fails in turn, or is interrupted, in reads and in writes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from kit.compare import error_text, refused
from kit.optimizers import adam
from kit.options import as_options
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from soak.failing import FLUSHING, INTERRUPT, LOCKING, MAKING, MOVING, READING, WRITING, Calls, Fault
from soak.mutations import Tiny

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.load import opening
from fsdp_optim.formats.own import OURS
from fsdp_optim.storage.posix import Folder
from fsdp_optim.testing import run_on_ranks

EVERY = (*READING, *MAKING, *MOVING, *FLUSHING, *WRITING, *LOCKING)
QUIET: dict[str, Any] = {"durable": False, "progress": False, "overwrite": True}

ACTIONS = [("load", 1), ("verify", 1), ("resume", 1), ("load of DCP", 1), ("save", 6), ("convert", 6)]
"""What is done, and how many calls there are from one that fails to the next one that does."""


def open_in(root: Path) -> list[str]:
    """The open files of this process below a folder."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # that of the listing itself
    return [name for name in targets if name.startswith(os.path.realpath(root))]


def load_what_another_rank_cannot_open(root: Path) -> tuple[tuple[str, str], list[str]]:
    """The error, and the files that are still open then."""
    with cpu():
        trained = Trained("FSDP2", adam, 1, Tiny)
        fsdp_optim.save(root / "step-1", trained.model, trained.optim, options=fsdp_optim.SaveOptions(progress=False))
        stops = mock.patch.object(opening, "open_checkpoint", side_effect=CheckpointError("cannot be opened here"))
        with stops if dist.get_rank() == 1 else contextlib.nullcontext():
            error = error_text(lambda: fsdp_optim.load(root / "step-1", trained.model, trained.optim))
        return error, open_in(root)


class RanksTest(unittest.TestCase):
    def test_a_checkpoint_that_one_rank_cannot_open(self) -> None:
        with tempfile.TemporaryDirectory(prefix="fsdp_optim_open_") as folder:
            for (kind, text), files in run_on_ranks(load_what_another_rank_cannot_open, 2, Path(folder)):
                self.assertEqual((kind, files), ("CheckpointError", []))
                self.assertIn("rank 1", text)


class OpenFilesTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="fsdp_optim_open_")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        logging.disable(logging.WARNING)
        self.addCleanup(logging.disable, logging.NOTSET)
        self.one = Trained("plain", adam, 2, Tiny)

    def save(self, name: str = "run/step-1", **options: Any) -> None:
        fsdp_optim.save(
            self.root / name,
            self.one.model,
            self.one.optim,
            step=1,
            **as_options(fsdp_optim.SaveOptions, **QUIET, **options),
        )

    def load(self, name: str = "run/step-1") -> None:
        fsdp_optim.load(
            self.root / name, self.one.model, self.one.optim, options=fsdp_optim.LoadOptions(progress=False)
        )

    def actions(self) -> dict[str, Callable[[], Any]]:
        return {
            "load": self.load,
            "verify": lambda: fsdp_optim.verify(self.root / "run" / "step-1"),
            "resume": lambda: fsdp_optim.resume(
                self.root / "run", self.one.model, self.one.optim, options=fsdp_optim.LoadOptions(progress=False)
            ),
            "load of DCP": lambda: self.load("dcp"),
            "save": self.save,
            "convert": lambda: fsdp_optim.convert(
                self.root / "run" / "step-1", self.root / "made", **as_options(fsdp_optim.ConvertOptions, **QUIET)
            ),
        }

    @parameterized.expand([(*action, number) for action in ACTIONS for number in (errno.ESTALE, INTERRUPT)])
    def test_each_call(self, action: str, stride: int, number: int) -> None:
        self.save()
        self.save("dcp", format="dcp")
        act, nth, num_raised = self.actions()[action], 0, 0
        while True:
            with Calls(self.root, Fault(number, EVERY, nth, lasts=False)).entered() as calls:
                try:
                    act()
                except (CheckpointError, KeyboardInterrupt):
                    num_raised += 1
            if not calls.hit:
                break
            with self.subTest(nth=nth):
                self.assertEqual(open_in(self.root), [])
            nth += stride
        self.assertGreater(num_raised, 4)
        self.save()
        self.load()

    def test_a_store_that_cannot_tell_whether_it_was_replaced(self) -> None:
        """The first error is raised, and the files are closed; of other kinds of errors, only the files are."""
        self.save()
        model = self.root / "run" / "step-1" / "model.safetensors"
        model.write_bytes(model.read_bytes()[:-1])
        store = Folder(model.parent, OURS.probe)
        with mock.patch(
            "fsdp_optim.storage.posix.opened.OpenFolder.was_replaced", side_effect=OSError(errno.ESTALE, "")
        ):
            refused(lambda: open_checkpoint(store, verify=True), CheckpointError, "model.safetensors", "bytes")
        self.assertEqual(open_in(self.root), [])
        with (
            mock.patch("fsdp_optim.storage.posix.opened.OpenFolder.was_replaced", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            open_checkpoint(store, verify=True)
        self.assertEqual(open_in(self.root), [])
