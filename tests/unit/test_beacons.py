"""Files that show whether two processes have the same folder before them, and names that nobody has given."""

from __future__ import annotations

import errno
import os
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from kit.compare import refused
from kit.folders import InFolder
from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.formats.own import PROBE
from fsdp_optim.plugins import sees
from fsdp_optim.storage.posix import beacon_above, filesystem, names_in
from fsdp_optim.storage.posix.beacon import BEACON, is_lasting, refresh
from fsdp_optim.storage.posix.path_status import is_empty_folder, is_nothing
from fsdp_optim.storage.posix.strangers import carry_over, strangers_in

TOKEN = "0123456789abcdef"
PASSING = (".nfs0000000000a1b2c3", ".nfs00000001", ".fuse_hidden0000001a00000002", f"{BEACON}{TOKEN}")
SOMEBODYS = (
    ".nfs",
    ".nfsrc",
    ".nfs-notes",
    ".fuse_hidden",
    ".fuse_hidden_by_me",
    BEACON,
    f"{BEACON}notes",
    f"{BEACON}{TOKEN}0",
    f"x{BEACON}{TOKEN}",
    "config.json",
    ".git",
    "",
)


class Listing(InFolder):
    def names(self) -> list[str]:
        return sorted(os.listdir(self.root))


class BeaconTest(Listing):
    @parameterized.expand([("",), ("run",), ("run/step-1",), ("a/b/c",)])
    def test_it_is_in_the_nearest_folder(self, below: str) -> None:
        with beacon_above(self.root / below) as address:
            self.assertEqual([str(self.root / name) for name in self.names()], [address])
            self.assertTrue(sees(Path(address)))
            self.assertEqual(os.path.getsize(address), 0)
        self.assertEqual(self.names(), [])
        self.assertFalse(sees(Path(address)))

    def test_a_file_is_no_folder(self) -> None:
        (self.root / "run").write_text("")
        with beacon_above(self.root / "run" / "step-1") as address:
            self.assertEqual(Path(address).parent, self.root)

    def test_no_name_is_given_twice(self) -> None:
        """A client may have kept that a name is not there."""
        with beacon_above(self.root) as beacon, beacon_above(self.root) as other:
            self.assertNotEqual(beacon, other)

    def test_an_error_inside_takes_it_away(self) -> None:
        def fail() -> None:
            with beacon_above(self.root):
                raise CheckpointError("no")

        refused(fail, CheckpointError, "no")
        self.assertEqual(self.names(), [])

    def test_one_that_somebody_else_took_away(self) -> None:
        with beacon_above(self.root) as address:
            os.unlink(address)

    def test_where_nothing_can_be_made(self) -> None:
        def enter() -> None:
            with beacon_above(self.root):
                raise AssertionError("it was made")

        with mock.patch.object(os, "open", side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))):
            refused(enter, CheckpointError, str(self.root), "cannot be created", os.strerror(errno.EROFS))
            refresh(self.root)

    def test_refreshing_leaves_nothing(self) -> None:
        with mock.patch.object(os, "open", side_effect=os.open) as opened:
            refresh(self.root)
        [call] = opened.call_args_list
        self.assertEqual(Path(call.args[0]).parent, self.root)
        self.assertEqual(self.names(), [])
        refresh(self.root / "missing")
        self.assertEqual(self.names(), [])

    def test_a_look_in_vain_lists_the_folder(self) -> None:
        """So that the client of a network file system asks anew."""
        (self.root / "there").write_text("")
        (self.root / "link").symlink_to("nowhere")
        with mock.patch.object(os, "listdir", side_effect=os.listdir) as listed:
            self.assertTrue(sees(self.root / "there"))
            self.assertTrue(sees(self.root / "link"))
            self.assertFalse(listed.called)
            self.assertFalse(sees(self.root / "missing"))
            listed.assert_called_once_with(self.root)
            self.assertFalse(sees(self.root / "missing" / "too"))

    @parameterized.expand([(errno.ESTALE,), (errno.EIO,), (errno.EACCES,)])
    def test_what_cannot_be_looked_at_is_not_seen(self, number: int) -> None:
        with mock.patch.object(os, "lstat", side_effect=OSError(number, os.strerror(number))):
            self.assertFalse(sees(self.root))


class NamesTest(Listing):
    @parameterized.expand([(name,) for name in PASSING])
    def test_passing(self, name: str) -> None:
        self.assertFalse(is_lasting(name))

    @parameterized.expand([(name,) for name in SOMEBODYS])
    def test_somebodys(self, name: str) -> None:
        self.assertTrue(is_lasting(name))

    def test_a_folder_with_passing_names_only_is_empty(self) -> None:
        for name in PASSING:
            (self.root / name).write_text("")
        self.assertTrue(is_empty_folder(self.root))
        self.assertTrue(is_nothing(self.root))
        self.assertEqual(names_in(self.root), set())
        (self.root / "mine").write_text("")
        self.assertFalse(is_empty_folder(self.root))
        self.assertEqual(names_in(self.root), {"mine"})

    def test_passing_names_are_not_carried_over(self) -> None:
        old, new = self.root / "old", self.root / "new"
        for folder in (old, old / "extra", old / "deep"):
            folder.mkdir()
            for name in (*PASSING, "mine"):
                (folder / name).write_text("mine")
        new.mkdir()
        (new / "extra").mkdir()
        strangers = strangers_in(old, "owner.lock", PROBE)
        self.assertEqual(strangers, ["deep", "extra/mine", "mine"])
        carry_over(old, new, strangers)
        files = sorted(str(path.relative_to(new)) for path in new.rglob("*") if path.is_file())
        self.assertEqual(files, ["deep/mine", "extra/mine", "mine"])

    @parameterized.expand([(errno.EPERM,), (errno.EINVAL,), (errno.ENOTTY,), (errno.ENOSYS,), (errno.EXDEV,)])
    def test_where_there_are_no_links_files_are_copied(self, number: int) -> None:
        old, new = self.root / "old", self.root / "new"
        for folder in (old, new):
            folder.mkdir()
        (old / "mine").write_text("mine")
        (old / "link").symlink_to("mine")
        with mock.patch.object(os, "link", side_effect=OSError(number, os.strerror(number))):
            carry_over(old, new, ["link", "mine"])
        self.assertEqual([(new / "mine").read_text(), os.readlink(new / "link")], ["mine", "mine"])

    @parameterized.expand([(errno.ENOSPC,), (errno.EDQUOT,), (errno.EIO,), (errno.ESTALE,)])
    def test_another_failure_of_a_link_is_one(self, number: int) -> None:
        (self.root / "mine").write_text("mine")
        (self.root / "new").mkdir()
        with (
            mock.patch.object(os, "link", side_effect=OSError(number, os.strerror(number))),
            self.assertRaises(OSError) as caught,
        ):
            carry_over(self.root, self.root / "new", ["mine"])
        self.assertEqual(caught.exception.errno, number)


class HostTest(Listing):
    """The string of a machine and a mount."""

    def test_it_is_the_same_in_a_folder_and_below(self) -> None:
        self.assertEqual(filesystem.this_host(self.root), filesystem.this_host(self.root / "not" / "there"))

    def test_another_mount_has_another_one(self) -> None:
        self.assertNotEqual(filesystem.this_host(Path("/proc/1")), filesystem.this_host(self.root))

    def test_the_folder_is_not_looked_up(self) -> None:
        """A client would keep that it is not there."""
        never = AssertionError("it was looked up")
        with mock.patch.object(os, "stat", side_effect=never), mock.patch.object(os, "lstat", side_effect=never):
            self.assertTrue(filesystem.this_host(self.root / "step-1"))

    def test_machines_without_a_boot_id_are_none(self) -> None:
        """Containers on two machines may have the same name."""
        real = Path.read_text

        def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
            if path.name == "boot_id":
                raise FileNotFoundError(path)
            return real(path, *args, **kwargs)

        with mock.patch.object(Path, "read_text", read_text):
            host = filesystem.this_host(self.root)
            self.assertEqual(filesystem.this_host(self.root), host)
            filesystem._unique_name.cache_clear()  # as in another process
            self.assertNotEqual(filesystem.this_host(self.root), host)

    @parameterized.expand(
        [
            *((kind, True, False) for kind in ("lustre", "gpfs", "ceph", "wekafs", "gfs2", "ocfs2", "fuse.glusterfs")),
            *((kind, False, False) for kind in ("nfs", "nfs4", "beegfs", "orangefs", "cifs", "9p", "")),
            *((kind, False, False) for kind in ("fuse.juicefs", "fuse.sshfs", "fuse.s3fs")),
            *((kind, True, True) for kind in ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay")),
        ]
    )
    def test_kinds(self, kind: str, in_place: bool, one_machine: bool) -> None:
        """Which let several machines write to one file, and which have one machine only."""
        self.assertEqual(kind in filesystem.WRITTEN_IN_PLACE, in_place)
        with mock.patch.object(filesystem, "filesystem_type", return_value=kind):
            self.assertEqual(filesystem.is_of_one_machine(self.root), one_machine)


if __name__ == "__main__":
    unittest.main()
