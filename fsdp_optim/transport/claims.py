"""Ranks of one job that do not know of each other, and write to one place: the first keep it, the others hear of it.

What is claimed is in the store of the whole job. Ranks hold one claim at a time, so that no keys add up.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from fsdp_optim.errors import CheckpointError
from fsdp_optim.transport.rank_group import RankGroup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PREFIX = "fsdp_optim/claims"


@dataclass(frozen=True)
class Claim:
    """A place that some of a job's ranks write to. Made by one of them; `store` None: they are all of the job, or alone in it."""

    store: Store | None
    who: str
    place: str

    @classmethod
    def lay(cls, callers: RankGroup, place: str) -> Claim:
        """Claim a place for the ranks of a call. Raises CheckpointError where other ranks of the job have claimed it."""
        who = ", ".join(map(str, callers.ranks))
        if not dist.is_initialized() or len(callers.ranks) == dist.get_world_size():
            return cls(None, who, place)
        claim = cls(replace(callers, group=None).store(), who, place)
        claim._enter()
        return claim

    def _enter(self) -> None:
        if self.store is None:
            return
        holder = bytes(self.store.compare_set(self._at(self.place), "", self.who)).decode()
        if holder != self.who:
            raise CheckpointError(
                f"{self.place}: the ranks [{self.who}] save to it, and so do the ranks [{holder}] of the same job, without "
                "knowing of each other. Where they belong together, give process_group= with all of them; else give each a path "
                "of its own"
            )
        mine = f"{_PREFIX}/by/{self.who}"
        previous = bytes(self.store.get(mine)).decode() if self.store.check([mine]) else self.place
        if previous != self.place:
            self.store.delete_key(self._at(previous))
        self.store.set(mine, self.place)

    def release(self) -> None:
        """Let others have the place, after a failure."""
        if self.store is not None:
            self.store.delete_key(self._at(self.place))
            self.store.delete_key(f"{_PREFIX}/by/{self.who}")

    @staticmethod
    def _at(place: str) -> str:
        return f"{_PREFIX}/at/{hashlib.blake2b(place.encode(errors='surrogateescape'), digest_size=16).hexdigest()}"
