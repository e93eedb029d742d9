"""What ranks find in the folders of a trainer: the lowest rank looks, and the others hear of it, so that all take one branch.

Looks of their own could differ, because clients of network file systems keep names and attributes for seconds: some ranks would
load by this library, and others would wait for them in a collective of another one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from fsdp_optim.checkpoint.common.seen_by_all import check_shared, waited_for
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.checkpoint.trainers.meeting import meeting
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.options import CallOptions
from fsdp_optim.storage.base import VISIBLE_WITHIN
from fsdp_optim.storage.posix.files import checkpoint_errors
from fsdp_optim.storage.posix.small_files import has_file, has_size
from fsdp_optim.transport.agree import agree, all_gather_bytes
from fsdp_optim.transport.failure import Failure

FoundT = TypeVar("FoundT")

_CALL = CallOptions()


def by_lowest(what: str, do: Callable[[], FoundT], options: CallOptions = _CALL) -> FoundT:
    """What `do` returns on the lowest rank, on all ranks. Called by all ranks of the job; `do` is called on the lowest one alone.

    So that all ranks take one branch: what `do` finds in a folder, ranks on other machines may find seconds later. It may change
    files too, such as remove old ones.

    Args:
        what: what `do` does, for errors; the same on all ranks.
        do: a function that returns a value which JSON has. A tuple becomes a list.
        options: `process_group`: fewer ranks than the job's; `timeout`: how long the ranks wait for each other.

    Raises (the same on all ranks):
        CheckpointError: the file system refuses what `do` does.
        FsdpOptimError: any other error that `do` raises on the lowest rank.
        RankTimeoutError: a rank did not come in time.
    """
    with meeting(what, options) as group:
        failure, content = Failure(), b""
        if group.rank == group.ranks[0]:
            with failure, checkpoint_errors(what):
                content = json.dumps(do()).encode()
        result = all_gather_bytes(group, what, content, error=failure.error)
        return json.loads(result.content_of(group.ranks[0]))  # type: ignore[no-any-return]


def see_files(
    folder: str | os.PathLike[str],
    sizes: Mapping[str, int | None],
    options: CallOptions = _CALL,
    *,
    shared: bool = True,
) -> None:
    """Wait until this rank sees files that the lowest rank has found. Called by all ranks of the job.

    Args:
        folder: the folder of the files.
        sizes: by name, the size in bytes of each file that this rank is to read, as `sizes_in` gives them; None: any size. Each
            rank may name other files.
        options: as for `by_lowest`.
        shared: the folder is the same for all ranks, which is checked. False: each machine may have its own; equal on all ranks.

    Raises (the same on all ranks):
        CheckpointError: a rank does not see a file in time, or the ranks have different folders before them.
        RankTimeoutError: a rank did not come in time.
    """
    with meeting("look", options) as group:
        if shared:
            check_shared(group, store_at(folder))
        failure, deadline = Failure(), time.monotonic() + VISIBLE_WITHIN
        with failure:
            for name, nbytes in sizes.items():
                _see(Path(folder), name, nbytes, deadline)
        agree(group, "the trainer's files are visible", failure.error)


def _see(folder: Path, name: str, nbytes: int | None, deadline: float) -> None:
    def is_here() -> bool:
        return has_file(folder, name) if nbytes is None else has_size(folder / name, nbytes)

    if not waited_for(is_here, deadline - time.monotonic()):
        size = f" with its {nbytes} bytes" if nbytes is not None else ""
        raise CheckpointError(f"{folder / name}: is not visible here{size} after {VISIBLE_WITHIN:g} s")


def has_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has a checkpoint of this library, as far as this rank sees. Raises CheckpointError if it cannot tell."""
    return has_file(folder, OURS.probe.manifest)
