"""The access of one process to a save into a bucket."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from fsdp_optim.buckets.objects.base import ABSENT, Bucket
from fsdp_optim.buckets.objects.keys import KeyedFiles, ObjectPlace
from fsdp_optim.buckets.objects.multipart import MultipartFile
from fsdp_optim.buckets.objects.uploads import Uploads
from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Capabilities, StoreWriter
from fsdp_optim.wire import decode, encode

_CLIENT_NBYTES = 6 << 20
"""The most bytes that threads, connections and requests of a process take of the budget, besides the parts."""


class SharedFile(NamedTuple):
    """A file whose parts several processes put. `upload`: its id; empty for a file of one part, which is put by one request."""

    nbytes: int
    part_nbytes: int
    upload: str


class Receipt(NamedTuple):
    """The parts of shared files that a process has put: by file, the number of each part, and what the bucket says of it."""

    parts: dict[str, tuple[tuple[int, str], ...]]

    def encoded(self) -> bytes:
        """Return the receipt as bytes."""
        return encode(self).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Receipt:
        """Decode a receipt, the inverse of `encoded`."""
        return decode(cls, data)


class Address(NamedTuple):
    """The facts that a process needs to take part in a save.

    `token`: of the save; `has_folder`: whether its files have a folder of their own; `shared`: files of several processes.
    """

    token: str
    has_folder: bool
    part_nbytes: int
    most_parts: int
    shared: dict[str, SharedFile]

    @property
    def only_if(self) -> str | None:
        """The condition for each object: files that have no folder of their own replace none, as those may be of another save."""
        return None if self.has_folder else ABSENT

    def part_nbytes_of(self, nbytes: int) -> int:
        """Return the size of the parts of a file of `nbytes` bytes."""
        return Capabilities(part_nbytes=self.part_nbytes, most_parts=self.most_parts).part_nbytes_of(nbytes)

    def files(self, place: ObjectPlace) -> KeyedFiles:
        """Where the files are."""
        return KeyedFiles(place, self.token if self.has_folder else None)

    def encoded(self) -> str:
        """Return the address as text."""
        return encode(self)

    @classmethod
    def decoded(cls, text: str) -> Address:
        """Decode an address, the inverse of `encoded`."""
        return decode(cls, text)


def _nbytes_for_parts(budget_nbytes: int) -> int:
    """Return the share of a budget that parts get: all but the share of the client, which is at most an eighth."""
    of_client = min(budget_nbytes // 8, _CLIENT_NBYTES)
    return budget_nbytes - of_client


class ObjectWriter(StoreWriter):
    """Puts the parts of shared files, and files of its own. Its receipt has the receipts of parts by file."""

    def __init__(self, bucket: Bucket, place: ObjectPlace, address: Address, who: str, budget_nbytes: int) -> None:
        self._bucket, self._place, self._address, self._who = bucket, place, address, who
        self._files = address.files(place)
        self._uploads = Uploads(bucket, _nbytes_for_parts(budget_nbytes), address.only_if)
        self._open: dict[str, MultipartFile] = {}
        self._receipts: dict[str, dict[int, Future[str]]] = {}
        self._own: dict[str, str] = {}  # the uploads of files that this process alone writes, by name

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        part_nbytes, upload = self._address.part_nbytes_of(nbytes), ""
        if nbytes > part_nbytes:
            upload = self._own[name] = self._bucket.begin_upload(self._files.key(name))
        elif not nbytes:
            self.put(name, b"")
        self._open_file(name, SharedFile(nbytes, part_nbytes, upload))
        if head:
            self.write(name, [memoryview(head)], 0)

    def _open_file(self, name: str, file: SharedFile) -> MultipartFile:
        key, receipts = self._files.key(name), self._receipts.setdefault(name, {})

        def send(number: int, data: memoryview) -> None:
            receipts[number] = self._uploads.put_part(key, file.upload, number, data)

        where, reserve = f"{self._place.where}/{name}", partial(self._uploads.reserve, file.upload)
        opened = self._open[name] = MultipartFile(where, file.nbytes, file.part_nbytes, send, reserve)
        return opened

    def write(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        opened = self._open.get(name)
        if opened is None:
            if name not in self._address.shared:
                raise CheckpointError(
                    f"{self._who} cannot write {self._place.where}/{name}: neither this process nor the leader has created it"
                )
            opened = self._open_file(name, self._address.shared[name])
        opened.write(pieces, offset)

    def put(self, name: str, data: bytes) -> None:
        self._bucket.put(self._files.key(name), data, only_if=self._address.only_if)

    def finish(self) -> bytes:
        for name, opened in self._open.items():
            if name in self._address.shared:
                opened.check_no_part_open()
            else:
                opened.check_whole()
        self._uploads.wait()
        put = {
            name: {number: receipt.result() for number, receipt in receipts.items()}
            for name, receipts in self._receipts.items()
        }
        for name, upload in list(self._own.items()):
            receipts = put.pop(name)
            parts = [receipts[number] for number in range(len(receipts))]
            self._bucket.end_upload(self._files.key(name), upload, parts, only_if=self._address.only_if)
            del self._own[name]
        self._uploads.close()
        shared = put.keys() & self._address.shared.keys()
        return Receipt({name: tuple(put[name].items()) for name in shared}).encoded()

    def discard(self) -> None:
        self._uploads.close()
        self._open.clear()
        own, self._own = self._own, {}
        for name, upload in own.items():
            with contextlib.suppress(OSError):  # then a later save removes it by its age
                self._bucket.drop_upload(self._files.key(name), upload)
