"""Single files at the place of a store, such as a page that a command makes. A store may have this besides its checkpoints."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable


class FileSink(Protocol):
    """A file that is being written from its beginning to its end."""

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes at the end."""


@runtime_checkable
class WritesFiles(Protocol):
    """A store that can write one file whose name is its place."""

    def new_file(self, *, overwrite: bool) -> AbstractContextManager[FileSink]:
        """Return a context that writes the file. It is there when the block ends; an error or a kill leaves what was there.

        Raises CheckpointError where there is a file, unless `overwrite` is True.
        """
