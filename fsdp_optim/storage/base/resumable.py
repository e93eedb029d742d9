"""Saves that another process can resume after they were killed: in files that can be read back, or in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeGuard

from fsdp_optim.storage.base.opened import Opened
from fsdp_optim.storage.base.staging import Staging, StoreWriter
from fsdp_optim.storage.base.store import Store

UNTIL_COMMIT = "resume."
"""The beginning of the names of files that are needed to resume a save, and that `commit` removes."""


class ResumableStaging(Staging, Protocol):
    """A save under way that another process can resume after this process was killed."""

    def keep(self, note: str) -> None:
        """Keep the save for `ResumableStore.resume` with the same note, from now on until `commit` or `abandon`."""

    def leave(self) -> None:
        """Release the save without removing its files, so that `resume` finds them. Raises nothing."""

    def names(self) -> list[str]:
        """Return the names of the files that exist."""

    def drop(self, names: Sequence[str]) -> None:
        """Remove files."""


class ResumableStore(Store, Protocol):
    """A store in which a killed save can be resumed."""

    def resume(self, note: str, *, overwrite: bool) -> ResumableStaging | None:
        """Take over the save to this place that was kept with this note and that no process resumes now; None if there is none.

        Raises CheckpointError as `begin` does.
        """

    def staged(self, address: str) -> Opened:
        """Return the files of a save under way as they are now, for all its processes."""


def is_resumable(store: Store) -> TypeGuard[ResumableStore]:
    """Return whether killed saves in a store can be resumed, because the store gives back the bytes that they have written."""
    return hasattr(store, "staged")


def can_be_left(staging: Staging) -> TypeGuard[ResumableStaging]:
    """Return whether another process can resume a save."""
    return hasattr(staging, "leave")


class PartsStaging(Staging, Protocol):
    """A save under way in parts that another process can resume after this process was killed."""

    def keep_parts(self, note: str) -> None:
        """Keep the save for `PartsStore.resume` with the same note, from now on until `commit` or `abandon`."""

    def leave_parts(self) -> None:
        """Release the save without removing its parts, so that `resume` finds them. Raises nothing."""

    def has_parts_of(self, files: Mapping[str, int], part_nbytes: Mapping[str, int]) -> bool:
        """Return whether the save has these files, of these sizes, in parts of these sizes."""


class PartsWriter(StoreWriter, Protocol):
    """The access of one process to a save in parts. A process that was killed may have put some of the parts already."""

    def note_part(self, name: str, number: int, data: bytes) -> None:
        """Note a part that this process has written, as soon as the store has it. `data`: for `PartsStore.noted`."""

    def adopt_part(self, name: str, number: int, receipt: str) -> None:
        """Count a part that a killed process has put as this process's."""


class PartsStore(Store, Protocol):
    """A store in which a killed save can be resumed, though the store does not give back its parts before the commit."""

    def resume(self, note: str, *, overwrite: bool) -> PartsStaging | None:
        """Take over the save to this place that was kept with this note and that no process resumes now; None if there is none.

        Raises CheckpointError as `begin` does.
        """

    def noted(self, address: str) -> Mapping[tuple[str, int], tuple[str, bytes]]:
        """Return the parts that were noted, by file and number: the receipt and the data of each note."""


def resumes_parts(store: Store) -> TypeGuard[PartsStore]:
    """Return whether killed saves in a store can be resumed, by notes of the parts that the store has."""
    return hasattr(store, "noted")


def keeps_parts(staging: Staging) -> TypeGuard[PartsStaging]:
    """Return whether another process can resume a save in parts."""
    return hasattr(staging, "keep_parts")
