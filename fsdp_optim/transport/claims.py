"""Claims on places for checkpoints: the first ranks of a job that claim a place keep it, and other ranks of the job fail."""

from __future__ import annotations

from msgspec import Struct

from fsdp_optim.errors import CheckpointError
from fsdp_optim.transport.base import Control, RankGroup


class Claim(Struct, frozen=True):
    """A place that some ranks of a job write to, claimed by one of them. `control` None: all ranks of the job write to it."""

    control: Control | None
    who: str
    place: str

    @classmethod
    def acquire(cls, group: RankGroup, place: str) -> Claim:
        """Claim a place for the ranks of a call. Raises CheckpointError where other ranks of the job have claimed it."""
        who = ", ".join(map(str, group.ranks))
        if len(group.ranks) == group.world.size:
            return cls(None, who, place)  # no other ranks are left that could save to the place
        holder = group.world.control.claim(who, place)
        if holder != who:
            raise CheckpointError(
                f"{place}: the ranks [{who}] save to this path, and so do the ranks [{holder}] of the same job, in separate "
                "calls. If all of these ranks save one checkpoint, give process_group= with all of them; else give each call a "
                "path of its own"
            )
        return cls(group.world.control, who, place)

    def release(self) -> None:
        """Release the place after a failure, so that others can claim the place."""
        if self.control is not None:
            self.control.release(self.who, self.place)
