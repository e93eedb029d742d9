"""A conversion that is killed leaves no half checkpoint; the next one begins again, is whole, and removes what was left."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

from kit.compare import check_same
from kit.conversions import MEMORY, check_converted, data_of, save_some
from kit.folders import SharedFolder
from kit.forked import LIBRARY, run
from kit.options import as_options
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.storage.posix import FolderStaging
from fsdp_optim.testing import run_on_ranks

KILLED = """
import os, signal, torch, fsdp_optim
from fsdp_optim.storage.posix import FolderStaging
from fsdp_optim.storage.posix import FolderWriter

torch.set_num_threads({threads})
real, before, left = FolderWriter.write, FolderStaging.{at}, [{num}]

def write(self, name, pieces, offset):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, name, pieces, offset)

def die(self, *args, **options):
    if {dies}:
        os.kill(os.getpid(), signal.SIGKILL)
    return before(self, *args, **options)

FolderWriter.write, FolderStaging.{at} = write, die
fsdp_optim.convert({source!r}, {target!r}, options=fsdp_optim.ConvertOptions(bucket_nbytes={memory}, durable=False), **{options})
"""


def killed(source: Path, target: Path, *, num: int = 1 << 60, at: str = "", threads: int = 2, **options: Any) -> None:
    """Convert in a process that is killed at its write `num` (from 0), or as it reaches a method of the staging."""
    place = {"source": str(source), "target": str(target), "memory": MEMORY, "options": options}
    code = KILLED.format(num=num, at=at or "commit", dies=bool(at), threads=threads, **place)
    done = run(code, preload=LIBRARY)
    check_same("killed", done.returncode, -9)


def leftovers(target: Path) -> list[Path]:
    return sorted(entry for entry in target.parent.iterdir() if entry.name.startswith(f"{target.name}."))


def converted_by_ranks(source: Path, target: Path) -> int:
    return fsdp_optim.convert(
        source, target, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False)
    ).nbytes_written


class ConvertKilledTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        cls.source, cls.wanted = cls.root / "source", cls.root / "wanted"
        save_some(cls.source)
        cls.nbytes = fsdp_optim.convert(
            cls.source, cls.wanted, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False)
        ).nbytes

    def setUp(self) -> None:
        self.target = self.own_folder() / "to"

    def convert(self, **options: Any) -> None:
        """Convert all, and leave nothing beside the checkpoint."""
        done = fsdp_optim.convert(
            self.source,
            self.target,
            **as_options(fsdp_optim.ConvertOptions, **{"bucket_nbytes": MEMORY, "durable": False, **options}),
        )
        check_same("written", (done.nbytes, done.nbytes_written), (self.nbytes, self.nbytes))
        check_same("left", leftovers(self.target), [])
        check_converted(self.target, self.wanted)

    def check_left(self) -> None:
        """The killed conversion is no checkpoint, and its files are beside the place."""
        self.assertFalse(self.target.exists())
        self.assertIsNone(fsdp_optim.latest(self.target.parent))
        self.assertEqual(len(leftovers(self.target)), 1)

    @parameterized.expand([(0, 1), (1, 1), (3, 1), (6, 2)])
    def test_a_kill_at_a_write(self, num: int, threads: int) -> None:
        killed(self.source, self.target, num=num, threads=threads)
        self.check_left()
        self.convert()

    @parameterized.expand([("create",), ("seal",), ("put",), ("commit",), ("take_place",)])
    def test_a_kill_around_the_writes(self, at: str) -> None:
        killed(self.source, self.target, at=at)
        if at != "take_place":  # there the manifest is written, so that the folder counts by itself
            self.check_left()
        self.convert()

    def test_a_kill_again_and_again(self) -> None:
        """Each conversion removes what the one before has left."""
        for _ in range(3):
            killed(self.source, self.target, num=2, threads=1)
            self.check_left()
        self.convert()

    def test_over_a_checkpoint(self) -> None:
        save_some(self.target, num_layers=1)
        before = data_of(self.target)
        killed(self.source, self.target, num=3, overwrite=True)
        check_same("what is there", data_of(self.target), before)
        with self.assertRaisesRegex(CheckpointError, "already exists"):
            self.convert()
        self.convert(overwrite=True)

    def test_a_save_beside_it_removes_what_is_left(self) -> None:
        killed(self.source, self.target, num=3)
        save_some(self.target.parent / "other", num_layers=1)
        check_same("left", leftovers(self.target), [])

    def test_two_ranks_after_one_process_was_killed(self) -> None:
        killed(self.source, self.target, num=3)
        written = run_on_ranks(converted_by_ranks, 2, self.source, self.target)
        self.assertTrue(all(written), written)
        self.assertEqual(sum(written), self.nbytes)
        check_same("left", leftovers(self.target), [])
        check_converted(self.target, self.wanted)

    def test_neither_an_interrupt_nor_an_error_leaves_anything(self) -> None:
        for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):
            with self.subTest(type(error).__name__):
                with (
                    mock.patch.object(FolderStaging, "seal", side_effect=error),
                    self.assertRaises((KeyboardInterrupt, CheckpointError)),
                ):
                    self.convert()
                self.assertEqual(list(self.target.parent.iterdir()), [])
                self.convert()
                shutil.rmtree(self.target)

    def test_a_conversion_under_way_is_left_alone(self) -> None:
        """The second one to the same place begins by itself, and the first one that is done wins."""
        real, begun = FolderStaging.seal, list[int]()

        def seal(staging: FolderStaging, *args: Any, **options: Any) -> None:
            if not begun:
                begun.append(0)
                done = fsdp_optim.convert(
                    self.source, self.target, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False)
                )
                begun.append(done.nbytes_written)
            real(staging, *args, **options)

        with (
            mock.patch.object(FolderStaging, "seal", seal),
            self.assertRaisesRegex(CheckpointError, "already exists|another save"),
        ):
            self.convert()
        self.assertEqual(begun[1], self.nbytes)
        check_converted(self.target, self.wanted)
