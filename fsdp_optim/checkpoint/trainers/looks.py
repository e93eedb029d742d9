"""What ranks find in the folders of a trainer: the lowest rank looks, and the others hear of it, so that all take one branch.

Looks of their own could differ, because clients of network file systems keep names and attributes for seconds: some ranks would
load by this library, and others would wait for them in a collective of another one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from fsdp_optim.checkpoint.common.seen_by_all import check_shared, waited_for
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import VISIBLE_WITHIN
from fsdp_optim.storage.posix.files import checkpoint_errors
from fsdp_optim.storage.posix.small_files import has_file, has_size
from fsdp_optim.transport.agree import agree, all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure

FoundT = TypeVar("FoundT")

_OF_ONE_RANK = re.compile(r"(?:rng_state|random_states)_(\d+)\.(?:pth|pkl)")
"""The files of trainers that only the rank of this number reads."""


def by_lowest(group: RankGroup, what: str, do: Callable[[], FoundT]) -> FoundT:
    """What `do` returns on the lowest rank, on all ranks; its error is raised on all of them. Called by all ranks.

    `do` looks at files, or changes them, and returns a value that JSON has.
    """
    failure, content = Failure(), b""
    if group.rank == group.ranks[0]:
        with failure, checkpoint_errors(what):
            content = json.dumps(do()).encode()
    result = all_gather_bytes(group, what, content, error=failure.error)
    return json.loads(result.content_of(group.ranks[0]))  # type: ignore[no-any-return]


def see_files(group: RankGroup, folder: str, sizes: Mapping[str, int]) -> None:
    """Wait until this rank sees the files that it is to read, with the sizes that the lowest rank has found (`sizes_in`).

    Called by all ranks. Raises CheckpointError, on all ranks, where a rank does not see a file in time; within some seconds where
    the ranks have different folders before them.
    """
    check_shared(group, store_at(folder))
    failure, deadline = Failure(), time.monotonic() + VISIBLE_WITHIN
    with failure:
        for name, nbytes in sizes.items():
            of_one = _OF_ONE_RANK.fullmatch(name)
            if of_one is None or int(of_one[1]) == group.rank:
                _see(Path(folder, name), nbytes, deadline)
    agree(group, "the trainer's files are visible", failure.error)


def _see(path: Path, nbytes: int, deadline: float) -> None:
    if not waited_for(lambda: has_size(path, nbytes), deadline - time.monotonic()):
        raise CheckpointError(f"{path}: is not visible here with its {nbytes} bytes after {VISIBLE_WITHIN:g} s")


def see_file(group: RankGroup, folder: str, name: str) -> None:
    """Wait until all ranks see a file, whatever its size: of folders that machines do not share, each may have its own.

    Called by all ranks; raises as `see_files` does.
    """
    failure = Failure()
    with failure:
        if not waited_for(lambda: has_file(folder, name), VISIBLE_WITHIN):
            raise CheckpointError(f"{folder}/{name}: is not visible here after {VISIBLE_WITHIN:g} s")
    agree(group, f"{name} is visible", failure.error)
