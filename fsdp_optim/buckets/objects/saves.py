"""Leases of the saves under way in a bucket: each save has a claim, which it renews until it ends. An old claim is a dead save's.

A claim is old by the clock of the store, or because this process has watched it for that long. The clocks of machines do not
count: a save puts its own claim before it looks at others, and the time that the store gives it shows the store's clock.

What a dead save has left is removed: its unfinished uploads, its objects, its claim and its notes. The checkpoint that the
manifest names is never touched, and nor is an object or an upload whose name no save gives.

Other processes act at the same time, so what is to be removed is listed first, then the claims, then the manifest is read: a
save puts its claim before everything else, and removes it after its manifest is there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fsdp_optim.buckets.objects.base import Bucket, ObjectInfo
from fsdp_optim.buckets.objects.keys import ObjectPlace, new_token
from fsdp_optim.buckets.objects.opened import OpenedObjects, current
from fsdp_optim.buckets.objects.watched import BEAT, watched
from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import CheckpointProbe

_BEATS = 5  # in the time after which the save of a claim counts as dead
_LOOKED_AT_ONCE = 16

log = logging.getLogger("fsdp_optim")


@dataclass
class SaveLease:
    """The lease of one save, held by its leader: the claim in the bucket, and a thread that renews it.

    `dead_after`: seconds without a sign of life. `is_plain`: whether `mark_plain` was called.
    """

    bucket: Bucket
    place: ObjectPlace
    token: str
    dead_after: float
    is_plain: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)
    _beating: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.bucket.put(self.place.claim(self.token), self._content)
        threading.Thread(target=self._beat, name=f"fsdp_optim: saving {self.place.where}", daemon=True).start()

    @property
    def _content(self) -> bytes:
        """The content of the next beat, which is never repeated: another process may know the claim by its bytes alone."""
        return json.dumps({"token": self.token, BEAT: secrets.token_hex(8)}).encode()

    def _beat(self) -> None:
        while not self._stop.wait(self.dead_after / _BEATS):
            with contextlib.suppress(OSError):  # the next beat may come through
                self.beat()

    def beat(self) -> None:
        """Give a sign of life. A claim that was removed does not come back."""
        with self._beating:
            claim = self.bucket.look(self.place.claim(self.token))
            if claim is not None and not self._stop.is_set():
                self.bucket.put(claim.key, self._content, only_if=claim.version)

    def is_held(self) -> bool:
        """Return whether the claim is still there: nobody has taken this save for dead."""
        keys = {info.key for info in self.bucket.list(self.place.note(self.token))}
        return self.place.claim(self.token) in keys and self.place.tombstone(self.token) not in keys

    def mark_plain(self) -> None:
        """Show that files without a folder of their own are this save's, or belong to the checkpoint that it replaces."""
        self.is_plain = True
        self.bucket.put(self.place.plain(self.token), b"")

    def others(self) -> list[str]:
        """Return the tokens of other saves that have a claim or notes here."""
        tokens = {self.place.token_of_note(info.key) for info in self.bucket.list(self.place.saving)}
        return sorted(tokens - {self.token})

    def finish(self, probe: CheckpointProbe[Any]) -> None:
        """Remove the objects that belong neither to the present checkpoint nor to another live save, and the claim."""
        if not remove_strays(self.bucket, self.place, probe, self.dead_after, self):
            # The other live save may have listed its leftovers already: without this note, nobody would remove ours.
            mark_dead(self.bucket, self.place, is_plain=self.is_plain)
        self.release()

    def stop(self) -> None:
        """Give no more signs of life."""
        self._stop.set()

    def release(self) -> None:
        """Remove the claim and all notes of the save."""
        self.stop()
        with self._beating:
            notes = [info.key for info in self.bucket.list(self.place.note(self.token))]
            self.bucket.delete([key for key in notes if key != self.place.claim(self.token)])
            self.bucket.delete([self.place.claim(self.token)])  # last, so that a later save sees the rest


@dataclass(frozen=True)
class _Saves:
    """The tokens of the saves in a place that have a claim or notes."""

    live: frozenset[str]
    dead: frozenset[str]

    @classmethod
    def listed(
        cls, bucket: Bucket, place: ObjectPlace, dead_after: float, own_lease: SaveLease | None = None
    ) -> _Saves:
        """Sort the saves of a place, except that of `own_lease`, into live and dead ones."""
        ages: dict[str, float] = {}
        for info in bucket.list(place.saving):
            token = place.token_of_note(info.key)
            if own_lease is not None and token == own_lease.token:
                continue
            age = float("inf") if info.key == place.tombstone(token) else info.age
            known = ages.get(token, age)
            ages[token] = max(known, age) if float("inf") in (known, age) else min(known, age)
        dead = frozenset(token for token, age in ages.items() if age > dead_after)
        dead |= watched().silent(bucket, place, frozenset(ages) - dead, dead_after)
        return cls(frozenset(ages) - dead, dead)


def remove_all_dead(
    bucket: Bucket, places: Sequence[ObjectPlace], parent: str, probe: CheckpointProbe[Any], dead_after: float
) -> None:
    """Remove the leftovers of dead saves in several places under `parent`."""

    def remove(place: ObjectPlace) -> bool:
        saves = remove_dead(bucket, place, probe, dead_after)
        return not saves.live

    if not places:
        return
    with ThreadPoolExecutor(_LOOKED_AT_ONCE, thread_name_prefix="fsdp_optim: look") as pool:
        idle = [place for place, is_idle in zip(places, pool.map(remove, places), strict=True) if is_idle]
    is_own = probe.is_own(None)
    for upload in list(bucket.uploads(parent)):
        # Without a claim, only an upload into the folder of a save surely belongs to a save.
        owner = next((place for place in idle if upload.key.startswith(place.inside)), None)
        is_old = owner is not None and upload.age > dead_after and owner.token_in(upload.key) is not None
        if owner is not None and is_old and is_own(owner.name_in(upload.key)):
            bucket.drop_upload(upload.key, upload.version)


def remove_dead(
    bucket: Bucket,
    place: ObjectPlace,
    probe: CheckpointProbe[Any],
    dead_after: float,
    own_lease: SaveLease | None = None,
) -> _Saves:
    """Remove the leftovers of dead saves in a place. Returns the saves that were there, without that of `own_lease`."""
    saves = _Saves.listed(bucket, place, dead_after, own_lease)
    if saves.dead:
        log.warning("%s: removing what a save that died, or was overtaken by another one, has left", place.where)
        for token in sorted(saves.dead):  # first: a save that is slow, not dead, must not finish any more
            mark_dead(bucket, place, token)
        bucket.delete([place.claim(token) for token in sorted(saves.dead)])
        remove_strays(bucket, place, probe, dead_after, own_lease)
    return saves


def mark_dead(bucket: Bucket, place: ObjectPlace, token: str | None = None, *, is_plain: bool = False) -> list[str]:
    """Mark all that has no manifest for removal, by this process or a later save; return the keys of the notes.

    `is_plain`: also files that have no folder of their own.
    """
    token = token or new_token()
    keys = [place.plain(token)] if is_plain else []
    keys.append(place.tombstone(token))
    for key in keys:
        bucket.put(key, b"")
    return keys


def remove_strays(
    bucket: Bucket,
    place: ObjectPlace,
    probe: CheckpointProbe[Any],
    dead_after: float,
    own_lease: SaveLease | None = None,
) -> bool:
    """Remove the objects of saves in a place, except of the checkpoint that the manifest names and of live saves.

    An object that has no token in its key is a save's only where a note says so: else somebody has put it there, a pretrained
    `model.safetensors` for example.

    `own_lease`: of a save that has ended, or has put nothing yet, and removes its claim and notes itself. Returns whether no
    other save is alive, so that nothing is left.
    """
    lease_token = own_lease.token if own_lease is not None else ""
    # Objects before claims before the manifest: a save that begins now has put no object of this list, and a save that ends now
    # has its claim until its manifest is there.
    uploads, objects = list(bucket.uploads(place.inside)), list(bucket.list(place.inside))
    live = _Saves.listed(bucket, place, dead_after, own_lease).live
    opened = current(bucket, place, probe)
    kept, is_own = opened.files.token if opened is not None else None, probe.is_own(None)

    notes_of = {info.key: place.token_of_note(info.key) for info in objects if info.key.startswith(place.saving)}
    is_noted = any(key == place.plain(token) for key, token in notes_of.items())
    has_plain = not live and (is_noted or (own_lease is not None and own_lease.is_plain))

    def is_stray(info: ObjectInfo) -> bool:
        token = place.token_in(info.key)
        if not is_own(place.name_in(info.key)):
            return False
        return has_plain if token is None else token not in live

    for upload in filter(is_stray, uploads):
        bucket.drop_upload(upload.key, upload.version)
    notes, strays = [], []
    for info in objects:
        token = place.token_in(info.key)
        if info.key.startswith(place.saving):
            if not live and token != lease_token:  # else the notes show a later save that there is something to remove
                notes.append(info.key)
        elif info.key == place.manifest(probe.manifest) or (opened is not None and token == kept):
            continue
        elif is_stray(info):
            strays.append(info.key)
    bucket.delete(strays)
    bucket.delete(notes)
    return not live


def own_keys(bucket: Bucket, opened: OpenedObjects, place: ObjectPlace, probe: CheckpointProbe[Any]) -> Iterator[str]:
    """Yield the keys of the files of a checkpoint that is open, without its manifest."""
    if opened.files.token is not None:
        yield from (info.key for info in bucket.list(f"{place.inside}{opened.files.token}/"))
        return
    is_own = probe.is_own(opened)
    for info in bucket.list(place.inside):
        name = info.key.removeprefix(place.inside)
        if name != probe.manifest and place.token_in(info.key) is None and is_own(name):
            yield info.key


def check_held(claim: SaveLease) -> None:
    """Refuse to finish a save that another one has taken for dead, and may have removed."""
    if not claim.is_held():
        raise taken_for_dead(claim)


def taken_for_dead(claim: SaveLease) -> CheckpointError:
    """Return the error of a save that another one has taken for dead."""
    return CheckpointError(
        f"{claim.place.where}: another save took this one for dead, because it gave no sign of life for some time "
        f"(dead_after, here {claim.dead_after:g} s), and has removed its objects: save again"
    )
