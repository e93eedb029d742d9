"""The checkpoints of a folder or a prefix, the newest first, complete or not; the newest; and the sequence number of the next."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from fsdp_optim.checkpoint.common.formats import HasSequence
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.summary import ManifestSummary
from fsdp_optim.registry import scheme_of
from fsdp_optim.results import CheckpointInfo
from fsdp_optim.storage.base import CheckpointDirectory, CheckpointEntry, Store, names_checkpoint

ListedCheckpoint = CheckpointEntry[ManifestSummary]
_ATTEMPTS = 10
log = logging.getLogger("fsdp_optim")


def checkpoints(*directories: CheckpointDirectory[ManifestSummary]) -> list[CheckpointInfo]:
    """All checkpoints on a shelf, the newest first. `shelves`: the same shelf, for each format."""
    return [info_of(one) for one in newest_first(listed(directories))]


def listed(directories: Sequence[CheckpointDirectory[ManifestSummary]]) -> list[ListedCheckpoint]:
    """All checkpoints on a shelf that this library has saved. `shelves`: the same shelf, for each format."""
    return [one for one, _ in listed_with_shelves(directories)]


def listed_with_shelves(
    directories: Sequence[CheckpointDirectory[ManifestSummary]],
) -> list[tuple[ListedCheckpoint, CheckpointDirectory[ManifestSummary]]]:
    """As `listed`; each with the shelf, of those given, that can read it.

    What cannot be entered counts by its name: one of a checkpoint, or like those of the others. Alone it counts in any case.
    """
    found: dict[tuple[str, str], tuple[ListedCheckpoint, CheckpointDirectory[ManifestSummary]]] = {}
    for directory in directories:
        for one in directory.listed():
            key = one.where, "" if one.where != directory.where else one.status.reason
            if key not in found or (found[key][0].summary is None and one.summary is not None):
                found[key] = one, directory
    ours = [(one, directory) for one, directory in found.values() if one.summary is None or not one.summary.is_stand_in]
    stems = {stem_of(one.base) for one, _ in ours if one.summary is not None}
    return [(one, directory) for one, directory in ours if not stems or _counts(one, stems)]


def _counts(one: ListedCheckpoint, stems: set[str]) -> bool:
    if one.status.has_manifest or not one.status.is_closed:
        return True
    return names_checkpoint(one.base.rpartition("/")[2]) or stem_of(one.base) in stems


def stem_of(where: str) -> str:
    """The name of a checkpoint but for its digits."""
    return re.sub(r"\d+", "#", where.rpartition("/")[2])


def info_of(one: ListedCheckpoint) -> CheckpointInfo:
    """The facts about a checkpoint on a shelf, for users."""
    summary, path = one.summary, one.where if scheme_of(one.where) is not None else Path(one.where)
    if summary is None:
        return CheckpointInfo(path, None, 0, 0, False, one.status.reason)
    nbytes, metric = sum(summary.files.values()), summary.manager.metric if summary.manager is not None else None
    return CheckpointInfo(
        path=path,
        step=summary.step,
        world_size=summary.world_size,
        nbytes=nbytes,
        complete=one.status.is_complete,
        reason=one.status.reason,
        metric=metric,
    )


def newest_first(ones: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """The order in which a resume looks at checkpoints.

    A checkpoint whose summary cannot be read has no sequence number. Its place follows from the number in its name: it is
    before the first one with a lower step. Without a number it comes first, because it may be the newest.
    """
    readable = sorted(
        ((one.summary.order, one) for one in ones if one.summary is not None), key=lambda pair: pair[0], reverse=True
    )
    found = [one for _, one in readable]
    others = sorted((one for one in ones if one.summary is None), key=lambda one: (number_in(one) or 0, one.base))
    for one in others:
        number = number_in(one)
        place = (i for i, other in enumerate(found) if number is None or _is_before(number, other))
        found.insert(next(place, len(found)), one)
    return found


def _is_before(number: int, other: ListedCheckpoint) -> bool:
    step = other.summary.step if other.summary is not None else number_in(other)
    return step is None or number > step


def number_in(one: ListedCheckpoint) -> int | None:
    """The last number in the name of a checkpoint."""
    return last_number(one.base.rpartition("/")[2])


def last_number(name: str) -> int | None:
    """The last number in a name."""
    numbers = re.findall(r"[0-9]+", name)
    return int(numbers[-1][-18:]) if numbers else None


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
