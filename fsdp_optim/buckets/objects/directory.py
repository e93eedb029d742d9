"""The checkpoints under a prefix of a bucket."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from fsdp_optim.buckets.objects.base import Bucket, MissingObjectError
from fsdp_optim.buckets.objects.keys import SAVING, ObjectPlace
from fsdp_optim.buckets.objects.opened import OpenedObjects, open_place
from fsdp_optim.buckets.objects.saves import mark_dead, own_keys
from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import (
    CheckpointDirectory,
    CheckpointEntry,
    CheckpointProbe,
    CheckpointStatus,
    SummaryT,
    is_reserved,
    is_sure_that_not,
)

_LOOKED_AT_ONCE = 16
_MOST_LISTED = 1000  # keys of a place without a manifest

log = logging.getLogger("fsdp_optim")


class LostManifestError(CheckpointError):
    """A place has files of a save, and no manifest."""


class ObjectDirectory(CheckpointDirectory[SummaryT]):
    """A prefix, or a whole bucket, whose next parts of keys may each be a checkpoint.

    `prefix`: empty, or with a slash at its end.
    """

    def __init__(self, bucket: Bucket, prefix: str, probe: CheckpointProbe[SummaryT]) -> None:
        self._bucket, self._prefix, self._probe = bucket, prefix, probe

    @property
    def where(self) -> str:
        return f"{self._bucket.name}/{self._prefix}".rstrip("/")

    def places(self) -> list[ObjectPlace]:
        """Return all places under the prefix, with a checkpoint or without."""
        prefixes = self._bucket.folders(self._prefix)
        names = sorted(prefix for prefix in prefixes if not prefix.removeprefix(self._prefix).startswith("."))
        return [ObjectPlace(f"{self._bucket.name}/{prefix}", prefix) for prefix in names]

    def opened(self, places: Sequence[ObjectPlace] | None = None) -> Iterator[OpenedObjects | CheckpointError]:
        """Return the checkpoint of each place that has a manifest, or the reason why this is unknown; several at a time.

        `places`: None: all places under the prefix.
        """
        return (opened for _, opened in self._looks(self.places() if places is None else places))

    def _looks(self, places: Sequence[ObjectPlace]) -> Iterator[tuple[ObjectPlace, OpenedObjects | CheckpointError]]:
        with ThreadPoolExecutor(_LOOKED_AT_ONCE, thread_name_prefix="fsdp_optim: look") as pool:
            for place, opened in zip(places, pool.map(self._look, places), strict=True):
                if opened is not None:
                    yield place, opened

    def _look(self, place: ObjectPlace) -> OpenedObjects | CheckpointError | None:
        try:
            opened = open_place(self._bucket, place, self._probe)
            opened.fetch_head(self._probe.manifest)
        except MissingObjectError:
            return self._lost(place)
        except CheckpointError as error:
            return error
        return opened

    def _lost(self, place: ObjectPlace) -> LostManifestError | None:
        """Return the error of a place that has files of a save, and no manifest, though no save is under way; else None."""
        has_trace = False
        try:
            for info in islice(self._bucket.list(place.inside), _MOST_LISTED):
                name = place.name_in(info.key)
                if info.key.startswith(place.saving) or name in (self._probe.manifest, *self._probe.others):
                    return None
                has_trace = has_trace or self._probe.is_trace(name)
        except CheckpointError:
            return None
        return (
            LostManifestError(f"{place.where}/{self._probe.manifest}: is missing; the checkpoint is incomplete")
            if has_trace
            else None
        )

    def listed(self) -> list[CheckpointEntry[SummaryT]]:
        entries = []
        for place, opened in self._looks(self.places()):
            is_lost = isinstance(opened, LostManifestError)
            if isinstance(opened, CheckpointError):
                status: CheckpointStatus[SummaryT] = CheckpointStatus(
                    has_manifest=False, is_sure=is_lost or is_sure_that_not(opened), reason=str(opened)
                )
                if status.is_sure and not is_lost:
                    continue
            else:
                status = self._status_in(opened, whole=False)
            if status.is_complete or not status.has_moved:
                entries.append(CheckpointEntry(place.where, place.where, status, can_go=not is_lost))
        return entries

    def unfinished(self) -> list[str]:
        """Return the common beginnings of the notes of saves, without that of this prefix: `step-60/.saving-<token>`.

        An unfinished folder that was uploaded is among them by its name.
        """

        def noted_in(place: ObjectPlace) -> set[str]:
            name = place.prefix.removeprefix(self._prefix)
            if SAVING in name and is_reserved(name):
                return {name}
            tokens = {place.token_of_note(info.key) for info in self._bucket.list(place.saving)}
            return {f"{place.saving}{token}".removeprefix(self._prefix) for token in tokens}

        with ThreadPoolExecutor(_LOOKED_AT_ONCE, thread_name_prefix="fsdp_optim: look") as pool:
            return sorted(set[str]().union(*pool.map(noted_in, self.places())))

    def _status_in(self, opened: OpenedObjects, *, whole: bool) -> CheckpointStatus[SummaryT]:
        try:
            status: CheckpointStatus[SummaryT] = self._probe.status_in(opened, whole=whole)
            if not status.is_complete and opened.was_replaced():
                return CheckpointStatus(is_sure=False, has_moved=True, reason=status.reason)
        except OSError as error:
            return CheckpointStatus(is_sure=is_sure_that_not(error), reason=str(error))
        return status

    def _place_of(self, entry: CheckpointEntry[SummaryT]) -> ObjectPlace:
        return ObjectPlace(entry.where, entry.where.removeprefix(f"{self._bucket.name}/"))

    def status_of(self, entry: CheckpointEntry[SummaryT]) -> CheckpointStatus[SummaryT]:
        try:
            opened = open_place(self._bucket, self._place_of(entry), self._probe)
        except MissingObjectError as error:
            return CheckpointStatus(has_manifest=False, has_moved=True, reason=str(error))
        except CheckpointError as error:
            return CheckpointStatus(is_sure=is_sure_that_not(error), reason=str(error))
        return self._status_in(opened, whole=True)

    def remove(self, entries: Sequence[CheckpointEntry[SummaryT]], reason: str) -> None:
        for entry in entries:
            place = self._place_of(entry)
            try:
                opened = open_place(self._bucket, place, self._probe)
                keys = list(own_keys(self._bucket, opened, place, self._probe))
                is_plain = opened.files.token is None
                notes = mark_dead(
                    self._bucket, place, is_plain=is_plain
                )  # a later save continues where this process dies
                self._bucket.delete(
                    [place.manifest(self._probe.manifest)]
                )  # before its files: they are no checkpoint then
                self._bucket.delete(keys)
                self._bucket.delete(notes)
            except OSError as error:
                log.warning("%s cannot be removed, though %s: %s", entry.where, reason, error)
                continue
            log.info("removed %s: %s", entry.where, reason)
