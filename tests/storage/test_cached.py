"""Reading through a cache: the same bytes, and never those of another checkpoint."""

from __future__ import annotations

import itertools
import logging
import os
import random
import tempfile
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.checkpoints import mine, scramble
from kit.compare import check_same
from kit.store_calls import load_from, save_to
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized

from fsdp_optim.buckets.blocks import BlockFolder
from fsdp_optim.buckets.cached import CachedStore
from fsdp_optim.buckets.fsspec import FsspecBucket
from fsdp_optim.buckets.objects import MemoryBucket, ObjectStore
from fsdp_optim.formats.own import OURS
from fsdp_optim.storage.base import Store
from fsdp_optim.testing import StoreConformance, run_on_ranks
from fsdp_optim.testing.store_case import MANIFEST, AnyManifest

SMALL = 200  # bytes of a block, so that small files have many


class Counting(MemoryBucket):
    """Counts what is read of it, by the last part of the key."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int]] = []

    def read_into(self, key: str, pieces: Sequence[memoryview], offset: int, *, version: str | None = None) -> None:
        self.reads.append((key.rpartition("/")[2], sum(map(len, pieces))))
        super().read_into(key, pieces, offset, version=version)


class TestCachedStore(StoreConformance, unittest.TestCase):
    """It keeps what a store promises; each handle finds what the others have read."""

    def make_store(self, probe: Any) -> Store:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.bucket, self.probe = folder.name, MemoryBucket(), probe
        return self.another_handle(None)

    def another_handle(self, store: Any) -> Store:
        inner = ObjectStore(self.bucket, "run/step-1", self.probe, part_nbytes=1000)
        return CachedStore(inner, BlockFolder(self.folder), MANIFEST, block_nbytes=700)


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name) / "cache"
        self.bucket = Counting()

    def blocks(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(self.folder.rglob("*")) if path.is_file()}


class TestRanges(InFolder):
    def setUp(self) -> None:
        super().setUp()
        self.data = random.Random(0).randbytes(30 * SMALL + 17)
        self.write(self.data, b"one")

    def write(self, data: bytes, line: bytes) -> None:
        staging = self.store().begin(overwrite=True, durable=False)
        writer = self.store().join(staging.address, durable=False, who="rank 0")
        writer.put("file", data)
        staging.seal([], [writer.finish()], durable=False)
        staging.commit(MANIFEST, line + b"\n" + staging.token.encode(), durable=False)

    def store(self) -> CachedStore:
        inner = ObjectStore(self.bucket, "run/step-1", AnyManifest())
        return CachedStore(inner, BlockFolder(self.folder), MANIFEST, block_nbytes=SMALL)

    def test_any_range_in_any_pieces(self) -> None:
        rng = random.Random(1)
        for _ in range(40):
            with self.store().open() as opened:
                for _ in range(4):
                    start, stop = sorted(rng.randrange(len(self.data) + 1) for _ in range(2))
                    cuts = sorted([start, stop, *(rng.randint(start, stop) for _ in range(5))])
                    pieces = [memoryview(bytearray(b - a)) for a, b in itertools.pairwise(cuts)]
                    opened.read_into("file", pieces, start)
                    self.assertEqual(b"".join(pieces), self.data[start:stop])
            for path in rng.sample(sorted(self.blocks()), min(3, len(self.blocks()))):
                path.unlink()

    def test_pieces_of_other_items_than_bytes(self) -> None:
        memory = bytearray(3 * SMALL)
        with self.store().open() as opened:
            opened.read_into("file", [memoryview(memory).cast("f")], 4)
        self.assertEqual(memory, self.data[4 : 4 + len(memory)])

    def test_blocks_that_follow_one_another_are_one_read(self) -> None:
        """Of at most eight of them."""
        head = 64 << 10  # what a store of objects reads at first
        data = random.Random(2).randbytes(head + 20 * SMALL)
        self.write(data, b"two")
        first = head // SMALL + 1
        for missing, expected in (
            (range(first, first + 20), [8, 8, 4]),
            ((first, first + 1, first + 5, first + 18), [2, 1, 1]),
            ((), []),
        ):
            for number in missing:
                for path in self.folder.rglob(str(number)):
                    path.unlink()
            with self.store().open() as opened:
                self.bucket.reads.clear()
                start = first * SMALL
                self.assertEqual(opened.read("file", start, len(data) - start), data[start:])
            num_blocks = [-(-nbytes // SMALL) for name, nbytes in self.bucket.reads if name == "file"]
            self.assertEqual(num_blocks, expected)

    def test_small_reads_of_one_block_open_it_once(self) -> None:
        with self.store().open() as opened:
            opened.read("file", 0, len(self.data))
        with (
            self.store().open() as opened,
            mock.patch.object(Path, "open", autospec=True, side_effect=Path.open) as opens,
        ):
            for start in range(0, SMALL, 10):
                self.assertEqual(opened.read("file", start, 10), self.data[start : start + 10])
        self.assertEqual(opens.call_count, 1)

    def test_another_checkpoint_of_the_same_place(self) -> None:
        """Is not served, in whatever order the two are read; the older one's blocks go."""
        with self.store().open() as opened:
            self.assertEqual(opened.read("file", 0, 1000), self.data[:1000])
        old = self.blocks()
        other = random.Random(3).randbytes(len(self.data))
        self.write(other, b"two")
        with self.store().open() as opened:
            self.assertEqual(opened.read("file", 0, 1000), other[:1000])
        self.assertTrue(old)
        self.assertEqual(set(old) & set(self.blocks()), set())

    def test_another_checkpoint_that_comes_while_one_is_opened(self) -> None:
        """Bytes that the handle of the older checkpoint reads are not kept as the newer one's."""
        other, real = random.Random(3).randbytes(len(self.data)), ObjectStore.open

        def overtaken(store: ObjectStore) -> Any:
            opened = real(store)
            opened.read("file", 0, 1)  # the store keeps what was read with it
            with mock.patch.object(ObjectStore, "open", real):
                self.write(other, b"two")
            return opened

        with mock.patch.object(ObjectStore, "open", overtaken), self.store().open() as opened:
            self.assertEqual(opened.read("file", 0, 1000), self.data[:1000])
        self.assertEqual(self.blocks(), {})
        with self.store().open() as opened:
            self.assertEqual(opened.read("file", 0, 1000), other[:1000])

    def test_another_place(self) -> None:
        with self.store().open() as opened:
            opened.read("file", 0, 1000)
        before = self.blocks()
        blocks = BlockFolder(self.folder).blocks_of("s3://other", "version")
        blocks.put("file", 0, memoryview(b"x" * SMALL))
        with self.store().open() as opened:
            self.assertEqual(opened.read("file", 0, 1000), self.data[:1000])
        self.assertLess(set(before), set(self.blocks()))

    def test_every_damage_is_found_and_mended(self) -> None:
        with self.store().open() as opened:
            opened.read("file", 0, len(self.data))
        whole = self.blocks()
        first, second, *_ = sorted(whole, key=lambda path: int(path.name))

        def as_folder(path: Path) -> None:
            path.unlink()
            path.mkdir()

        def edited(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
            def change_file(path: Path) -> None:
                path.write_bytes(change(whole[path]))

            return change_file

        damages: dict[str, Callable[[Path], None]] = {
            "missing": Path.unlink,
            "empty": edited(lambda data: b""),
            "shorter": edited(lambda data: data[:-1]),
            "without its end": edited(lambda data: data[: SMALL // 2]),
            "without its beginning": edited(lambda data: data[1:]),
            "longer": edited(lambda data: data + b"x"),
            "zeros": edited(lambda data: bytes(len(data))),
            "of the other block": edited(lambda data: whole[second]),
        }
        for at in (0, SMALL // 2, SMALL - 1, SMALL, SMALL + 7):
            damages[f"byte {at}"] = edited(lambda data, at=at: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        for name, damage in damages.items():
            with self.subTest(name=name):
                damage(first)
                with self.store().open() as opened:
                    self.bucket.reads.clear()
                    self.assertEqual(opened.read("file", 0, len(self.data)), self.data)
                    self.assertEqual([key for key, _ in self.bucket.reads if key != MANIFEST], ["file"])
                self.assertEqual(self.blocks(), whole)
        as_folder(first)
        with self.assertLogs("fsdp_optim", logging.WARNING), self.store().open() as opened:
            self.assertEqual(opened.read("file", 0, len(self.data)), self.data)

    @parameterized.expand([("full", 28), ("read-only", 30), ("closed", 13)])
    def test_a_folder_that_takes_nothing(self, name: str, number: int) -> None:
        """Costs one warning; nothing half-written stays."""
        real = Path.open

        def refused(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "x" not in mode:
                return real(path, mode, *args, **options)
            if name == "full":
                path.write_bytes(b"half")
            raise OSError(number, os.strerror(number))

        with mock.patch.object(Path, "open", refused), self.assertLogs("fsdp_optim", logging.WARNING) as logs:
            store = self.store()
            for _ in range(2):
                with store.open() as opened:
                    self.assertEqual(opened.read("file", 0, len(self.data)), self.data)
        self.assertEqual(len(logs.output), 1, logs.output)
        self.assertIn(os.strerror(number), logs.output[0])
        self.assertEqual(self.blocks(), {})

    def test_a_folder_that_cannot_be(self) -> None:
        self.folder.write_bytes(b"a file")
        with self.assertLogs("fsdp_optim", logging.WARNING) as logs, self.store().open() as opened:
            self.assertEqual(opened.read("file", 0, len(self.data)), self.data)
        self.assertEqual(len(logs.output), 1)
        self.assertEqual(self.folder.read_bytes(), b"a file")

    def test_a_version_that_is_removed_while_it_is_read(self) -> None:
        """By a process that has opened the next one: what it reads stays right, without a warning."""
        with self.store().open() as opened:
            opened.read("file", 0, SMALL)
            BlockFolder(self.folder).blocks_of(self.store().where, "another version")
            with self.assertNoLogs("fsdp_optim", logging.WARNING):
                self.assertEqual(opened.read("file", 0, len(self.data)), self.data)


class TestLoading(InFolder):
    def load(self) -> None:
        target = Trained("plain", steps=0)
        scramble(target)
        inner = ObjectStore(self.bucket, "run/step-1", OURS.probe)
        store = CachedStore(inner, BlockFolder(self.folder), OURS.probe.manifest)
        load_from(store, target, compare=True)
        check_same("loaded", mine(target), mine(self.trained))

    def test_the_second_load_reads_the_manifest_only(self) -> None:
        self.trained = Trained("plain")
        store = ObjectStore(self.bucket, "run/step-1", OURS.probe)
        save_to(store, self.trained)
        self.load()
        self.assertGreater(len({name for name, _ in self.bucket.reads}), 2)
        self.bucket.reads.clear()
        self.load()
        self.assertEqual({name for name, _ in self.bucket.reads}, {OURS.probe.manifest})


def save_and_load_on_a_rank(url: str, folder: str) -> None:
    """All ranks load at the same time, with one cache, which is damaged in between."""
    bucket, prefix = FsspecBucket.at(url)
    inner = ObjectStore(bucket, prefix, OURS.probe)
    with cpu():
        trained = Trained("FSDP2")
        call = trained.process_group
        save_to(inner, trained, process_group=call)
        for turn in range(3):
            store = CachedStore(inner, BlockFolder(folder), OURS.probe.manifest, block_nbytes=SMALL)
            target = Trained("FSDP2", steps=0)
            scramble(target)
            load_from(store, target, process_group=call, compare=True)
            check_same(f"loaded {turn}", mine(target), mine(trained))
            dist.barrier()
            for path in sorted(Path(folder).rglob("*"))[dist.get_rank() :: 2 * dist.get_world_size()]:
                if path.is_file():
                    path.write_bytes(path.read_bytes()[:-1])
            dist.barrier()


class OnRanksTest(unittest.TestCase):
    def test_two_processes_share_a_cache(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_and_load_on_a_rank, 2, f"file://{folder}/run/step-1", f"{folder}/cache")
            self.assertGreater(len([path for path in Path(folder, "cache").rglob("*") if path.is_file()]), 10)


if __name__ == "__main__":
    unittest.main()
