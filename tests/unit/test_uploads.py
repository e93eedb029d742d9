"""Parts on their way to a bucket: those that are filled, wait or are sent take no more memory than the budget."""

from __future__ import annotations

import threading
import time
import unittest
import weakref
from unittest import mock

from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.buckets.objects import Address, MemoryBucket, ObjectPlace, ObjectWriter, multipart
from fsdp_optim.buckets.objects.writer import SharedFile

PART, NUM_PARTS = 8, 20


class Counted(MemoryBucket):
    """A slow bucket that counts the memory of parts. `fails`: the first part is refused."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.live = self.most = self.num_sent = 0
        self.fails, self.lock = fails, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.live += nbytes
            self.most = max(self.most, self.live)

    def pages(self, nbytes: int) -> memoryview:
        memory = memoryview(bytearray(nbytes))
        self.add(nbytes)
        weakref.finalize(memory, self.add, -nbytes)
        return memory

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> str:
        time.sleep(0.005)
        self.num_sent += 1
        if self.fails:
            raise CheckpointError("the line is cut")
        return f"{number}"

    def put(self, key: str, data: bytes, *, only_if: str | None = None) -> str:
        self.add(len(data))  # a copy of the part
        time.sleep(0.005)
        self.num_sent += 1
        self.add(-len(data))
        return "version"


def writer_of(bucket: Counted, files: dict[str, SharedFile], num_parts: int) -> ObjectWriter:
    """A writer whose budget has room for so many parts."""
    address = Address("token", False, PART, 10_000, files)
    budget = -(-num_parts * PART * 8 // 7)
    return ObjectWriter(bucket, ObjectPlace("memory://run/step", "run/step"), address, "rank 0", budget)


class UploadsTest(unittest.TestCase):
    @parameterized.expand([(1, 1), (1, 4), (2, 4)])
    def test_memory_of_parts(self, num_files: int, num_parts: int) -> None:
        """Also where a part of each of several files is being filled."""
        bucket = Counted()
        files = {f"file-{k}": SharedFile(NUM_PARTS * PART, PART, "upload") for k in range(num_files)}
        writer = writer_of(bucket, files, num_parts)
        with mock.patch.object(multipart, "pages", bucket.pages):
            for at in range(0, NUM_PARTS * PART, PART // 2):
                for name in files:
                    writer.write(name, [memoryview(bytes(PART // 2))], at)
            writer.finish()
        self.assertEqual(bucket.num_sent, num_files * NUM_PARTS)
        self.assertLessEqual(bucket.most, num_parts * PART)

    def test_memory_of_files_of_one_part(self) -> None:
        """They are copied once more."""
        bucket = Counted()
        files = {f"file-{k}": SharedFile(PART, PART, "") for k in range(NUM_PARTS)}
        writer = writer_of(bucket, files, 4)
        with mock.patch.object(multipart, "pages", bucket.pages):
            for name in files:
                writer.write(name, [memoryview(bytes(PART))], 0)
            writer.finish()
        self.assertEqual(bucket.num_sent, NUM_PARTS)
        self.assertLessEqual(bucket.most, 4 * PART)

    def test_more_open_parts_than_memory(self) -> None:
        """Parts that wait for their other half hold nobody up."""
        bucket = Counted()
        files = {f"file-{k}": SharedFile(PART, PART, "upload") for k in range(5)}
        writer = writer_of(bucket, files, 2)
        for at in (0, PART // 2):
            for name in files:
                writer.write(name, [memoryview(bytes(PART // 2))], at)
        writer.finish()
        self.assertEqual(bucket.num_sent, 5)

    def test_a_failure_is_raised_by_a_later_write(self) -> None:
        bucket = Counted(fails=True)
        writer = writer_of(bucket, {"file": SharedFile(NUM_PARTS * PART, PART, "upload")}, 1)
        with self.assertRaisesRegex(CheckpointError, "the line is cut"):
            for number in range(NUM_PARTS):
                writer.write("file", [memoryview(bytes(PART))], number * PART)
        writer.discard()
        self.assertLess(bucket.num_sent, NUM_PARTS)


if __name__ == "__main__":
    unittest.main()
