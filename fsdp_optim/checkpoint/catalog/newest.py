"""The checkpoints of a folder or a prefix: the newest one, and the sequence number of the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from fsdp_optim.checkpoint.catalog.listing import listed_with_directories
from fsdp_optim.checkpoint.common.formats import HasSequence
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.summary import ManifestSummary
from fsdp_optim.storage.base import CheckpointDirectory, Store

_ATTEMPTS = 10

log = logging.getLogger("fsdp_optim")


def latest(*directories: CheckpointDirectory[ManifestSummary]) -> str | None:
    """Return the place of the newest complete checkpoint in a directory; None where there is none.

    Checkpoints of other libraries do not count. `directories`: the same directory, for each format.

    Raises CheckpointError where the directory cannot be listed, or has only checkpoints that cannot be read just now.
    """
    unread: list[str] = []
    for attempt in range(_ATTEMPTS):
        looks = listed_with_directories(directories)
        unread = [entry.status.reason for entry, _ in looks if not entry.status.is_sure]
        for entry, _ in looks:
            if not entry.status.is_complete:
                log.warning("%s is no checkpoint that can be read: %s", entry.where, entry.status.reason)
        candidates = [
            (entry.status.summary.order, entry, directory)
            for entry, directory in looks
            if entry.status.summary is not None
        ]
        for _, entry, directory in sorted(candidates, key=lambda candidate: candidate[0], reverse=True):
            status = directory.status_of(entry)  # by the complete manifest, not its beginning alone
            if status.is_complete:
                return entry.where
            if status.has_moved and attempt < _ATTEMPTS - 1:
                break  # another checkpoint replaced this one since the directory was listed: list again
            log.warning("%s is no complete checkpoint: %s", entry.where, status.reason)
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
    """Return the next sequence number: one above the highest in any manifest next to this checkpoint, complete or not.

    The listing of a bucket may be old, so the number there is at least this millisecond's: a save that does not see the previous
    save must not be taken for older than it, and be removed by the manager.
    """
    highest = 0 if store.on_file_system else time.time_ns() // 1_000_000 - 1
    siblings = store.siblings()
    if store.on_file_system:
        summaries = {entry.where: entry.summary for entry in store.directory().listed() if entry.summary is not None}
        highest = max((summary.order[0] for summary in summaries.values()), default=0)
        siblings = store.siblings({where.rpartition("/")[2] for where in summaries})
    for opened in siblings:
        with opened:
            highest = max(highest, *(format.sequence_in(opened) for format in formats))
    return highest + 1
