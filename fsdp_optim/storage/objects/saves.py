"""Saves under way in a bucket: each has a claim, which it writes again and again. A claim that grows old is that of a dead save.

What a dead save has left is removed: its unfinished uploads, its objects, its claim and its notes. The checkpoint that the
manifest names is never touched, and nor is an object whose name no save gives.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Judge
from fsdp_optim.storage.objects.base import Bucket
from fsdp_optim.storage.objects.keys import Place
from fsdp_optim.storage.objects.opened import OpenedObjects, open_place

_BEATS = 5  # in the time after which a claim is that of a dead save

log = logging.getLogger("fsdp_optim")


@dataclass
class Claim:
    """The claim of one save, held by its leader. `dead_after`: seconds without a sign of life."""

    bucket: Bucket
    place: Place
    token: str
    dead_after: float
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._put()
        threading.Thread(target=self._beat, name=f"fsdp_optim: saving {self.place.where}", daemon=True).start()

    def _put(self) -> None:
        self.bucket.put(self.place.claim(self.token), json.dumps({"token": self.token}).encode())

    def _beat(self) -> None:
        while not self._stop.wait(self.dead_after / _BEATS):
            with contextlib.suppress(OSError):  # the next one may come through
                if self.is_held():
                    self._put()

    def is_held(self) -> bool:
        """Whether the claim is still there: nobody has taken this save for dead."""
        return self.bucket.look(self.place.claim(self.token)) is not None

    def others(self) -> list[str]:
        """The tokens of other saves that have a claim or notes here."""
        tokens = {self.place.token_of_note(found.key) for found in self.bucket.list(self.place.saving)}
        return sorted(tokens - {self.token})

    def release(self) -> None:
        """Remove the claim and all notes of the save."""
        self._stop.set()
        notes = [found.key for found in self.bucket.list(self.place.note(self.token))]
        self.bucket.delete(sorted(notes, key=lambda key: key == self.place.claim(self.token)))  # the claim goes last


def current(bucket: Bucket, place: Place, judge: Judge[Any]) -> OpenedObjects | None:
    """The checkpoint that is there; None where there is no manifest."""
    if bucket.look(place.manifest(judge.manifest)) is None:
        return None
    return open_place(bucket, place, judge)


def remove_dead(bucket: Bucket, place: Place, judge: Judge[Any], dead_after: float) -> None:
    """Remove what dead saves have left in a place."""
    newest: dict[str, float] = {}
    for found in bucket.list(place.saving):
        token = place.token_of_note(found.key)
        newest[token] = min(found.age, newest.get(token, found.age))
    dead = {token for token, age in newest.items() if age > dead_after}
    if dead and len(dead) == len(newest):
        log.warning("%s: removing what a save that has died has left", place.where)
        remove_strays(bucket, place, judge)
    for token in dead:
        if len(dead) < len(newest):  # only what has the token in its key is surely that of the dead save
            bucket.delete([found.key for found in bucket.list(f"{place.inside}{token}/")])
        bucket.delete([found.key for found in bucket.list(place.note(token))])
    if not newest.keys() - dead:
        for upload in list(bucket.uploads(place.inside)):
            if upload.age > dead_after:
                bucket.drop_upload(upload.key, upload.version)


def remove_strays(bucket: Bucket, place: Place, judge: Judge[Any]) -> None:
    """Remove all objects of saves in a place but those of the checkpoint that the manifest names. No save is under way."""
    opened = current(bucket, place, judge)
    kept = opened.files.token if opened is not None else None
    is_own = judge.is_own(opened if kept is None else None)
    for upload in list(bucket.uploads(place.inside)):
        bucket.drop_upload(upload.key, upload.version)
    strays = []
    for found in bucket.list(place.inside):
        name, token = found.key.removeprefix(place.inside), place.token_in(found.key)
        if found.key == place.manifest(judge.manifest) or (token is not None and token == kept):
            continue
        if token is None and (not is_own(name) or (opened is not None and kept is None)):
            continue  # somebody else's, or of the checkpoint that is there
        strays.append(found.key)
    bucket.delete(strays)


def own_keys(bucket: Bucket, opened: OpenedObjects, place: Place, judge: Judge[Any]) -> Iterator[str]:
    """The keys of the files of a checkpoint that is open, without its manifest."""
    if opened.files.token is not None:
        yield from (found.key for found in bucket.list(f"{place.inside}{opened.files.token}/"))
        return
    is_own = judge.is_own(opened)
    for found in bucket.list(place.inside):
        name = found.key.removeprefix(place.inside)
        if name != judge.manifest and place.token_in(found.key) is None and is_own(name):
            yield found.key


def check_held(claim: Claim) -> None:
    """Refuse to finish a save that another one has taken for dead, and may have removed."""
    if not claim.is_held():
        raise CheckpointError(
            f"{claim.place.where}: another save took this one for dead, because it gave no sign of life for "
            f"{claim.dead_after:g} s, and has removed its objects: save again"
        )
