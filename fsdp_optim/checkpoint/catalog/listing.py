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
from fsdp_optim.results.contents import CheckpointInfo
from fsdp_optim.storage.base import CheckpointDirectory, CheckpointEntry, Store, names_checkpoint

ListedCheckpoint = CheckpointEntry[ManifestSummary]
_ATTEMPTS = 10
log = logging.getLogger("fsdp_optim")


def checkpoints(*directories: CheckpointDirectory[ManifestSummary]) -> list[CheckpointInfo]:
    """Return all checkpoints in a directory, the newest first. `directories`: the same directory, for each format."""
    return [info_of(entry) for entry in newest_first(listed(directories))]


def listed(directories: Sequence[CheckpointDirectory[ManifestSummary]]) -> list[ListedCheckpoint]:
    """Return all checkpoints in a directory that this library has saved. `directories`: the same one, for each format."""
    return [entry for entry, _ in listed_with_directories(directories)]


def listed_with_directories(
    directories: Sequence[CheckpointDirectory[ManifestSummary]],
) -> list[tuple[ListedCheckpoint, CheckpointDirectory[ManifestSummary]]]:
    """List as `listed`; return each checkpoint with the directory, of `directories`, that can read it.

    A folder that cannot be entered counts as a checkpoint by its name: the name of a checkpoint, or a name like the names of the
    other checkpoints. If there are no others, it counts in any case.
    """
    by_place: dict[tuple[str, str], tuple[ListedCheckpoint, CheckpointDirectory[ManifestSummary]]] = {}
    for directory in directories:
        for entry in directory.listed():
            key = entry.where, "" if entry.where != directory.where else entry.status.reason
            if key not in by_place or (by_place[key][0].summary is None and entry.summary is not None):
                by_place[key] = entry, directory
    own = [
        (entry, directory)
        for entry, directory in by_place.values()
        if entry.summary is None or not entry.summary.is_stand_in
    ]
    stems = {stem_of(entry.base) for entry, _ in own if entry.summary is not None}
    return [(entry, directory) for entry, directory in own if not stems or _counts(entry, stems)]


def _counts(entry: ListedCheckpoint, stems: set[str]) -> bool:
    if entry.status.has_manifest or not entry.status.is_closed:
        return True
    return names_checkpoint(entry.base.rpartition("/")[2]) or stem_of(entry.base) in stems


def stem_of(where: str) -> str:
    """Return the name of a checkpoint but for its digits."""
    return re.sub(r"\d+", "#", where.rpartition("/")[2])


def info_of(entry: ListedCheckpoint) -> CheckpointInfo:
    """Return the facts about a checkpoint for users."""
    summary, path = entry.summary, entry.where if scheme_of(entry.where) is not None else Path(entry.where)
    if summary is None:
        return CheckpointInfo(path, None, 0, 0, False, entry.status.reason)
    nbytes, metric = sum(summary.files.values()), summary.manager.metric if summary.manager is not None else None
    return CheckpointInfo(
        path=path,
        step=summary.step,
        world_size=summary.world_size,
        nbytes=nbytes,
        complete=entry.status.is_complete,
        reason=entry.status.reason,
        metric=metric,
        saved_at=summary.created_ns / 1e9 if summary.created_ns else None,
        thinned=summary.thinned_from is not None,
        wrapper=summary.wrapper,
    )


def newest_first(entries: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """Sort checkpoints in the order in which a resume tries them.

    A checkpoint whose summary cannot be read has no sequence number. Its place follows from the number in its name: it is
    before the first checkpoint with a lower step. Without a number it comes first, because it may be the newest.
    """
    readable = sorted(
        ((entry.summary.order, entry) for entry in entries if entry.summary is not None),
        key=lambda pair: pair[0],
        reverse=True,
    )
    ordered = [entry for _, entry in readable]
    others = sorted(
        (entry for entry in entries if entry.summary is None), key=lambda entry: (number_in(entry) or 0, entry.base)
    )
    for entry in others:
        number = number_in(entry)
        place = (i for i, other in enumerate(ordered) if number is None or _is_before(number, other))
        ordered.insert(next(place, len(ordered)), entry)
    return ordered


def _is_before(number: int, other: ListedCheckpoint) -> bool:
    step = other.summary.step if other.summary is not None else number_in(other)
    return step is None or number > step


def number_in(entry: ListedCheckpoint) -> int | None:
    """Return the last number in the name of a checkpoint."""
    return last_number(entry.base.rpartition("/")[2])


def last_number(name: str) -> int | None:
    """Return the last number in a name."""
    numbers = re.findall(r"[0-9]+", name)
    return int(numbers[-1][-18:]) if numbers else None


def latest(*directories: CheckpointDirectory[ManifestSummary]) -> str | None:
    """Return the place of the newest complete checkpoint of a directory; None where there is none.

    Checkpoints of other libraries do not count. `directories`: the same directory, for each format.

    Raises CheckpointError where the directory cannot be listed, or has only checkpoints that cannot be read just now.
    """
    unread: list[str] = []
    for attempt in range(_ATTEMPTS):
        looks = listed_with_directories(directories)
        unread = [entry.status.reason for entry, _ in looks if not entry.status.is_sure]
        for entry, _ in looks:
            if not entry.status.is_complete:
                log.warning("%s cannot be read as a checkpoint: %s", entry.where, entry.status.reason)
        complete = [
            (entry.status.summary.order, entry, directory)
            for entry, directory in looks
            if entry.status.summary is not None
        ]
        for _, entry, directory in sorted(complete, key=lambda candidate: candidate[0], reverse=True):
            status = directory.status_of(entry)  # by the whole manifest, not its beginning alone
            if status.is_complete:
                return entry.where
            if status.has_moved and attempt < _ATTEMPTS - 1:
                break  # another checkpoint replaced this entry since the directory was listed
            log.warning("%s is not a complete checkpoint: %s", entry.where, status.reason)
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

    The listing of a bucket may be old, so the number there is that of this millisecond at least: a save that does not see the one
    before it must not be taken for older, and be removed by the manager.
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
