"""A folder on a network file system, seen from one process: names that clients leave, listings that are old or never settle."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.folders import InFolder
from kit.managed import names_in
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.formats.own import PROBE
from fsdp_optim.storage.posix import Folder, FolderStaging, folder, writer
from fsdp_optim.storage.posix import directory as directory

# ------------------------------------------------------------------------------------------ the end of a save


def open_in(folder: Path) -> list[str]:
    """The files in a folder that this process has open."""
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if Path(path).is_relative_to(folder):
                paths.append(path)
    return paths


class StagingTest(InFolder):
    def begin(self, **options: Any) -> FolderStaging:
        staging = FolderStaging.begin(self.path, PROBE, **{"overwrite": False, "durable": False, **options})
        self.addCleanup(staging.abandon)
        return staging

    @contextlib.contextmanager
    def silly(self) -> Iterator[None]:
        """A client of NFS: what is removed while it is open stays under another name, and with it the folder."""
        real = os.unlink

        def unlink(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
            whole = Path(os.readlink(f"/proc/self/fd/{dir_fd}"), path) if dir_fd is not None else Path(path)
            if str(whole) in open_in(self.root):
                os.rename(whole, whole.with_name(".nfs0000000000000001"))
            else:
                real(path, *args, dir_fd=dir_fd, **kwargs)

        with mock.patch.object(os, "unlink", unlink):
            yield

    @parameterized.expand([(False,), (True,)])
    def test_abandoning_leaves_nothing(self, late: bool) -> None:
        staging = self.begin()
        staging.put("fsdp_optim.json", b"{}", durable=False)
        with self.silly():
            staging.abandon(late=late)
        self.check_only()

    def test_a_finished_checkpoint_has_no_silly_name(self) -> None:
        for overwrite in (False, True):
            staging = self.begin(overwrite=overwrite)
            with self.silly():
                staging.commit("fsdp_optim.json", b"{}", durable=False)
            self.assertEqual(names_in(self.path), ["fsdp_optim.json"])
            self.check_only("step-1")

    def test_what_clients_leave_is_not_carried_over(self) -> None:
        self.begin().commit("fsdp_optim.json", b"{}", durable=False)
        for name in (".nfs0000000000000001", ".fuse_hidden0000000100000002", "notes.txt"):
            (self.path / name).write_text("x")
        self.begin(overwrite=True).commit("fsdp_optim.json", b"{}", durable=False)
        self.assertEqual(names_in(self.path), ["fsdp_optim.json", "notes.txt"])

    def test_a_name_that_goes_away_meanwhile_is_no_failure(self) -> None:
        self.begin().commit("fsdp_optim.json", b"{}", durable=False)
        names = [".nfs0000000000000001", "notes.txt", "fsdp_optim.json"]
        (self.path / "notes.txt").write_text("x")
        real = os.listdir
        with mock.patch.object(os, "listdir", lambda path=".": names if Path(str(path)) == self.path else real(path)):
            self.begin(overwrite=True).commit("fsdp_optim.json", b"{}", durable=False)
        self.assertEqual(names_in(self.path), ["fsdp_optim.json", "notes.txt"])

    def test_nobody_writes_into_a_folder_that_is_being_removed(self) -> None:
        """Else the removal would fail, and leave a folder without a claim."""
        staging, real = self.begin(), folder.remove_tree

        def remove(path: Path) -> None:
            with self.assertRaises(FileNotFoundError):
                (staging.folder / "late.safetensors").write_bytes(b"x")
            real(path)

        with mock.patch.object(folder, "remove_tree", remove):
            staging.abandon(late=True)
        self.check_only()

    def test_what_a_rank_writes_late_is_in_nobodys_way(self) -> None:
        staging = self.begin()
        address = staging.folder
        staging.abandon(late=True)
        folder_writer = writer.FolderWriter(address, durable=False, who="rank 1")
        with self.assertRaises(OSError):
            folder_writer.put("late.safetensors", b"x")
        self.check_only()
        self.begin().commit("fsdp_optim.json", b"{}", durable=False)
        self.check_only("step-1")


# ------------------------------------------------------------------------------------------ listings


class ListingTest(InFolder):
    def names(self) -> list[str]:
        return [Path(entry.where).name for entry in Folder(self.root / "_", PROBE).directory().listed()]

    def save(self, *names: str) -> None:
        for name in names:
            model = torch.nn.Linear(2, 2)
            fsdp_optim.save(
                self.root / name,
                model,
                options=fsdp_optim.SaveOptions(durable=False, progress=False),
                step=int(name[-1]),
            )

    def test_a_checkpoint_that_can_never_be_read_is_listed(self) -> None:
        """The newest one, whose manifest another machine has replaced, as far as this one can see."""
        self.save("step-1", "step-2")
        real = directory.status_of

        def moved(folder: Path, *args: Any, **kwargs: Any) -> Any:
            status = real(folder, *args, **kwargs)
            if folder.name != "step-2":
                return status
            return type(status)(None, True, False, True, "stale")

        with mock.patch.object(directory, "status_of", moved):
            listed = Folder(self.root / "_", PROBE).directory().listed()
        self.assertEqual([Path(entry.where).name for entry in listed], ["step-1", "step-2"])
        self.assertFalse(listed[1].status.is_sure)

    def test_one_that_went_away_is_not(self) -> None:
        self.save("step-1", "step-2")
        real = directory.status_of

        def moved(folder: Path, *args: Any, **kwargs: Any) -> Any:
            if folder.name == "step-2":
                shutil.rmtree(folder, ignore_errors=True)
            return real(folder, *args, **kwargs)

        with mock.patch.object(directory, "status_of", moved):
            self.assertEqual(self.names(), ["step-1"])

    def test_names_that_come_and_go(self) -> None:
        """Other saves are under way all the time."""
        self.save("step-1")
        looks = itertools.count()
        with mock.patch.object(directory, "names_in", side_effect=lambda root: {"step-1", f"step-{next(looks)}-gone"}):
            self.assertEqual(self.names(), ["step-1"])
        self.assertGreater(next(looks), 1)

    def test_a_damaged_newest_one_is_listed(self) -> None:
        self.save("step-1", "step-2")
        (self.root / "step-2" / "fsdp_optim.json").write_bytes(b"{")
        self.assertEqual(self.names(), ["step-1", "step-2"])

    def test_the_client_is_made_to_list_anew(self) -> None:
        self.save("step-1")
        with (
            mock.patch.object(directory, "is_of_one_machine", return_value=False),
            mock.patch.object(directory, "refresh", side_effect=directory.refresh) as refreshed,
        ):
            self.assertEqual(self.names(), ["step-1"])
            refreshed.assert_called_with(self.root)
        with mock.patch.object(directory, "refresh", side_effect=AssertionError("on one machine nothing is made")):
            self.names()
        self.check_only("step-1")

    def test_a_beacon_is_no_checkpoint(self) -> None:
        self.save("step-1")
        with Folder(self.root / "_", PROBE).beacon():
            self.assertEqual(self.names(), ["step-1"])
            self.assertEqual([checkpoint.path.name for checkpoint in fsdp_optim.checkpoints(self.root)], ["step-1"])


if __name__ == "__main__":
    unittest.main()
