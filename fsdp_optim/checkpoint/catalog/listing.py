"""The checkpoints of a folder or a prefix, the newest first, complete or not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fsdp_optim.buckets.schemes import scheme_of
from fsdp_optim.checkpoint.common.results import CheckpointInfo
from fsdp_optim.formats.base.summary import Brief
from fsdp_optim.storage.base import Listed, Shelf, names_checkpoint

ListedCheckpoint = Listed[Brief]


def checkpoints(*shelves: Shelf[Brief]) -> list[CheckpointInfo]:
    """All checkpoints on a shelf, the newest first. `shelves`: the same shelf, for each format."""
    return [info_of(one) for one in newest_first(listed(shelves))]


def listed(shelves: Sequence[Shelf[Brief]]) -> list[ListedCheckpoint]:
    """All checkpoints on a shelf that this library has saved. `shelves`: the same shelf, for each format."""
    return [one for one, _ in listed_with_shelves(shelves)]


def listed_with_shelves(shelves: Sequence[Shelf[Brief]]) -> list[tuple[ListedCheckpoint, Shelf[Brief]]]:
    """As `listed`; each with the shelf, of those given, that can read it.

    What cannot be entered counts by its name: one of a checkpoint, or like those of the others. Alone it counts in any case.
    """
    found: dict[tuple[str, str], tuple[ListedCheckpoint, Shelf[Brief]]] = {}
    for shelf in shelves:
        for one in shelf.listed():
            key = one.where, "" if one.where != shelf.where else one.standing.reason
            if key not in found or (found[key][0].brief is None and one.brief is not None):
                found[key] = one, shelf
    ours = [(one, shelf) for one, shelf in found.values() if one.brief is None or not one.brief.is_foreign]
    stems = {stem_of(one.base) for one, _ in ours if one.brief is not None}
    return [(one, shelf) for one, shelf in ours if not stems or _counts(one, stems)]


def _counts(one: ListedCheckpoint, stems: set[str]) -> bool:
    if one.standing.has_manifest or not one.standing.is_closed:
        return True
    return names_checkpoint(one.base.rpartition("/")[2]) or stem_of(one.base) in stems


def stem_of(where: str) -> str:
    """The name of a checkpoint but for its digits."""
    return re.sub(r"\d+", "#", where.rpartition("/")[2])


def info_of(one: ListedCheckpoint) -> CheckpointInfo:
    """The facts about a checkpoint on a shelf, for users."""
    brief, path = one.brief, one.where if scheme_of(one.where) is not None else Path(one.where)
    if brief is None:
        return CheckpointInfo(path, None, 0, 0, False, one.standing.reason)
    nbytes, metric = sum(brief.files.values()), brief.manager.metric if brief.manager is not None else None
    return CheckpointInfo(
        path, brief.step, brief.world_size, nbytes, one.standing.is_complete, one.standing.reason, metric
    )


def newest_first(ones: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """The order in which a resume looks at checkpoints.

    A checkpoint whose summary cannot be read has no sequence number. Its place follows from the number in its name: it is
    before the first one with a lower step. Without a number it comes first, because it may be the newest.
    """
    readable = sorted(
        ((one.brief.order, one) for one in ones if one.brief is not None), key=lambda pair: pair[0], reverse=True
    )
    found = [one for _, one in readable]
    others = sorted((one for one in ones if one.brief is None), key=lambda one: (number_in(one) or 0, one.base))
    for one in others:
        number = number_in(one)
        place = (i for i, other in enumerate(found) if number is None or _is_before(number, other))
        found.insert(next(place, len(found)), one)
    return found


def _is_before(number: int, other: ListedCheckpoint) -> bool:
    step = other.brief.step if other.brief is not None else number_in(other)
    return step is None or number > step


def number_in(one: ListedCheckpoint) -> int | None:
    """The last number in the name of a checkpoint."""
    return last_number(one.base.rpartition("/")[2])


def last_number(name: str) -> int | None:
    """The last number in a name."""
    numbers = re.findall(r"[0-9]+", name)
    return int(numbers[-1][-18:]) if numbers else None
