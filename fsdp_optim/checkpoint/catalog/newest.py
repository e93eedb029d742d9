"""The checkpoints of a folder or a prefix: the newest one, which of them are one series, and which keep_last removes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_optim.checkpoint.catalog.listing import listed_with_shelves, stem_of
from fsdp_optim.checkpoint.common.formats import HasSequence
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.summary import ManifestSummary
from fsdp_optim.storage.base import CheckpointDirectory, CompleteCheckpoint, Store

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
    def of_complete(cls, one: CompleteCheckpoint[ManifestSummary]) -> Series:
        return cls.of(one.base, one.summary.content, one.summary.step, one.summary.keep_last)

    def is_alike(self, other: Series) -> bool:
        """Whether both are of one series."""
        return self.content == other.content and (self.stem == other.stem or (self.rotates and other.rotates))


def latest(*directories: CheckpointDirectory[ManifestSummary]) -> str | None:
    """The place of the newest complete checkpoint on a shelf; None where there is none.

    Checkpoints of other libraries do not count. `shelves`: the same shelf, for each format.

    Raises CheckpointError where the shelf cannot be listed, or has only checkpoints that cannot be read just now.
    """
    unread: list[str] = []
    for attempt in range(_ATTEMPTS):
        looks = listed_with_shelves(directories)
        unread = [one.status.reason for one, _ in looks if not one.status.is_sure]
        for one, _ in looks:
            if not one.status.is_complete:
                log.warning("%s is no checkpoint that can be read: %s", one.where, one.status.reason)
        found = [
            (one.status.summary.order, one, directory) for one, directory in looks if one.status.summary is not None
        ]
        for _, one, directory in sorted(found, key=lambda candidate: candidate[0], reverse=True):
            status = directory.status_of(one)  # by the whole manifest, not its beginning alone
            if status.is_complete:
                return one.where
            if status.has_moved and attempt < _ATTEMPTS - 1:
                break  # another checkpoint replaced this one since the shelf was listed
            log.warning("%s is no complete checkpoint: %s", one.where, status.reason)
            if not status.is_sure:
                unread.append(status.reason)
        else:
            break
    if unread:
        raise CheckpointError(
            f"{directories[0].where}: has checkpoints, but none that can be read: {'; '.join(unread)}"
        )
    return None


def next_sequence(store: Store, formats: Iterable[HasSequence]) -> int:
    """One more than the highest sequence number of all that has a manifest beside a place, complete or not.

    The listing of a bucket may be old, so the number there is that of this millisecond at least: a save that does not see the one
    before it must not be taken for older, and be removed by keep_last.
    """
    highest = 0 if store.on_file_system else time.time_ns() // 1_000_000 - 1
    siblings = store.siblings()
    if store.on_file_system:
        briefs = {one.where: one.summary for one in store.directory().listed() if one.summary is not None}
        highest = max((summary.order[0] for summary in briefs.values()), default=0)
        siblings = store.siblings({where.rpartition("/")[2] for where in briefs})
    for opened in siblings:
        with opened:
            highest = max(highest, *(format.sequence_in(opened) for format in formats))
    return highest + 1


def outdated(
    store: Store, series: Series, keep_last: int, *, is_saved: bool = False
) -> list[CompleteCheckpoint[ManifestSummary]]:
    """The checkpoints of the series of `store`, its newest, that are older than the newest `keep_last` of them.

    Those that are kept instead are read whole: a damaged checkpoint does not count. `is_saved`: that of `store` is there, and
    what is newer does not count: another job has gone on, while this one was stopped or cut off.
    """
    directory: CheckpointDirectory[ManifestSummary] = store.directory()
    kept, older = 1, []
    listed = directory.complete()[0]
    own = next((one.summary.order for one in listed if is_saved and one.base == store.where), None)
    alike = [
        one
        for one in reversed(listed)
        if one.base != store.where
        and one.can_go
        and one.summary.manager is None
        and (own is None or one.summary.order <= own)
        and Series.of_complete(one).is_alike(series)
    ]
    if len(alike) < keep_last:  # all stay, whole or not
        return []
    for one in alike:
        if kept >= keep_last:
            older.append(one)
        elif directory.status_of(one).is_complete:
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
    store.directory().remove(older, f"keep_last={keep_last}, and {store.where} is newer")
