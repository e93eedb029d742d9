"""Retention: which checkpoints of a folder are a CheckpointManager's own, which a run that went back left behind, which stay."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from fsdp_optim.arguments import Arguments, check_at_least, check_one_of
from fsdp_optim.checkpoint.catalog.listing import ListedCheckpoint, newest_first, number_in
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base.summary import ManagerRecord, ManifestSummary
from fsdp_optim.formats.own.probe import is_of_optim
from fsdp_optim.options import Best
from fsdp_optim.storage.base import CheckpointDirectory, Store

_NAME = re.compile(r"step-([0-9]{8,})")

log = logging.getLogger("fsdp_optim")


def name_of_step(step: int) -> str:
    """Return the name of the checkpoint of a step; names sort as steps do."""
    return f"step-{step:08}"


@dataclass(frozen=True)
class KeepRules(Arguments):
    """Retention rules. A checkpoint stays if any rule keeps it; without a rule all stay. The newest always stays.

    `keep_optim_last`: how many of the newest checkpoints keep their optimizer; None: all.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    best: Best = "min"
    keep_optim_last: int | None = None

    def validate(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best", "keep_optim_last"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        check_one_of("best", self.best, ("min", "max"))

    def counted(self, entries: Sequence[ManagedCheckpoint]) -> set[str]:
        """Return the names of the checkpoints that `keep_last` and `keep_best` keep."""
        in_order = sorted(entries, key=lambda entry: entry.order, reverse=True)
        kept = {entry.name for entry in in_order[: self.keep_last or 1]}
        scored = [(entry.metric, entry) for entry in in_order if entry.metric is not None]
        scored.sort(
            key=lambda pair: pair[0], reverse=self.best == "max"
        )  # stable: of equal metrics the newest is the best
        return kept | {entry.name for _, entry in scored[: self.keep_best or 0]}

    def kept(self, entries: Sequence[ManagedCheckpoint]) -> set[str]:
        """Return the names of the checkpoints that stay."""
        if self.keep_last is None and self.keep_every is None and self.keep_best is None:
            return {entry.name for entry in entries}
        every = self.keep_every
        kept = {entry.name for entry in entries if every is not None and entry.step % every == 0}
        return kept | self.counted(entries)


class ManagedCheckpoint(Struct, frozen=True):
    """A complete checkpoint of a manager, as the rules see it. `after`: as in `ManagerRecord`."""

    name: str
    step: int
    order: tuple[int, int, int, str]
    after: int
    metric: float | None = None

    @classmethod
    def of(cls, name: str, summary: ManifestSummary, record: ManagerRecord) -> ManagedCheckpoint:
        return cls(name, summary.step or 0, summary.order, record.after, record.metric)


def left_behind(entries: Iterable[ManagedCheckpoint]) -> set[str]:
    """Return the names of the checkpoints that the run has left behind: the chain back from the newest does not reach them.

    Each checkpoint says which step it was saved after. Where that checkpoint is not there, the run may have come from any older
    checkpoint of an earlier step, and none of these is left behind.
    """
    behind: set[str] = set()
    passed_by: set[str] = set()  # older than the last checkpoint of the chain, of earlier steps than the next in it
    wanted: int | None = None  # the step of the next checkpoint in the chain
    for entry in sorted(entries, key=lambda entry: entry.order, reverse=True):
        if wanted is None or entry.step == wanted:
            wanted, behind, passed_by = entry.after, behind | passed_by, set()
        elif entry.step < wanted:
            passed_by.add(entry.name)
        else:
            behind.add(entry.name)
    return behind


def superfluous(
    rules: KeepRules,
    entries: Sequence[ManagedCheckpoint],
    is_complete: Callable[[str], bool],
    new: ManagedCheckpoint | None = None,
) -> set[str]:
    """Return the names of the checkpoints that no rule keeps.

    Checkpoints that `keep_last` and `keep_best` count are looked at by `is_complete`, because a damaged checkpoint must not count
    in the place of a good one; those that are not complete neither count nor go. `new`: a checkpoint that counts without a look.
    """
    left, others = list(entries), [new] if new is not None else []
    while gone := {entry.name for entry in left} - rules.kept([*left, *others]):
        counted = rules.counted([*left, *others]) - {other.name for other in others}
        damaged = {name for name in counted if not is_complete(name)}
        if not damaged:
            return gone
        left = [entry for entry in left if entry.name not in damaged]
    return set()


def is_named(entry: ListedCheckpoint) -> bool:
    """Return whether a checkpoint has the name that a manager gives to its step."""
    name = entry.base.rpartition("/")[2]
    step = entry.summary.step if entry.summary is not None else number_in(entry)
    return _NAME.fullmatch(name) is not None and step is not None and name == name_of_step(step)


def is_own(entry: ListedCheckpoint) -> bool:
    """Return whether a manager made a checkpoint: the manifest says so, and the name is the one of its step.

    Where the manifest cannot be read, the name decides.
    """
    return is_named(entry) and (entry.summary is None or entry.summary.manager is not None)


def own_in(listed: Iterable[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """Return the checkpoints that a manager made and that were not left behind, damaged ones included."""
    own = [entry for entry in listed if is_own(entry)]
    behind = left_behind(entries_of(own))
    return [entry for entry in own if entry.where not in behind]


def entries_of(listed: Iterable[ListedCheckpoint]) -> list[ManagedCheckpoint]:
    """Return the complete checkpoints of a list, as the rules see them."""
    summaries = ((entry.where, entry.status.summary) for entry in listed)
    return [
        ManagedCheckpoint.of(where, b, b.manager) for where, b in summaries if b is not None and b.manager is not None
    ]


@dataclass
class KnownSaves:
    """The checkpoints of a folder that a run knows, on the leading rank: all that were there when it resumed, and its own.

    `unread`: the places that could not be read then. The checkpoint that is first read there is the one that was there.
    `doubtful`: the places of those that may be intact, though the run could not read them when it resumed: they stay.
    `thinned`: the tokens of those that this run has thinned.
    """

    tokens: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    thinned: set[str] = field(default_factory=set)
    sequence: int = 0  # the highest of the known ones: a later listing may be older than these checkpoints
    directory: CheckpointDirectory[ManifestSummary] | None = None  # as the last save has listed it

    def look_as_before(self, store: Store) -> None:
        """Let a save look only at what is new in the folder since the previous save."""
        if self.directory is not None:
            store.share_looks(self.directory)
        self.directory = store.directory()

    def see(self, listed: Iterable[ListedCheckpoint]) -> None:
        """Add the checkpoints of the folder, because the run resumes."""
        for entry in listed:
            self._add(entry)
            if not entry.status.is_sure:
                self.doubtful.add(entry.base)

    def see_unread(self, listed: Iterable[ListedCheckpoint]) -> None:
        """Add the checkpoints that could not be read when the run resumed, and can be read now."""
        for entry in listed:
            if entry.base in self.unread:
                self._add(entry)

    def _add(self, entry: ListedCheckpoint) -> None:
        if entry.summary is None:
            self.unread.add(entry.base)
            return
        self.unread.discard(entry.base)
        self.tokens.add(entry.summary.token)
        self.sequence = max(self.sequence, entry.summary.sequence)

    def continues_from(self, where: str, unread: set[str]) -> None:
        """The run continues from the checkpoint of a place. `unread`: the places of newer ones that it could not load."""
        self.doubtful = (self.doubtful | unread) - {where}

    def saves(self, where: str, token: str) -> None:
        """Add a checkpoint that the run itself saves."""
        self.unread.discard(where)
        self.doubtful.discard(where)
        self.tokens.add(token)

    def may_go(self, entry: ListedCheckpoint) -> bool:
        """Return whether the run may remove or thin a checkpoint. One that may not go does not count in the place of others."""
        return entry.can_go and entry.base not in self.doubtful

    def has(self, entry: ListedCheckpoint) -> bool:
        return entry.summary is not None and (entry.summary.token in self.tokens or entry.base in self.unread)


class ManagedSave(Struct, frozen=True):
    """The additions of a CheckpointManager to a save.

    Attributes:
        record: its record in the manifest.
        rules: which checkpoints stay when this one is complete.
        known: the checkpoints that the run knows. Another run's checkpoints are neither counted nor removed.
        has_resumed: whether the manager knows which checkpoint of the folder the run continues from.
    """

    record: ManagerRecord
    rules: KeepRules
    known: KnownSaves
    has_resumed: bool = True

    def check(self, store: Store) -> list[ListedCheckpoint]:
        """Raise CheckpointError if the save would replace a checkpoint that no manager made, or mix two runs in one folder.

        Returns the checkpoints in the folder.
        """
        self.known.look_as_before(store)
        listed: list[ListedCheckpoint] = store.directory().listed()
        here = next((entry for entry in listed if entry.base == store.where), None)
        self.known.see_unread(listed)
        if here is not None and not here.status.is_sure and not here.status.is_closed:
            raise CheckpointError(
                f"{store.where}: already exists, and cannot be read at the moment: {here.status.reason}"
            )
        if here is not None and not is_own(here):
            raise CheckpointError(
                f"{store.where}: already exists, and no CheckpointManager made it, so it is not replaced: move it away, or "
                "give another folder"
            )
        others = [entry for entry in own_in(listed) if not self.known.has(entry)]
        if others and not self.has_resumed:
            raise CheckpointError(
                f"{store.where}: the folder has checkpoints of an earlier run, {len(others)} of them, and this manager has not "
                "resumed: call manager.resume() before the first step, or give another folder"
            )
        newer = [(entry.summary.order, entry.where) for entry in others if entry.summary is not None]
        if newer:
            raise CheckpointError(
                f"{store.where}: another run saves into this folder: it has made {max(newer)[1]} since this manager resumed. "
                "Give each run a folder of its own; if the other run has ended, manager.resume() continues from its checkpoint"
            )
        return listed

    def outdated(
        self, store: Store, listed: Iterable[ListedCheckpoint], content: str, step: int, sequence: int | None = None
    ) -> list[ListedCheckpoint]:
        """Return the checkpoints that the new one in `store` makes superfluous. `content`: as in `ManifestSummary`.

        `sequence`: the number of this save; None: above all others. The manifests of checkpoints that `keep_last` and
        `keep_best` count are read completely, because a damaged checkpoint must not count in the place of a good one.
        """
        directory: CheckpointDirectory[ManifestSummary] = store.directory()
        others = [other for other in listed if is_own(other) and other.base != store.where and self.known.may_go(other)]
        own = [c for c in others if c.summary is None or (c.summary.series == content and self.known.has(c))]
        highest = max((other.summary.sequence for other in own if other.summary is not None), default=0)
        number = highest + 1 if sequence is None else sequence
        order = (number, step, 0, "")
        new = ManagedCheckpoint(store.where, step, order, self.record.after, self.record.metric)
        entries = [entry for entry in entries_of(own) if entry.order < order]
        behind = left_behind([*entries, new])
        behind |= {other.where for other in own if not other.status.is_complete and self._is_behind(other, number)}
        entries = [entry for entry in entries if entry.name not in behind]
        by_name = {other.where: other for other in own}
        gone = superfluous(self.rules, entries, lambda name: directory.status_of(by_name[name]).is_complete, new)
        return [by_name[name] for name in sorted(behind | gone)]

    def _is_behind(self, entry: ListedCheckpoint, sequence: int) -> bool:
        """Return whether a damaged checkpoint is of steps that this save takes back."""
        if not entry.status.is_sure:
            return False
        if entry.summary is None:
            return (number_in(entry) or 0) > self.record.after
        return entry.summary.sequence < sequence and (entry.summary.step or 0) > self.record.after

    def with_outdated_optim(
        self, store: Store, listed: Iterable[ListedCheckpoint], content: str, sequence: int | None = None
    ) -> list[ListedCheckpoint]:
        """Return the checkpoints whose optimizer the new one in `store` makes superfluous, as far as the rules say so.

        `content`, `sequence`: as for `outdated`. Damaged checkpoints do not count in the place of good ones, and stay.
        """
        keep, directory = self.rules.keep_optim_last, store.directory()
        own = self._older(store, listed, content, sequence) if keep is not None else []
        older = [entry for entry in own if _has_optim(entry)]
        num_kept = 1  # the new one
        for index, entry in enumerate(older):
            if num_kept == keep:
                return older[index:]
            num_kept += directory.status_of(entry).is_complete
        return []

    def _older(
        self, store: Store, listed: Iterable[ListedCheckpoint], content: str, sequence: int | None
    ) -> list[ListedCheckpoint]:
        """Return the complete checkpoints of this run that are older than the new one in `store`, the newest first."""
        return [
            entry
            for entry in newest_first([entry for entry in listed if is_own(entry) and self.known.has(entry)])
            if (summary := entry.status.summary) is not None
            and summary.series == content
            and (sequence is None or summary.sequence < sequence)
            and entry.base != store.where
            and self.known.may_go(entry)
        ]

    def thin_outdated(self, store: Store, content: str, sequence: int, thin: Callable[[str], object]) -> None:
        """Thin the checkpoints that `with_outdated_optim` returns, by `thin`. Warns if one cannot be thinned.

        Checkpoints that are thin already are thinned again once a run, because a killed run may have left files there.
        """
        if self.rules.keep_optim_last is None:
            return
        try:
            listed: list[ListedCheckpoint] = store.directory().listed()
            outdated = self.with_outdated_optim(store, listed, content, sequence)
        except OSError as error:
            log.warning("no checkpoint was thinned after %s: %s", store.where, error)
            return
        thin_already = [
            entry
            for entry in self._older(store, listed, content, sequence)
            if entry.summary is not None
            and entry.summary.thinned_from is not None
            and entry.summary.token not in self.known.thinned
        ]
        for entry in (*outdated, *thin_already):
            try:
                thin(entry.where)
            except CheckpointError as error:
                log.warning("%s keeps its optimizer, because it cannot be thinned: %s", entry.where, error)
                continue
            if entry.summary is not None:
                self.known.thinned.add(entry.summary.token)
            if entry in outdated:
                keep = self.rules.keep_optim_last
                log.info("thinned %s: keep_optim_last=%d, and %s is newer", entry.where, keep, store.where)

    def remove_outdated(self, store: Store, content: str, step: int, sequence: int) -> None:
        """Remove the checkpoints that the save of `store` makes superfluous. Warns if one cannot be removed."""
        try:
            outdated = self.outdated(store, store.directory().listed(), content, step, sequence)
        except OSError as error:
            log.warning("nothing was removed after %s: %s", store.where, error)
            return
        taken_back = [entry for entry in outdated if (number_in(entry) or 0) > self.record.after]
        rest = [entry for entry in outdated if entry not in taken_back]
        directory = store.directory()
        if taken_back:
            directory.remove(
                taken_back, f"the run went back to step {max(self.record.after, 0)}, and {store.where} is newer"
            )
        if rest:
            directory.remove(
                rest,
                f"no rule of the CheckpointManager keeps it, and {store.where} is newer",
            )


def _has_optim(entry: ListedCheckpoint) -> bool:
    """Return whether a checkpoint of this library's own format has files of an optimizer."""
    summary = entry.status.summary
    return summary is not None and any(is_of_optim(name) for name in summary.files)


def metric_of(metric: object) -> float | None:
    """Return a metric as a float; None for no metric, and for a metric that is no finite number, which never is the best."""
    if metric is None:
        return None
    try:
        value = float(metric)  # type: ignore[arg-type]  # also of a tensor or an array with one element
    except OverflowError:  # an integer beyond all floats
        value = math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"metric must be a number or None, not {metric!r}: {error}") from error
    if not math.isfinite(value):
        log.warning("metric is %s: this checkpoint does not count among the best", value)
        return None
    return value
