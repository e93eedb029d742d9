"""Files of `torch.save` before torch 1.6, and with `_use_new_zipfile_serialization=False`: pickles, then all storages.

After the value comes the list of the keys of the storages, and after the list, for each key, a number of elements in 8 bytes
and the elements. So the place of each storage is known from the pickles alone.
"""

from __future__ import annotations

import io
from functools import partial
from hashlib import sha256
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.inert_pickle import MOST_NBYTES, Unpickler
from fsdp_optim.foreign.archive.torch_globals import Storage, storage_of
from fsdp_optim.foreign.archive.zip_records import FilePart
from fsdp_optim.foreign.reader import Source
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.storage.base import Opened

_MAGIC_NUMBER, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_NUMEL_NBYTES = 8
HEAD_NBYTES = 32
"""The number of bytes that `is_legacy` needs."""


def is_legacy(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is one of torch before 1.6: the first pickle is a number."""
    return head[:1] == b"\x80" and _MAGIC_NUMBER.to_bytes(10, "little") in head


class LegacyStorages:
    """The storages of one file, whose places are known when `load` has returned."""

    def __init__(self, opened: Opened, name: str, start: int, part: FilePart) -> None:
        self._opened, self._name, self._start = opened, name, start
        self._nbytes = part.nbytes
        self._where = opened.named(name)
        self._storages: dict[str, Storage] = {}
        self._starts: dict[str, int] = {}
        self._pickles = FilePart(opened, name, start, min(part.nbytes, MOST_NBYTES))
        self.digest = ""

    def load(self, plain: Unpickler, unpickler: Unpickler) -> Any:
        """Return the value of the file. `plain` reads the values that torch adds."""
        file = io.BufferedReader(self._pickles)  # operations are read a byte at a time
        magic, version, system = (plain.load(file) for _ in range(3))
        if magic != _MAGIC_NUMBER or version != _VERSION or not isinstance(system, dict):
            raise CheckpointError(f"{self._where}: is no file of torch.save of a version that is known: it was changed")
        if system.get("little_endian") is not True:
            raise CheckpointError(
                f"{self._where}: was written on a big-endian machine; only little-endian files are read: load it with "
                "torch.load and save it again on a little-endian machine"
            )
        value = unpickler.load(file)
        keys = plain.load(file)
        self.digest = sha256(self._pickles.at(0, file.tell())).hexdigest()
        with as_checkpoint_error(self._where):
            self._place([str(key) for key in keys], file.tell())
        return value

    def _place(self, keys: list[str], at: int) -> None:
        if len(set(keys)) != len(keys) or not set(self._storages) <= set(keys):
            raise ValueError("the list of storages is not that of the tensors")
        for key in keys:
            if key not in self._storages:
                raise ValueError(f"the storage {key!r:.80} belongs to no tensor")
            self._starts[key] = at + _NUMEL_NBYTES
            at += _NUMEL_NBYTES + self._storages[key].nbytes
        if at > self._nbytes:
            raise CheckpointError(
                f"{self._where}: the last tensor ends at byte {at}, but the file has {self._nbytes} bytes: it was cut short"
            )

    def storage(self, identity: Any) -> Any:
        """Return the storage, or the class of a module, that a persistent id describes."""
        if type(identity) is tuple and len(identity) == 4 and identity[0] == "module":
            return identity[1]
        *described, view = identity
        if view is not None:
            raise ValueError("a storage that is a view of another one, as torch before 0.4 wrote it")
        storage = storage_of(tuple(described))
        first = self._storages.setdefault(storage.key, storage)
        if first.nbytes != storage.nbytes:
            raise ValueError(f"the storage {storage.key!r:.80} has two sizes")
        return storage

    def source(self, storage: Storage) -> Source:
        """Return the place of the bytes of a storage."""
        return Source(self._name, partial(self._checked_start, storage))

    def _checked_start(self, storage: Storage) -> int:
        start = self._start + self._starts[storage.key]
        head = self._opened.read(self._name, start - _NUMEL_NBYTES, _NUMEL_NBYTES)
        numel = int.from_bytes(head, "little", signed=True)
        if numel != storage.numel:
            raise CheckpointError(
                f"{self._where}: the storage {storage.key} has {numel} elements in the file, not {storage.numel}: it was changed"
            )
        return start
