"""What every Bucket must do, as one test class; `fsdp_optim.buckets.objects.base` has the protocol.

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
from collections.abc import Sequence

from fsdp_optim.buckets.objects.base import ABSENT, MissingObjectError, OvertakenError
from fsdp_optim.errors import CheckpointError
from fsdp_optim.testing.bucket_uploads import UploadPromises

_UNUSUAL_KEYS = (
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


class BucketConformance(UploadPromises):
    """A mix-in for a `unittest.TestCase`: the promises of a Bucket, one per test.

    `make_bucket` gives a bucket with nothing in it; `another_handle` gives another object for the same bucket, as another process
    would make it.

    Attributes:
        knows_conditions: whether the store knows `only_if`; where it does not, it puts an object anyway.
        num_many: how many objects are listed at once: more than a page of the store's listings.
    """

    def test_what_it_is(self) -> None:
        """The bucket's name is a URL without a slash at the end, and the sizes of parts are possible."""
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
        """Through another handle too; size and version agree with the listing."""
        bucket = self.make_bucket()
        for nbytes in (0, 1, 1000, 300_000):
            key, data = f"run/of-{nbytes}", self._data(nbytes)
            version = bucket.put(key, data)
            other = self.another_handle(bucket)
            self._case.assertEqual(other.read(key), (data, version))
            info = other.look(key)
            assert info is not None
            self._case.assertEqual((info.key, info.nbytes, info.version), (key, nbytes, version))
            listed = list(other.list(key))
            self._case.assertEqual(
                [(entry.key, entry.nbytes, entry.version) for entry in listed], [(key, nbytes, version)]
            )

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
        """A range of another version is not read, even where the pieces have no bytes."""
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
            listed = list(bucket.folders(prefix))
            self._case.assertEqual(set(listed), folders, prefix)
            self._case.assertEqual(len(listed), len(folders), prefix)

    def test_unusual_keys(self) -> None:
        """Spaces, signs that URLs and XML give a meaning, and letters beyond ASCII: all calls take them."""
        bucket = self.make_bucket()
        for key in _UNUSUAL_KEYS:
            with self._case.subTest(key=key):
                version = bucket.put(key, key.encode())
                self._case.assertEqual(bucket.read(key), (key.encode(), version))
                memory = bytearray(2)
                bucket.read_into(key, [memoryview(memory)], 1, version=version)
                self._case.assertEqual(memory, key.encode()[1:3])
                upload = bucket.begin_upload(key)
                self._case.assertEqual([(info.key, info.version) for info in bucket.uploads(key)], [(key, upload)])
                bucket.drop_upload(key, upload)
        self._case.assertEqual(self._keys(bucket, "run/"), sorted(_UNUSUAL_KEYS, key=str.encode))
        bucket.delete(_UNUSUAL_KEYS)
        self._case.assertEqual(self._keys(bucket), [])

    def test_deleting(self) -> None:
        """The objects that are given are deleted, and no other one; a missing object is no error."""
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
        info = bucket.look("run/object")
        assert info is not None
        for entry in (info, *bucket.list("run/")):
            self._case.assertGreaterEqual(entry.age, 0)
            self._case.assertLess(entry.age, 600)
