"""The part of `BucketConformance` about uploads in parts."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_optim.buckets.objects.base import ABSENT, OvertakenError
from fsdp_optim.errors import CheckpointError
from fsdp_optim.testing.bucket_case import BucketCase


class UploadPromises(BucketCase):
    """The promises of a Bucket about uploads in parts, one per test."""

    def test_parts_in_any_order(self) -> None:
        """The object is there when the upload ends, not before; its version agrees with the listing."""
        bucket = self.make_bucket()
        parts = self._parts(bucket, 4)
        upload = bucket.begin_upload("run/object")
        receipts = [""] * len(parts)
        for number in (2, 0, 3, 1):
            other = self.another_handle(bucket) if bucket.can.parts_by_many else bucket
            receipts[number] = other.put_part("run/object", upload, number, memoryview(parts[number]))
        self._case.assertIsNone(bucket.look("run/object"))
        self._case.assertEqual(self._keys(bucket), [])
        version = bucket.end_upload("run/object", upload, receipts)
        data = b"".join(parts)
        info = self.another_handle(bucket).look("run/object")
        assert info is not None
        self._case.assertEqual((info.nbytes, info.version), (len(data), version))
        memory = bytearray(len(data))
        bucket.read_into("run/object", [memoryview(memory)], 0, version=version)
        self._case.assertTrue(memory == data)
        self._case.assertEqual(list(bucket.uploads("")), [])

    def test_parts_by_threads(self) -> None:
        """Parts of two objects, and reads of a third one, at once."""
        bucket = self.make_bucket()
        other = self._data(20_000)
        bucket.put("run/third", other)
        parts, calls = self._parts(bucket, 4), list[Callable[[], None]]()
        uploads: dict[str, str] = {}
        receipts: dict[tuple[str, int], str] = {}

        def put(key: str, number: int) -> None:
            receipts[key, number] = bucket.put_part(key, uploads[key], number, memoryview(parts[number]))

        def read(offset: int) -> None:
            memory = bytearray(5000)
            bucket.read_into("run/third", [memoryview(memory)], offset)
            self._case.assertTrue(memory == other[offset : offset + 5000])

        for key in ("run/first", "run/second"):
            uploads[key] = bucket.begin_upload(key)
            calls += [lambda key=key, number=number: put(key, number) for number in range(4)]  # type: ignore[misc]
        calls += [lambda offset=offset: read(offset) for offset in range(0, 15_001, 5000)]  # type: ignore[misc]
        self._on_threads(calls)
        for key, upload in uploads.items():
            bucket.end_upload(key, upload, [receipts[key, number] for number in range(4)])
            self._case.assertTrue(bucket.read(key)[0] == b"".join(parts))

    def test_a_part_that_is_put_again(self) -> None:
        """The same bytes, as after an answer that was lost: the last receipts count."""
        bucket = self.make_bucket()
        parts = self._parts(bucket, 2)
        upload = bucket.begin_upload("run/object")
        for _ in range(2):
            receipts = [
                bucket.put_part("run/object", upload, number, memoryview(part)) for number, part in enumerate(parts)
            ]
        bucket.end_upload("run/object", upload, receipts)
        self._case.assertTrue(bucket.read("run/object")[0] == b"".join(parts))

    def test_one_short_part(self) -> None:
        """An upload of one short part, and of none."""
        bucket = self.make_bucket()
        for num_parts in (1, 0):
            version = self._upload(bucket, f"run/of-{num_parts}", [b"x"] * num_parts)
            self._case.assertEqual(bucket.read(f"run/of-{num_parts}"), (b"x" * num_parts, version))
        self._case.assertEqual(list(bucket.uploads("")), [])

    def test_an_upload_replaces(self) -> None:
        """An object is whole until the upload of another one ends."""
        bucket = self.make_bucket()
        bucket.put("run/object", b"first")
        parts = self._parts(bucket, 2)
        upload = bucket.begin_upload("run/object")
        receipts = [
            bucket.put_part("run/object", upload, number, memoryview(part)) for number, part in enumerate(parts)
        ]
        self._case.assertEqual(bucket.read("run/object")[0], b"first")
        bucket.end_upload("run/object", upload, receipts)
        self._case.assertTrue(bucket.read("run/object")[0] == b"".join(parts))

    def test_an_upload_where_nothing_is(self) -> None:
        """As for `put`."""
        bucket = self.make_bucket()
        parts = self._parts(bucket, 2)
        self._upload(bucket, "run/object", parts, ABSENT)
        self._needs_conditions()
        with self._refused(OvertakenError, bucket, "run/object"):
            self._upload(bucket, "run/object", self._parts(bucket, 2, 1), ABSENT)
        self._case.assertTrue(bucket.read("run/object")[0] == b"".join(parts))

    def test_an_upload_over_what_was_seen(self) -> None:
        """As for `put`."""
        self._needs_conditions()
        bucket = self.make_bucket()
        first = self._upload(bucket, "run/object", self._parts(bucket, 2))
        second = self._upload(bucket, "run/object", self._parts(bucket, 2, 2), first)
        with self._refused(OvertakenError, bucket, "run/object"):
            self._upload(bucket, "run/object", self._parts(bucket, 2), first)
        self._case.assertEqual(bucket.read("run/object")[1], second)

    def test_unfinished_uploads(self) -> None:
        """Unfinished uploads are listed by prefix until they are dropped; to drop an upload twice is no error."""
        bucket = self.make_bucket()
        uploads = {key: bucket.begin_upload(key) for key in ("run/a/one", "run/a/two", "run/b/one")}
        bucket.put_part("run/a/two", uploads["run/a/two"], 0, memoryview(b"x"))
        for prefix in ("", "run/", "run/a/", "run/a/t", "run/c"):
            listed = {info.key: info.version for info in self.another_handle(bucket).uploads(prefix)}
            self._case.assertEqual(listed, {key: upload for key, upload in uploads.items() if key.startswith(prefix)})
        for _ in range(2):
            self.another_handle(bucket).drop_upload("run/a/two", uploads["run/a/two"])
        self._case.assertEqual({info.key for info in bucket.uploads("run/")}, {"run/a/one", "run/b/one"})
        self._case.assertEqual(self._keys(bucket), [])

    def test_two_uploads_of_one_key(self) -> None:
        """Each upload has an id of its own, and the upload that ends last is seen."""
        bucket = self.make_bucket()
        uploads = [bucket.begin_upload("run/object") for _ in range(2)]
        self._case.assertNotEqual(*uploads)
        receipts = [bucket.put_part("run/object", upload, 0, memoryview(upload.encode())) for upload in uploads]
        for upload, receipt in zip(uploads, receipts, strict=True):
            bucket.end_upload("run/object", upload, [receipt])
            self._case.assertEqual(bucket.read("run/object")[0], upload.encode())

    def test_a_part_of_an_upload_that_is_gone(self) -> None:
        """Neither the part nor the end of the upload is taken."""
        bucket = self.make_bucket()
        upload = bucket.begin_upload("run/object")
        receipt = bucket.put_part("run/object", upload, 0, memoryview(b"x"))
        bucket.drop_upload("run/object", upload)
        with self._refused(CheckpointError, bucket, "run/object"):
            bucket.put_part("run/object", upload, 0, memoryview(b"x"))
        with self._refused(CheckpointError, bucket, "run/object"):
            bucket.end_upload("run/object", upload, [receipt])
        self._case.assertIsNone(bucket.look("run/object"))

    def test_ages_of_uploads(self) -> None:
        """Seconds since an upload was begun."""
        bucket = self.make_bucket()
        bucket.begin_upload("run/other")
        (upload,) = bucket.uploads("run/")
        self._case.assertGreaterEqual(upload.age, 0)
        self._case.assertLess(upload.age, 600)
