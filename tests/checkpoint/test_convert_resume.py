"""A conversion that is killed goes on where it stopped, where nothing has changed; else it begins anew."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
from kit.compare import check_same
from kit.conversions import MEMORY, UNIT, check_converted, data_of, save_some
from kit.folders import SharedFolder
from kit.options import as_options
from kit.scripts import run
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.errors import CheckpointError
from fsdp_optim.offline.workers import JOURNAL
from fsdp_optim.storage.posix.folder import FolderStaging
from fsdp_optim.storage.posix.writer import FolderWriter
from fsdp_optim.testing import run_on_ranks

KILLED = """
import os, signal, torch, fsdp_optim
from fsdp_optim.storage.posix.folder import FolderStaging
from fsdp_optim.storage.posix.writer import FolderWriter

torch.set_num_threads({threads})
real, before, left = FolderWriter.write, FolderStaging.{at}, [{num}]

def write(self, name, pieces, offset):
    if name == {journal!r}:
        left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, name, pieces, offset)

def die(self, *args, **options):
    if {dies}:
        os.kill(os.getpid(), signal.SIGKILL)
    return before(self, *args, **options)

FolderWriter.write, FolderStaging.{at} = write, die
from kit.options import as_options
options = as_options(fsdp_optim.ConvertOptions, bucket_nbytes={memory}, durable=False, **{options})
fsdp_optim.convert({source!r}, {target!r}, **options)
"""


def killed(source: Path, target: Path, *, num: int = 1 << 60, at: str = "", threads: int = 2, **options: Any) -> None:
    """Convert in a process that is killed when it notes unit `num` (from 0), or as it reaches a method of the staging."""
    place = {"source": str(source), "target": str(target), "memory": MEMORY, "journal": JOURNAL, "options": options}
    code = KILLED.format(num=num, at=at or "commit", dies=bool(at), threads=threads, **place)
    done = run(code, preload=("torch", "fsdp_optim"))
    check_same("killed", done.returncode, -9)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """The bytes that are written into each file inside the context."""
    found: Counter[str] = Counter()
    real = FolderWriter.write

    def write(self: FolderWriter, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        found[name] += sum(map(len, pieces))
        real(self, name, pieces, offset)

    with mock.patch.object(FolderWriter, "write", write):
        yield found


def leftovers(target: Path) -> list[Path]:
    return sorted(one for one in target.parent.iterdir() if ".saving-" in one.name)


def resumed_by_ranks(source: Path, target: Path) -> int:
    return fsdp_optim.convert(
        source, target, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False)
    ).nbytes_written


class ConvertResumeTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        cls.source, cls.wanted = cls.root / "source", cls.root / "wanted"
        save_some(cls.source)
        done = fsdp_optim.convert(
            cls.source, cls.wanted, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False)
        )
        cls.nbytes = done.nbytes
        cls.num_units = sum(
            -(-file.stat().st_size // UNIT) for file in cls.wanted.glob("*.safetensors")
        )  # a header is too short to matter

    def setUp(self) -> None:
        self.target = self.own_folder() / "to"

    def convert(self, source: Path | None = None, **options: Any) -> int:
        done = fsdp_optim.convert(
            source or self.source,
            self.target,
            **as_options(fsdp_optim.ConvertOptions, **{"bucket_nbytes": MEMORY, "durable": False, **options}),
        )
        self.assertEqual(done.nbytes, self.nbytes)
        return done.nbytes_written

    @parameterized.expand([(0,), (1,), (3,), (6,)])
    def test_what_is_noted_is_not_written_again(self, num: int) -> None:
        """Of `num` units that were noted before the kill, no byte of a tensor is written again."""
        killed(self.source, self.target, num=num, threads=1)
        (left,) = leftovers(self.target)
        with counted() as written:
            rest = self.convert()
        check_converted(self.target, self.wanted)
        tensors = sum(nbytes for name, nbytes in written.items() if name.endswith(".safetensors"))
        self.assertEqual(tensors, rest)
        noted = self.nbytes - rest
        self.assertGreaterEqual(noted, max(num - 1, 0) * UNIT)  # the last unit of a file may be short
        self.assertLessEqual(noted, num * UNIT)
        self.assertFalse(left.exists())

    def test_a_kill_in_any_of_several_lanes(self) -> None:
        killed(self.source, self.target, num=4)
        self.assertLess(self.convert(), self.nbytes - 2 * UNIT)
        check_converted(self.target, self.wanted)

    @parameterized.expand([("commit",), ("take_place",), ("seal",), ("keep",)])
    def test_a_kill_around_the_units(self, at: str) -> None:
        """Before the first one it begins anew; after the last one nothing is written again."""
        killed(self.source, self.target, at=at)
        rest = self.convert()
        self.assertEqual(rest, self.nbytes if at in ("keep", "take_place") else 0)
        check_converted(self.target, self.wanted)

    def test_a_kill_again_and_again(self) -> None:
        for _ in range(3):
            killed(self.source, self.target, num=2, threads=1)
        self.assertLessEqual(self.convert(), self.nbytes - 5 * UNIT)
        check_converted(self.target, self.wanted)

    def test_over_a_checkpoint(self) -> None:
        save_some(self.target, num_layers=1)
        before = data_of(self.target)
        killed(self.source, self.target, num=3, overwrite=True)
        check_same("what is there", data_of(self.target), before)
        with self.assertRaisesRegex(CheckpointError, "exists already"):
            self.convert()
        self.assertLess(self.convert(overwrite=True), self.nbytes)
        check_converted(self.target, self.wanted)

    def changes(self) -> dict[str, Callable[[], int]]:
        def saved_again() -> int:
            save_some(self.root / "changed")
            return self.convert(self.root / "changed")

        return {
            "saved again": saved_again,
            "files of another size": lambda: self.convert(max_file_size=1 << 22),
            "another memory": lambda: self.convert(bucket_nbytes=2 * MEMORY),
        }

    @parameterized.expand([("saved again",), ("files of another size",), ("another memory",)])
    def test_what_has_changed_begins_anew(self, change: str) -> None:
        save_some(self.root / "changed")
        source = self.root / "changed" if change == "saved again" else self.source
        killed(source, self.target, num=4)
        (left,) = leftovers(self.target)
        self.assertEqual(self.changes()[change](), self.nbytes)
        self.assertEqual(leftovers(self.target), [])
        self.assertFalse(left.exists())
        if change == "another memory":
            check_converted(self.target, self.wanted)

    def test_a_source_of_another_tool_that_was_written_again(self) -> None:
        """Its names and shapes are those of before, and nothing in it tells one save from another."""
        source = self.own_folder()
        for number in (1, 2):
            tensors = {name: torch.full((UNIT,), number, dtype=torch.int32) for name in ("a", "b")}
            safetensors.torch.save_file(tensors, source / "model.safetensors")
            if number == 1:
                killed(source, self.target, num=3)
        self.assertEqual(len(leftovers(self.target)), 1)
        fsdp_optim.convert(source, self.target, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False))
        found = safetensors.torch.load_file(self.target / "model.safetensors")
        self.assertEqual({name: one.unique().tolist() for name, one in found.items()}, {"a": [2], "b": [2]})

    def test_what_is_not_as_it_was_noted_is_written_again(self) -> None:
        """A byte of the third unit was lost in a power cut, and the head of the other file."""
        for damage in ("data", "head", "journal", "file", "length"):
            with self.subTest(damage):
                killed(self.source, self.target, num=5, threads=1)
                (left,) = leftovers(self.target)
                self.damage(left, damage)
                rest = self.convert()
                check_converted(self.target, self.wanted)
                self.assertEqual(rest == self.nbytes, damage not in ("data",))
                shutil.rmtree(self.target)

    def test_a_frame_that_was_lost_is_written_again(self) -> None:
        """A torch file has a header of each tensor between the tensors: one is lost beside a unit that was noted."""
        wanted = self.own_folder() / "wanted"
        fsdp_optim.convert(
            self.source, wanted, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False), format="torch"
        )
        killed(self.source, self.target, num=5, threads=1, format="torch")
        (left,) = leftovers(self.target)
        content = bytearray((left / "model.pt").read_bytes())
        at = content.index(b"PK\x03\x04", len(content) // 2)
        content[at : at + 4] = bytes(4)
        (left / "model.pt").write_bytes(content)
        fsdp_optim.convert(
            self.source,
            self.target,
            options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False),
            format="torch",
        )
        found, whole = ((path / "model.pt").read_bytes() for path in (self.target, wanted))
        self.assertTrue(found == whole, "the converted file has other bytes")

    def damage(self, left: Path, damage: str) -> None:
        file, journal = left / "optim.safetensors", left / JOURNAL
        content = bytearray(file.read_bytes())
        if damage == "journal":
            journal.write_bytes(bytes(journal.stat().st_size))
        elif damage == "file":
            file.unlink()
        elif damage == "length":
            file.write_bytes(content[:-1])
        else:
            content[9 if damage == "head" else len(content) // 4] ^= 1
            file.write_bytes(content)

    def test_two_ranks_go_on_where_one_process_was_killed(self) -> None:
        killed(self.source, self.target, num=3)
        written = run_on_ranks(resumed_by_ranks, 2, self.source, self.target)
        self.assertTrue(all(written), written)
        self.assertLess(sum(written), self.nbytes)
        check_converted(self.target, self.wanted)

    def test_an_interrupt_leaves_it_and_an_error_does_not(self) -> None:
        for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):
            with self.subTest(type(error).__name__):
                with (
                    mock.patch.object(FolderStaging, "seal", side_effect=error),
                    self.assertRaises((KeyboardInterrupt, CheckpointError)),
                ):
                    self.convert()
                is_left = isinstance(error, KeyboardInterrupt)
                self.assertEqual(len(leftovers(self.target)), int(is_left))
                self.assertEqual(self.convert(), 0 if is_left else self.nbytes)
                check_converted(self.target, self.wanted)
                shutil.rmtree(self.target)

    def test_a_conversion_under_way_is_left_alone(self) -> None:
        """The second one to the same place begins by itself, and the first one that is done wins."""
        real, begun = FolderStaging.seal, list[int]()

        def seal(staging: FolderStaging, *args: Any, **options: Any) -> None:
            if not begun:
                begun.append(0)
                begun.append(self.convert())
            real(staging, *args, **options)

        with (
            mock.patch.object(FolderStaging, "seal", seal),
            self.assertRaisesRegex(CheckpointError, "exists already|another save"),
        ):
            self.convert()
        self.assertEqual(begun[1], self.nbytes)
        check_converted(self.target, self.wanted)
