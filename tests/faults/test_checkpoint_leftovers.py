"""A save that looks for leftovers never takes a folder that another save is just making for one."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_optim.formats.own import PROBE
from fsdp_optim.storage.posix import LOCK, FolderStaging, is_held, leftovers


class LeftoversTest(unittest.TestCase):
    def setUp(self) -> None:
        self.use_new_place()

    def use_new_place(self) -> None:
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.path = Path(place.name) / "path"
        self.neighbour = Path(place.name) / "neighbour"

    def begin(self, path: Path) -> FolderStaging:
        staging = FolderStaging.begin(path, PROBE, overwrite=True, durable=False)
        self.addCleanup(staging.abandon)
        return staging

    def check_is_held(self, staging: FolderStaging) -> None:
        self.assertTrue((staging.folder / LOCK).exists(), "it has lost its lock")
        self.assertTrue(is_held(staging.folder), "nobody holds it")
        self.begin(self.neighbour)
        self.assertTrue(staging.folder.exists(), "a later save took it for a leftover")

    def test_lock_is_held_for_a_moment_by_a_save_that_looks(self) -> None:
        real, looks = fcntl.flock, threading.Event()

        def flock(fd: int, operation: int) -> None:
            if not looks.is_set():
                looks.set()
                other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
                real(other, fcntl.LOCK_EX)
                timers.append(threading.Timer(0.03, os.close, [other]))
                timers[0].start()
            real(fd, operation)

        timers: list[threading.Timer] = []
        with mock.patch.object(fcntl, "flock", flock):
            staging = self.begin(self.path)
        timers[0].join()
        self.check_is_held(staging)

    def test_lock_is_held_for_ever(self) -> None:
        with mock.patch.object(fcntl, "flock", side_effect=BlockingIOError), self.assertRaises(OSError) as caught:
            FolderStaging.begin(self.path, PROBE, overwrite=True, durable=False)
        self.assertIn("took the new folder for a leftover", str(caught.exception))
        self.assertEqual(list(self.path.parent.iterdir()), [])

    def test_the_rest_of_what_a_dead_save_was_removing(self) -> None:
        """The next save beside it removes it, though nobody holds it and it has no lock; a stranger's name stays."""
        rest, named = (self.path.with_name(f"path.gone-{mark}") for mark in ("0123456789abcdef", "by-a-user"))
        for folder in (rest, named):
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"part of it")
        self.begin(self.neighbour)
        self.assertEqual((rest.exists(), named.exists()), (False, True))

    def test_removed_while_it_is_made(self) -> None:
        """Before each call that the one makes, the other looks and removes; before each call of the other, the one continues."""
        for first in ("mkdir", "open", "flock", "rename"):
            with self.subTest(paused_before=first):
                self.use_new_place()
                self.check_is_held(self.made_while_removed(first))

    def made_while_removed(self, first: str) -> FolderStaging:
        """Pause the one before its call `first`; the other goes as far as the removal of a file; then the one ends."""
        paused, go_on, made = threading.Event(), threading.Event(), list[Any]()
        saver = threading.Thread(target=lambda: made.append(self.begin(self.path)))

        def pausing(real: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if threading.current_thread() is saver and not paused.is_set():
                    paused.set()
                    go_on.wait(10)
                return real(*args, **kwargs)

            return call

        real_unlink = os.unlink

        def unlink(*args: Any, **kwargs: Any) -> None:
            if threading.current_thread() is not saver:
                go_on.set()
                saver.join(10)
            real_unlink(*args, **kwargs)

        where: Any = fcntl if first == "flock" else os
        with mock.patch.object(where, first, pausing(getattr(where, first))), mock.patch.object(os, "unlink", unlink):
            saver.start()
            self.assertTrue(paused.wait(10))
            leftovers.remove_leftovers(self.neighbour, PROBE)
            go_on.set()
            saver.join(10)
        self.assertEqual(len(made), 1, "the save that was beginning failed")
        staging = made[0]
        assert isinstance(staging, FolderStaging)
        return staging
