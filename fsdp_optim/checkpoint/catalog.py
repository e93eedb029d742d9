"""The checkpoints of a folder: their order, the newest one, their series, and the ones that keep_last removes."""

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
    """The key of checkpoints that keep_last counts together: equal content, and alike names or `step` and `keep_last` each."""

    content: str
    stem: str  # the name without its digits
    rotates: bool

    @classmethod
    def of(cls, base: Path, content: str, step: int | None, keep_last: int | None) -> Series:
        return cls(content, re.sub(r"\d+", "#", base.name), step is not None and keep_last is not None)

    def is_alike(self, other: Series) -> bool:
        """Whether both are of one series."""
        return self.content == other.content and (self.stem == other.stem or (self.rotates and other.rotates))


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint of a folder. `base`: its path. `folder`: its present path, which differs from `base` if a save was killed."""

    folder: Path
    base: Path
    brief: Brief

    @property
    def series(self) -> Series:
        return Series.of(self.base, self.brief.content, self.brief.step, self.brief.keep_last)


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint in a folder; None if there is none.

    Raises CheckpointError if the folder cannot be listed, or if it has only checkpoints that cannot be read just now.
    """
    unread: list[str] = []
    for attempt in range(_ATTEMPTS):
        found, unread = checkpoints_in(root)
        for checkpoint in reversed(found):
            standing = standing_of(checkpoint.folder, OURS.judge)  # verifies the whole manifest
            if standing.is_complete:
                return checkpoint.folder
            if standing.has_moved and attempt < _ATTEMPTS - 1:
                break  # the checkpoint was replaced after the folder was listed
            log.warning("%s is not a complete checkpoint: %s", checkpoint.folder, standing.reason)
            if not standing.is_sure:
                unread.append(standing.reason)
        else:
            break
    if unread:
        raise CheckpointError(f"{root}: has checkpoints, but none of them can be read: {'; '.join(unread)}")
    return None


def checkpoints_in(root: Path) -> tuple[list[FoundCheckpoint], list[str]]:
    """The complete checkpoints in a folder, the oldest first, and the reasons why others could not be read just now.

    Only the beginnings of manifests are read. A listing during a rename may have neither name of the folder, so a listing counts
    only if the next one is the same.
    """
    found: list[FoundCheckpoint] = []
    unread: list[str] = []
    for _ in range(_ATTEMPTS):
        before = names_in(root)
        found, unread, vanished = _scan(root, before)
        if not vanished and names_in(root) == before:
            break
        time.sleep(_AGAIN)
    return sorted(found, key=lambda checkpoint: checkpoint.brief.order), unread


def _scan(root: Path, names: set[str]) -> tuple[list[FoundCheckpoint], list[str], bool]:
    """As `checkpoints_in`, from one listing; also whether a folder vanished meanwhile, so that a checkpoint may be missing."""
    bases = dict(aside(root, OLD))
    unfinished = {folder for mark in UNFINISHED for folder, _ in aside(root, mark)}
    found, unread, vanished = [], [], False
    for folder in (root / name for name in sorted(names)):
        base = bases.get(folder, folder)
        if folder in unfinished or (base != folder and not is_nothing(base)):
            continue
        standing = standing_of(folder, OURS.judge, whole=False)
        if standing.brief is not None:
            found.append(FoundCheckpoint(folder, base, standing.brief))
            continue
        if standing.has_moved:
            vanished = True
        elif standing.has_manifest:
            log.warning("%s has a manifest, but cannot be read as a checkpoint: %s", folder, standing.reason)
            if not standing.is_sure:
                unread.append(standing.reason)
    return found, unread, vanished


def next_sequence(store: Store, format: Format) -> int:
    """One more than the highest sequence number in the folder of a store, of complete and incomplete checkpoints."""
    highest = 0
    for opened in store.siblings():
        with opened:
            highest = max(highest, format.sequence_in(opened))
    return highest + 1


def outdated(path: Path, series: Series, keep_last: int) -> list[FoundCheckpoint]:
    """The checkpoints of a series, of which `path` is the newest, that are older than its newest `keep_last`.

    The manifests of the kept checkpoints are verified as a whole, and a damaged checkpoint does not count as kept.
    """
    kept, older = 1, []
    for checkpoint in reversed(checkpoints_in(path.parent)[0]):
        if checkpoint.base == path or is_link(checkpoint.folder) or not checkpoint.series.is_alike(series):
            continue
        if kept >= keep_last:
            older.append(checkpoint)
        elif standing_of(checkpoint.folder, OURS.judge).is_complete:
            kept += 1
    return older


def keep_newest(path: Path, series: Series, keep_last: int) -> None:
    """Remove the checkpoints of a series that are older than its newest `keep_last`, but never `path`, the newest.

    A checkpoint that cannot be removed causes a warning only, because the new checkpoint is complete.
    """
    try:
        older = outdated(path, series, keep_last)
    except OSError as error:
        log.warning("nothing was removed for keep_last=%d: %s", keep_last, error)
        return
    gone = []
    for checkpoint in older:
        strangers = _strangers_in(checkpoint.folder)
        try:
            gone.append(retire(checkpoint.folder))
        except OSError as error:
            reason = error.strerror or error
            log.warning("%s cannot be removed, although keep_last=%d: %s", checkpoint.folder, keep_last, reason)
            continue
        with_them = f", including files that no save wrote: {', '.join(strangers)}" if strangers else ""
        log.info("removed %s: keep_last=%d, and %s is newer%s", checkpoint.folder, keep_last, path, with_them)
    remove_gone(gone)


def _strangers_in(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return strangers_in(folder, LOCK, OURS.judge)
    return []
