"""The checkpoints of a folder: their order, the newest one, which of them are one series, and which keep_last removes."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from dataclasses import dataclass
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base import Format
from fsdp_optim.formats.brief import Brief
from fsdp_optim.formats.ours import OURS
from fsdp_optim.storage.base import Store
from fsdp_optim.storage.posix.leftovers import LOCK, OLD, UNFINISHED, aside, remove_gone, retire
from fsdp_optim.storage.posix.looks import is_link, is_nothing, names_in, standing_of
from fsdp_optim.storage.posix.strangers import strangers_in

_ATTEMPTS, _AGAIN = 10, 0.01  # times, seconds

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class Series:
    """What checkpoints have in common that keep_last counts: the same content, and alike names or a step and keep_last each."""

    content: str
    stem: str  # the name but for its digits
    rotates: bool

    @classmethod
    def of(cls, base: Path, content: str, step: int | None, keep_last: int | None) -> Series:
        return cls(content, re.sub(r"\d+", "#", base.name), step is not None and keep_last is not None)

    def is_alike(self, other: Series) -> bool:
        """Whether both are of one series."""
        return self.content == other.content and (self.stem == other.stem or (self.rotates and other.rotates))


@dataclass(frozen=True)
class Found:
    """A checkpoint of a folder. `base`: its path; `folder`: where it is, which is aside where a save was killed."""

    folder: Path
    base: Path
    brief: Brief

    @property
    def series(self) -> Series:
        return Series.of(self.base, self.brief.content, self.brief.step, self.brief.keep_last)


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint in a folder; None where there is none.

    Raises CheckpointError where the folder cannot be listed, or has only checkpoints that cannot be read just now.
    """
    unread: list[str] = []
    for attempt in range(_ATTEMPTS):
        found, unread = checkpoints_in(root)
        for one in reversed(found):
            standing = standing_of(one.folder, OURS.judge)  # all of the manifest, not its beginning alone
            if standing.is_complete:
                return one.folder
            if standing.has_moved and attempt < _ATTEMPTS - 1:
                break  # it was replaced since the folder was listed
            log.warning("%s is no complete checkpoint: %s", one.folder, standing.reason)
            if not standing.is_sure:
                unread.append(standing.reason)
        else:
            break
    if unread:
        raise CheckpointError(f"{root}: has checkpoints, but none that can be read: {'; '.join(unread)}")
    return None


def checkpoints_in(root: Path) -> tuple[list[Found], list[str]]:
    """The complete checkpoints in a folder by what the beginnings of their manifests say, the oldest first.

    Also why others that have a manifest could not be read just now. A listing that is made while a folder is renamed may have
    neither name of it: it counts when the next one is the same.
    """
    found: list[Found] = []
    unread: list[str] = []
    for _ in range(_ATTEMPTS):
        before = names_in(root)
        found, unread, vanished = _scan(root, before)
        if not vanished and names_in(root) == before:
            break
        time.sleep(_AGAIN)
    return sorted(found, key=lambda one: one.brief.order), unread


def _scan(root: Path, names: set[str]) -> tuple[list[Found], list[str], bool]:
    """As `checkpoints_in`, at one look; and whether a folder went away meanwhile, so that one may be missing."""
    bases = dict(aside(root, OLD))
    unfinished = {folder for mark in UNFINISHED for folder, _ in aside(root, mark)}
    found, unread, vanished = [], [], False
    for folder in (root / name for name in sorted(names)):
        base = bases.get(folder, folder)
        if folder in unfinished or (base != folder and not is_nothing(base)):
            continue
        standing = standing_of(folder, OURS.judge, whole=False)
        if standing.brief is not None:
            found.append(Found(folder, base, standing.brief))
            continue
        if standing.has_moved:
            vanished = True
        elif standing.has_manifest:
            log.warning("%s has a manifest, and is no checkpoint that can be read: %s", folder, standing.reason)
            if not standing.is_sure:
                unread.append(standing.reason)
    return found, unread, vanished


def next_sequence(store: Store, format: Format) -> int:
    """One more than the highest sequence number of all that has a manifest beside a place, complete or not."""
    highest = 0
    for opened in store.siblings():
        with opened:
            highest = max(highest, format.sequence_in(opened))
    return highest + 1


def outdated(path: Path, series: Series, keep_last: int) -> list[Found]:
    """The checkpoints of the series of `path`, its newest, that are older than the newest `keep_last` of them.

    Those that are kept instead are read whole: one that is damaged does not count.
    """
    kept, older = 1, []
    for one in reversed(checkpoints_in(path.parent)[0]):
        if one.base == path or is_link(one.folder) or not one.series.is_alike(series):
            continue
        if kept >= keep_last:
            older.append(one)
        elif standing_of(one.folder, OURS.judge).is_complete:
            kept += 1
    return older


def keep_newest(path: Path, series: Series, keep_last: int) -> None:
    """Remove the checkpoints of a series, that of `path`, that are older than its newest `keep_last`; never `path`.

    What cannot be removed is warned about: the new checkpoint is there.
    """
    try:
        older = outdated(path, series, keep_last)
    except OSError as error:
        log.warning("nothing was removed for keep_last=%d: %s", keep_last, error)
        return
    gone = []
    for one in older:
        strangers = _strangers_in(one.folder)
        try:
            gone.append(retire(one.folder))
        except OSError as error:
            log.warning("%s cannot be removed, though keep_last=%d: %s", one.folder, keep_last, error.strerror or error)
            continue
        with_them = f", with what somebody had put into it: {', '.join(strangers)}" if strangers else ""
        log.info("removed %s: keep_last=%d, and %s is newer%s", one.folder, keep_last, path, with_them)
    remove_gone(gone)


def _strangers_in(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return strangers_in(folder, LOCK, OURS.judge)
    return []
