"""A folder of checkpoints that is given where one checkpoint is wanted: the error names the checkpoints in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fsdp_optim.errors import CheckpointError, counted_noun, shortened, wrong_use

if TYPE_CHECKING:
    from fsdp_optim.api import CheckpointInfo

_MOST_NAMED = 4


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


@contextmanager
def one_checkpoint_at(path: str, storage_options: dict[str, Any] | None) -> Iterator[None]:
    """Raise CheckpointError in the place of an error about a path that is a folder of checkpoints, and name these."""
    try:
        yield
    except CheckpointError as error:
        infos = checkpoints_in(path, storage_options)
        if not infos:
            raise
        newest = next((info for info in infos if info.complete), infos[0])
        wrong = wrong_use(
            f"{path}: is a folder of {counted_noun(len(infos), 'checkpoint')} ({shortened(map(name_of, infos), _MOST_NAMED)}), "
            f"not a checkpoint: did you mean {newest.path}?"
        )
        wrong.on_all_ranks = error.on_all_ranks
        raise wrong from error
