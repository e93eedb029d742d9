"""Write one new object, complete or absent. A small object is one request; a longer one is uploaded in parts, one in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fsdp_optim.buckets.objects.base import ABSENT, Bucket, OvertakenError
from fsdp_optim.errors import CheckpointError, wrong_use
from fsdp_optim.storage.base import FileSink


class NewObject(FileSink):
    """An object that is being written from its beginning to its end."""

    def __init__(self, bucket: Bucket, key: str, part_nbytes: int) -> None:
        self._bucket, self._key, self._part_nbytes = bucket, key, part_nbytes
        self._part = bytearray()
        self._upload: str | None = None
        self._receipts: list[str] = []

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data).cast("B")
        while len(left):
            num = self._part_nbytes - len(self._part)
            self._part += left[:num]
            left = left[num:]
            if len(self._part) == self._part_nbytes:
                self._put_part()

    def _put_part(self) -> None:
        if self._upload is None:
            self._upload = self._bucket.begin_upload(self._key)
        number = len(self._receipts)
        self._receipts.append(self._bucket.put_part(self._key, self._upload, number, memoryview(self._part)))
        self._part = bytearray()

    def finish(self, only_if: str | None) -> None:
        """Give the object its name. Raises OvertakenError as `Bucket.put` does."""
        if self._upload is None:
            self._bucket.put(self._key, bytes(self._part), only_if=only_if)
            return
        if self._part:
            self._put_part()
        self._bucket.end_upload(self._key, self._upload, self._receipts, only_if=only_if)
        self._upload = None

    def drop(self) -> None:
        """Remove the parts of an object that stays unfinished."""
        if self._upload is not None:
            self._bucket.drop_upload(self._key, self._upload)


@contextlib.contextmanager
def new_object(bucket: Bucket, key: str, where: str, part_nbytes: int, *, overwrite: bool) -> Iterator[NewObject]:
    """Write one object, which is there when the block ends. `where`: its URL, for errors.

    Raises CheckpointError if there is an object, and it must not be replaced.
    """
    if not overwrite and bucket.look(key) is not None:
        raise _taken(where)
    new = NewObject(bucket, key, part_nbytes)
    try:
        yield new
        new.finish(None if overwrite else ABSENT)
    except BaseException as error:
        with contextlib.suppress(CheckpointError):
            new.drop()
        if isinstance(error, OvertakenError):
            raise _taken(where) from None
        raise


def _taken(where: str) -> CheckpointError:
    return wrong_use(f"{where}: already exists: give another URL, or overwrite=True to replace it")
