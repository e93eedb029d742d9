"""The place of a checkpoint, made equal on all ranks."""

from __future__ import annotations

import os

from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, store_at, store_of_leader
from fsdp_optim.storage.base import Store
from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.base import RankGroup


def common_store(group: RankGroup, place: Place, options: StorageOptions = None) -> Store:
    """Return the store of a place, the same on all ranks. Called by all ranks.

    A relative path counts from the working directory of the lowest rank.
    """
    own_store = store_at(place, options=options)
    content = os.fsencode(own_store.where)
    result = all_gather_bytes(group, "path", content if group.rank == group.ranks[0] else b"", compared=content)
    if result.all_equal:
        return own_store
    return store_of_leader(place, own_store, os.fsdecode(result.content_of(group.ranks[0])), options=options)
