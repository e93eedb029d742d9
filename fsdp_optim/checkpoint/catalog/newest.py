"""The checkpoints of a folder or a prefix: the newest one, which of them are one series, and which keep_last removes."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from fsdp_optim.checkpoint.catalog.listing import listed_with_shelves, stem_of
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.formats.base.summary import Brief
from fsdp_optim.storage.base import Shelf, Shelved, Store
from fsdp_optim.storage.posix.store import Folder

_ATTEMPTS = 10

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class Series:
    """The common facts of the checkpoints that keep_last counts: the same content, and alike names or a step and keep_last each.

    The checkpoints of a CheckpointManager are in no such series: the manager's rules keep them.
    """

    content: str
    stem: str  # the name but for its digits
    rotates: bool

    @classmethod
    def of(cls, where: str, content: str, step: int | None, keep_last: int | None) -> Series:
        return cls(content, stem_of(where), step is not None and keep_last is not None)

    @classmethod
    def of_shelved(cls, one: Shelved[Brief]) -> Series:
        return cls.of(one.base, one.brief.content, one.brief.step, one.brief.keep_last)

    def is_alike(self, other: Series) -> bool:
        """Whether both are of one series."""
        return self.content == other.content and (self.stem == other.stem or (self.rotates and other.rotates))


def latest(*shelves: Shelf[Brief]) -> str | None:
    """The place of the newest complete checkpoint on a shelf; None where there is none.

    Checkpoints of other libraries do not count. `shelves`: the same shelf, for each format.

    Raises CheckpointError where the shelf cannot be listed, or has only checkpoints that cannot be read just now.
    """
    unread: list[str] = []
    for attempt in range(_ATTEMPTS):
        looks = listed_with_shelves(shelves)
        unread = [one.standing.reason for one, _ in looks if not one.standing.is_sure]
        for one, _ in looks:
            if not one.standing.is_complete:
                log.warning("%s is no checkpoint that can be read: %s", one.where, one.standing.reason)
        found = [(one.standing.brief.order, one, shelf) for one, shelf in looks if one.standing.brief is not None]
        for _, one, shelf in sorted(found, key=lambda candidate: candidate[0], reverse=True):
            standing = shelf.standing_of(one)  # by the whole manifest, not its beginning alone
            if standing.is_complete:
                return one.where
            if standing.has_moved and attempt < _ATTEMPTS - 1:
                break  # another checkpoint replaced this one since the shelf was listed
            log.warning("%s is no complete checkpoint: %s", one.where, standing.reason)
            if not standing.is_sure:
                unread.append(standing.reason)
        else:
            break
    if unread:
        raise CheckpointError(f"{shelves[0].where}: has checkpoints, but none that can be read: {'; '.join(unread)}")
    return None


def next_sequence(store: Store, formats: Collection[Format]) -> int:
    """One more than the highest sequence number of all that has a manifest beside a place, complete or not.

    The listing of a bucket may be old, so the number there is that of this millisecond at least: a save that does not see the one
    before it must not be taken for older, and be removed by keep_last.
    """
    highest = 0 if isinstance(store, Folder) else time.time_ns() // 1_000_000 - 1
    siblings = store.siblings()
    if isinstance(store, Folder):
        briefs = {one.where: one.brief for one in store.shelf().listed() if one.brief is not None}
        highest = max((brief.order[0] for brief in briefs.values()), default=0)
        siblings = store.siblings({where.rpartition("/")[2] for where in briefs})
    for opened in siblings:
        with opened:
            highest = max(highest, *(format.sequence_in(opened) for format in formats))
    return highest + 1


def outdated(store: Store, series: Series, keep_last: int, *, is_saved: bool = False) -> list[Shelved[Brief]]:
    """The checkpoints of the series of `store`, its newest, that are older than the newest `keep_last` of them.

    Those that are kept instead are read whole: a damaged checkpoint does not count. `is_saved`: that of `store` is there, and
    what is newer does not count: another job has gone on, while this one was stopped or cut off.
    """
    shelf: Shelf[Brief] = store.shelf()
    kept, older = 1, []
    listed = shelf.complete()[0]
    own = next((one.brief.order for one in listed if is_saved and one.base == store.where), None)
    alike = [
        one
        for one in reversed(listed)
        if one.base != store.where
        and one.can_go
        and one.brief.manager is None
        and (own is None or one.brief.order <= own)
        and Series.of_shelved(one).is_alike(series)
    ]
    if len(alike) < keep_last:  # all stay, whole or not
        return []
    for one in alike:
        if kept >= keep_last:
            older.append(one)
        elif shelf.standing_of(one).is_complete:
            kept += 1
    return older


def keep_newest(store: Store, series: Series, keep_last: int) -> None:
    """Remove the checkpoints of a series, that of `store`, that are older than its newest `keep_last`; never `store`'s own.

    Warns of those that cannot be removed, because the new checkpoint is there.
    """
    try:
        older = outdated(store, series, keep_last, is_saved=True)
    except OSError as error:
        log.warning("nothing was removed for keep_last=%d: %s", keep_last, error)
        return
    store.shelf().remove(older, f"keep_last={keep_last}, and {store.where} is newer")
