"""A save removes files from its folder only if nobody needs them any more, and its own bytes are on the disk."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.catalogs import CatalogTest, clock, load, save, sequence_of, unreadable
from kit.checkpoint_damage import seal
from kit.checkpoint_format import MANIFEST, check_folder, read_manifest
from kit.checkpoints import save as save_trained
from kit.compare import Differs, check_same, error_text, refused
from kit.retention import path_of_step
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.formats.own import PROBE
from fsdp_optim.storage.posix import LOCK, FolderStaging
from fsdp_optim.testing import run_on_ranks

TOKEN = "0123456789abcdef"
LIMIT = 60.0  # seconds; what takes them has hung


class AsideTest(CatalogTest):
    def setUp(self) -> None:
        """A save was killed between two renames: all that there is of step-1 is under another name."""
        super().setUp()
        save(self.path, extra={"number": 1})
        self.aside = self.root / f"step-1.old-{TOKEN}"
        self.path.rename(self.aside)

    @parameterized.expand(((errno.EIO,), (errno.EMFILE,), (errno.ESTALE,), (errno.EACCES,)))
    def test_what_cannot_be_read_just_now_stays(self, number: int) -> None:
        with unreadable(self.aside.name, number=number):
            save(self.root / "step-2")
            self.assertIn(self.aside.name, error_text(lambda: load(self.path))[1])
        self.check_only("step-2", self.aside.name)
        check_same("step-1", load(self.path).state["number"], 1)

    @parameterized.expand((("open",), ("preadv",)))
    def test_what_fails_in_a_later_call_stays(self, name: str) -> None:
        """The folder and the file are there, and cannot be opened or read: the library's own error hides why, not that."""
        real = getattr(os, name)

        def fail(file: Any, *args: Any, **kwargs: Any) -> Any:
            folder = kwargs.get("dir_fd", file)
            if isinstance(folder, int) and self.aside.name in os.readlink(f"/proc/self/fd/{folder}"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(file, *args, **kwargs)

        with mock.patch.object(os, name, fail):
            save(self.root / "step-2")
            self.assertIn(os.strerror(errno.EIO), error_text(lambda: load(self.path))[1])
            save(self.root / "step-1", overwrite=True)
        self.assertTrue(self.aside.exists())

    def test_a_newer_version_stays(self) -> None:
        seal(self.aside, read_manifest(self.aside) | {"version": 99})
        save(self.root / "step-2")
        self.check_only("step-2", self.aside.name)
        self.assertIn("has the schema version 99; this fsdp_optim reads up to", error_text(lambda: load(self.path))[1])

    def test_a_damaged_one_stays(self) -> None:
        """Some of it can still be saved by hand."""
        (self.aside / "optim.safetensors").unlink()
        save(self.root / "step-2")
        self.check_only("step-2", self.aside.name)

    def test_what_is_in_its_place_cannot_be_read(self) -> None:
        save(self.path, overwrite=True)
        shutil.copytree(self.path, self.aside)
        with unreadable(self.path.name, number=errno.EIO):
            save(self.root / "step-2")
        self.check_only("step-1", "step-2", self.aside.name)
        save(self.root / "step-3")
        self.check_only("step-1", "step-2", "step-3")

    def test_what_is_in_its_place_is_damaged(self) -> None:
        save(self.path, overwrite=True)
        shutil.copytree(self.path, self.aside)
        (self.path / "model.safetensors").unlink()
        save(self.root / "step-2")
        self.check_only("step-1", "step-2", self.aside.name)

    def test_the_name_in_its_place_is_not_on_the_disk(self) -> None:
        shutil.copytree(self.aside, self.path)
        with failing_flush(self.root):
            save(self.root / "step-2")
        self.check_only("step-1", "step-2", self.aside.name)
        save(self.root / "step-3")
        self.check_only("step-1", "step-2", "step-3")

    def test_a_save_to_its_path(self) -> None:
        """Without overwrite=True it is not taken for nothing; with it, it goes when the new one is there."""
        with unreadable(self.aside.name, number=errno.EIO):
            kind, text = error_text(lambda: save(self.path))
            check_same("kind", kind, "CheckpointError")
            for word in (str(self.path), self.aside.name, os.strerror(errno.EIO), "overwrite=True"):
                self.assertIn(word, text)
            self.check_only(self.aside.name)
            save(self.path, overwrite=True, extra={"number": 2})
        check_same("step-1", load(self.path).state["number"], 2)
        save(self.root / "step-2")
        self.check_only("step-1", "step-2")

    def test_it_is_found_again(self) -> None:
        self.check_latest(self.aside.name)
        self.assertIn("overwrite=True", error_text(lambda: save(self.path))[1])
        self.check_only("step-1")

    def test_the_newest_of_several(self) -> None:
        """By their order, not by their names."""
        for number, token in ((2, "f" * 16), (3, "2" * 16), (4, "a" * 16)):
            with clock(-float(number)):
                save(self.root / "step-9", extra={"number": number})
            (self.root / "step-9").rename(self.root / f"step-1.old-{token}")
        check_same("step-1", load(self.path).state["number"], 4)
        save(self.path, overwrite=True)
        self.check_only("step-1")

    def test_half_of_it_was_removed(self) -> None:
        (self.aside / MANIFEST).unlink()
        save(self.root / "step-2")
        self.check_only("step-2")

    def test_a_neighbour_hides_no_other(self) -> None:
        """Where one entry of a folder cannot be looked at, the others still can."""
        (self.root / "a").mkdir()
        with unreadable("a", number=errno.ESTALE):
            check_same("step-1", load(self.path).state["number"], 1)


class LockTest(CatalogTest):
    def saved_in_time(self) -> None:
        """A save, in a thread, so that one that hangs does not hang the tests."""
        failed: list[BaseException] = []

        def run() -> None:
            try:
                save(self.path)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(LIMIT)
        if thread.is_alive():
            raise Differs(f"the save has not ended after {LIMIT:g} s")
        if failed:
            raise failed[0]

    @parameterized.expand(
        (
            ("pipe", lambda lock: os.mkfifo(lock)),
            ("link", lambda lock: lock.symlink_to(lock.parent.parent / "mine")),
            ("folder", lambda lock: lock.mkdir()),
        )
    )
    def test_a_lock_that_is_no_file(self, _: str, make: Callable[[Path], None]) -> None:
        """Nobody must wait for it, and what no save has made is not removed."""
        neighbour = self.root / f"step-9.saving-{TOKEN}"
        neighbour.mkdir()
        make(neighbour / LOCK)
        (self.root / "mine").write_bytes(b"mine")
        self.saved_in_time()
        self.check_only("mine", "step-1", neighbour.name)
        check_folder(self.path)


def name_of(fd: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{fd}"))


@contextmanager
def failing_flush(folder: Path) -> Iterator[None]:
    """A folder's names cannot be brought to the disk."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if name_of(fd) == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with mock.patch.object(os, "fsync", fsync):
        yield


@contextmanager
def noted() -> Iterator[list[tuple[str, str]]]:
    """The files that are flushed, renamed, opened to be written, and removed, in order."""
    events: list[tuple[str, str]] = []

    def noting(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[0] & (os.O_WRONLY | os.O_RDWR):
                events.append((name, str(name_of(path) if isinstance(path, int) else path)))
            return real(path, *args, **kwargs)

        return mock.patch.object(owner, name, call)

    with noting(os, "fsync"), noting(os, "rename"), noting(os, "open"), noting(os, "mkdir"), noting(shutil, "rmtree"):
        yield events


class FlushTest(CatalogTest):
    @parameterized.expand(((True,), (False,)))
    def test_new_parents_are_flushed_in_theirs(self, durable: bool) -> None:
        with noted() as events:
            save(self.root / "a" / "b" / "c" / "step-1", durable=durable)
        folders_first = [(what, path) for what, path in events if what in ("mkdir", "fsync")][:6]
        made = [self.root / "a", self.root / "a" / "b", self.root / "a" / "b" / "c"]
        wanted = [event for path in made for event in (("mkdir", str(path)), ("fsync", str(path.parent)))]
        check_same("first of all", folders_first, wanted)

    def test_parents_that_cannot_be_flushed(self) -> None:
        with failing_flush(self.root):
            kind, text = error_text(lambda: save(self.root / "a" / "step-1", durable=True))
            check_same("kind", kind, "CheckpointError")
            self.assertIn(str(self.root / "a" / "step-1"), text)
            save(self.root / "b" / "step-1")  # nobody has asked for more
        check_folder(self.root / "b" / "step-1")

    def test_a_name_that_cannot_be_made_durable(self) -> None:
        """The earlier checkpoint is kept until a later save has brought the new name to the disk."""
        save(self.path, extra={"number": 1}, durable=True)
        with failing_flush(self.root):
            kind, text = error_text(lambda: save(self.path, extra={"number": 2}, overwrite=True, durable=True))
        check_same("kind", kind, "CheckpointError")
        [aside] = [path for path in self.root.iterdir() if path != self.path]
        for word in (str(self.path), os.strerror(errno.EIO), str(aside)):
            self.assertIn(word, text)
        check_same("aside", load(aside).state["number"], 1)
        check_same("in place", load(self.path).state["number"], 2)
        save(self.root / "step-2", durable=True)
        self.check_only("step-1", "step-2")

    def test_nothing_is_removed_for_a_name_that_is_not_durable(self) -> None:
        self.keep(1, 1, durable=True)
        with failing_flush(self.root):
            error_text(lambda: self.keep(2, 1, durable=True))
        self.check_steps(1, 2)

    @parameterized.expand((("overwrite",), ("keep_last",)))
    def test_the_new_one_is_on_the_disk_before_the_old_one_goes(self, what: str) -> None:
        """Also with durable=False, because the old one may be the only one that is on the disk."""
        self.keep(1, 1)
        new = path_of_step(self.root, 1 if what == "overwrite" else 2)
        with noted() as events:
            if what == "overwrite":
                save(new, durable=False, overwrite=True)
            else:
                self.keep(2, 1)
        first = next(
            i for i, (what, path) in enumerate(events) if what == "rmtree" and (".old-" in path or ".gone-" in path)
        )
        flushed = {Path(path).name for what, path in events[:first] if what == "fsync"}
        lacking = {str(path.name) for path in new.rglob("*") if path.is_file()} - flushed
        check_same("files that are not on the disk", lacking, set())
        check_same("the folder of the checkpoints", ("fsync", str(self.root)) in events[:first], True)

    def test_nothing_is_flushed_where_nothing_goes(self) -> None:
        with noted() as events:
            self.keep(1, 2)
            self.keep(2, 2, overwrite=True)
            save(self.root / "other")
        check_same("flushed", [path for what, path in events if what == "fsync"], [])

    def test_on_all_ranks(self) -> None:
        for rank, (first, second) in enumerate(run_on_ranks(flushes, 2, self.path)):
            check_same(f"rank {rank}, the first save", first, 0)
            if not second:
                raise Differs(f"rank {rank} has flushed nothing of the second save")


def flushes(path: Path) -> list[int]:
    """How often this rank flushes: when nothing is replaced, and when something is."""
    counts = []
    with cpu():
        trained = Trained("FSDP2", steps=1)
        for overwrite in (False, True):
            with noted() as events:
                save_trained(path, trained, overwrite=overwrite)
            counts.append(sum(what == "fsync" for what, _ in events))
            dist.barrier()
    return counts


class OvertakenTest(CatalogTest):
    """Two saves to one path at the same time: one wins, the other raises, whatever they were asked."""

    def staged(self, number: int, overwrite: bool) -> FolderStaging:
        staging = FolderStaging.begin(self.path, PROBE, overwrite=overwrite)
        save(self.root / "other" / "step", extra={"number": number})
        shutil.copytree(self.root / "other" / "step", staging.folder, dirs_exist_ok=True)
        shutil.rmtree(self.root / "other")
        return staging

    @parameterized.expand(
        [(there, overwrite) for there in (False, True) for overwrite in (False, True) if overwrite >= there]
    )
    def test_the_first_to_end_wins(self, there: bool, overwrite: bool) -> None:
        if there:
            save(self.path)
        slower, faster = self.staged(1, overwrite), self.staged(2, overwrite)
        faster.take_place(durable=True)
        kind, text = error_text(lambda: slower.take_place(durable=True))
        slower.abandon()
        check_same("kind", kind, "CheckpointError")
        self.assertIn(str(self.path), text)
        check_same("there", load(self.path).state["number"], 2)
        self.check_only("step-1")

    def test_another_one_ends_between_the_two_renames(self) -> None:
        """The words are about the other save: this one has said that it may replace what was there."""
        save(self.path)
        slower, faster = self.staged(1, True), self.staged(2, True)
        real, renamed = os.rename, list[bool]()

        def rename(old: Any, new: Any) -> None:
            real(old, new)
            if not renamed:
                renamed.append(True)
                faster.take_place(durable=True)

        with mock.patch.object(os, "rename", rename):
            refused(
                lambda: slower.take_place(durable=True), CheckpointError, str(self.path), "another save", "was faster"
            )
        slower.abandon()
        check_same("there", load(self.path).state["number"], 2)
        save(self.path, overwrite=True, extra={"number": 3})
        self.check_only("step-1")

    def test_what_is_moved_away_is_not_missed(self) -> None:
        save(self.path)
        staged = self.staged(1, True)
        self.path.rename(self.root / "elsewhere")
        staged.take_place(durable=True)
        check_same("there", load(self.path).state["number"], 1)

    def test_one_after_the_other(self) -> None:
        for number in (1, 2, 3):
            save(self.path, overwrite=True, extra={"number": number})
            check_same("sequence", sequence_of(self.path), number)
        self.check_only("step-1")
