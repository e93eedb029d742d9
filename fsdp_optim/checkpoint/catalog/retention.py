"""Which checkpoints of a CheckpointManager are its own, which were left behind by a run that went back, and which stay."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from fsdp_optim.checkpoint.catalog.listing import ListedCheckpoint, number_in
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base.summary import ManagerRecord, ManifestSummary
from fsdp_optim.options import Arguments, check_at_least, check_one_of
from fsdp_optim.storage.base import CheckpointDirectory, Store

Best: TypeAlias = Literal["min", "max"]

_NAME = re.compile(r"step-([0-9]{8,})")

log = logging.getLogger("fsdp_optim")


def name_of_step(step: int) -> str:
    """The name of the checkpoint of a step; names sort as steps do."""
    return f"step-{step:08}"


@dataclass(frozen=True)
class KeepRules(Arguments):
    """The rules by which checkpoints stay: one that any rule keeps stays. Without a rule all stay; the newest stays always."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    best: Best = "min"

    def validate(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        check_one_of("best", self.best, ("min", "max"))

    def counted(self, entries: Sequence[ManagedCheckpoint]) -> set[str]:
        """The names of the checkpoints that `keep_last` and `keep_best` keep."""
        in_order = sorted(entries, key=lambda entry: entry.order, reverse=True)
        kept = {entry.name for entry in in_order[: self.keep_last or 1]}
        scored = [(entry.metric, entry) for entry in in_order if entry.metric is not None]
        scored.sort(
            key=lambda pair: pair[0], reverse=self.best == "max"
        )  # stable: of equal ones the newest is the best
        return kept | {entry.name for _, entry in scored[: self.keep_best or 0]}

    def kept(self, entries: Sequence[ManagedCheckpoint]) -> set[str]:
        """The names of the checkpoints that stay."""
        if self.keep_last is None and self.keep_every is None and self.keep_best is None:
            return {entry.name for entry in entries}
        every = self.keep_every
        kept = {entry.name for entry in entries if every is not None and entry.step % every == 0}
        return kept | self.counted(entries)


@dataclass(frozen=True)
class ManagedCheckpoint:
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
    """The names of the checkpoints that the run has left behind: the newest one does not go back to them, step by step.

    Each one says which step it was saved after. Where that checkpoint is not there, every older one of an earlier step may be
    where the run came from, and none of them is left behind.
    """
    behind: set[str] = set()
    passed_by: set[str] = set()  # older than the last one of the chain, of earlier steps than the next one
    wanted: int | None = None  # the step of the next one
    for entry in sorted(entries, key=lambda entry: entry.order, reverse=True):
        if wanted is None or entry.step == wanted:
            wanted, behind, passed_by = entry.after, behind | passed_by, set()
        elif entry.step < wanted:
            passed_by.add(entry.name)
        else:
            behind.add(entry.name)
    return behind


def is_named(one: ListedCheckpoint) -> bool:
    """Whether a checkpoint has the name that a manager gives to its step."""
    name = one.base.rpartition("/")[2]
    step = one.summary.step if one.summary is not None else number_in(one)
    return _NAME.fullmatch(name) is not None and step is not None and name == name_of_step(step)


def is_own(one: ListedCheckpoint) -> bool:
    """Whether a manager made a checkpoint: the manifest says so, and the name is that of the step.

    Where the manifest cannot be read, the name decides.
    """
    return is_named(one) and (one.summary is None or one.summary.manager is not None)


def own_in(listed: Iterable[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """The checkpoints that a manager made, damaged ones included, without those that were left behind."""
    own = [one for one in listed if is_own(one)]
    behind = left_behind(entries_of(own))
    return [one for one in own if one.where not in behind]


def entries_of(ones: Iterable[ListedCheckpoint]) -> list[ManagedCheckpoint]:
    """The complete ones of these checkpoints, as the rules see them."""
    briefs = ((one.where, one.status.summary) for one in ones)
    return [ManagedCheckpoint.of(where, b, b.manager) for where, b in briefs if b is not None and b.manager is not None]


@dataclass
class KnownSaves:
    """The checkpoints of a folder that a run knows, on the leading rank: those that were there when it resumed, and its own.

    `unread`: the places of those that could not be read then. What is read there first is what was there.
    """

    tokens: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    sequence: int = 0  # the highest of them: a later listing may still be one of before them
    directory: CheckpointDirectory[ManifestSummary] | None = None  # as the last save has looked at it

    def look_as_before(self, store: Store) -> None:
        """Let a save look only at what is new in the folder since the one before."""
        if self.directory is not None:
            store.share_looks(self.directory)
        self.directory = store.directory()

    def see(self, listed: Iterable[ListedCheckpoint]) -> None:
        """The run resumes, and knows the checkpoints in the folder."""
        for one in listed:
            self._add(one)

    def see_unread(self, listed: Iterable[ListedCheckpoint]) -> None:
        """The run looks again, and knows those that it could not read when it resumed."""
        for one in listed:
            if one.base in self.unread:
                self._add(one)

    def _add(self, one: ListedCheckpoint) -> None:
        if one.summary is None:
            self.unread.add(one.base)
            return
        self.unread.discard(one.base)
        self.tokens.add(one.summary.token)
        self.sequence = max(self.sequence, one.summary.sequence)

    def saves(self, where: str, token: str) -> None:
        """The run saves a checkpoint of its own."""
        self.unread.discard(where)
        self.tokens.add(token)

    def has(self, one: ListedCheckpoint) -> bool:
        return one.summary is not None and (one.summary.token in self.tokens or one.base in self.unread)


@dataclass(frozen=True)
class ManagedSave:
    """The additions of a CheckpointManager to a save.

    Attributes:
        record: its record in the manifest.
        rules: which checkpoints stay when this one is complete.
        known: the checkpoints that the run knows. Those of another run are neither counted nor removed.
        has_resumed: whether the manager knows which checkpoint of the folder the run goes on from.
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
        here = next((one for one in listed if one.base == store.where), None)
        self.known.see_unread(listed)
        if here is not None and not here.status.is_sure and not here.status.is_closed:
            raise CheckpointError(f"{store.where}: is there already, and cannot be read just now: {here.status.reason}")
        if here is not None and not is_own(here):
            raise CheckpointError(
                f"{store.where}: is there already, and no CheckpointManager made it, so it is not replaced: move it away, or "
                "give another folder"
            )
        others = [one for one in own_in(listed) if not self.known.has(one)]
        if others and not self.has_resumed:
            raise CheckpointError(
                f"{store.where}: the folder has checkpoints of an earlier run, {len(others)} of them, and this manager has not "
                "resumed: call manager.resume() before the first step, or give another folder"
            )
        newer = [(one.summary.order, one.where) for one in others if one.summary is not None]
        if newer:
            raise CheckpointError(
                f"{store.where}: another run saves into this folder: it has made {max(newer)[1]} since this manager resumed. "
                "Give each run a folder of its own; if the other run has ended, manager.resume() goes on from its checkpoint"
            )
        return listed

    def outdated(
        self, store: Store, listed: Iterable[ListedCheckpoint], content: str, step: int, sequence: int | None = None
    ) -> list[ListedCheckpoint]:
        """The checkpoints that this one, that of `store`, makes superfluous. `content`: as in `ManifestSummary`.

        `sequence`: that of this save; None: above all others. Those that are counted in the place of others are read whole,
        because a damaged one does not count.
        """
        directory: CheckpointDirectory[ManifestSummary] = store.directory()
        others = [one for one in listed if is_own(one) and one.base != store.where and one.can_go]
        own = [one for one in others if one.summary is None or (one.summary.content == content and self.known.has(one))]
        highest = max((one.summary.sequence for one in own if one.summary is not None), default=0)
        number = highest + 1 if sequence is None else sequence
        order = (number, step, 0, "")
        new = ManagedCheckpoint(store.where, step, order, self.record.after, self.record.metric)
        entries = [entry for entry in entries_of(own) if entry.order < order]
        behind = left_behind([*entries, new])
        behind |= {one.where for one in own if not one.status.is_complete and self._is_behind(one, number)}
        entries = [entry for entry in entries if entry.name not in behind]
        by_name = {one.where: one for one in own}
        while True:
            gone = {entry.name for entry in entries} - self.rules.kept([*entries, new])
            if not gone:
                break
            counted = self.rules.counted([*entries, new]) - {new.name}
            damaged = {name for name in counted if not directory.status_of(by_name[name]).is_complete}
            if not damaged:
                break
            entries = [entry for entry in entries if entry.name not in damaged]
        return [by_name[name] for name in sorted(behind | gone)]

    def _is_behind(self, one: ListedCheckpoint, sequence: int) -> bool:
        """Whether a damaged checkpoint is of steps that this save takes back."""
        if not one.status.is_sure:
            return False
        if one.summary is None:
            return (number_in(one) or 0) > self.record.after
        return one.summary.sequence < sequence and (one.summary.step or 0) > self.record.after

    def remove_outdated(self, store: Store, content: str, step: int, sequence: int) -> None:
        """Remove the checkpoints that the save of `store` makes superfluous. Warns of those that cannot be removed."""
        try:
            outdated = self.outdated(store, store.directory().listed(), content, step, sequence)
        except OSError as error:
            log.warning("nothing was removed after %s: %s", store.where, error)
            return
        taken_back = [one for one in outdated if (number_in(one) or 0) > self.record.after]
        rest = [one for one in outdated if one not in taken_back]
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


def metric_of(metric: object) -> float | None:
    """A metric as a float; None for no metric, and for a metric that is no finite number, which never is the best."""
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
