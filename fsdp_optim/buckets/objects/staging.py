"""A save under way in a bucket, as its leader sees it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from fsdp_optim.buckets.objects.base import ABSENT, Bucket, MissingObjectError, OvertakenError
from fsdp_optim.buckets.objects.keys import ObjectPlace, new_token, own_token
from fsdp_optim.buckets.objects.opened import OpenedObjects, current
from fsdp_optim.buckets.objects.saves import (
    SaveLease,
    check_held,
    mark_dead,
    own_keys,
    remove_all_dead,
    remove_dead,
    taken_for_dead,
)
from fsdp_optim.buckets.objects.writer import Address, Receipt, SharedFile
from fsdp_optim.errors import CheckpointError, wrong_use
from fsdp_optim.storage.base import Capabilities, CheckpointProbe, Staging

log = logging.getLogger("fsdp_optim")


class ObjectStaging(Staging):
    """Shared files are uploads until `seal`; the manifest is put last, on the condition that nobody else was faster."""

    def __init__(
        self,
        bucket: Bucket,
        place: ObjectPlace,
        probe: CheckpointProbe[Any],
        capabilities: Capabilities,
        claim: SaveLease,
    ) -> None:
        """A save that has its claim."""
        self._bucket, self._place, self._probe, self._capabilities = bucket, place, probe, capabilities
        self._claim, self._token = claim, claim.token
        self._before: OpenedObjects | None = None  # the checkpoint that it replaces
        self._has_folder = True  # whether its files have a folder of their own
        self._shared: dict[str, SharedFile] = {}  # the files that it has begun
        self._committed = False

    @classmethod
    def begun(
        cls,
        bucket: Bucket,
        place: ObjectPlace,
        probe: CheckpointProbe[Any],
        capabilities: Capabilities,
        *,
        overwrite: bool,
        dead_after: float,
        siblings: Sequence[ObjectPlace] = (),
    ) -> ObjectStaging:
        """Begin a save, and remove the leftovers of dead saves from the place, and from its siblings.

        The claim comes first: its time shows some buckets the clock of the store, by which other saves are dead.
        """
        check_free(bucket, place, probe, overwrite=overwrite)
        claim = SaveLease(bucket, place, new_token(), dead_after)
        staging = cls(bucket, place, probe, capabilities, claim)
        try:
            remove_all_dead(bucket, siblings, place.parent, probe, dead_after)
            saves = remove_dead(bucket, place, probe, dead_after, claim)
            staging._find_room(overwrite=overwrite, has_dead=bool(saves.dead))
        except BaseException:
            staging.abandon()
            raise
        return staging

    def _find_room(self, *, overwrite: bool, has_dead: bool) -> None:
        """Find the checkpoint that is replaced, and decide whether the files get a folder of their own."""
        self._before = check_free(self._bucket, self._place, self._probe, overwrite=overwrite)
        listed = self._bucket.list(self._place.inside)
        is_empty = all(info.key.startswith(self._place.saving) for info in listed)
        # The listing may be old: it need not show the files of the checkpoint that is replaced. A save that was slow,
        # not dead, may still put objects where nobody else has a folder.
        self._has_folder = self._before is not None or not is_empty or has_dead or bool(self._claim.others())
        if not self._has_folder:
            self._claim.mark_plain()

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
    def inner_folder(self) -> str:
        return f"{self._token}/" if self._has_folder else ""

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
        put: dict[str, dict[int, str]] = {}
        for receipt in receipts:
            for name, parts_put in Receipt.decoded(receipt).parts.items():
                put.setdefault(name, {}).update(parts_put)
        for name, file in self._shared.items():
            of_file, num = put.get(name, {}), -(-file.nbytes // file.part_nbytes)
            missing = [number for number in range(num) if number not in of_file]
            if missing:
                raise CheckpointError(
                    f"{self._place.where}/{name}: nobody has put part {missing[0]} of its {num} parts"
                )
            if file.upload:
                parts = [of_file[number] for number in range(num)]
                self._bucket.end_upload(self._key(name), file.upload, parts, only_if=self._address.only_if)

    def put(self, name: str, data: bytes, *, durable: bool) -> None:
        self._bucket.put(self._key(name), data, only_if=self._address.only_if)

    def commit(self, manifest: str, data: bytes, *, durable: bool) -> None:
        check_held(self._claim)  # another save may have taken this one for dead, and removed its objects
        if self._has_folder:
            # A copy of the manifest in the folder makes it a checkpoint by itself, and shows readers that the folder counts.
            self._bucket.put(self._key(manifest), data)
        if self._before is not None and self._before.files.token is None:
            self._claim.mark_plain()  # so that a later save removes the old files if this process dies before it does
        self._check_not_overtaken(manifest)
        before = None if self._before is None else self._bucket.read(self._place.manifest(manifest))
        # Listed now, because the manifest that names the old files is replaced next.
        older = [] if self._before is None else list(own_keys(self._bucket, self._before, self._place, self._probe))
        try:
            self._bucket.put(self._place.manifest(manifest), data, only_if=ABSENT if before is None else before[1])
        except OvertakenError as error:
            if not self._is_own(manifest, data):  # a repeated request is overtaken by itself
                raise self._overtaken() from error
        if not self._is_own(manifest, data):  # where the store knows no conditions
            raise self._overtaken()
        # Only now: a save that took this one for dead in the meantime has put its tombstone before it removed any object.
        if not self._claim.is_held():
            self._check_complete(manifest, None if before is None else before[0])
        self._committed = True
        self._remove_older(older)

    def _check_not_overtaken(self, manifest: str) -> None:
        """Raise where the manifest is not that of the beginning: a store that knows no conditions would not refuse the put."""
        info = self._bucket.look(self._place.manifest(manifest))
        at_begin = None if self._before is None else self._before.manifest_version
        if (None if info is None else info.version) != at_begin:
            raise self._overtaken()

    def _check_complete(self, manifest: str, before: bytes | None) -> None:
        """Withdraw the manifest where another save took this one for dead at the last moment, and has removed its objects."""
        opened = current(self._bucket, self._place, self._probe)
        if opened is None:
            return
        has_files = opened.files.token == (self._token if self._has_folder else None)
        if has_files and self._probe.status_in(opened, whole=True).is_complete:
            return
        if before is None:
            self._bucket.delete([self._place.manifest(manifest)])
        else:
            self._bucket.put(self._place.manifest(manifest), before, only_if=opened.manifest_version)
        raise taken_for_dead(self._claim)

    def _is_own(self, manifest: str, data: bytes) -> bool:
        with contextlib.suppress(MissingObjectError):
            return self._bucket.read(self._place.manifest(manifest))[0] == data
        return False

    def _overtaken(self) -> CheckpointError:
        return CheckpointError(f"{self._place.where}: cannot be put in place: another save to this path was faster")

    def _remove_older(self, older: Sequence[str]) -> None:
        """Remove the objects of the replaced checkpoint. The new one is there, so a later save may remove what is left."""
        try:
            self._bucket.delete(older)
            self._claim.finish(self._probe)
        except OSError as error:
            log.warning("%s: objects of an older save are left: %s", self._place.where, error)
        finally:
            self._claim.stop()

    def abandon(self, *, late: bool = False) -> None:
        """Remove what this save has put. A later save removes what is left: the claim shows it, or with `late` a note."""
        if self._committed:
            return
        with contextlib.suppress(OSError):
            for name, file in self._shared.items():
                if file.upload:
                    self._bucket.drop_upload(self._key(name), file.upload)
            if self._may_count():
                self._claim.release()
            else:
                self._claim.finish(self._probe)
                if late:  # without a note, an object that has no folder of a save is a stranger's
                    mark_dead(self._bucket, self._place, self._token, is_plain=self._claim.is_plain)
        self._claim.stop()

    def _may_count(self) -> bool:
        """Return whether the manifest may be this save's, though its `put` seemed to fail."""
        opened = current(self._bucket, self._place, self._probe)
        return opened is not None and own_token(self._probe.token_in(opened)) in (self._token, None)


def check_free(
    bucket: Bucket, place: ObjectPlace, probe: CheckpointProbe[Any], *, overwrite: bool
) -> OpenedObjects | None:
    """Return the checkpoint that is there.

    Raises CheckpointError for one that may not be replaced, and for one of another format.
    """
    opened = current(bucket, place, probe)
    if opened is not None and not overwrite:
        raise wrong_use(f"{place.where}: a checkpoint already exists: save to another path, or give overwrite=True")
    for other in probe.others if opened is None else ():
        if bucket.look(place.manifest(other)) is not None:
            raise CheckpointError(
                f"{place.where}: has a checkpoint of another format, because {other} is there: save to another path, or remove it"
            )
    return opened
