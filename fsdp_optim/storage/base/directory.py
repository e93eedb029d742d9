"""The checkpoints of one folder or prefix, and the questions that a store asks the format about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fsdp_optim.storage.base.opened import Opened


class SummaryLike(Protocol):
    """The summary of a manifest, as a store needs it. `order` sorts the checkpoints of one place by age, the oldest first."""

    @property
    def order(self) -> tuple[int, int, int, str]: ...


SummaryT = TypeVar("SummaryT", bound=SummaryLike)


@dataclass(frozen=True)
class CheckpointStatus(Generic[SummaryT]):
    """The state of a place: a complete checkpoint, surely none, or undecided.

    Attributes:
        summary: the summary of a complete checkpoint; None where the place has none, or is undecided.
        has_manifest: whether the place has a manifest, or could not be read; False also where this user has no access to it.
        is_sure: False where the place may have a complete checkpoint, but could not be read just now, or not by this version.
        has_moved: whether the checkpoint went away, or another took its name, during the probe.
        reason: why the checkpoint is not complete, or is undecided.
        partial: the summary of a checkpoint that is not complete, or is undecided, where the summary could be read.
        is_closed: whether this user may not enter the place, or not read its manifest.
    """

    summary: SummaryT | None = None
    has_manifest: bool = True
    is_sure: bool = True
    has_moved: bool = False
    reason: str = ""
    partial: SummaryT | None = None
    is_closed: bool = False

    @property
    def is_complete(self) -> bool:
        return self.summary is not None


@dataclass(frozen=True)
class CheckpointEntry(Generic[SummaryT]):
    """A place in a directory that is, or may be, a checkpoint, complete or not.

    Attributes:
        where: its place now: the path or the URL from which it is loaded.
        base: the place for which it was saved, which differs from `where` after a save that was killed between two renames.
        status: its state, as far as the beginning of its manifest shows.
        can_go: False where `remove` would not remove the checkpoint itself, as of a symbolic link.
    """

    where: str
    base: str
    status: CheckpointStatus[SummaryT]
    can_go: bool = True

    @property
    def summary(self) -> SummaryT | None:
        """The summary, also of a checkpoint that is not complete; None where it cannot be read."""
        return self.status.summary or self.status.partial


class CheckpointDirectory(Protocol[SummaryT]):
    """All checkpoints of one folder, or under one prefix. `where`: its name, for errors."""

    @property
    def where(self) -> str: ...

    def listed(self) -> list[CheckpointEntry[SummaryT]]:
        """Return all places with a manifest, in no order.

        Where the directory can recognise them, damaged checkpoints are included: places that have lost their manifest, and places
        that cannot be entered. Raises CheckpointError where the directory cannot be listed.
        """

    def complete(self) -> list[CheckpointEntry[SummaryT]]:
        """Return the complete checkpoints, the oldest first."""
        entries = [(entry.status.summary, entry) for entry in self.listed()]
        complete = [(summary.order, entry) for summary, entry in entries if summary is not None]
        return [entry for _, entry in sorted(complete, key=lambda pair: pair[0])]

    def unfinished(self) -> list[str]:
        """Return the names of the unfinished saves, sorted: each is under way, or has died. None where this cannot be told."""
        return []

    def status_of(self, entry: CheckpointEntry[SummaryT]) -> CheckpointStatus[SummaryT]:
        """Return the status of a checkpoint by its complete manifest."""

    def remove(self, entries: Sequence[CheckpointEntry[SummaryT]], reason: str) -> None:
        """Remove checkpoints. Each removal is logged with the reason; a checkpoint that cannot be removed is warned about."""

    def finish_removals(self) -> None:
        """Remove what calls of `remove` that were killed have left. Does nothing where only the next save can."""
        return


class CheckpointProbe(Protocol[SummaryT]):
    """The questions that a store asks a format before it removes or replaces anything.

    `manifest`: the name of the file whose presence makes a place a checkpoint. `others`: the manifests of other formats in which
    checkpoints may be beside checkpoints of this format, or in their place.
    """

    manifest: str

    @property
    def others(self) -> tuple[str, ...]:
        return ()

    def status_in(self, opened: Opened, *, whole: bool) -> CheckpointStatus[SummaryT]:
        """Return whether the checkpoint is complete. `whole`: verify the complete manifest, not only its beginning."""

    def token_in(self, opened: Opened) -> str | None:
        """Return the token of the save that wrote the checkpoint; None where the token cannot be read."""

    def is_trace(self, name: str) -> bool:
        """Return whether only saves of this format give a file this name: a place that has it has, or had, a manifest."""
        return False

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        """Return a function that says whether a file of a given name was written by a save.

        `opened` None: the place cannot be opened. Where the manifest cannot be read, every name that a save could give counts as
        written by a save.
        """
