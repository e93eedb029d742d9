"""The checkpoints of a folder."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from fsdp_optim.storage.base import (
    CheckpointDirectory,
    CheckpointEntry,
    CheckpointProbe,
    CheckpointStatus,
    SummaryT,
)
from fsdp_optim.storage.posix.beacon import refresh
from fsdp_optim.storage.posix.claim import LOCK
from fsdp_optim.storage.posix.filesystem import is_of_one_machine
from fsdp_optim.storage.posix.leftovers import GONE, NEW, OLD, SAVING, UNFINISHED, aside, remove_gone, retire
from fsdp_optim.storage.posix.path_status import has_lost_manifest, is_link, is_nothing, names_in, status_of, version_of
from fsdp_optim.storage.posix.strangers import strangers_in

_ATTEMPTS, _AGAIN = 10, 0.01  # times, seconds

log = logging.getLogger("fsdp_optim")


class FolderDirectory(CheckpointDirectory[SummaryT]):
    """A folder in which each folder may be a checkpoint.

    A complete checkpoint is probed again only when its manifest is another file: a folder may have thousands of checkpoints.
    """

    def __init__(self, root: Path, probe: CheckpointProbe[SummaryT]) -> None:
        self._root, self._probe = root, probe
        self._statuses: dict[str, tuple[tuple[int, ...], CheckpointStatus[SummaryT]]] = {}

    @property
    def where(self) -> str:
        return str(self._root)

    def listed(self) -> list[CheckpointEntry[SummaryT]]:
        """Return all places with a manifest, as `CheckpointDirectory.listed` says.

        A listing that is made while a folder is renamed may have neither name of the folder, so a listing counts when the next
        listing is the same. A client of a network file system may have cached an old listing, so it is made to ask again.
        """
        if not is_of_one_machine(self._root):
            refresh(self._root)
        entries: list[CheckpointEntry[SummaryT]] = []
        for _ in range(_ATTEMPTS):
            before = names_in(self._root)
            entries, moved = self._scan(before)
            if not moved and names_in(self._root) == before:
                return entries
            time.sleep(_AGAIN)
        there = names_in(self._root)  # places that could never be read are listed as undecided, not left out
        return [*entries, *(entry for entry in moved if Path(entry.where).name in there)]

    def unfinished(self) -> list[str]:
        if not is_of_one_machine(self._root):
            refresh(self._root)
        names = names_in(self._root)
        return sorted(folder.name for mark in (NEW, SAVING) for folder, _ in aside(self._root, mark, names))

    def _scan(self, names: set[str]) -> tuple[list[CheckpointEntry[SummaryT]], list[CheckpointEntry[SummaryT]]]:
        """List once; return also the folders that went away, or were replaced, meanwhile."""
        bases = {folder.name: base for folder, base in aside(self._root, OLD, names)}
        unfinished = {folder.name for mark in UNFINISHED for folder, _ in aside(self._root, mark, names)}
        before, self._statuses = self._statuses, {}
        entries, moved = [], []
        for name in sorted(names):
            folder = self._root / name
            base = bases.get(name, folder)
            if name in unfinished or (name in bases and not is_nothing(base)):
                continue
            version = version_of(folder, self._probe)
            if name in before and version is not None and before[name][0] == version:
                status = before[name][1]
            else:
                status = status_of(folder, self._probe, whole=False)
            if status.is_complete and version is not None:
                self._statuses[name] = version, status
            if status.has_moved:
                moved.append(CheckpointEntry(str(folder), str(base), status, _can_go(folder)))
            elif status.has_manifest or _may_be_checkpoint(folder, status) or has_lost_manifest(folder, self._probe):
                entries.append(CheckpointEntry(str(folder), str(base), status, _can_go(folder)))
        return entries, moved

    def status_of(self, entry: CheckpointEntry[SummaryT]) -> CheckpointStatus[SummaryT]:
        return status_of(Path(entry.where), self._probe)

    def remove(self, entries: Sequence[CheckpointEntry[SummaryT]], reason: str) -> None:
        gone = []
        for folder in (Path(entry.where) for entry in entries):
            strangers = self._strangers_in(folder)
            try:
                gone.append(retire(folder))
            except OSError as error:
                log.warning("%s cannot be removed, though %s: %s", folder, reason, error.strerror or error)
                continue
            with_them = f", with what somebody had put into it: {', '.join(strangers)}" if strangers else ""
            log.info("removed %s: %s%s", folder, reason, with_them)
        remove_gone(gone)

    def finish_removals(self) -> None:
        remove_gone([folder for folder, _ in aside(self._root, GONE)])

    def _strangers_in(self, folder: Path) -> list[str]:
        with contextlib.suppress(OSError):
            return strangers_in(folder, LOCK, self._probe)
        return []


def _may_be_checkpoint(folder: Path, status: CheckpointStatus[SummaryT]) -> bool:
    """Return whether a folder that may not be entered is listed, unlike folders that systems and tools hide."""
    return status.is_closed and not folder.name.startswith(".") and folder.name != "lost+found"


def _can_go(folder: Path) -> bool:
    """Return whether `remove` removes the checkpoint itself; False for a symbolic link, and where the system cannot tell."""
    with contextlib.suppress(OSError):
        return not is_link(folder)
    return False
