"""A rank that nobody waits for any more: what it puts after its save was given up counts for nothing."""

from __future__ import annotations

import unittest

from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.buckets.objects import MemoryBucket, ObjectStore
from fsdp_optim.testing.store_case import MANIFEST, AnyManifest

PREFIX, BESIDE = "run/step-1", "run/step-2"
NAME = "model.safetensors"
DEAD_AFTER = 300.0


class LatePutsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.bucket = MemoryBucket()

    def store(self, prefix: str = PREFIX) -> ObjectStore:
        return ObjectStore(self.bucket, prefix, AnyManifest(), part_nbytes=100, dead_after=DEAD_AFTER)

    def save(self, prefix: str, content: bytes) -> None:
        store = self.store(prefix)
        staging = store.begin(overwrite=True, durable=False)
        writer = store.join(staging.address, durable=False, who="rank 0")
        writer.put(NAME, content)
        staging.seal([], [writer.finish()], durable=False)
        staging.commit(MANIFEST, b"one\n" + staging.token.encode(), durable=False)

    def contents(self) -> dict[str, bytes]:
        return {found.key: self.bucket.read(found.key)[0] for found in self.bucket.list("")}

    @parameterized.expand([("the same place", PREFIX), ("a place beside it", BESIDE)])
    def test_over_another_save(self, _: str, then: str) -> None:
        """The checkpoint that is there stays as it is. The next save removes the object."""
        self.save(PREFIX, b"old")
        before = self.contents()
        store = self.store()
        staging = store.begin(overwrite=True, durable=False)
        staging.create("optim.safetensors", 1000, b"")
        writer = store.join(staging.address, durable=False, who="rank 1")
        writer.write("optim.safetensors", [memoryview(bytes(100))], 0)
        staging.abandon(late=True)
        writer.put(NAME, b"late")
        late = {f"{PREFIX}/{staging.token}/{NAME}": b"late"}
        notes = {key: data for key, data in self.contents().items() if key.endswith("/dead")}
        self.assertEqual(self.contents(), {**before, **late, **notes})
        with self.assertRaises(CheckpointError):  # the upload is gone: no part of it can come
            writer.write("optim.safetensors", [memoryview(bytes(100))], 100)
            writer.finish()
        with store.open() as opened:
            self.assertEqual(opened.read_whole(NAME), b"old")
        self.save(then, b"new")
        self.assertEqual({*late, *notes} & set(self.contents()), set())
        self.assertEqual(list(self.bucket.uploads("")), [])

    @parameterized.expand([("the same place", PREFIX), ("a place beside it", BESIDE)])
    def test_first_save(self, _: str, then: str) -> None:
        """The object has the name of one that somebody has put there; a note tells the next save that it is not."""
        store = self.store()
        staging = store.begin(overwrite=False, durable=False)
        writer = store.join(staging.address, durable=False, who="rank 1")
        staging.abandon(late=True)
        writer.put(NAME, b"late")
        with self.assertRaises(CheckpointError):
            store.open()
        self.assertEqual(list(store.siblings()), [])
        self.save(then, b"new")
        with self.store(then).open() as opened:
            self.assertEqual(opened.read_whole(NAME), b"new")
        left = [key for key, data in self.contents().items() if data == b"late" or not key.startswith(then)]
        self.assertEqual(left, [])

    def test_first_save_whose_ranks_have_all_stopped(self) -> None:
        """It leaves nothing; what is there afterwards is somebody's."""
        store = self.store()
        staging = store.begin(overwrite=False, durable=False)
        writer = store.join(staging.address, durable=False, who="rank 1")
        writer.put(NAME, b"early")
        staging.abandon()
        self.assertEqual(self.contents(), {})
        self.bucket.put(f"{PREFIX}/{NAME}", b"of a user")
        self.save(PREFIX, b"new")
        self.assertEqual(self.contents()[f"{PREFIX}/{NAME}"], b"of a user")


if __name__ == "__main__":
    unittest.main()
