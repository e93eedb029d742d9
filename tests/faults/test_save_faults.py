"""Cases that the torture of faults has found: calls of the file system that fail in a save, each in its place."""

from __future__ import annotations

import errno
import fcntl
import os
import unittest
from collections import Counter
from pathlib import Path
from unittest import mock

from kit.compare import Differs
from parameterized import parameterized
from soak.failing import FLUSHING, MAKING, MOVING, READING, WRITING, Fault
from soak.faults import Case, Subject, on_ranks
from soak.torture import temporary

from fsdp_optim import CheckpointError
from fsdp_optim.formats.own import PROBE
from fsdp_optim.storage.posix import FolderStaging
from fsdp_optim.storage.posix.files import sync_file, sync_folder
from fsdp_optim.testing import run_on_ranks

ALL = (*WRITING, *MAKING, *MOVING, *FLUSHING, *READING)
FAILS = OSError(errno.EIO, os.strerror(errno.EIO))


def case(action: str, number: int, functions: tuple[str, ...], share: float, *, lasts: bool, victim: int = 0) -> Case:
    """`share`: of the calls that the save makes, those that go well."""
    return Case(0, action, "overwrite", "leftover", (), Fault(number, functions, 0, lasts), share, victim)


ALONE = {
    "close, and all later": [case("save", errno.ENOSPC, ("close",), k / 8, lasts=True) for k in range(8)],
    "close in the background": [case("async_save", errno.EIO, ("close",), k / 8, lasts=False) for k in range(8)],
    "no descriptors": [case("async_save", errno.EMFILE, ("open", "io.open"), k / 12, lasts=False) for k in range(12)],
    "no looks": [case("save", errno.ESTALE, READING, k / 6, lasts=True) for k in range(6)],
}
ON_RANKS = [
    case("async_save", errno.EIO, ALL, share, lasts=True, victim=victim) for share, victim in ((0.8, 0), (0.97, 1))
]


def without_farewell(root: Path, cases: list[Case]) -> list[tuple[int, list[str], Counter[str]]]:
    """On each rank: as `on_ranks`, but nobody waits for a rank that cannot say that it has seen what failed."""
    with mock.patch("fsdp_optim.transport.completion._GRACE", 0.2):
        return on_ranks(root, cases)


class FaultsTest(unittest.TestCase):
    @parameterized.expand(list(ALONE))
    def test_alone(self, name: str) -> None:
        with temporary() as root:
            subject = Subject(root)
            wrong = [text for fault in ALONE[name] for text in subject.run(fault)[0]]
        if wrong:
            raise Differs("\n".join(wrong))

    def test_on_ranks(self) -> None:
        with temporary() as root:
            by_rank = run_on_ranks(without_farewell, 2, root, ON_RANKS)
        wrong = [text for cases in by_rank for _, texts, _ in cases for text in texts]
        if wrong:
            raise Differs("\n".join(wrong))


class PiecesTest(unittest.TestCase):
    def test_a_folder_that_is_abandoned_lets_go_of_its_lock(self) -> None:
        """rmtree raises what a close says, also where it is to ignore errors."""
        with temporary() as root:
            staging = FolderStaging.begin(root / "path", PROBE, overwrite=False)
            (staging.folder / "extra").mkdir()
            lock = os.open(staging.folder / "owner.lock", os.O_RDWR)
            with _failing_close():
                staging.abandon()
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(lock)
            FolderStaging.begin(root / "path", PROBE, overwrite=False).abandon()
            self.assertEqual(list(root.iterdir()), [])

    def test_the_lock_of_a_leftover_whose_close_fails(self) -> None:
        """A leftover is removed, and what closing its lock says is no reason not to save."""
        with temporary() as root:
            leftover = root / "path.saving-0123456789abcdef"
            leftover.mkdir()
            (leftover / "owner.lock").write_text("")
            with _failing_close("owner.lock"):
                staging = FolderStaging.begin(root / "path", PROBE, overwrite=False)
            self.assertEqual(list(root.iterdir()), [staging.folder])
            staging.abandon()

    def test_the_lock_of_a_folder_that_gets_no_name_whose_close_fails(self) -> None:
        """The folder goes, and the error says why it got no name."""
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with temporary() as root:
            with (
                _failing_close("owner.lock"),
                mock.patch.object(Path, "rename", side_effect=full),
                self.assertRaisesRegex(CheckpointError, os.strerror(errno.ENOSPC)),
            ):
                FolderStaging.begin(root / "path", PROBE, overwrite=False)
            self.assertEqual(list(root.iterdir()), [])

    def test_a_flush_whose_close_fails(self) -> None:
        """Nothing was written through the descriptor: what was flushed is on the disk."""
        with temporary() as root:
            (root / "file").touch()
            with _failing_close():
                sync_file(root / "file")
                sync_folder(root)
            with mock.patch("os.fsync", side_effect=FAILS), _failing_close():
                self.assertRaises(CheckpointError, sync_file, root / "file")
                self.assertRaises(OSError, sync_folder, root)


def _failing_close(name: str = "") -> mock._patch[mock.MagicMock]:
    """Every close fails, or those of files of one name."""
    real = os.close

    def close(fd: int) -> None:
        fails = os.readlink(f"/proc/self/fd/{fd}").endswith(name)
        real(fd)
        if fails:
            raise FAILS

    return mock.patch("os.close", side_effect=close)


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))
