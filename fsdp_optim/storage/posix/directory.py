"""The checkpoints of a folder."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from fsdp_optim.storage.base import BriefT, Judge, Listed, Shelf, Shelved, Standing
from fsdp_optim.storage.posix.beacon import refresh
from fsdp_optim.storage.posix.claim import LOCK
from fsdp_optim.storage.posix.filesystem import is_of_one_machine
from fsdp_optim.storage.posix.leftovers import OLD, UNFINISHED, aside, remove_gone, retire
from fsdp_optim.storage.posix.looks import has_lost_manifest, is_link, is_nothing, names_in, standing_of, version_of
from fsdp_optim.storage.posix.strangers import strangers_in

_ATTEMPTS, _AGAIN = 10, 0.01  # times, seconds

log = logging.getLogger("fsdp_optim")


class FolderShelf(Shelf[BriefT]):
    """A folder in which each folder may be a checkpoint.

    A complete checkpoint is looked into again only when its manifest is another file: a folder may have thousands of them.
    """

    def __init__(self, root: Path, judge: Judge[BriefT]) -> None:
        self._root, self._judge = root, judge
        self._looks: dict[str, tuple[tuple[int, ...], Standing[BriefT]]] = {}

    @property
    def where(self) -> str:
        return str(self._root)

    def complete(self) -> tuple[list[Shelved[BriefT]], list[str]]:
        found: list[Shelved[BriefT]] = []
        unread: list[str] = []
        for one in self.listed():
            standing = one.standing
            if standing.brief is not None:
                found.append(Shelved(one.where, one.base, standing.brief, one.can_go))
                continue
            if standing.has_manifest:
                log.warning("%s has a manifest, and is no checkpoint that can be read: %s", one.where, standing.reason)
                if not standing.is_sure:
                    unread.append(standing.reason)
        return sorted(found, key=lambda one: one.brief.order), unread

    def listed(self) -> list[Listed[BriefT]]:
        """As a Shelf does. A listing that is made while a folder is renamed may have neither name of the folder, so a listing
        counts when the next one is the same. A client of a network file system may have kept an old listing, so it is made to ask
        again.
        """
        if not is_of_one_machine(self._root):
            refresh(self._root)
        found: list[Listed[BriefT]] = []
        for _ in range(_ATTEMPTS):
            before = names_in(self._root)
            found, moved = self._scan(before)
            if not moved and names_in(self._root) == before:
                return found
            time.sleep(_AGAIN)
        there = names_in(self._root)  # what could never be read is listed as undecided, not left out
        return [*found, *(one for one in moved if Path(one.where).name in there)]

    def _scan(self, names: set[str]) -> tuple[list[Listed[BriefT]], list[Listed[BriefT]]]:
        """As `listed`, at one look; and the folders that went away, or were replaced, meanwhile."""
        bases = {folder.name: base for folder, base in aside(self._root, OLD, names)}
        unfinished = {folder.name for mark in UNFINISHED for folder, _ in aside(self._root, mark, names)}
        before, self._looks = self._looks, {}
        found, moved = [], []
        for name in sorted(names):
            folder = self._root / name
            base = bases.get(name, folder)
            if name in unfinished or (name in bases and not is_nothing(base)):
                continue
            version = version_of(folder, self._judge)
            if name in before and version is not None and before[name][0] == version:
                standing = before[name][1]
            else:
                standing = standing_of(folder, self._judge, whole=False)
            if standing.is_complete and version is not None:
                self._looks[name] = version, standing
            if standing.has_moved:
                moved.append(Listed(str(folder), str(base), standing, _can_go(folder)))
            elif (
                standing.has_manifest or _may_be_checkpoint(folder, standing) or has_lost_manifest(folder, self._judge)
            ):
                found.append(Listed(str(folder), str(base), standing, _can_go(folder)))
        return found, moved

    def standing_of(self, one: Shelved[BriefT] | Listed[BriefT]) -> Standing[BriefT]:
        return standing_of(Path(one.where), self._judge)

    def remove(self, ones: Sequence[Shelved[BriefT] | Listed[BriefT]], reason: str) -> None:
        gone = []
        for folder in (Path(one.where) for one in ones):
            strangers = self._strangers_in(folder)
            try:
                gone.append(retire(folder))
            except OSError as error:
                log.warning("%s cannot be removed, though %s: %s", folder, reason, error.strerror or error)
                continue
            with_them = f", with what somebody had put into it: {', '.join(strangers)}" if strangers else ""
            log.info("removed %s: %s%s", folder, reason, with_them)
        remove_gone(gone)

    def _strangers_in(self, folder: Path) -> list[str]:
        with contextlib.suppress(OSError):
            return strangers_in(folder, LOCK, self._judge)
        return []


def _may_be_checkpoint(folder: Path, standing: Standing[BriefT]) -> bool:
    """Whether a folder that may not be entered is listed: not those that systems and tools hide."""
    return standing.is_closed and not folder.name.startswith(".") and folder.name != "lost+found"


def _can_go(folder: Path) -> bool:
    """Whether `remove` removes the checkpoint itself; False for a symbolic link, and where the system cannot tell."""
    with contextlib.suppress(OSError):
        return not is_link(folder)
    return False
