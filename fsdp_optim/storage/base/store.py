"""One place for one checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base.changes import ChangesCheckpoint
from fsdp_optim.storage.base.directory import CheckpointDirectory, CheckpointProbe
from fsdp_optim.storage.base.opened import Opened
from fsdp_optim.storage.base.staging import Staging, StoreWriter

VISIBLE_WITHIN = 30.0
"""Seconds within which a network file system shows files that another machine has written, flushed, closed and announced."""


class Store(ChangesCheckpoint, Protocol):
    """One place for one checkpoint.

    `where`: the name of the place, for errors and for comparing places. `on_file_system`: whether the place is a folder of a file
    system, and `where` its path: reads need no cache, and a listing shows at once what this process has changed. `can_shrink`:
    whether `shrink`, which `fsdp_optim.thin` needs, is implemented.
    """

    on_file_system: bool = False

    @property
    def where(self) -> str: ...

    def open(self) -> Opened:
        """Open the checkpoint that is there now. Raises CheckpointError where there is none."""

    def open_any(self) -> Opened:
        """Open the files that are there now, whoever wrote them. Symbolic links are followed, and a file's name may be any path
        inside the place. Where the place is one file, or the common beginning of the names of files, `selected` names it.

        Raises CheckpointError where there is nothing.
        """
        raise CheckpointError(f"{self.where}: this store opens no files of other libraries")

    def with_probe(self, probe: CheckpointProbe[Any]) -> Store:
        """The same place for checkpoints of another format. A store that asks nothing of the format returns itself."""
        return self

    def above(self) -> tuple[Store, str] | None:
        """The place around this one, and the name of this one in it, by which the folder of one of several models is read."""
        return None

    def begin(self, *, overwrite: bool, durable: bool) -> Staging:
        """Begin a save, and remove the leftovers of saves that died.

        Raises CheckpointError where something is there, unless `overwrite` is True, and where nothing can be written.
        `durable`: `commit` returns only when the checkpoint survives a power cut.
        """

    def join(self, address: str, *, durable: bool, who: str, budget_nbytes: int = 64 << 20) -> StoreWriter:
        """Take part in a save that another process has begun.

        `who`: the name of this process, for errors. `budget_nbytes`: memory for bytes on their way to a store that takes parts;
        one part is held in any case.
        """

    def machine_id(self) -> str:
        """Return a string that is equal on processes that can share a file where `writes_ranges` is "on one machine".

        Processes with equal strings see at once what one of them has done in this place.
        """

    def sees(self, address: str) -> bool:
        """Return whether this process sees a save, or a `beacon`, that another process has begun at `address`."""
        return True

    def beacon(self) -> AbstractContextManager[str]:
        """Return a context that puts something into the place, or its parent, which all processes can see; it yields the address.

        Raises CheckpointError where nothing can be made there.
        """
        return nullcontext(self.where)

    def directory(self) -> CheckpointDirectory[Any]:
        """Return the folder, or the prefix, that this place and its siblings are in."""

    def share_looks(self, directory: CheckpointDirectory[Any]) -> None:
        """Look at the siblings by a directory that has looked at them before, and keeps what it saw. Does nothing by default."""
        return

    def siblings(self, known: Collection[str] = ()) -> Iterator[Opened]:
        """Return all possible checkpoints in the same folder or under the same prefix, including this. The caller closes each.

        `known`: the names of those that are left out.
        """
