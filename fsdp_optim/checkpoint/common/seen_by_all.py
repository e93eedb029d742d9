"""Checks that a path is the same folder on all ranks: a file that one rank makes is visible to the other ranks.

Ranks on several machines may share a path but not the folder: a typing error, local disks, a link that leads elsewhere on one
machine. That is an error on all ranks, before anything is written or loaded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.protocols import WrittenFormat
from fsdp_optim.storage.base import Store
from fsdp_optim.transport.agree import agree, all_equal, all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure

SEEN_WITHIN = 10.0
"""Seconds in which a new name must be visible on all machines. No client can have cached that it is not there."""

_LOOK_EVERY = 0.05  # seconds


def check_seen_by_all(group: RankGroup, store: Store, address: str, where: str = "") -> None:
    """Raise CheckpointError, on all ranks, where some do not see what the lowest rank has made. Called by all ranks.

    `where`: the path that the user gave, if it is not the place of the store.
    """
    failure = Failure()
    what = address if address.startswith("/") else "the save"
    with failure:
        if not waited_for(lambda: store.sees(address), SEEN_WITHIN):
            raise CheckpointError(
                f"{where or store.where}: {what}, which rank {group.ranks[0]} has made, is not visible here after "
                f"{SEEN_WITHIN:g} s: this path is another folder than on rank {group.ranks[0]}. All ranks must see the same "
                "folder: give a path on a file system that their machines share, or the URL of a bucket"
            )
    agree(group, "seen", failure.error)


def check_shared(group: RankGroup, store: Store, where: str = "") -> None:
    """Raise CheckpointError, on all ranks, where the path is another folder on some of them. Called by all ranks.

    On one machine nothing is made. A place in which the lowest rank may not write is not checked. `where`: as for
    `check_seen_by_all`.
    """
    if all_equal(group, "machines", store.machine_id().encode()):
        return
    # The beacon, a file that the lowest rank makes, stays until all ranks have looked for it.
    with contextlib.ExitStack() as held:
        address = b""
        if group.rank == group.ranks[0]:
            with contextlib.suppress(CheckpointError):
                address = held.enter_context(store.beacon()).encode(errors="surrogateescape")
        beacon = (
            all_gather_bytes(group, "a beacon", address).content_of(group.ranks[0]).decode(errors="surrogateescape")
        )
        if beacon:
            check_seen_by_all(group, store, beacon, where)


def is_there(store: Store, format: WrittenFormat, token: str) -> bool:
    """Return whether a place has the checkpoint with this token, as far as this rank can see."""
    with contextlib.suppress(CheckpointError), store.open() as opened:
        return format.probe.token_in(opened) == token
    return False


def waited_for(is_so: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition holds, or comes to hold within some seconds."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY)
    return True
