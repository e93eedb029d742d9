"""The objects under a prefix of a bucket, or one object, whoever put them there."""

from __future__ import annotations

from fsdp_optim.buckets.objects.base import Bucket, MissingObjectError
from fsdp_optim.buckets.objects.keys import ObjectPlace
from fsdp_optim.buckets.objects.versioned import VersionedObjects
from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import MOST_DEPTH, MOST_FILES, check_inside


class OpenedAny(VersionedObjects):
    """The objects under a prefix, in the versions that they had when they were listed or first asked for."""

    is_any = True

    def __init__(self, bucket: Bucket, prefix: str, selected: str = "") -> None:
        super().__init__(bucket)
        self._prefix, self.selected = prefix, selected
        self._names: list[str] | None = None

    @classmethod
    def at(cls, bucket: Bucket, place: ObjectPlace) -> OpenedAny:
        """Return the objects of a place; where the place is an object, or the beginning of the names of objects, these alone."""
        if next(iter(bucket.list(place.inside)), None) is not None:
            return cls(bucket, place.inside)
        name = place.prefix[len(place.parent) :]
        stem, dot, suffix = name.rpartition(".")
        begin, end = (f"{stem}-", f".{suffix}") if dot else (f"{name}-", "")
        if bucket.look(place.prefix) is not None or any(
            info.key.endswith(end) for info in bucket.list(f"{place.parent}{begin}")
        ):
            return cls(bucket, place.parent, name)
        raise MissingObjectError(f"{place.where}: there are no objects")

    @property
    def where(self) -> str:
        return f"{self._bucket.name}/{self._prefix}{self.selected}".rstrip("/")

    def named(self, name: str) -> str:
        return f"{self._bucket.name}/{self._prefix}{name}"

    def names(self) -> list[str]:
        if self._names is None:
            self._names = []
            for num, info in enumerate(self._bucket.list(self._prefix)):
                if num >= MOST_FILES:
                    raise CheckpointError(
                        f"{self.where}: has more than {MOST_FILES} objects: give the prefix of one checkpoint"
                    )
                name = info.key[len(self._prefix) :]
                if name and not name.endswith("/") and name.count("/") <= MOST_DEPTH:
                    self._names.append(name)
                    self._infos.setdefault(name, info)
            self._names.sort()
        return self._names

    def versions(self) -> list[tuple[str, tuple[object, ...] | None]]:
        listed = ((name, self._look(name)) for name in self.names())
        return [(name, None if info is None else (info.version,)) for name, info in listed]

    def _key(self, name: str) -> str:
        return f"{self._prefix}{check_inside(self.where, name)}"

    def was_replaced(self) -> bool:
        return False
