"""An error of the file system or of an optimizer in a save or load is raised as one of the library's errors."""

from __future__ import annotations

import copy
import errno
import gc
import os
import tempfile
import unittest
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from kit.checkpoint_damage import seal
from kit.checkpoint_format import read_manifest
from kit.compare import check_same, error_text
from kit.optimizers import adam
from kit.trained import Trained
from parameterized import parameterized
from soak.failing import Calls, Fault
from soak.mutations import Tiny

import fsdp_optim


class FileErrorsTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="fsdp_optim_errors_")
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "step-1"
        self.one = Trained("plain", adam, 2, Tiny)
        self.save()

    def save(self) -> None:
        fsdp_optim.save(self.path, self.one.model, self.one.optim, overwrite=True)

    def load(self) -> None:
        fsdp_optim.load(self.path, self.one.model, self.one.optim)

    @parameterized.expand([("save", True, 4), ("load", True, 4), ("load", False, 4)])
    def test_calls_that_only_look(self, action: str, lasts: bool, at_least: int) -> None:
        """Each of them fails in turn, with `lasts` and all later ones with it. Nothing is left open."""
        gc.collect()  # connections of earlier tests close when they are collected
        raised, nth, open_before = 0, 0, len(os.listdir("/proc/self/fd"))
        while True:
            fault = Fault(errno.ESTALE, ("stat", "lstat", "fstat", "listdir", "scandir", "close"), nth, lasts)
            with Calls(self.path.parent, fault).entered() as calls:
                kind, text = error_text(getattr(self, action))
            if not calls.hit:
                break
            with self.subTest(str(fault)):
                self.assertIn(kind, ("", "CheckpointError"), text)
                num_open = len(os.listdir("/proc/self/fd"))
                self.assertLessEqual(num_open, open_before, text)
                open_before = num_open  # fewer where connections of earlier tests have closed meanwhile
            raised, nth = raised + bool(kind), nth + 1
        self.assertGreaterEqual(raised, at_least)
        self.save()
        self.load()

    @parameterized.expand([(1,), (7,), (64,)])
    def test_calls_that_move_few_bytes(self, most: int) -> None:
        """The kernel may take, or give, fewer bytes than it is asked for."""

        def few(buffers: Sequence[memoryview]) -> list[memoryview]:
            return [memoryview(buffers[0])[:most]] if len(buffers[0]) >= most else list(buffers[:1])

        wanted = copy.deepcopy(self.one.optim.state_dict()), copy.deepcopy(self.one.model.state_dict())
        pwritev, preadv = os.pwritev, os.preadv
        with (
            mock.patch.object(os, "pwritev", lambda fd, buffers, at: pwritev(fd, few(buffers), at)),
            mock.patch.object(os, "preadv", lambda fd, buffers, at: preadv(fd, few(buffers), at)),
        ):
            self.save()
            for tensor in self.one.model.parameters():
                tensor.data.fill_(-1.0)
            self.load()
        check_same("loaded", (self.one.optim.state_dict(), self.one.model.state_dict()), wanted)
        fsdp_optim.verify(self.path, progress=False)

    def test_a_state_that_the_optimizer_cannot_take(self) -> None:
        checkpoint = read_manifest(self.path)
        for param in checkpoint["optim"]["params"].values():
            param["values"] = [
                value for value in param["values"] if value[0] != "step"
            ]  # nothing is loaded of what is left
        seal(self.path, checkpoint)
        before = {id(param): dict(values) for param, values in self.one.optim.state.items()}
        with self.assertRaisesRegex(fsdp_optim.StateError, r"Adam needs step in its next step"):
            self.load()
        self.assertEqual({id(param): dict(values) for param, values in self.one.optim.state.items()}, before)
