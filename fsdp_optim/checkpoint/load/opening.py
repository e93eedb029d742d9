"""The begin of a load: all ranks open the same checkpoint.

A rank on another machine than the one that saved may see the checkpoint, or the one that it has replaced, some seconds later:
there the ranks poll until all have opened the same one. That waits for a file system; a checkpoint that another save replaces
meanwhile is the concern of `retry_if_replaced`, around the complete load.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import NoReturn

from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.seen_by_all import check_shared
from fsdp_optim.errors import CheckpointError, ReplacedError
from fsdp_optim.formats.base.protocols import OpenedAs, Reader, replaced_error
from fsdp_optim.storage.base import VISIBLE_WITHIN, Store
from fsdp_optim.transport.agree import MeetingResult, agree, all_equal, all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between attempts on several machines

_FAILED, _REPLACED = b"failed", b"replaced"  # what a rank says that could not open the checkpoint

log = logging.getLogger("fsdp_optim")


def open_on_all(group: RankGroup, store: Store, call: str, *, verify: bool, format: OpenedAs) -> Reader:
    """Open the same checkpoint on all ranks. Called by all ranks.

    `call`: the arguments of the call, which ranks compare. `format` None: it is recognised.

    On one machine, what a rank sees is what is there: a difference raises ReplacedError at once, for `retry_if_replaced`. On
    several machines a rank may see it late, so the ranks open it again within `VISIBLE_WITHIN`.

    Raises, on all ranks:
        ReplacedError: on one machine, some ranks see another checkpoint than the others.
        CheckpointError: no rank can open it; on one machine, some cannot; on several machines, some cannot in time or still see
            another one, or have different folders before them.
    """
    begun, pause = time.monotonic(), _FIRST_PAUSE
    one_machine: bool | None = None
    while True:
        failure, checkpoint = Failure(), None
        with failure:
            checkpoint = open_checkpoint(store, verify=verify, format=format)
        is_same = False
        try:
            result = _compare(group, call, checkpoint, failure)
            failures = [content for content in map(result.content_of, group.ranks) if content]
            is_same = result.all_equal and checkpoint is not None and not failures
        finally:
            if checkpoint is not None and not is_same:
                checkpoint.close()
        if is_same and checkpoint is not None:
            for note in checkpoint.index.facts.notes if group.rank == group.ranks[0] else ():
                log.warning(note)
            return checkpoint
        if len(failures) == len(group.ranks) and _REPLACED not in failures:
            agree(group, "opened", failure.error)  # raises: every rank has brought an error
        if one_machine is None:
            one_machine = all_equal(group, "machines", store.machine_id().encode())
            if not one_machine:
                check_shared(group, store)
        if one_machine:
            _refuse_on_one_machine(group, store, failures, failure)
        if _is_over(group, begun):
            agree(group, "opened", _unseen(failure.error))
            raise CheckpointError(_different(store))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _compare(group: RankGroup, call: str, checkpoint: Reader | None, failure: Failure) -> MeetingResult:
    """Compare what the ranks have opened. A rank that failed has a content, which says how."""
    opened = json.dumps(checkpoint.index.identity, sort_keys=True).encode() if checkpoint is not None else b""
    failed = b"" if failure.error is None else _REPLACED if isinstance(failure.error, ReplacedError) else _FAILED
    return all_gather_bytes(group, f"opened with {call}", failed, opened)


def _refuse_on_one_machine(group: RankGroup, store: Store, failures: Sequence[bytes], failure: Failure) -> NoReturn:
    """Raise the same error on all ranks of one machine, which have not opened the same checkpoint.

    Where a save has replaced the checkpoint for one rank, all ranks must open it again, whatever the others have seen.
    """
    if _REPLACED in failures:
        raise replaced_error(store.where) from failure.error
    agree(group, "opened", failure.error)
    raise ReplacedError(
        _different(store)
    )  # each rank has opened one, so another save has ended between the first and the last


def _different(store: Store) -> str:
    return (
        f"{store.where}: the ranks see different checkpoints: the path must be on a file system that all ranks share, and no "
        "process may save to it again and again during the load"
    )


def _unseen(error: BaseException | None) -> CheckpointError | None:
    """The error of a rank that has not seen in time what others see."""
    return CheckpointError(f"not visible here after {VISIBLE_WITHIN:g} s: {error}") if error is not None else None


def _is_over(group: RankGroup, begun: float) -> bool:
    """Whether the ranks have polled for long enough, by the clock of the lowest: clocks of their own would part them."""
    is_lowest = group.rank == group.ranks[0]
    over = b"over" if is_lowest and time.monotonic() - begun > VISIBLE_WITHIN else b""
    return bool(all_gather_bytes(group, "polled", over).content_of(group.ranks[0]))
