"""Where a checkpoint is written from and to: devices that files cannot be read into, several machines, their file systems.

There is one machine and no device here, so what tells the library of others is replaced; everything behind it is real.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.cases import expand, some
from kit.checkpoints import Whole, async_save, check_files, load_trained, oracle_after, save
from kit.compare import Differs, check_refused, check_same, error_text
from kit.folders import InFolder
from kit.optimizers import OfModel, two_groups
from kit.trained import STEPS, Trained
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized

from fsdp_optim import SaveOptions
from fsdp_optim.checkpoint.common import local_extents
from fsdp_optim.storage.posix import FolderStaging, filesystem, folder, store
from fsdp_optim.testing import run_on_ranks

KWARGS: dict[str, Any] = {"model": Whole, "make": OfModel(two_groups)}
BUCKETS = (1 << 26, 64)


# ------------------------------------------------------------------------------------------ by way of the host


@contextlib.contextmanager
def nothing_lies_on_the_host(*, has_part: bool) -> Iterator[None]:
    """All local tensors are taken for a device's. Raises if none of a rank that has a part came by way of the host."""
    made = []
    real = local_extents._by_way_of_host

    def by_way_of_host(runs: Any) -> Any:
        made.append(sum(len(run.memory) for run in runs))
        return real(runs)

    with (
        mock.patch.object(local_extents, "lies_on_host", return_value=False),
        mock.patch.object(local_extents, "_by_way_of_host", by_way_of_host),
    ):
        yield
    if has_part and not made:
        raise Differs("nothing came by way of the host")


def trip_by_way_of_host(root: Path, bucket: int, wrappers: Sequence[str]) -> None:
    with cpu():
        for wrapper in wrappers:
            path = root / f"{wrapper} {bucket}"
            # Of several ranks that hold the same part of a small model, one writes it.
            has_part = wrapper not in ("DDP", "plain", "HSDP") or dist.get_rank() == 0
            with nothing_lies_on_the_host(has_part=has_part):
                save(path, Trained(wrapper, **KWARGS), bucket_nbytes=bucket)
                load_trained(path, wrapper, KWARGS, bucket_nbytes=bucket)


def save_in_background_by_way_of_host(root: Path, wrappers: Sequence[str]) -> None:
    """It is brought to the host once, while the caller waits."""
    with cpu():
        for wrapper in wrappers:
            trained = Trained(wrapper, **KWARGS)
            with mock.patch.object(local_extents, "lies_on_host", return_value=False):
                handle = async_save(root / wrapper, trained)
            handle.wait()


SOME, OTHERS = tuple(WRAPPERS)[::2], tuple(WRAPPERS)[1::2]


class DeviceTest(InFolder):
    @expand(
        soon=[(BUCKETS[0], 4, SOME)], later=[(BUCKETS[0], 4, OTHERS), (BUCKETS[1], 2, SOME), (BUCKETS[1], 2, OTHERS)]
    )
    def test_save_and_load(self, bucket: int, world_size: int, wrappers: Sequence[str]) -> None:
        run_on_ranks(trip_by_way_of_host, world_size, self.root, bucket, wrappers)
        for wrapper in wrappers:
            check_files(self.root / f"{wrapper} {bucket}", oracle_after(STEPS))

    @expand(soon=[(2, SOME)], later=[(4, OTHERS)])
    def test_async_save(self, world_size: int, wrappers: Sequence[str]) -> None:
        run_on_ranks(save_in_background_by_way_of_host, world_size, self.root, wrappers)
        for wrapper in wrappers:
            check_files(self.root / wrapper, oracle_after(STEPS))


# ------------------------------------------------------------------------------------------ several machines

MOUNTS = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:25 / /data rw,relatime shared:9 - nfs4 server:/export rw
31 30 0:26 / /data/with\\040space rw shared:10 master:1 - fuse.gcsfuse bucket rw
32 30 0:27 / /data/twice rw - xfs /dev/a rw
33 30 0:28 / /data/twice rw - lustre server@tcp:/home rw
"""


class FileSystemTest(unittest.TestCase):
    @parameterized.expand(
        (
            ("/", "ext4"),
            ("/home/run", "ext4"),
            ("/database", "ext4"),
            ("/data", "nfs4"),
            ("/data/run/step-1", "nfs4"),
            ("/data/with space/run", "fuse.gcsfuse"),
            ("/data/twice/run", "lustre"),
        )
    )
    def test_kind(self, path: str, kind: str) -> None:
        with mock.patch.object(Path, "read_text", return_value=MOUNTS):
            self.assertEqual(filesystem.filesystem_type(Path(path)), kind)

    def test_where_nothing_is_said(self) -> None:
        def refuse(self: Path, **_: Any) -> str:
            raise FileNotFoundError(self)

        with mock.patch.object(Path, "read_text", refuse):
            self.assertEqual(filesystem.filesystem_type(Path("/data")), "")
            self.assertTrue(filesystem.this_host(Path("/data")))

    def test_sparse(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            self.assertTrue(filesystem.has_sparse_files(Path(name)))
            real = os.fstat

            class Full:
                st_blocks = 1 << 11

            with mock.patch.object(os, "fstat", lambda fd: Full if real(fd).st_size == 1 << 20 else real(fd)):
                self.assertFalse(filesystem.has_sparse_files(Path(name)))
            self.assertEqual(os.listdir(name), [])


def save_on_machines(root: Path, num_machines: int, kind: str, sparse: bool, options: dict[str, Any]) -> None:
    host = f"machine {dist.get_rank() % num_machines}"
    with (
        cpu(),
        mock.patch.object(store, "this_host", return_value=host),
        mock.patch.object(folder, "filesystem_type", return_value=kind),
        mock.patch.object(folder, "has_sparse_files", return_value=sparse),
    ):
        save(root, Trained("FSDP2", **KWARGS), **options)


class MachinesTest(InFolder):
    @expand(
        *some(
            (
                ("fuse", 2, "fuse.gcsfuse", True, {}, False),
                ("fuse, one machine", 1, "fuse.gcsfuse", True, {}, True),
                ("unknown", 2, "", True, {}, False),
                ("unknown, one machine", 1, "", True, {}, True),
                ("nfs", 2, "nfs4", True, {}, False),
                ("nfs, one machine", 1, "nfs4", True, {}, True),
                ("lustre", 3, "lustre", True, {}, True),
                ("local", 1, "ext4", True, {}, True),
                ("not sparse", 1, "ext4", False, {}, False),
                ("as the caller says", 2, "fuse.gcsfuse", True, {"strategy": "in_place"}, True),
                ("as the caller says, the other", 1, "ext4", True, {"strategy": "per_rank_files"}, False),
            ),
            every=2,
        )
    )
    def test_files_that_only_one_rank_writes_to(
        self, _: str, machines: int, kind: str, sparse: bool, options: dict[str, Any], in_place: bool
    ) -> None:
        run_on_ranks(save_on_machines, 3, self.path, machines, kind, sparse, options)
        check_files(self.path, oracle_after(STEPS))
        check_same("one file for all", (self.path / "model.safetensors").exists(), in_place)
        run_on_ranks(load_trained, 2, self.path, "FSDP1 orig", KWARGS)


def save_while_the_leader_is_slow(path: Path) -> tuple[str, str]:
    """The ranks learn by their meeting that they share a machine; only then the lowest rank makes the files."""
    real = FolderStaging.create

    def slow(*args: Any) -> None:
        time.sleep(0.5)
        real(*args)

    with mock.patch.object(FolderStaging, "create", slow):
        return error_text(lambda: save_on_machines(path, 1, "nfs4", True, {}))


class SlowTest(InFolder):
    def test_nobody_writes_into_files_before_they_are_made(self) -> None:
        self.assertEqual(run_on_ranks(save_while_the_leader_is_slow, 2, self.path), [("", "")] * 2)
        check_files(self.path, oracle_after(STEPS))
        self.assertTrue((self.path / "model.safetensors").exists())


# ------------------------------------------------------------------------------------------ on its way to the disk


def save_and_note(path: Path, durable: bool, ask_nbytes: int) -> dict[int, list[tuple[int, int]]]:
    """Return, by inode, the ranges whose writeback was requested. `ask_nbytes`: the bytes per request."""
    ranges: dict[int, list[tuple[int, int]]] = {}

    def note(fd: int, offset: int, nbytes: int) -> None:
        ranges.setdefault(os.fstat(fd).st_ino, []).append((offset, offset + nbytes))

    writer = "fsdp_optim.storage.posix.writer"
    with cpu(), mock.patch(f"{writer}.start_writeback", note), mock.patch(f"{writer}._ASK_NBYTES", ask_nbytes):
        save(path, Trained("FSDP2", **KWARGS), durable=durable)
    return ranges


class WritebackTest(InFolder):
    def test_it_begins_before_it_is_waited_for(self) -> None:
        by_rank = run_on_ranks(save_and_note, 2, self.path, True, 1)
        for name in ("model.safetensors", "optim.safetensors"):
            file = self.path / name
            ranges = sorted(span for by_inode in by_rank for span in by_inode.get(file.stat().st_ino, []))
            header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
            borders = [header, *(stop for _, stop in ranges)]
            check_same(name, borders, [*(start for start, _ in ranges), file.stat().st_size])

    def test_short_writes_are_asked_for_together(self) -> None:
        by_each, together = (
            run_on_ranks(save_and_note, 2, self.path / str(nbytes), True, nbytes) for nbytes in (1, 200)
        )
        asked = [len(ranges) for by_inode in by_each for ranges in by_inode.values()]
        fewer = [len(ranges) for by_inode in together for ranges in by_inode.values()]
        assert 0 < sum(fewer) < sum(asked), (fewer, asked)
        for ranges in (ranges for by_inode in together for ranges in by_inode.values()):
            assert all(stop - start >= 200 for start, stop in ranges), ranges

    def test_not_where_nobody_waits(self) -> None:
        check_same("ranges", run_on_ranks(save_and_note, 2, self.path, False, 1), [{}, {}])


# ------------------------------------------------------------------------------------------ told at the end


@contextlib.contextmanager
def closing_fails(name: str, is_here: bool) -> Iterator[None]:
    """A network file system tells of a full disk when a file is closed."""
    real = os.close

    def close(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        writes = os.get_blocking(fd) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        real(fd)
        if is_here and writes and Path(path).name.startswith(name):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with mock.patch.object(os, "close", close):
        yield


def save_and_fail(root: Path, wrapper: str, name: str, rank: int, in_background: bool) -> list[tuple[str, str]]:
    """The error of a save that fails, and that of the next save."""
    with cpu():
        trained = Trained(wrapper, **KWARGS)

        def call() -> None:
            if in_background:
                async_save(root / "step-1", trained, options=SaveOptions(durable=False)).wait(30.0)
            else:
                save(root / "step-1", trained, durable=False)

        with closing_fails(name, dist.get_rank() == rank):
            errors = [error_text(call)]
        return [*errors, error_text(call)]


class ClosingTest(InFolder):
    @parameterized.expand(
        [
            (wrapper, name, rank, in_background)
            for wrapper, name, rank in (
                ("FSDP2", "optim.safetensors", 0),
                ("FSDP2", "model.safetensors", 1),
                ("FSDP2 x TP", "optim.safetensors", 1),
                ("FSDP2", "optim.safetensors.sums", 0),
                ("FSDP2", "fsdp_optim.json", 0),
            )
            for in_background in (False, True)
        ]
    )
    def test_a_full_disk(self, wrapper: str, name: str, rank: int, in_background: bool) -> None:
        by_rank = run_on_ranks(save_and_fail, 2, self.root, wrapper, name, rank, in_background)
        first, second = zip(*by_rank, strict=True)
        check_refused("full", first, "CheckpointError", name, os.strerror(errno.EDQUOT))
        check_same("the next", second, (("", ""),) * 2)
        check_files(self.path, oracle_after(STEPS))
        self.check_only("step-1")


# ------------------------------------------------------------------------------------------ what nobody wrote


def save_all_but_one(path: Path, checksums: bool) -> tuple[str, str]:
    """Rank 1 loses a run on the way."""
    from fsdp_optim.checkpoint.save.writing import RankWriter

    real = RankWriter.extents_of

    def lose(self: RankWriter, parts: Any) -> Any:
        extents = real(self, parts)
        if dist.get_rank() == 1:
            extents["optim.safetensors"].pop()
        return extents

    with cpu(), mock.patch.object(RankWriter, "extents_of", lose):
        return error_text(lambda: save(path, Trained("FSDP2", **KWARGS), checksums=checksums))


class CoverTest(InFolder):
    @parameterized.expand(((True,), (False,)))
    def test_a_byte_that_nobody_wrote_is_found(self, checksums: bool) -> None:
        errors = run_on_ranks(save_all_but_one, 3, self.path, checksums)
        check_refused("a run was lost", errors, "CheckpointError", "optim.safetensors", "written by no rank")
        self.check_only()


if __name__ == "__main__":
    unittest.main()
