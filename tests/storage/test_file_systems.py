"""Buckets over file systems of fsspec, and the stores on them."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from kit.file_systems import Buffered
from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.buckets.fsspec import FsspecBucket
from fsdp_optim.buckets.objects import ABSENT, Bucket, MissingObjectError, ObjectStore, OvertakenError
from fsdp_optim.storage.base import Store, is_sure_that_not
from fsdp_optim.testing import BucketConformance, StoreConformance

_numbers = itertools.count()


class OnFsspec(BucketConformance):
    """Uploads are those of one process, so that another handle does not know them; it reads what is complete."""

    num_many = 105


class TestMemoryBucket(OnFsspec, unittest.TestCase):
    knows_conditions = False  # of many that put at once, several may win

    def make_bucket(self) -> Bucket:
        bucket, prefix = FsspecBucket.at(f"memory://test-{next(_numbers)}/bucket/run")
        self.assertEqual(prefix, "run")
        return bucket


class TestFileBucket(OnFsspec, unittest.TestCase):
    def make_bucket(self) -> Bucket:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return FsspecBucket.at(f"file://{folder.name}/bucket/run")[0]


class TestFileBucketWithoutRenames(TestFileBucket):
    def setUp(self) -> None:
        for name in ("rename", "link"):
            patch = mock.patch.object(os, name, side_effect=PermissionError(1, "Operation not permitted"))
            patch.start()
            self.addCleanup(patch.stop)


class TestBufferedBucket(OnFsspec, unittest.TestCase):
    """As `gs://` and `az://`: files are seen when they are closed."""

    knows_conditions = False

    def make_bucket(self) -> Bucket:
        return FsspecBucket(Buffered(use_listings_cache=False), "bucket/run", "buffered://bucket/run")


class TestFileStore(StoreConformance, unittest.TestCase):
    part_nbytes = 1000

    def make_store(self, probe: Any) -> Store:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.probe = probe
        return self.store_at(f"file://{folder.name}/run/step-1")

    def store_at(self, url: str) -> ObjectStore:
        return ObjectStore(*FsspecBucket.at(url), self.probe, part_nbytes=self.part_nbytes)

    def another_handle(self, store: Store) -> Store:
        return self.store_at(store.where)


class TestMemoryStore(TestFileStore):
    def make_store(self, probe: Any) -> Store:
        self.probe = probe
        return self.store_at(f"memory://test-{next(_numbers)}/run/step-1")


class TestFilesOnDisk(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.bucket, _ = FsspecBucket.at(f"file://{self.folder}/run/step-1")

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))

    def test_keys_are_paths(self) -> None:
        self.bucket.put("step-1/extra/a", b"x")
        self.assertEqual((self.folder / "run/step-1/extra/a").read_bytes(), b"x")
        self.assertEqual(self.bucket.name, f"file://{self.folder}/run")

    def test_folders_go_with_their_last_file(self) -> None:
        """All but that of the bucket."""
        self.bucket.put("step-1/extra/a", b"x")
        self.bucket.put("step-1/b", b"x")
        self.bucket.delete(["step-1/extra/a"])
        self.assertEqual(self.names(), ["run", "run/step-1", "run/step-1/b"])
        self.bucket.delete(["step-1/b"])
        self.assertEqual(self.names(), ["run"])

    def test_another_handle_reads_what_is_complete(self) -> None:
        parts = [b"a" * 100, b"b" * 100, b"c" * 7]
        upload = self.bucket.begin_upload("step-1/file")
        receipts = {
            number: self.bucket.put_part("step-1/file", upload, number, memoryview(parts[number]))
            for number in (2, 0, 1)
        }
        version = self.bucket.end_upload("step-1/file", upload, [receipts[number] for number in range(3)])
        other, _ = FsspecBucket.at(f"file://{self.folder}/run/step-1")
        self.assertEqual(other.read("step-1/file"), (b"".join(parts), version))
        self.assertEqual([entry.version for entry in other.list("step-1/")], [version])

    def test_nothing_is_left_of_a_dropped_upload(self) -> None:
        upload = self.bucket.begin_upload("step-1/file")
        self.bucket.put_part("step-1/file", upload, 0, memoryview(b"x"))
        self.assertEqual(self.names(), ["run", "run/step-1", "run/step-1/file"])
        self.bucket.drop_upload("step-1/file", upload)
        self.assertEqual(self.names(), ["run"])

    def test_of_many_one_wins_and_nobody_sees_half_of_it(self) -> None:
        data = [bytes([number]) * 2_000_000 for number in range(4)]
        won: list[int] = []
        seen: set[int] = set()

        def put(number: int) -> None:
            bucket, _ = FsspecBucket.at(f"file://{self.folder}/run/step-1")
            try:
                bucket.put("step-1/manifest", data[number], only_if=ABSENT)
            except OvertakenError:
                return
            won.append(number)

        threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            info = self.bucket.look("step-1/manifest")
            if info is not None:
                seen.add(info.nbytes)
        for thread in threads:
            thread.join()
        self.assertEqual(len(won), 1)
        self.assertEqual(self.bucket.read("step-1/manifest")[0], data[won[0]])
        self.assertLessEqual(seen, {2_000_000})
        self.assertEqual(self.names(), ["run", "run/step-1", "run/step-1/manifest"])

    def test_a_file_that_lost_its_writer_is_an_unfinished_upload(self) -> None:
        """Of an object that was to be put over another one."""
        self.bucket.put("step-1/a", b"x")
        (self.folder / "run/step-1/.put-0123").write_bytes(b"half")
        self.assertEqual([entry.key for entry in self.bucket.list("")], ["step-1/a"])
        (upload,) = self.bucket.uploads("step-1/")
        self.assertGreaterEqual(upload.age, 0)
        self.bucket.drop_upload(upload.key, upload.version)
        self.assertEqual(self.names(), ["run", "run/step-1", "run/step-1/a"])

    def test_two_objects_of_one_length_and_time_have_two_versions(self) -> None:
        """Where the clock of the file system is slow, the second one waits for it."""
        real, now = os.stat, [1_000_000.0]
        first = self.bucket.put("step-1/a", b"first")

        def slow(path: Any, *args: Any, **options: Any) -> Any:
            status = real(path, *args, **options)
            now[0] += 0.2
            return os.stat_result([*status[:7], int(now[0]), int(now[0]), int(now[0])])

        with mock.patch.object(os, "stat", slow):
            first = self.bucket.put("step-1/a", b"first")
            second = self.bucket.put("step-1/a", b"other")
        self.assertNotEqual(first, second)

    def test_links_are_refused(self) -> None:
        (self.folder / "run/step-1").mkdir(parents=True)
        (self.folder / "run/step-1/file").symlink_to("/etc/passwd")
        with self.assertRaisesRegex(CheckpointError, "step-1/file: is a symbolic link"):
            self.bucket.look("step-1/file")
        self.assertEqual(list(self.bucket.list("")), [])

    def test_a_folder_that_may_not_be_read_is_not_an_empty_one(self) -> None:
        self.bucket.put("step-1/a", b"x")
        closed = mock.patch.object(os, "scandir", side_effect=PermissionError(13, "Permission denied"))
        with closed, self.assertRaisesRegex(CheckpointError, "cannot be listed: PermissionError") as caught:
            list(self.bucket.list("step-1/"))
        self.assertFalse(is_sure_that_not(caught.exception))


class TestErrors(unittest.TestCase):
    def setUp(self) -> None:
        self.fs = Buffered()
        self.bucket = FsspecBucket(self.fs, "bucket", "buffered://bucket", secrets=["hunter22"])

    @parameterized.expand(
        [
            ("info", lambda bucket: bucket.look("a"), "cannot be looked at"),
            ("ls", lambda bucket: list(bucket.list("")), "cannot be listed"),
            ("cat_file", lambda bucket: bucket.read("a"), "cannot be read"),
            ("cat_file", lambda bucket: bucket.read_into("a", [memoryview(bytearray(1))], 0), "cannot be read"),
            ("open", lambda bucket: bucket.put("a", b""), "cannot be written"),
            ("rm_file", lambda bucket: bucket.delete(["a"]), "cannot be deleted"),
        ]
    )
    def test_one_line_that_leaves_open_what_is_there(self, call: str, do: Any, words: str) -> None:
        self.bucket.put("a", b"x")
        for error in (RuntimeError("429:\nslow hunter22"), PermissionError("403"), TimeoutError("no\nanswer")):
            self.fs.fails = {call: error}
            with self.assertRaisesRegex(
                CheckpointError, rf"^buffered://bucket.*: {words}: {type(error).__name__}: "
            ) as caught:
                do(self.bucket)
            self.assertNotRegex(str(caught.exception), "\n|hunter22")
            self.assertFalse(is_sure_that_not(caught.exception))

    def test_a_missing_bucket_is_not_made(self) -> None:
        self.fs.fails = {"open": FileNotFoundError("no bucket")}
        with self.assertRaisesRegex(MissingObjectError, "buffered://bucket/a: cannot be written: no bucket"):
            self.bucket.put("a", b"x")

    def test_what_others_put_is_seen_at_once(self) -> None:
        """Though the file system keeps listings."""
        self.assertEqual(list(self.bucket.list("a/")), [])
        other = FsspecBucket(self.fs, "bucket", "buffered://bucket")
        other.put("a/b", b"x")
        self.assertEqual([entry.key for entry in self.bucket.list("a/")], ["a/b"])
        self.fs.objects["bucket/a/c"] = (b"", "tag")
        self.assertEqual([entry.key for entry in self.bucket.list("a/")], ["a/b", "a/c"])

    def test_a_dropped_upload_is_discarded(self) -> None:
        upload = self.bucket.begin_upload("a")
        self.bucket.put_part("a", upload, 0, memoryview(bytes(2000)))
        self.bucket.drop_upload("a", upload)
        self.assertEqual((self.fs.discarded, self.fs.objects), (["bucket/a"], {}))

    def test_other_bytes_for_a_part_that_is_written(self) -> None:
        upload = self.bucket.begin_upload("a")
        self.bucket.put_part("a", upload, 0, memoryview(b"x"))
        with self.assertRaisesRegex(CheckpointError, "part 0 is written"):
            self.bucket.put_part("a", upload, 0, memoryview(b"y"))

    def test_parts_that_are_missing(self) -> None:
        upload = self.bucket.begin_upload("a")
        receipts = [self.bucket.put_part("a", upload, number, memoryview(b"x")) for number in (0, 2)]
        for given in (receipts, receipts[:1]):
            with self.assertRaisesRegex(CheckpointError, "a part of it is missing"):
                self.bucket.end_upload("a", upload, given)
        self.assertIsNone(self.bucket.look("a"))

    def test_replaced_while_it_is_read(self) -> None:
        version = self.bucket.put("a", b"first")
        real = self.fs.cat_file

        def replaced(*args: Any, **options: Any) -> bytes:
            self.fs.objects["bucket/a"] = (b"other", "another tag")
            return real(*args, **options)

        with mock.patch.object(self.fs, "cat_file", replaced), self.assertRaises(OvertakenError):
            self.bucket.read_into("a", [memoryview(bytearray(5))], 0, version=version)


class TestUrls(unittest.TestCase):
    @parameterized.expand(
        [
            ("memory://run/step-1", "memory://run", "step-1"),
            ("memory://bucket/run/step-1/", "memory://bucket/run", "step-1"),
            ("memory://bucket", "memory://bucket", ""),
            ("file:///a/run/step-1", "file:///a/run", "step-1"),
        ]
    )
    def test_names(self, url: str, name: str, prefix: str) -> None:
        bucket, inside = FsspecBucket.at(url)
        self.assertEqual((bucket.name, inside), (name, prefix))

    @parameterized.expand(
        [
            ("nosuch://bucket/a", "nosuch://: is not the scheme of a store that is known"),
            ("gs://bucket/a", "gs://: needs the package gcsfs: pip install gcsfs"),
            ("az://bucket/a", "az://: needs the package adlfs: pip install adlfs"),
            ("sftp://host/a", "sftp://: needs the package paramiko: pip install paramiko"),
            ("file://relative/a", "file://relative/a: a URL of a file has three slashes: file:///relative/a"),
            ("memory", "memory: is not a URL"),
        ]
    )
    def test_what_is_missing_is_named(self, url: str, words: str) -> None:
        missing = mock.patch.dict(sys.modules, {"gcsfs": None, "adlfs": None, "paramiko": None})
        with missing, self.assertRaises(CheckpointError) as caught:
            FsspecBucket.at(url)
        self.assertIn(words, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def test_without_fsspec(self) -> None:
        missing = mock.patch.dict(sys.modules, {"fsspec.core": None})
        with (
            missing,
            self.assertRaisesRegex(
                CheckpointError, "memory://: needs the package fsspec: pip install 'fsspec>=2024.3'"
            ),
        ):
            FsspecBucket.at("memory://a/b")

    def test_options(self) -> None:
        """They reach the file system, which is not shared; what does not fit is an error, without secrets."""
        bucket, _ = FsspecBucket.at("file:///a/b", {"auto_mkdir": True})
        self.assertTrue(bucket._fs.auto_mkdir)
        self.assertIsNot(FsspecBucket.at("file:///a/b")[0]._fs, FsspecBucket.at("file:///a/b")[0]._fs)
        self.assertFalse(bucket._fs.dircache.use_listings_cache)
        wrong = mock.patch("fsspec.core.url_to_fs", side_effect=TypeError("what is password=hunter22?"))
        with wrong, self.assertRaisesRegex(CheckpointError, "ftp://me@host/a: cannot be opened .*TypeError") as caught:
            FsspecBucket.at("ftp://me:word@host/a", {"password": "hunter22"})
        self.assertNotRegex(str(caught.exception), "hunter22|word@")


if __name__ == "__main__":
    unittest.main()
