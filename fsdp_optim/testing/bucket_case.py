"""The bucket of a test, and the steps that the tests of buckets share."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence

from fsdp_optim.buckets.objects.base import Bucket
from fsdp_optim.errors import CheckpointError
from fsdp_optim.testing.mix_in import MixIn


class BucketCase(MixIn):
    """The bucket of a test. `BucketConformance` describes the attributes and the first two methods."""

    knows_conditions: bool = True
    num_many: int = 1005

    def make_bucket(self) -> Bucket:
        """Return a bucket with nothing in it."""
        raise NotImplementedError

    def another_handle(self, bucket: Bucket) -> Bucket:
        """Another object for the same bucket."""
        return bucket

    def _data(self, nbytes: int, seed: int = 0) -> bytes:
        return random.Random(f"{nbytes} {seed}").randbytes(nbytes)

    def _keys(self, bucket: Bucket, prefix: str = "") -> list[str]:
        return [info.key for info in self.another_handle(bucket).list(prefix)]

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

    def _needs_conditions(self) -> None:
        if not self.knows_conditions:
            self._case.skipTest("this store puts an object whether the condition holds or not")
