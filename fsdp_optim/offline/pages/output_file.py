"""One file that a call writes for its user, such as a page: on this machine, or at a URL."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from fsdp_optim.checkpoint.common.stores import StorageOptions, is_url, options_of, store_at
from fsdp_optim.errors import wrong_use
from fsdp_optim.storage.base import FileSink, WritesFiles
from fsdp_optim.storage.posix.new_file import local_file, new_file

Output = str | os.PathLike[str]
"""A path of this machine, or a URL."""


def checked_output(output: Output) -> Path | str:
    """Return the absolute path, or the URL. Raises CheckpointError for a folder of this machine."""
    return str(output) if is_url(output) else local_file(output)


def open_output(
    output: Output, storage_options: StorageOptions, *, overwrite: bool
) -> AbstractContextManager[FileSink]:
    """Return a context that writes the file: it is complete or absent."""
    if is_url(output):
        store = store_at(str(output), options=options_of(str(output), storage_options))
        if not isinstance(store, WritesFiles):
            raise wrong_use(f"{output}: its store writes checkpoints, and no single files: give a path of this machine")
        return store.new_file(overwrite=overwrite)
    return new_file(output, overwrite=overwrite)


def write_output(output: Output, text: str, storage_options: StorageOptions) -> None:
    """Write a text as a file, which replaces one that is there."""
    with open_output(output, storage_options, overwrite=True) as file:
        file.write(text.encode())
