"""A rank that nobody waits for any more: what it puts after its save was given up counts for nothing."""

from __future__ import annotations

import dataclasses
import time
import unittest
from collections.abc import Iterator

from kit.interrupted import InterruptedBucket
from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.buckets.objects import Memory, MemoryBucket, ObjectInfo, ObjectStore
from fsdp_optim.testing.store_case import MANIFEST, AnyManifest

PREFIX, BESIDE = "run/step-1", "run/step-2"
NAME = "model.safetensors"
DEAD_AFTER = 300.0
SHORT = 0.01  # seconds after which some saves take others for dead


class OldNotesBucket(MemoryBucket):
    """A bucket in which time has passed: only the claims, which are put again and again, are new."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for info in super().list(prefix):
            yield dataclasses.replace(info, age=0.0 if info.key.endswith("/claim") else 2 * DEAD_AFTER)


class LatePutsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.bucket = MemoryBucket()

    def store(self, prefix: str = PREFIX, dead_after: float = DEAD_AFTER) -> ObjectStore:
        return ObjectStore(self.bucket, prefix, AnyManifest(), part_nbytes=100, dead_after=dead_after)

    def save(self, prefix: str, content: bytes, dead_after: float = DEAD_AFTER) -> None:
        store = self.store(prefix, dead_after)
        staging = store.begin(overwrite=True, durable=False)
        writer = store.join(staging.address, durable=False, who="rank 0")
        writer.put(NAME, content)
        staging.seal([], [writer.finish()], durable=False)
        staging.commit(MANIFEST, b"one\n" + staging.token.encode(), durable=False)

    def contents(self) -> dict[str, bytes]:
        return {entry.key: self.bucket.read(entry.key)[0] for entry in self.bucket.list("")}

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

    @parameterized.expand([("one request", None), ("one part", 100), ("three parts", 250)])
    def test_first_save_that_was_taken_for_dead(self, _: str, nbytes: int | None) -> None:
        """Its files, as those of the save after it, have no folder of their own: it replaces none of them."""
        store = self.store()
        writer = store.join(store.begin(overwrite=False, durable=False).address, durable=False, who="rank 1")
        time.sleep(1.2 * SHORT)
        self.save(BESIDE, b"beside", dead_after=SHORT)
        self.save(PREFIX, b"new")
        before = self.contents()
        self.assertEqual(before[f"{PREFIX}/{NAME}"], b"new")
        with self.assertRaises(CheckpointError):
            if nbytes is None:
                writer.put(NAME, b"late")
            else:
                writer.create(NAME, nbytes, b"")
                writer.write(NAME, [memoryview(bytes(nbytes))], 0)
                writer.finish()
        self.assertEqual(self.contents(), before)

    @parameterized.expand([("first", False), ("over another one", True)])
    def test_a_save_that_was_taken_for_dead_puts_no_manifest(self, _: str, overwrite: bool) -> None:
        """Not for a moment: a reader that came then would find a checkpoint without its files."""
        self.bucket = bucket = InterruptedBucket(Memory())
        if overwrite:
            self.save(PREFIX, b"old")
        staging = self.store().begin(overwrite=overwrite, durable=False)
        time.sleep(1.2 * SHORT)
        self.save(BESIDE, b"beside", dead_after=SHORT)
        before, num_calls = self.contents(), len(bucket.calls)
        with self.assertRaisesRegex(CheckpointError, f"{PREFIX}: another save took this one for dead"):
            staging.commit(MANIFEST, b"one\n" + staging.token.encode(), durable=False)
        self.assertEqual([call for call in bucket.calls[num_calls:] if call.startswith("put ")], [])
        staging.abandon()
        self.assertEqual(self.contents(), before)

    def test_a_save_that_renews_its_claim_is_alive(self) -> None:
        """However old the note beside the claim is, which says that its files have no folder of their own."""
        self.bucket = OldNotesBucket()
        store = self.store()
        staging = store.begin(overwrite=False, durable=False)
        writer = store.join(staging.address, durable=False, who="rank 1")
        writer.put(NAME, b"slow")
        self.assertEqual([key.rpartition("/")[2] for key in self.contents()], ["claim", "plain", NAME])
        self.save(BESIDE, b"new")
        staging.seal([], [writer.finish()], durable=False)
        staging.commit(MANIFEST, b"one\n" + staging.token.encode(), durable=False)
        with store.open() as opened:
            self.assertEqual(opened.read_whole(NAME), b"slow")


if __name__ == "__main__":
    unittest.main()
