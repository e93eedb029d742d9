"""Objects of a bucket as the files of a place, each in the version that it had when it was first asked for."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_optim.buckets.objects.base import Bucket, ObjectInfo, OvertakenError
from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Opened


class VersionedObjects(Opened):
    """The parent of classes that open objects for reading; a child gives the key of each file."""

    request_nbytes = 1 << 20

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.num_requests = bucket, bucket.can.most_reads
        self._infos: dict[str, ObjectInfo | None] = {}

    def _key(self, name: str) -> str:
        """Return the key of a file. Raises CheckpointError for a name that leaves the place."""
        raise NotImplementedError

    def _look(self, name: str) -> ObjectInfo | None:
        if name not in self._infos:
            self._infos[name] = self._bucket.look(self._key(name))
        return self._infos[name]

    def has(self, name: str) -> bool:
        try:
            return self._look(name) is not None
        except CheckpointError:
            return True

    def version_of(self, name: str) -> tuple[object, ...] | None:
        info = self._bucket.look(self._key(name))
        return None if info is None else (info.version,)

    def size_of(self, name: str) -> int:
        nbytes = self.nbytes_of(name)
        if nbytes < 0:
            raise CheckpointError(f"{self.named(name)}: is missing; the checkpoint is not whole")
        return nbytes

    def nbytes_of(self, name: str) -> int:
        info = self._look(name)
        return -1 if info is None else info.nbytes

    def read_into(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(map(len, pieces))
        if not nbytes:
            return
        size = self.size_of(name)
        if offset + nbytes > size:
            raise CheckpointError(f"{self.named(name)}: ends at byte {size}: it was cut short")
        self._fill(name, pieces, offset, offset + nbytes)

    def _fill(self, name: str, pieces: Sequence[memoryview], offset: int, stop: int) -> None:
        """Fill pieces of memory with the bytes [offset, stop) of a file, which has them."""
        info = self._look(name)
        try:
            self._bucket.read_into(self._key(name), pieces, offset, version=info.version if info else None)
        except OvertakenError as error:
            raise CheckpointError(f"{self.named(name)}: was written again while it was read") from error

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
