"""A Store whose checkpoints are objects in a bucket."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from fsdp_optim.buckets.objects.base import Bucket, MissingObjectError, OvertakenError
from fsdp_optim.buckets.objects.directory import ObjectDirectory
from fsdp_optim.buckets.objects.keys import ObjectPlace
from fsdp_optim.buckets.objects.new_object import NewObject, new_object
from fsdp_optim.buckets.objects.opened import OpenedAny, OpenedObjects, open_place
from fsdp_optim.buckets.objects.staging import ObjectStaging
from fsdp_optim.buckets.objects.writer import Address, ObjectWriter
from fsdp_optim.errors import CheckpointError, wrong_use
from fsdp_optim.storage.base import Capabilities, CheckpointProbe, Opened, Store, check_not_reserved

PART_NBYTES = 5 << 20
"""The usual size of parts; larger where a file would have too many. As many as fit into memory are sent at a time."""

DEAD_AFTER = 300.0
"""Seconds without a sign of life after which a save is dead, and its leftovers are removed by the next save."""


class ObjectStore(Store):
    """One place in a bucket.

    Args:
        prefix: the beginning of the keys of this checkpoint; its siblings have another last part.
        probe: the answers of the format about the objects in the place.
        part_nbytes: the size of parts; None: `PART_NBYTES`, or the size that the bucket asks for.
        dead_after: seconds after which a save that gives no sign of life is dead.
    """

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        probe: CheckpointProbe[Any],
        *,
        part_nbytes: int | None = None,
        dead_after: float = DEAD_AFTER,
    ) -> None:
        self.bucket, self._probe, self._dead_after = bucket, probe, dead_after
        prefix = prefix.strip("/")
        if not prefix:
            raise CheckpointError(
                f"{bucket.name}: a checkpoint needs a name of its own in the bucket: {bucket.name}/step-1000"
            )
        self.place = ObjectPlace(f"{bucket.name}/{prefix}", prefix)
        can = bucket.can
        size = min(max(part_nbytes or PART_NBYTES, can.least_part_nbytes), can.most_part_nbytes)
        self.capabilities = Capabilities(
            "parts" if can.parts_by_many else "no", renames=False, part_nbytes=size, most_parts=can.most_parts
        )

    @property
    def where(self) -> str:
        return self.place.where

    def open(self) -> OpenedObjects:
        try:
            return open_place(self.bucket, self.place, self._probe)
        except MissingObjectError as error:
            raise wrong_use(str(error)) from error

    def open_any(self) -> OpenedAny:
        return OpenedAny.at(self.bucket, self.place)

    def with_probe(self, probe: CheckpointProbe[Any]) -> ObjectStore:
        other = copy.copy(self)
        other._probe = probe
        return other

    def above(self) -> tuple[ObjectStore, str] | None:
        prefix, _, name = self.place.prefix.rpartition("/")
        if not prefix:
            return None
        other = copy.copy(self)
        other.place = ObjectPlace(f"{self.bucket.name}/{prefix}", prefix)
        return other, name

    def begin(self, *, overwrite: bool, durable: bool) -> ObjectStaging:
        """As a Store does. An object store knows no durability: an object is stored when the store has answered."""
        check_not_reserved(self.where, self.where.split("/"))
        return ObjectStaging.begun(
            self.bucket,
            self.place,
            self._probe,
            self.capabilities,
            overwrite=overwrite,
            dead_after=self._dead_after,
            siblings=[sibling for sibling in self.directory().places() if sibling != self.place],
        )

    def join(self, address: str, *, durable: bool, who: str, budget_nbytes: int = 64 << 20) -> ObjectWriter:
        return ObjectWriter(self.bucket, self.place, Address.decoded(address), who, budget_nbytes)

    def machine_id(self) -> str:
        return self.where

    @property
    def can_shrink(self) -> bool:
        return True

    def shrink(self, opened: Opened, manifest: str, data: bytes | None, names: Sequence[str]) -> int:
        if not isinstance(opened, OpenedObjects):
            raise CheckpointError(f"{self.where}: was not opened as a checkpoint of a bucket, so it cannot be changed")
        keys = [opened.files.key(name) for name in names]  # looked up before the manifest is another one
        copy_of_manifest = opened.files.key(manifest) if opened.files.token is not None else None
        if opened.was_replaced():  # a store that knows no conditions would not refuse the put
            raise self._replaced()
        if data is not None:
            key = self.place.manifest(manifest)
            try:
                self.bucket.put(key, data, only_if=opened.manifest_version)
            except OvertakenError as error:
                if self.bucket.read(key)[0] != data:  # a repeated request is overtaken by itself
                    raise self._replaced() from error
            if copy_of_manifest is not None:
                self.bucket.put(copy_of_manifest, data)
        infos = [info for info in map(self.bucket.look, keys) if info is not None]
        self.bucket.delete([info.key for info in infos])
        return sum(info.nbytes for info in infos)

    @property
    def can_attach(self) -> bool:
        return True

    def attach(self, opened: Opened, name: str, data: bytes) -> None:
        if not isinstance(opened, OpenedObjects):
            raise CheckpointError(f"{self.where}: was not opened as a checkpoint of a bucket, so it cannot be changed")
        key = opened.files.key(name)
        if opened.was_replaced():
            raise self._replaced()
        self.bucket.put(key, data)

    def new_file(self, *, overwrite: bool) -> AbstractContextManager[NewObject]:
        part_nbytes = self.capabilities.part_nbytes or PART_NBYTES
        return new_object(self.bucket, self.place.prefix, self.where, part_nbytes, overwrite=overwrite)

    def _replaced(self) -> CheckpointError:
        return CheckpointError(f"{self.where}: was replaced by another save meanwhile, and stays as it is")

    def directory(self) -> ObjectDirectory[Any]:
        return ObjectDirectory(self.bucket, self.place.parent, self._probe)

    def siblings(self, known: Collection[str] = ()) -> Iterator[Opened]:
        directory = self.directory()
        places = (place for place in directory.places() if place.where.rpartition("/")[2] not in known)
        without = {place.where: place for place in places}
        for opened in directory.opened(tuple(without.values())):
            if not isinstance(opened, CheckpointError):
                del without[opened.where]
                yield opened
        for place in without.values():  # the siblings may have a checkpoint of another format
            if any(self.bucket.look(place.manifest(name)) is not None for name in self._probe.others):
                yield OpenedAny(self.bucket, place.inside)
