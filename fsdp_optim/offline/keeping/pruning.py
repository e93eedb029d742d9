"""Prune: remove the checkpoints of a folder that no retention rule keeps, by the rules of a CheckpointManager."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdp_optim.checkpoint.catalog.listing import ListedCheckpoint, listed_with_directories, newest_first
from fsdp_optim.checkpoint.catalog.retention import KeepRules, ManagedCheckpoint, superfluous
from fsdp_optim.checkpoint.catalog.roots import check_root
from fsdp_optim.checkpoint.common.formats import listed_formats
from fsdp_optim.checkpoint.common.stores import StorageOptions, directory_at
from fsdp_optim.errors import wrong_use
from fsdp_optim.formats.base.summary import ManagerRecord, ManifestSummary
from fsdp_optim.registry import scheme_of
from fsdp_optim.results.offline import PruneResult
from fsdp_optim.storage.base import CheckpointDirectory

_NO_RECORD = ManagerRecord(-1, None)


def prune(root: str, rules: KeepRules, *, dry_run: bool, storage_options: StorageOptions = None) -> PruneResult:
    """Remove the complete checkpoints that no rule keeps; return what stays. The newest of each series always stays."""
    rules.validate()
    if rules.keep_last is None and rules.keep_every is None and rules.keep_best is None:
        raise wrong_use(f"{root}: nothing was removed, because no rule says what stays: give keep_last=3, for example")
    directories = [directory_at(root, storage_options, format) for format in listed_formats()]
    listed = listed_with_directories(directories)
    if not listed:
        check_root(root, storage_options)
        raise wrong_use(f"{root}: has no checkpoints, or is not there")
    by_place = {entry.where: (entry, directory) for entry, directory in listed}
    entries = newest_first([entry for entry, _ in listed])
    gone, damaged = _gone(rules, entries, by_place)
    passed_over = [entry for entry in entries if not _counts(entry) or entry.where in damaged]
    going = [entry for entry in entries if entry.where in gone]
    if not dry_run:
        _remove(going, by_place)
        directories[0].finish_removals()
    left = _places_in(directories) if not dry_run else set()
    return PruneResult(
        root=directories[0].where,
        removed=tuple(_path(entry) for entry in going if entry.where not in left),
        kept=tuple(_path(entry) for entry in entries if entry.where not in gone and entry not in passed_over),
        passed_over=tuple(map(_path, passed_over)),
        not_removed=tuple(_path(entry) for entry in going if entry.where in left),
        nbytes=sum(_nbytes(entry) for entry in going if entry.where not in left),
        dry_run=dry_run,
    )


_ByPlace = dict[str, "tuple[ListedCheckpoint, CheckpointDirectory[ManifestSummary]]"]


def _gone(rules: KeepRules, entries: Sequence[ListedCheckpoint], by_place: _ByPlace) -> tuple[set[str], set[str]]:
    """Return the places that no rule keeps, and those that look complete at first and are not.

    Checkpoints of other parameters are a series of their own, with its own newest; a thin one is in the series it was saved in.
    """
    damaged = set[str]()

    def is_complete(where: str) -> bool:
        entry, directory = by_place[where]
        if not directory.status_of(entry).is_complete:
            damaged.add(where)
        return where not in damaged

    series: dict[str, list[ManagedCheckpoint]] = {}
    for entry in entries:
        summary = entry.status.summary
        if summary is not None and _counts(entry):
            record = summary.manager if summary.manager is not None else _NO_RECORD
            series.setdefault(summary.series, []).append(ManagedCheckpoint.of(entry.where, summary, record))
    gone = {where for members in series.values() for where in superfluous(rules, members, is_complete)}
    return gone, damaged


def _counts(entry: ListedCheckpoint) -> bool:
    """Return whether a checkpoint is complete and can be removed."""
    return entry.status.is_complete and entry.can_go


def _remove(going: Sequence[ListedCheckpoint], by_place: _ByPlace) -> None:
    """Remove checkpoints, the oldest first. Raises nothing for a checkpoint that cannot be removed: the log has it."""
    for entry in reversed(going):
        by_place[entry.where][1].remove([entry], "no rule keeps it")


def _places_in(directories: Sequence[CheckpointDirectory[ManifestSummary]]) -> set[str]:
    return {entry.where for entry, _ in listed_with_directories(directories)}


def _nbytes(entry: ListedCheckpoint) -> int:
    return sum(entry.summary.files.values()) if entry.summary is not None else 0


def _path(entry: ListedCheckpoint) -> Path | str:
    return entry.where if scheme_of(entry.where) is not None else Path(entry.where)
