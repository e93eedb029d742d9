"""`file://`: objects that are files of this machine, or of what is mounted on it. Another machine may have others there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fsdp_optim.buckets.objects.base import Bucket
from fsdp_optim.buckets.objects.store import ObjectStore
from fsdp_optim.buckets.objects.writer import Address
from fsdp_optim.storage.base import CheckpointProbe
from fsdp_optim.storage.posix.beacon import beacon_above, sees
from fsdp_optim.storage.posix.filesystem import this_host


class MountedObjects(ObjectStore):
    """One place in a folder, as an `ObjectStore`. `folder`: where the bucket's objects are files."""

    def __init__(self, bucket: Bucket, prefix: str, probe: CheckpointProbe[Any], folder: str, **options: Any) -> None:
        super().__init__(bucket, prefix, probe, **options)
        self._folder = Path(folder)

    def machine_id(self) -> str:
        return f"{self.where} {this_host(self._folder)}"

    def sees(self, address: str) -> bool:
        """As a Store does. `address`: of a save, whose claim must be visible, or the path of a beacon."""
        is_save = address.startswith("{")
        return sees(self._folder / self.place.claim(Address.decoded(address).token) if is_save else Path(address))

    def beacon(self) -> AbstractContextManager[str]:
        return beacon_above(self._folder / self.place.prefix)
