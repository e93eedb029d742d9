"""A bucket: the operations that a checkpoint needs of an object store, as one protocol of plain values.

An `ObjectStore` keeps checkpoints in any `Bucket`. A bucket knows keys and bytes; the layout of keys, commits, leftovers and
tokens are the store's. Keys are relative to the bucket, with `/` between their parts, and begin with none.

    bucket.put(key, data, only_if=ABSENT)                      # small objects, whole
    upload = bucket.begin_upload(key)                          # one process; large objects, in parts
    receipt = bucket.put_part(key, upload, number, data)       # any process, any part, in any order
    bucket.end_upload(key, upload, receipts, only_if=...)      # one process: the object is there now
    for info in bucket.list(prefix): ...
    bucket.read_into(key, pieces, offset, version=info.version)

Every method may be called from several threads at once. Requests that fail for a reason that may pass (throttling, resets,
time-outs, truncated bodies) are repeated with backoff for a stated time. Then, and for everything else, the error is a
CheckpointError of one line that names the object and the answer of the store. Where the answer shows neither that an object is
missing nor that it is damaged (denied rights, time-outs), the error is caused by `Undecided` or an OSError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fsdp_optim.errors import CheckpointError

ABSENT = ""
"""As `only_if`: the object is put only where there is none under its key."""


class MissingObjectError(CheckpointError):
    """There is no object under a key, or no bucket."""

    is_wrong_use = True


class OvertakenError(CheckpointError):
    """The condition of a `put` or `end_upload` does not hold: another process has put or removed the object."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object, or one unfinished upload, of a listing.

    Attributes:
        version: a word that differs when the object is written again (an ETag); of an upload its id.
        age: seconds since it was written, or begun, by the clock of the store, never by this machine's. 0 where the store does
            not say when, or this process has put nothing yet that would show the store's clock.
    """

    key: str
    nbytes: int
    version: str
    age: float


@dataclass(frozen=True)
class BucketCan:
    """The abilities of a bucket.

    Attributes:
        parts_by_many: whether several processes can put the parts of one upload.
        least_part_nbytes, most_part_nbytes: the size of a part, all of them equal but the last one, which may be shorter.
        most_parts: how many parts an object can have.
        most_reads: how many `read_into` are best under way at the same time; each may hold a copy of the bytes that it reads.
    """

    parts_by_many: bool
    least_part_nbytes: int = 5 << 20
    most_part_nbytes: int = 5 << 30
    most_parts: int = 10_000
    most_reads: int = 8


class Bucket(Protocol):
    """Objects under keys. `name`: its URL without a trailing slash (`s3://bucket`), for errors; it has no secrets."""

    @property
    def name(self) -> str: ...
    @property
    def can(self) -> BucketCan: ...

    def look(self, key: str) -> ObjectInfo | None:
        """Return an object's size, version and age; None where there is none."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Return all objects whose keys begin with `prefix`, in the order of their keys."""

    def folders(self, prefix: str) -> Iterator[str]:
        """Return the distinct beginnings of keys up to the next `/` after `prefix`, without that `/`: one level of a tree."""

    def read_into(self, key: str, pieces: Sequence[memoryview], offset: int, *, version: str | None = None) -> None:
        """Fill pieces of memory, one after the other, with the bytes of an object from `offset` on, by one request.

        Raises MissingObjectError where there is no object, OvertakenError where it has another version than `version`, and
        CheckpointError where it ends before the pieces are full.
        """

    def read(self, key: str) -> tuple[bytes, str]:
        """Return all of a small object, and its version. Raises MissingObjectError."""

    def put(self, key: str, data: bytes, *, only_if: str | None = None) -> str:
        """Put an object, whole; returns its version.

        `only_if`: ABSENT, or the version that is to be replaced. Raises OvertakenError where the store sees that the
        condition does not hold. A store that knows no conditions puts the object anyway, so callers read the object back.
        """

    def begin_upload(self, key: str) -> str:
        """Begin an object that is put in parts; returns the upload's id. Nothing is seen under the key."""

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> str:
        """Put one part, counted from 0; returns a receipt for `end_upload`. A part that is put again replaces the first one.

        The store verifies the bytes by a checksum of its own.
        """

    def end_upload(self, key: str, upload: str, receipts: Sequence[str], *, only_if: str | None = None) -> str:
        """Make the object of its parts, whose receipts are given in order; returns its version."""

    def drop_upload(self, key: str, upload: str) -> None:
        """Remove an unfinished upload and its parts. An upload that is gone is no error."""

    def uploads(self, prefix: str) -> Iterator[ObjectInfo]:
        """Return the unfinished uploads of keys that begin with `prefix`: `version` is the upload's id, `nbytes` 0."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Objects that are gone are no error."""
