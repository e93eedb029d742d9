"""The checkpoints of one folder or prefix, and the questions that a store asks the format about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fsdp_optim.storage.base.opened import Opened


class BriefLike(Protocol):
    """The summary of a manifest, as a store needs it. `order` sorts the checkpoints of one place by age, the oldest first."""

    @property
    def order(self) -> tuple[int, int, int, str]: ...


BriefT = TypeVar("BriefT", bound=BriefLike)


@dataclass(frozen=True)
class Standing(Generic[BriefT]):
    """The state of a place: a complete checkpoint, surely none, or undecided.

    Attributes:
        brief: the summary of a complete checkpoint; None where the place has none, or is undecided.
        has_manifest: whether the place has a manifest, or could not be asked; False also where this user has no access to it.
        is_sure: False where the place may have a complete checkpoint, but could not be read just now, or not by this version.
        has_moved: whether the checkpoint went away, or another one took its name, during the look.
        reason: why the checkpoint is not complete, or is undecided.
        partial: the summary of a checkpoint that is not complete, or is undecided, where the summary could be read.
        is_closed: whether this user may not enter the place, or not read its manifest.
    """

    brief: BriefT | None = None
    has_manifest: bool = True
    is_sure: bool = True
    has_moved: bool = False
    reason: str = ""
    partial: BriefT | None = None
    is_closed: bool = False

    @property
    def is_complete(self) -> bool:
        return self.brief is not None


@dataclass(frozen=True)
class Shelved(Generic[BriefT]):
    """A complete checkpoint on a shelf, as far as the beginning of its manifest shows.

    Attributes:
        where: its place now: the path or the URL from which it is loaded.
        base: the place for which it was saved, which is another one where a save was killed between two renames.
        can_go: False where `remove` would not remove the checkpoint itself, as of a symbolic link.
    """

    where: str
    base: str
    brief: BriefT
    can_go: bool = True


@dataclass(frozen=True)
class Listed(Generic[BriefT]):
    """A place on a shelf that is a checkpoint, complete or not, or that may be one. The rest: as for `Shelved`."""

    where: str
    base: str
    standing: Standing[BriefT]
    can_go: bool = True

    @property
    def brief(self) -> BriefT | None:
        """The summary, also of a checkpoint that is not complete; None where it cannot be read."""
        return self.standing.brief or self.standing.partial

    @classmethod
    def of_shelved(cls, one: Shelved[BriefT]) -> Listed[BriefT]:
        return cls(one.where, one.base, Standing(one.brief), one.can_go)


class Shelf(Protocol[BriefT]):
    """All checkpoints of one folder, or under one prefix. `where`: its name, for errors."""

    @property
    def where(self) -> str: ...

    def complete(self) -> tuple[list[Shelved[BriefT]], list[str]]:
        """The complete checkpoints, the oldest first, and why others that have a manifest could not be read just now.

        Raises CheckpointError where the shelf cannot be listed.
        """

    def listed(self) -> list[Listed[BriefT]]:
        """All places with a manifest, in no order, damaged checkpoints included where the shelf can tell: those that have lost
        their manifest, and what cannot be entered, too.

        Raises CheckpointError where the shelf cannot be listed.
        """
        complete, unread = self.complete()
        undecided = [Listed[BriefT](self.where, self.where, Standing(is_sure=False, reason=why)) for why in unread]
        return [*map(Listed.of_shelved, complete), *undecided]

    def standing_of(self, one: Shelved[BriefT] | Listed[BriefT]) -> Standing[BriefT]:
        """The state of a checkpoint by the whole of its manifest."""

    def remove(self, ones: Sequence[Shelved[BriefT] | Listed[BriefT]], reason: str) -> None:
        """Remove checkpoints. Each removal is logged with the reason; a checkpoint that cannot be removed is warned about."""


class Judge(Protocol[BriefT]):
    """The questions that a store asks a format before it removes or replaces anything.

    `manifest`: the name of the file whose presence makes a place a checkpoint. `others`: the manifests of other formats in which
    checkpoints may be beside those of this format, or in their place.
    """

    manifest: str
    others: tuple[str, ...] = ()

    def standing_in(self, opened: Opened, *, whole: bool) -> Standing[BriefT]:
        """Whether the checkpoint is complete. `whole`: verify the whole manifest, not only its beginning."""

    def token_in(self, opened: Opened) -> str | None:
        """The token of the save that wrote the checkpoint; None where the token cannot be read."""

    def is_trace(self, name: str) -> bool:
        """Whether only a save of this format gives this name to a file: a place that has it, and no manifest, has lost that."""
        return False

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        """A function that says whether a file of a given name was written by a save. `opened` None: the place cannot be opened.

        Where the manifest cannot be read, every name that a save could give counts as written by a save.
        """
