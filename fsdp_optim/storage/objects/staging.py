"""A save under way in a bucket, as its leader sees it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Capabilities, Judge, Staging
from fsdp_optim.storage.objects.base import ABSENT, Bucket, OvertakenError
from fsdp_optim.storage.objects.keys import Place, new_token, own_token
from fsdp_optim.storage.objects.opened import OpenedObjects
from fsdp_optim.storage.objects.saves import Claim, check_held, current, own_keys, remove_dead, remove_strays
from fsdp_optim.storage.objects.writer import Address, SharedFile

log = logging.getLogger("fsdp_optim")


class ObjectStaging(Staging):
    """Shared files are uploads until `seal`; the manifest is put last, on the condition that nobody else was faster."""

    def __init__(
        self,
        bucket: Bucket,
        place: Place,
        judge: Judge[Any],
        capabilities: Capabilities,
        *,
        overwrite: bool,
        dead_after: float,
        token: str | None = None,
    ) -> None:
        self._bucket, self._place, self._judge, self._capabilities = bucket, place, judge, capabilities
        self._check_free(overwrite)
        remove_dead(bucket, place, judge, dead_after)
        self._token, self._shared = token or new_token(), dict[str, SharedFile]()
        self._has_folder, self._committed = True, False
        self._claim = Claim(bucket, place, self._token, dead_after)
        try:
            self._before = self._check_free(overwrite)
            is_empty = all(found.key.startswith(place.saving) for found in bucket.list(place.inside))
            self._has_folder = not is_empty or bool(self._claim.others())
        except BaseException:
            self.abandon()
            raise

    def _check_free(self, overwrite: bool) -> OpenedObjects | None:
        found = current(self._bucket, self._place, self._judge)
        if found is not None and not overwrite:
            raise CheckpointError(
                f"{self._place.where}: a checkpoint is there already: save to another path, or say overwrite=True"
            )
        return found

    @property
    def _address(self) -> Address:
        can = self._capabilities
        return Address(self._token, self._has_folder, can.part_nbytes, can.most_parts, dict(self._shared))

    @property
    def address(self) -> str:
        return self._address.encoded()

    @property
    def token(self) -> str:
        return self._token

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def replaces(self) -> bool:
        return self._before is not None

    def _key(self, name: str) -> str:
        return self._address.files(self._place).key(name)

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        """Begin the upload of a file. The process that puts the first part puts the head, too."""
        part_nbytes = self._capabilities.part_nbytes_of(nbytes)
        upload = self._bucket.begin_upload(self._key(name)) if nbytes > part_nbytes else ""
        self._shared[name] = SharedFile(nbytes, part_nbytes, upload)

    def seal(self, names: Sequence[str], receipts: Sequence[bytes], *, durable: bool) -> None:
        found: dict[str, dict[int, str]] = {}
        for receipt in receipts:
            for name, its in json.loads(receipt).items():
                found.setdefault(name, {}).update({int(number): one for number, one in its.items()})
        for name, file in self._shared.items():
            its, num = found.get(name, {}), -(-file.nbytes // file.part_nbytes)
            missing = [number for number in range(num) if number not in its]
            if missing:
                raise CheckpointError(
                    f"{self._place.where}/{name}: nobody has put part {missing[0]} of its {num} parts"
                )
            if file.upload:
                self._bucket.end_upload(self._key(name), file.upload, [its[number] for number in range(num)])

    def put(self, name: str, data: bytes, *, durable: bool) -> None:
        self._bucket.put(self._key(name), data)

    def commit(self, manifest: str, data: bytes, *, durable: bool) -> None:
        check_held(self._claim)
        if self._has_folder:
            self._bucket.put(
                self._key(manifest), data
            )  # the folder is a checkpoint by itself, and tells that it counts
        condition = ABSENT if self._before is None else self._before.manifest_version
        try:
            self._bucket.put(self._place.manifest(manifest), data, only_if=condition)
        except OvertakenError as error:
            if not self._is_mine(manifest, data):  # a repeated request is overtaken by itself
                raise self._overtaken() from error
        if not self._is_mine(manifest, data):  # where the store knows no conditions
            raise self._overtaken()
        self._committed = True
        self._remove_older()

    def _is_mine(self, manifest: str, data: bytes) -> bool:
        return self._bucket.read(self._place.manifest(manifest))[0] == data

    def _overtaken(self) -> CheckpointError:
        return CheckpointError(f"{self._place.where}: cannot be put in place: another save to this path was faster")

    def _remove_older(self) -> None:
        """What cannot be removed now is removed by a later save: the new checkpoint is there."""
        try:
            if self._before is not None:
                self._bucket.delete(list(own_keys(self._bucket, self._before, self._place, self._judge)))
            if not self._claim.others():
                remove_strays(self._bucket, self._place, self._judge)
            self._claim.release()
        except OSError as error:
            log.warning("%s: objects of an older save are left: %s", self._place.where, error)

    def abandon(self) -> None:
        if self._committed:
            return
        with contextlib.suppress(OSError):
            for name, file in self._shared.items():
                if file.upload:
                    self._bucket.drop_upload(self._key(name), file.upload)
            if not self._may_count():
                self._remove_own()
            self._claim.release()

    def _may_count(self) -> bool:
        """Whether the manifest may be that of this save, though its `put` seemed to fail."""
        found = current(self._bucket, self._place, self._judge)
        return found is not None and own_token(self._judge.token_in(found)) in (self._token, None)

    def _remove_own(self) -> None:
        if self._has_folder:
            own = [found.key for found in self._bucket.list(f"{self._place.inside}{self._token}/")]
            self._bucket.delete(own)
        elif not self._claim.others() and current(self._bucket, self._place, self._judge) is None:
            remove_strays(self._bucket, self._place, self._judge)
