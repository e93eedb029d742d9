"""The checkpoints in a folder, and what the commands say of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_optim.errors import CheckpointError

if TYPE_CHECKING:
    from fsdp_optim.api import CheckpointInfo


def checkpoints_in(path: str, storage_options: dict[str, Any] | None) -> list[CheckpointInfo]:
    """Return the checkpoints in a folder, or under a URL, the newest first; none where the path is no such folder."""
    from fsdp_optim import api

    try:
        return api.checkpoints(path, storage_options=storage_options)
    except CheckpointError:
        return []


def name_of(info: CheckpointInfo) -> str:
    """Return the name of a checkpoint without its folder."""
    return str(info.path).rpartition("/")[2]


def reason_of(info: CheckpointInfo, reason: str = "") -> str:
    """Return why a checkpoint is damaged, without its path where the reason begins with it."""
    text = reason or info.reason
    return text.removeprefix(f"{info.path}: ").removeprefix(f"{info.path}/")
