"""The checkpoints of a folder or a prefix, the newest first, complete or not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fsdp_optim.formats.base.summary import ManifestSummary
from fsdp_optim.registry import scheme_of
from fsdp_optim.results import CheckpointInfo
from fsdp_optim.storage.base import CheckpointDirectory, CheckpointEntry, names_checkpoint

ListedCheckpoint = CheckpointEntry[ManifestSummary]


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
