"""What every Bucket has to do, as one test class; `fsdp_optim.storage.objects.base` has the protocol.

    class TestMyBucket(BucketConformance, unittest.TestCase):
        def make_bucket(self):
            return MyBucket(...)         # with nothing in it, each time that it is called

A bucket is expected to keep its promises also where its processes are on several machines, and where requests fail; no suite in
one process can show that.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.objects.base import ABSENT, Bucket, MissingObjectError, OvertakenError
from fsdp_optim.testing.mix_in import MixIn

_ODD_KEYS = (
    *("run/with space", "run/with+plus", "run/per%20cent", "run/ünïcödé-名前", "run/a=b&c=d", "run/semi;colon,comma"),
    *(
        "run/(brackets)[1]{2}",
        "run/star*quote'",
        "run/.hidden",
        "run/a..b",
        "run/UPPER",
        "run/@at:colon",
        "run/#hash?mark",
    ),
)


class BucketConformance(MixIn):
    """A mix-in for a `unittest.TestCase`: what a Bucket promises, one promise a test.

    `make_bucket` gives a bucket with nothing in it; `another_handle` gives another object for the same bucket, as another process
    would make it.

    Attributes:
        knows_conditions: whether the store knows `only_if`; where it does not, it puts an object anyway.
        num_many: how many objects are listed at once: more than a page of the store's listings.
    """

    knows_conditions: bool = True
    num_many: int = 1005

    def make_bucket(self) -> Bucket:
        """A bucket with nothing in it."""
        raise NotImplementedError

    def another_handle(self, bucket: Bucket) -> Bucket:
        """Another object for the same bucket."""
        return bucket

    def _data(self, nbytes: int, seed: int = 0) -> bytes:
        return random.Random(f"{nbytes} {seed}").randbytes(nbytes)

    def _keys(self, bucket: Bucket, prefix: str = "") -> list[str]:
        return [found.key for found in self.another_handle(bucket).list(prefix)]

    def _parts(self, bucket: Bucket, num_parts: int, seed: int = 0) -> list[bytes]:
        """Parts of one size, but a shorter last one."""
        nbytes = bucket.can.least_part_nbytes
        return [self._data(nbytes, seed + number) for number in range(num_parts - 1)] + [self._data(nbytes // 3, seed)]

    def _upload(self, bucket: Bucket, key: str, parts: Sequence[bytes], only_if: str | None = None) -> str:
        upload = bucket.begin_upload(key)
        receipts = [bucket.put_part(key, upload, number, memoryview(part)) for number, part in enumerate(parts)]
        return bucket.end_upload(key, upload, receipts, only_if=only_if)

    @contextlib.contextmanager
    def _refused(self, kind: type[CheckpointError], bucket: Bucket, *words: str) -> Iterator[None]:
        """An error of exactly this class, one line, with the bucket and these words in it."""
        with self._case.assertRaises(kind) as caught:
            yield
        self._case.assertIs(type(caught.exception), kind)
        for word in (bucket.name, *words):
            self._case.assertIn(word, str(caught.exception))
        self._case.assertNotIn("\n", str(caught.exception))

    def _on_threads(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make calls on threads at once; raise the first error."""
        errors: list[BaseException] = []

        def run(call: Callable[[], None]) -> None:
            try:
                call()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def test_what_it_is(self) -> None:
        """Its name is a URL without a slash at the end, and its sizes of parts are possible."""
        bucket = self.make_bucket()
        self._case.assertRegex(bucket.name, r"^[a-z0-9+]+://[^\s]*[^/\s]$")
        self._case.assertLessEqual(1, bucket.can.least_part_nbytes)
        self._case.assertLessEqual(bucket.can.least_part_nbytes, bucket.can.most_part_nbytes)
        self._case.assertLessEqual(1, bucket.can.most_parts)

    def test_nothing_is_there(self) -> None:
        """A new bucket lists nothing, and says of any key that it is missing."""
        bucket = self.make_bucket()
        self._case.assertEqual(self._keys(bucket), [])
        self._case.assertEqual(list(bucket.folders("")), [])
        self._case.assertEqual(list(bucket.uploads("")), [])
        self._case.assertIsNone(bucket.look("run/missing"))
        with self._refused(MissingObjectError, bucket, "run/missing"):
            bucket.read("run/missing")
        for nbytes in (0, 3):
            with self._refused(MissingObjectError, bucket, "run/missing"):
                bucket.read_into("run/missing", [memoryview(bytearray(nbytes))], 0)

    def test_what_was_put_is_read(self) -> None:
        """Through another handle too; size and version are those of the listing."""
        bucket = self.make_bucket()
        for nbytes in (0, 1, 1000, 300_000):
            key, data = f"run/of-{nbytes}", self._data(nbytes)
            version = bucket.put(key, data)
            other = self.another_handle(bucket)
            self._case.assertEqual(other.read(key), (data, version))
            found = other.look(key)
            assert found is not None
            self._case.assertEqual((found.key, found.nbytes, found.version), (key, nbytes, version))
            listed = list(other.list(key))
            self._case.assertEqual([(one.key, one.nbytes, one.version) for one in listed], [(key, nbytes, version)])

    def test_an_object_is_replaced(self) -> None:
        """By another one of another length, which has another version."""
        bucket = self.make_bucket()
        first = bucket.put("run/object", b"first")
        second = bucket.put("run/object", b"the second")
        self._case.assertNotEqual(first, second)
        self._case.assertEqual(self.another_handle(bucket).read("run/object"), (b"the second", second))
        self._case.assertEqual(self._keys(bucket), ["run/object"])

    def test_ranges(self) -> None:
        """Any range, into pieces of any lengths that lie apart; nothing beside them is touched."""
        bucket, rng = self.make_bucket(), random.Random(1)
        data = self._data(50_000)
        version = bucket.put("run/object", data)
        for nbytes in (0, 1, 2, 777, 50_000):
            offset = rng.randrange(len(data) - nbytes + 1)
            cuts = sorted({0, nbytes, *(rng.randrange(nbytes + 1) for _ in range(3))})
            memory = bytearray(3 * nbytes + 100)
            at, spans = 10, []
            for start, end in itertools.pairwise(cuts):
                spans.append((at, at + end - start))
                at += end - start + 7
            view = memoryview(memory)
            pieces = [view[start:end] for start, end in spans]
            rng.shuffle(spans)  # the order of pieces is not the order of addresses
            pieces = [view[start:end] for start, end in spans] if nbytes != 1 else pieces
            bucket.read_into("run/object", pieces, offset, version=version)
            self._case.assertTrue(b"".join(pieces) == data[offset : offset + nbytes])
            for piece in pieces:
                piece[:] = bytes(len(piece))
            self._case.assertEqual(memory, bytearray(len(memory)), "bytes beside the pieces")

    def test_bytes_beyond_the_end(self) -> None:
        """An error, whether the range begins before the end, at it, or behind."""
        bucket = self.make_bucket()
        bucket.put("run/object", b"0123456789")
        bucket.put("run/empty", b"")
        for key, offset, nbytes in (
            ("run/object", 5, 6),
            ("run/object", 10, 1),
            ("run/object", 99, 5),
            ("run/empty", 0, 1),
        ):
            with self._refused(CheckpointError, bucket, key):
                bucket.read_into(key, [memoryview(bytearray(nbytes))], offset)

    def test_a_range_of_another_version(self) -> None:
        """It is not read; nor where the pieces have no bytes."""
        bucket = self.make_bucket()
        first = bucket.put("run/object", b"first")
        bucket.put("run/object", b"other")
        for nbytes in (0, 3):
            with self._refused(OvertakenError, bucket, "run/object"):
                bucket.read_into("run/object", [memoryview(bytearray(nbytes))], 1, version=first)

    def test_put_where_nothing_is(self) -> None:
        """`ABSENT`: the first one wins."""
        bucket = self.make_bucket()
        bucket.put("run/object", b"first", only_if=ABSENT)
        self._needs_conditions()
        with self._refused(OvertakenError, bucket, "run/object"):
            self.another_handle(bucket).put("run/object", b"second", only_if=ABSENT)
        self._case.assertEqual(bucket.read("run/object")[0], b"first")

    def test_put_over_what_was_seen(self) -> None:
        """A version: only that one is replaced; nothing that is missing is."""
        bucket = self.make_bucket()
        first = bucket.put("run/object", b"first")
        second = bucket.put("run/object", b"second", only_if=first)
        self._needs_conditions()
        with self._refused(OvertakenError, bucket, "run/object"):
            bucket.put("run/object", b"third", only_if=first)
        self._case.assertEqual(bucket.read("run/object"), (b"second", second))
        bucket.delete(["run/object"])
        with self._refused(OvertakenError, bucket, "run/object"):
            bucket.put("run/object", b"third", only_if=second)
        self._case.assertIsNone(bucket.look("run/object"))

    def test_of_many_one_wins(self) -> None:
        """Of handles that put at once where nothing is."""
        self._needs_conditions()
        bucket, won = self.make_bucket(), list[int]()

        def put(number: int) -> None:
            with contextlib.suppress(OvertakenError):
                self.another_handle(bucket).put("run/object", b"%d" % number, only_if=ABSENT)
                won.append(number)

        self._on_threads([lambda number=number: put(number) for number in range(4)])  # type: ignore[misc]
        self._case.assertEqual(len(won), 1)
        self._case.assertEqual(bucket.read("run/object")[0], b"%d" % won[0])

    def _needs_conditions(self) -> None:
        if not self.knows_conditions:
            self._case.skipTest("this store puts an object whether the condition holds or not")

    def test_parts_in_any_order(self) -> None:
        """The object is there when the upload ends, not before; its version is that of the listing."""
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
        found = self.another_handle(bucket).look("run/object")
        assert found is not None
        self._case.assertEqual((found.nbytes, found.version), (len(data), version))
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
        """The same bytes, as after an answer that was lost: the receipts are those of the last time."""
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
        """And none."""
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
        """They are listed by prefix, with and without parts, until they are dropped; to drop one twice is no error."""
        bucket = self.make_bucket()
        uploads = {key: bucket.begin_upload(key) for key in ("run/a/one", "run/a/two", "run/b/one")}
        bucket.put_part("run/a/two", uploads["run/a/two"], 0, memoryview(b"x"))
        for prefix in ("", "run/", "run/a/", "run/a/t", "run/c"):
            found = {one.key: one.version for one in self.another_handle(bucket).uploads(prefix)}
            self._case.assertEqual(found, {key: one for key, one in uploads.items() if key.startswith(prefix)})
        for _ in range(2):
            self.another_handle(bucket).drop_upload("run/a/two", uploads["run/a/two"])
        self._case.assertEqual({one.key for one in bucket.uploads("run/")}, {"run/a/one", "run/b/one"})
        self._case.assertEqual(self._keys(bucket), [])

    def test_two_uploads_of_one_key(self) -> None:
        """Each has an id of its own, and the one that ends last is seen."""
        bucket = self.make_bucket()
        uploads = [bucket.begin_upload("run/object") for _ in range(2)]
        self._case.assertNotEqual(*uploads)
        receipts = [bucket.put_part("run/object", upload, 0, memoryview(upload.encode())) for upload in uploads]
        for upload, receipt in zip(uploads, receipts, strict=True):
            bucket.end_upload("run/object", upload, [receipt])
            self._case.assertEqual(bucket.read("run/object")[0], upload.encode())

    def test_a_part_of_an_upload_that_is_gone(self) -> None:
        """Neither it nor the end of the upload is taken."""
        bucket = self.make_bucket()
        upload = bucket.begin_upload("run/object")
        receipt = bucket.put_part("run/object", upload, 0, memoryview(b"x"))
        bucket.drop_upload("run/object", upload)
        with self._refused(CheckpointError, bucket, "run/object"):
            bucket.put_part("run/object", upload, 0, memoryview(b"x"))
        with self._refused(CheckpointError, bucket, "run/object"):
            bucket.end_upload("run/object", upload, [receipt])
        self._case.assertIsNone(bucket.look("run/object"))

    def test_listing(self) -> None:
        """By prefix, which need not end at a `/`, in the order of the keys' bytes; folders are one level of the tree."""
        bucket = self.make_bucket()
        keys = ["run/step-1/a", "run/step-1/b/c", "run/step-10/a", "run/step-2/a", "run/top", "run.old/a", "runs"]
        for key in reversed(keys):
            bucket.put(key, key.encode())
        for prefix in ("", "run", "run/", "run/step-1", "run/step-1/", "run/t", "other"):
            wanted = sorted((key for key in keys if key.startswith(prefix)), key=str.encode)
            self._case.assertEqual(self._keys(bucket, prefix), wanted, prefix)
            below = [key[len(prefix) :] for key in wanted]
            folders = {prefix + rest.partition("/")[0] for rest in below if "/" in rest}
            found = list(bucket.folders(prefix))
            self._case.assertEqual(set(found), folders, prefix)
            self._case.assertEqual(len(found), len(folders), prefix)

    def test_odd_keys(self) -> None:
        """Spaces, signs that URLs and XML give a meaning, and letters beyond ASCII: all calls take them."""
        bucket = self.make_bucket()
        for key in _ODD_KEYS:
            with self._case.subTest(key=key):
                version = bucket.put(key, key.encode())
                self._case.assertEqual(bucket.read(key), (key.encode(), version))
                memory = bytearray(2)
                bucket.read_into(key, [memoryview(memory)], 1, version=version)
                self._case.assertEqual(memory, key.encode()[1:3])
                upload = bucket.begin_upload(key)
                self._case.assertEqual([(one.key, one.version) for one in bucket.uploads(key)], [(key, upload)])
                bucket.drop_upload(key, upload)
        self._case.assertEqual(self._keys(bucket, "run/"), sorted(_ODD_KEYS, key=str.encode))
        bucket.delete(_ODD_KEYS)
        self._case.assertEqual(self._keys(bucket), [])

    def test_deleting(self) -> None:
        """Those that are given, and no other one; one that is missing is no error."""
        bucket = self.make_bucket()
        for key in ("run/a", "run/ab", "run/b"):
            bucket.put(key, b"x")
        bucket.delete(iter(["run/a", "run/missing"]))
        bucket.delete([])
        self._case.assertEqual(self._keys(bucket), ["run/ab", "run/b"])

    def test_many_objects(self) -> None:
        """More than a page of a listing, and more than one request deletes; most of those are missing."""
        bucket = self.make_bucket()
        keys = [f"run/{number:05}" for number in range(self.num_many)]

        def put(some: Sequence[str]) -> None:
            for key in some:
                bucket.put(key, b"")

        self._on_threads([lambda some=keys[start::4]: put(some) for start in range(4)])  # type: ignore[misc]
        bucket.put("runs", b"")
        self._case.assertEqual(self._keys(bucket, "run/"), keys)
        self._case.assertEqual(list(bucket.folders("")), ["run"])
        bucket.delete([*(f"run/missing/{number}" for number in range(1000)), *keys])
        self._case.assertEqual(self._keys(bucket), ["runs"])

    def test_ages(self) -> None:
        """Seconds since an object was written; not below 0, and small for a new one."""
        bucket = self.make_bucket()
        bucket.put("run/object", b"x")
        found = bucket.look("run/object")
        assert found is not None
        for one in (found, *bucket.list("run/")):
            self._case.assertGreaterEqual(one.age, 0)
            self._case.assertLess(one.age, 600)

    def test_ages_of_uploads(self) -> None:
        """Seconds since an upload was begun."""
        bucket = self.make_bucket()
        bucket.begin_upload("run/other")
        (found,) = bucket.uploads("run/")
        self._case.assertGreaterEqual(found.age, 0)
        self._case.assertLess(found.age, 600)
