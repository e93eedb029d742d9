"""A Store whose checkpoints are objects in a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Capabilities, Judge, Store
from fsdp_optim.storage.objects.base import Bucket
from fsdp_optim.storage.objects.completion import ObjectCompletion
from fsdp_optim.storage.objects.keys import Place
from fsdp_optim.storage.objects.opened import OpenedObjects, open_place
from fsdp_optim.storage.objects.saves import own_keys, remove_dead
from fsdp_optim.storage.objects.staging import ObjectStaging
from fsdp_optim.storage.objects.writer import Address, ObjectWriter

PART_NBYTES = 8 << 20
"""The size of parts, where a bucket takes it and a file has not too many of them."""

DEAD_AFTER = 300.0
"""Seconds without a sign of life after which a save is dead, and what it has left is removed by the next one."""

_LOOKED_AT_ONCE = 16


class ObjectStore(Store):
    """One place in a bucket.

    Args:
        prefix: the beginning of the keys of this checkpoint; its siblings have another last part.
        judge: answers of the format about what lies there.
        part_nbytes: the size of parts; None: `PART_NBYTES`, or what the bucket asks for.
        dead_after: seconds after which a save that gives no sign of life is dead.
    """

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        judge: Judge[Any],
        *,
        part_nbytes: int | None = None,
        dead_after: float = DEAD_AFTER,
    ) -> None:
        self.bucket, self._judge, self._dead_after = bucket, judge, dead_after
        prefix = prefix.strip("/")
        if not prefix:
            raise CheckpointError(
                f"{bucket.name}: a checkpoint needs a name of its own in the bucket: {bucket.name}/step-1000"
            )
        self.place = Place(f"{bucket.name}/{prefix}", prefix)
        can = bucket.can
        size = min(max(part_nbytes or PART_NBYTES, can.least_part_nbytes), can.most_part_nbytes)
        self.capabilities = Capabilities(
            "parts" if can.parts_by_many else "no", renames=False, part_nbytes=size, most_parts=can.most_parts
        )

    @property
    def where(self) -> str:
        return self.place.where

    def open(self) -> OpenedObjects:
        return open_place(self.bucket, self.place, self._judge)

    def begin(self, *, overwrite: bool, durable: bool) -> ObjectStaging:
        """As a Store does. An object store knows no durability: what it has answered for is stored."""
        for sibling in self.siblings_places():
            if sibling != self.place:
                remove_dead(self.bucket, sibling, self._judge, self._dead_after)
        return ObjectStaging(
            self.bucket, self.place, self._judge, self.capabilities, overwrite=overwrite, dead_after=self._dead_after
        )

    def join(self, address: str, *, durable: bool, who: str, budget_nbytes: int = 64 << 20) -> ObjectWriter:
        return ObjectWriter(self.bucket, self.place, Address.decoded(address), who, budget_nbytes)

    def completion(self, address: str, rank: int, ranks: Sequence[int], timeout: float) -> ObjectCompletion:
        token = Address.decoded(address).token
        return ObjectCompletion(self.bucket, self.place, self._judge, token, rank, ranks, timeout)

    def machine_id(self) -> str:
        return self.where

    def siblings_places(self) -> list[Place]:
        """This place and all others beside it in the bucket, whatever they have."""
        folders = {*self.bucket.folders(self.place.parent), self.place.prefix}
        names = sorted(one for one in folders if not one.rpartition("/")[2].startswith("."))
        return [Place(f"{self.bucket.name}/{one}", one) for one in names]

    def siblings(self) -> Iterator[OpenedObjects]:
        with ThreadPoolExecutor(_LOOKED_AT_ONCE, thread_name_prefix="fsdp_optim: look") as pool:
            for opened in pool.map(self._look, self.siblings_places()):
                if opened is not None:
                    yield opened

    def _look(self, place: Place) -> OpenedObjects | None:
        """The checkpoint of a place, with the beginning of its manifest; None where it has none, or it is gone again."""
        try:
            opened = open_place(self.bucket, place, self._judge)
            opened.fetch_head(self._judge.manifest)
        except CheckpointError:
            return None
        return opened

    def remove(self, opened: OpenedObjects, place: Place) -> None:
        """Remove a checkpoint: its manifest first, so that nobody takes the rest for one."""
        keys = list(own_keys(self.bucket, opened, place, self._judge))
        self.bucket.delete([place.manifest(self._judge.manifest)])
        self.bucket.delete(keys)
