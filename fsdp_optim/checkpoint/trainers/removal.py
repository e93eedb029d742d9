"""The removal of a checkpoint that a trainer does not keep."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fsdp_optim.checkpoint.common.stores import store_at


def remove_checkpoint(
    path: str | os.PathLike[str], reason: str, *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Remove a checkpoint of this library, its manifest before its files. One rank calls it; no communication.

    Does nothing where there is no such checkpoint. The removal is logged.

    Args:
        path: the checkpoint: a path, or a URL as for `fsdp_optim.save`.
        reason: why it goes, for the log.
        storage_options: as for `fsdp_optim.save`.

    Raises:
        CheckpointError: the place cannot be listed.
    """
    store = store_at(path, options=storage_options)
    directory = store.directory()
    directory.remove([entry for entry in directory.listed() if entry.base == store.where], reason)
