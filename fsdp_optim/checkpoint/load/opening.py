"""The begin of a load: all ranks open the same checkpoint.

A rank on another machine than the one that saved may see the checkpoint, or the one that it has replaced, some seconds later: so
the ranks open it again until all have the same one.
"""

from __future__ import annotations

import json
import logging
import time

from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.seen_by_all import check_shared
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.protocols import Format, Reader
from fsdp_optim.storage.base import VISIBLE_WITHIN, Store
from fsdp_optim.transport.agree import MeetingResult, agree, all_equal, all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure

_LOOKS = 5  # times, on one machine: for a path where another checkpoint replaces the one that is being opened
_FIRST_PAUSE, _LONGEST = 0.05, 1.0  # seconds between looks on several machines

log = logging.getLogger("fsdp_optim")


def open_on_all(group: RankGroup, store: Store, call: str, *, verify: bool, format: Format | None) -> Reader:
    """Open the same checkpoint on all ranks. Called by all ranks.

    `call`: the arguments of the call, which ranks compare. `format` None: it is recognised.

    Raises CheckpointError, on all ranks, where all of them fail, or where some of them still see another checkpoint than the
    others after `VISIBLE_WITHIN`; before that, where they turn out to have different folders before them.
    """
    begun, looks, pause = time.monotonic(), 0, _FIRST_PAUSE
    one_machine: bool | None = None
    while True:
        failure, checkpoint = Failure(), None
        with failure:
            checkpoint = open_checkpoint(store, verify=verify, format=format)
        is_same = False
        try:
            result = _compare(group, call, checkpoint, failure)
            num_failed = sum(bool(result.content_of(rank)) for rank in group.ranks)
            is_same = result.all_equal and checkpoint is not None and not num_failed
        finally:
            if checkpoint is not None and not is_same:
                checkpoint.close()
        if is_same and checkpoint is not None:
            for note in checkpoint.index.facts.notes if group.rank == group.ranks[0] else ():
                log.warning(note)
            return checkpoint
        looks += 1
        if num_failed == len(group.ranks):
            agree(group, "opened", failure.error)
        if one_machine is None:
            one_machine = all_equal(group, "machines", store.machine_id().encode())
            if not one_machine:
                check_shared(group, store)
        if (one_machine and (num_failed or looks == _LOOKS)) or _is_over(group, begun):
            agree(group, "opened", failure.error if one_machine else _unseen(failure.error))
            raise CheckpointError(
                f"{store.where}: the ranks see different checkpoints: the path must be on a file system that all ranks share, "
                "and no process may save to it again and again during the load"
            )
        if not one_machine:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)


def _compare(group: RankGroup, call: str, checkpoint: Reader | None, failure: Failure) -> MeetingResult:
    """Compare what the ranks have opened. A rank that failed has a content."""
    opened = json.dumps(checkpoint.index.identity, sort_keys=True).encode() if checkpoint is not None else b""
    return all_gather_bytes(group, f"opened with {call}", b"failed" if failure.error is not None else b"", opened)


def _unseen(error: BaseException | None) -> CheckpointError | None:
    """The error of a rank that has not seen in time what others see."""
    return CheckpointError(f"not visible here after {VISIBLE_WITHIN:g} s: {error}") if error is not None else None


def _is_over(group: RankGroup, begun: float) -> bool:
    """Whether the ranks have looked for long enough, by the clock of the lowest."""
    is_lowest = group.rank == group.ranks[0]
    over = b"over" if is_lowest and time.monotonic() - begun > VISIBLE_WITHIN else b""
    return bool(all_gather_bytes(group, "looked", over).content_of(group.ranks[0]))
