"""Every store passes the conformance tests of the protocol."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.buckets.objects import MemoryBucket, ObjectStore
from fsdp_optim.buckets.objects.multipart import MultipartFile
from fsdp_optim.formats.own import OURS
from fsdp_optim.storage.base import Opened, Store
from fsdp_optim.storage.posix import Folder
from fsdp_optim.testing import StoreConformance

NAME = "model.safetensors"


class TestFolder(StoreConformance, unittest.TestCase):
    def make_store(self, probe: Any) -> Store:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.probe = probe
        return Folder(Path(folder.name) / "run" / "step-1", probe)

    def another_handle(self, store: Store) -> Store:
        return Folder(store.where, self.probe)


class TestOpenFolder(unittest.TestCase):
    def setUp(self) -> None:
        self.path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "run" / "step-1"
        self.path.mkdir(parents=True)

    def test_a_file_stays_open_while_a_thread_reads_it(self) -> None:
        """However many files are read meanwhile, of which few are open at once."""
        for number in range(100):
            (self.path / f"{number}.bin").write_bytes(b"%d" % (1000 + number))
        real, waits, goes_on = os.preadv, threading.Event(), threading.Event()

        def preadv(*args: Any) -> int:
            if not waits.is_set():
                waits.set()
                goes_on.wait(20)
            return real(*args)

        def read(opened: Opened, number: int) -> bytes:
            data = bytearray(4)
            opened.read_into(f"{number}.bin", [memoryview(data)], 0)
            return bytes(data)

        opened = self.enterContext(Folder(self.path, OURS.probe).open())
        with ThreadPoolExecutor(1) as pool, mock.patch.object(os, "preadv", preadv):
            first = pool.submit(read, opened, 0)
            self.assertTrue(waits.wait(20))
            others = [read(opened, number) for number in range(1, 100)]
            goes_on.set()
            self.assertEqual(first.result(), b"1000")
        self.assertEqual(others, [b"%d" % (1000 + number) for number in range(1, 100)])

    def test_a_folder_without_its_name_was_replaced(self) -> None:
        store = Folder(self.path, OURS.probe)
        with store.open() as opened:
            self.assertFalse(opened.was_replaced())
            self.path.rename(self.path.with_name("elsewhere"))
            self.assertTrue(opened.was_replaced())


class TestObjects(StoreConformance, unittest.TestCase):
    part_nbytes, parts_by_many = 1000, True

    def make_store(self, probe: Any) -> Store:
        self.bucket, self.probe = MemoryBucket(parts_by_many=self.parts_by_many), probe
        return self.another_handle(None)

    def another_handle(self, store: Any) -> Store:
        return ObjectStore(self.bucket, "run/step-1", self.probe, part_nbytes=self.part_nbytes)


class TestObjectsOfOneWriter(TestObjects):
    parts_by_many = False


class TestParts(unittest.TestCase):
    @parameterized.expand([(1, 1), (1000, 1), (1001, 2), (2500, 3)])
    def test_a_file_without_a_receipt_of_each_part_is_not_sealed(self, nbytes: int, num: int) -> None:
        """A rank died after it had said that it was done, say: the others' receipts do not make up a file."""
        for absent in range(num):
            store = ObjectStore(MemoryBucket(), "run/step-1", OURS.probe, part_nbytes=1000)
            staging = store.begin(overwrite=False, durable=False)
            staging.create("model.safetensors", nbytes, b"")
            writers = [store.join(staging.address, durable=False, who=f"rank {rank}") for rank in range(num)]
            for index, writer in enumerate(writers):
                size = min(1000, nbytes - 1000 * index)
                writer.write("model.safetensors", [memoryview(bytes(size))], 1000 * index)
            receipts = [writer.finish() for writer in writers]
            del receipts[absent]
            with self.assertRaisesRegex(
                CheckpointError, f"model.safetensors: nobody has put part {absent} of its {num}"
            ):
                staging.seal(["model.safetensors"], receipts, durable=False)
            staging.abandon()


class TestHeads(unittest.TestCase):
    def test_reads_around_the_end_of_the_head(self) -> None:
        """The first 64 KiB of a small object are read at once: every range is the same bytes, whatever part of it they hold."""
        data = random.Random(0).randbytes(130_000)
        store = ObjectStore(MemoryBucket(), "run/step-1", OURS.probe)
        staging = store.begin(overwrite=False, durable=False)
        writer = store.join(staging.address, durable=False, who="rank 0")
        for name, content in ((NAME, data), (OURS.probe.manifest, b"{}")):
            writer.put(name, content)
        writer.finish()
        edges = [0, 1, 65_535, 65_536, 65_537, 129_999, 130_000]
        for start, stop in itertools.combinations(edges, 2):
            with self.subTest(start=start, stop=stop), store.open() as opened:
                first = (stop - start) // 2
                pieces = [bytearray(first), bytearray(stop - start - first)]
                opened.read_into(NAME, [memoryview(piece) for piece in pieces], start)
                self.assertEqual(b"".join(pieces), data[start:stop])
        staging.abandon()


class TestMultipartFile(unittest.TestCase):
    @parameterized.expand(itertools.product((1, 9, 10, 11, 20, 25), (3, 10, 100)))
    def test_every_cut(self, nbytes: int, part_nbytes: int) -> None:
        """A file is written in two ranges, the second range first, split at every place."""
        data = bytes(range(nbytes))
        for cut in range(nbytes + 1):
            sent: dict[int, bytes] = {}
            parts = MultipartFile("file", nbytes, part_nbytes, sent.__setitem__)
            parts.write([memoryview(data)[cut:]], cut)
            parts.write([memoryview(data)[: cut // 2], memoryview(data)[cut // 2 : cut]], 0)
            parts.check_whole()
            self.assertEqual(b"".join(sent[number] for number in sorted(sent)), data)
            self.assertEqual({len(part) for part in sent.values()} - {part_nbytes, nbytes % part_nbytes}, set())

    def test_bytes_beyond_the_end(self) -> None:
        parts = MultipartFile("file", 10, 4, lambda number, data: None)
        with self.assertRaisesRegex(CheckpointError, "file: has 10 bytes, so byte 10"):
            parts.write([memoryview(b"12345")], 6)


if __name__ == "__main__":
    unittest.main()
