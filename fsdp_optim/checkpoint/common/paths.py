"""The place of a checkpoint, made equal on all ranks."""

from __future__ import annotations

import os

from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, store_at, store_of_leader
from fsdp_optim.storage.base import Store
from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.base import RankGroup


def common_store(group: RankGroup, place: Place, options: StorageOptions = None) -> Store:
    """The store of a place, the same on all ranks: a relative path counts from the working directory of the lowest rank.

    Called by all ranks.
    """
    mine = store_at(place, options=options)
    content = os.fsencode(mine.where)
    result = all_gather_bytes(group, "path", content if group.rank == group.ranks[0] else b"", compared=content)
    if result.all_equal:
        return mine
    return store_of_leader(place, mine, os.fsdecode(result.content_of(group.ranks[0])), options=options)
