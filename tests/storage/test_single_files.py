"""One file at a URL: complete or absent, in parts of bounded size, and never in the place of another unless that is asked for."""

from __future__ import annotations

import unittest
from typing import Any

from kit.servers import new_bucket, shared
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.buckets.objects import MemoryBucket
from fsdp_optim.buckets.objects.new_object import new_object
from fsdp_optim.buckets.s3 import S3Bucket

PART = 5 << 20
SIZES = (0, 1, PART - 1, PART, PART + 1, 2 * PART + 7)


def content_of(nbytes: int) -> bytes:
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


def write(bucket: Any, key: str, content: bytes, *, overwrite: bool, step: int = 1 << 20) -> None:
    with new_object(bucket, key, f"{bucket.name}/{key}", PART, overwrite=overwrite) as new:
        for at in range(0, len(content), step):
            new.write(content[at : at + step])


class FilesTest(unittest.TestCase):
    def check(self, bucket: Any) -> None:
        for size in SIZES:
            key, content = f"files/{size}.bin", content_of(size)
            write(bucket, key, content, overwrite=False)
            self.assertEqual(bucket.read(key)[0], content)
            with self.assertRaisesRegex(fsdp_optim.CheckpointError, "already exists: give another URL"):
                write(bucket, key, b"other", overwrite=False)
            self.assertEqual(bucket.read(key)[0], content)
            write(bucket, key, b"other", overwrite=True)
            self.assertEqual(bucket.read(key)[0], b"other")
        for nbytes in (10, PART + 10):
            with self.assertRaises(ZeroDivisionError), new_object(bucket, "files/x", "x", PART, overwrite=False) as new:
                new.write(content_of(nbytes))
                raise ZeroDivisionError
            self.assertIsNone(bucket.look("files/x"))
        self.assertEqual([*bucket.uploads("files/")], [])

    def test_in_memory(self) -> None:
        self.check(MemoryBucket())

    @parameterized.expand(["moto"])
    def test_on_a_server(self, kind: str) -> None:
        options = shared(kind)
        self.check(S3Bucket(new_bucket(options), options))

    def test_another_writer_was_faster(self) -> None:
        bucket = MemoryBucket()
        for nbytes in (10, PART + 10):
            key = f"files/{nbytes}"
            with (
                self.assertRaisesRegex(fsdp_optim.CheckpointError, "already exists"),
                new_object(bucket, key, key, PART, overwrite=False) as new,
            ):
                new.write(content_of(nbytes))
                bucket.put(key, b"first")
            self.assertEqual(bucket.read(key)[0], b"first")
