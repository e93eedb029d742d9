"""Writing: a save under way, as its leader and as each process sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Capabilities:
    """The abilities of a store, by which a save chooses how the ranks write.

    Attributes:
        writes_ranges: whether several processes can write ranges of one file at the same time: from every machine, from one
            machine only, in complete parts ("parts": each of the file's equal parts by one process), or not at all. Without that
            ability each file is written by one process.
        renames: whether a checkpoint gets its name by a single rename. False: its manifest is put last.
        part_nbytes: the size of the equal parts in which the store uploads a file, in bytes. 0: the store writes any range.
        most_parts: the highest number of parts of a file; 0: any number. The parts of a large file are larger for it.
    """

    writes_ranges: Literal["anywhere", "on one machine", "parts", "no"] = "anywhere"
    renames: bool = True
    part_nbytes: int = 0
    most_parts: int = 0

    def part_nbytes_of(self, nbytes: int) -> int:
        """Return the size of the parts of a file of `nbytes` bytes: `part_nbytes`, doubled until the parts are few enough."""
        size = self.part_nbytes
        while self.most_parts and size * self.most_parts < nbytes:
            size *= 2
        return size


class Staging(Protocol):
    """A save under way, as its leading process sees it."""

    @property
    def address(self) -> str:
        """The string with which the other processes join. Final only after `create` of the files that several processes write."""

    @property
    def token(self) -> str:
        """A string that no other save has."""

    @property
    def inner_folder(self) -> str:
        """The folder, with a slash at its end, that has all files but the manifest; "" where they are beside it."""
        return ""

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of the store in this place."""

    @property
    def replaces(self) -> bool:
        """Whether `commit` removes an earlier checkpoint."""

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        """Create a file of `nbytes` bytes that begins with `head`. Several processes write ranges of the file."""

    def seal(self, names: Sequence[str], receipts: Sequence[bytes], *, durable: bool) -> None:
        """Complete the files `names`, which were written in ranges. `receipts`: the results of `finish` of all processes."""

    def put(self, name: str, data: bytes, *, durable: bool) -> None:
        """Write a small complete file."""

    def commit(self, manifest: str, data: bytes, *, durable: bool) -> None:
        """Write the manifest, and make this save the checkpoint. Raises CheckpointError where another save was faster."""

    def abandon(self, *, late: bool = False) -> None:
        """Remove the files of this save, after a failure. Raises nothing.

        `late`: another process of this save may still write; a later save to the place removes its files.
        """


class StoreWriter(Protocol):
    """The access of one process to a save under way."""

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        """Create a file of `nbytes` bytes that begins with `head`. Only this process writes the rest of the file."""

    def write(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        """Write pieces of memory, one after the other, to a file from byte `offset` on. Each byte is written once.

        The memory is used again when the call is over: what is put later is copied first.
        """

    def put(self, name: str, data: bytes) -> None:
        """Write a small complete file."""

    def finish(self) -> bytes:
        """Return, with a receipt for `seal`, when all writes are complete, and on the disk if the save is durable."""

    def discard(self) -> None:
        """Release all files, after a failure. Raises nothing."""
