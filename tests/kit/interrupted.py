"""A bucket that stops one process before any of its requests: to kill it, or to let another process act meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fsdp_optim.buckets.objects import BucketCan, MemoryBucket, ObjectInfo
from fsdp_optim.buckets.objects.memory import Objects

STRANGERS = ("config.json", "notes/today.txt")
"""Names that no save gives, in the place of a checkpoint."""


class Killed(OSError):
    """This process is dead: none of its requests reaches the bucket any more."""


class InterruptedBucket(MemoryBucket):
    """A bucket that calls `then` before its nth request, counted from 0, and continues; `kills`: it is dead instead.

    `conditions` False: a store that knows no conditions. `calls`: the requests that were made.
    """

    def __init__(
        self,
        objects: Objects,
        nth: int | None = None,
        then: Callable[[], object] = str,
        *,
        kills: bool = False,
        conditions: bool = True,
    ) -> None:
        super().__init__(objects)
        self._nth, self._then, self._kills, self._conditions = nth, then, kills, conditions
        self.calls: list[str] = []
        self._is_dead, self._in_count = False, threading.Lock()

    @property
    def can(self) -> BucketCan:
        return super().can

    def _count(self, what: str) -> None:
        with self._in_count:
            if self._is_dead:
                raise Killed("dead")
            is_now = len(self.calls) == self._nth
            self.calls.append(what)
            self._is_dead = is_now and self._kills
        if is_now:
            self._then()
        if self._is_dead:
            raise Killed("dead")

    def look(self, key: str) -> ObjectInfo | None:
        self._count(f"look {key}")
        return next((entry for entry in super().list(key) if entry.key == key), None)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._count(f"list {prefix}")
        return super().list(prefix)

    def folders(self, prefix: str) -> Iterator[str]:
        self._count(f"folders {prefix}")
        keys = (entry.key for entry in super().list(prefix))
        return iter(sorted({key[: key.index("/", len(prefix))] for key in keys if "/" in key[len(prefix) :]}))

    def read_into(self, key: str, pieces: Sequence[memoryview], offset: int, *, version: str | None = None) -> None:
        self._count(f"read_into {key}")
        super().read_into(key, pieces, offset, version=version)

    def read(self, key: str) -> tuple[bytes, str]:
        self._count(f"read {key}")
        return super().read(key)

    def put(self, key: str, data: bytes, *, only_if: str | None = None) -> str:
        self._count(f"put {key}")
        return super().put(key, data, only_if=only_if if self._conditions else None)

    def begin_upload(self, key: str) -> str:
        self._count(f"begin_upload {key}")
        return super().begin_upload(key)

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> str:
        self._count(f"put_part {key}")
        return super().put_part(key, upload, number, data)

    def end_upload(self, key: str, upload: str, receipts: Sequence[str], *, only_if: str | None = None) -> str:
        self._count(f"end_upload {key}")
        return super().end_upload(key, upload, receipts, only_if=only_if if self._conditions else None)

    def drop_upload(self, key: str, upload: str) -> None:
        self._count(f"drop_upload {key}")
        super().drop_upload(key, upload)

    def uploads(self, prefix: str) -> Iterator[ObjectInfo]:
        self._count(f"uploads {prefix}")
        return super().uploads(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """One by one, as a process may die in the middle."""
        for key in keys:
            self._count(f"delete {key}")
            super().delete([key])


def left_over(bucket: Any, root: str, probe: Any) -> list[str]:
    """Objects and uploads under `root` that are neither strangers' nor of the checkpoint of their place."""
    from fsdp_optim.buckets.objects import ObjectPlace
    from fsdp_optim.buckets.objects.saves import current
    from fsdp_optim.formats.base.checksums import sums_of

    left = []
    for prefix in bucket.folders(root):
        place = ObjectPlace(f"{bucket.name}/{prefix}", prefix)
        known = {place.inside + name for name in STRANGERS}
        opened = current(bucket, place, probe)
        if opened is not None:
            status = probe.status_in(opened, whole=True)
            if status.summary is None:
                raise AssertionError(f"{place.where}: is no complete checkpoint: {status.reason}")
            names = set(status.summary.files)
            known |= {opened.files.key(name) for name in names | {sums_of(name) for name in names}}
            known |= {place.manifest(probe.manifest)}
            known |= {f"{place.inside}{opened.files.token}/{probe.manifest}"} if opened.files.token else set()
        left += [entry.key for entry in bucket.list(place.inside) if entry.key not in known]
    return left + [f"upload {upload.key}" for upload in bucket.uploads(root) if not upload.key.endswith(STRANGERS)]
