"""Saves in parts that were killed, and go on: the process that takes them over, and the objects that it finds in the bucket."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsdp_optim.buckets.objects.base import Bucket, Found, MissingObjectError, OvertakenError
from fsdp_optim.buckets.objects.keys import Place
from fsdp_optim.buckets.objects.opened import OpenedObjects
from fsdp_optim.buckets.objects.part_notes import KEPT, PARTS
from fsdp_optim.buckets.objects.saves import SaveLease, is_ownerless
from fsdp_optim.buckets.objects.staging import ObjectStaging
from fsdp_optim.buckets.objects.writer import Address
from fsdp_optim.storage.base import Capabilities, CheckpointProbe

_READ_AT_ONCE = 16


def noted_parts(bucket: Bucket, place: Place, address: Address) -> dict[tuple[str, int], tuple[str, bytes]]:
    """The parts that were noted and are still there."""
    prefix = place.note(address.token, PARTS)
    keys = [found.key for found in bucket.list(prefix)]
    parts: dict[tuple[str, int], tuple[str, bytes]] = {}
    with ThreadPoolExecutor(_READ_AT_ONCE, thread_name_prefix="fsdp_optim: read") as pool:
        for content, _ in pool.map(bucket.read, keys):
            for name, number, receipt, data in json.loads(content):
                parts[name, number] = (receipt, base64.b64decode(data))
    for name, file in address.shared.items():
        if not file.upload and (name, 0) in parts:
            found = bucket.look(address.files(place).key(name))
            if found is None or found.version != parts[name, 0][0]:
                del parts[name, 0]
    return parts


def resumed(
    bucket: Bucket,
    place: Place,
    probe: CheckpointProbe[Any],
    capabilities: Capabilities,
    note: str,
    *,
    dead_after: float,
    before: OpenedObjects | None,
) -> ResumedStaging | None:
    """Take over the save that was kept with this note; None if there is none, or if some process goes on with it.

    `before`: the checkpoint that is there now.
    """
    notes = list(bucket.list(place.saving))
    for found in notes:
        token = place.token_of_note(found.key)
        address = _kept(bucket, place, found.key, token, note)
        if address is None or (before is not None and not address.has_folder):
            continue
        claim = _taken_over(bucket, place, token, notes, dead_after)
        if claim is None:
            continue
        try:
            staging = ResumedStaging(bucket, place, probe, capabilities, address, claim, before)
            if staging.has_uploads():
                staging.remove_all_but_parts()
                return staging
        except BaseException:
            claim.stop()
            raise
        staging.abandon()
    return None


def _kept(bucket: Bucket, place: Place, key: str, token: str, note: str) -> Address | None:
    """The address of a save that was kept with this note."""
    if key != place.note(token, KEPT):
        return None
    with contextlib.suppress(MissingObjectError, ValueError, KeyError, TypeError):
        kept = json.loads(bucket.read(key)[0])
        return Address.decoded(kept["address"]) if kept["note"] == note else None
    return None


def _taken_over(
    bucket: Bucket, place: Place, token: str, notes: Sequence[Found], dead_after: float
) -> SaveLease | None:
    """The claim of a save that nobody goes on with, as this process's own; None if some process may go on with it."""
    if any(found.key == place.tombstone(token) for found in notes):
        return None
    with contextlib.suppress(MissingObjectError, OvertakenError):
        found = bucket.look(place.claim(token))
        if found is None or not is_ownerless(bucket.read(found.key)[0], found.age, dead_after):
            return None
        claim = SaveLease(bucket, place, token, dead_after, replaces=found.version)
        if claim.is_held():
            return claim
        claim.stop()
    return None


class ResumedStaging(ObjectStaging):
    """A save that another process has begun."""

    def __init__(
        self,
        bucket: Bucket,
        place: Place,
        probe: CheckpointProbe[Any],
        capabilities: Capabilities,
        address: Address,
        claim: SaveLease,
        before: OpenedObjects | None,
    ) -> None:
        folder, shared = address.has_folder, address.shared
        super().__init__(
            *(bucket, place, probe, capabilities, claim), before=before, has_folder=folder, shared=shared, is_kept=True
        )
        claim.is_plain = not address.has_folder
        for name in self._shared:
            with contextlib.suppress(MissingObjectError):
                version = bucket.read(self._note_of_sealed(name))[0].decode()
                found = bucket.look(self._key(name))
                if found is not None and found.version == version:
                    self._sealed.add(name)

    def has_uploads(self) -> bool:
        """Whether the store still has the uploads of files that are not complete.

        A store that does not list them has those whose files are not there.
        """
        listed = {found.version for found in self._bucket.uploads(self._place.inside)}
        wanted = {name: one.upload for name, one in self._shared.items() if one.upload and name not in self._sealed}
        if listed:
            return listed.issuperset(wanted.values())
        return all(self._bucket.look(self._key(name)) is None for name in wanted)

    def remove_all_but_parts(self) -> None:
        """Remove objects of the save that are written again."""
        whole = {name for name, _ in noted_parts(self._bucket, self._place, self._address)}
        kept = self._sealed | {name for name, one in self._shared.items() if not one.upload and name in whole}
        token, is_own = self._token if self._has_folder else None, self._judge.is_own(None)
        kept |= set() if self._has_folder else {self._judge.manifest}
        strays = []
        for found in self._bucket.list(self._place.inside):
            name, is_note = self._place.name_in(found.key), found.key.startswith(self._place.saving)
            if not is_note and self._place.token_in(found.key) == token and is_own(name) and name not in kept:
                strays.append(found.key)
        self._bucket.delete(strays)
