"""The checkpoints of a folder or a prefix: the newest one, and the sequence number of the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from fsdp_optim.checkpoint.catalog.listing import listed_with_shelves
from fsdp_optim.checkpoint.common.formats import HasSequence
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.summary import ManifestSummary
from fsdp_optim.storage.base import CheckpointDirectory, Store

_ATTEMPTS = 10

log = logging.getLogger("fsdp_optim")


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
    before it must not be taken for older, and be removed by the manager.
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
