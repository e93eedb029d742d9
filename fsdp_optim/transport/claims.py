"""Ranks of one job that do not know of each other, and write to one place: the first keep it, the others hear of it."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_optim.errors import CheckpointError
from fsdp_optim.transport.base import Control, RankGroup


@dataclass(frozen=True)
class Claim:
    """A place that some of a job's ranks write to. Made by one of them; `control` None: they are all of the job."""

    control: Control | None
    who: str
    place: str

    @classmethod
    def lay(cls, group: RankGroup, place: str) -> Claim:
        """Claim a place for the ranks of a call. Raises CheckpointError where other ranks of the job have claimed it."""
        who = ", ".join(map(str, group.ranks))
        if len(group.ranks) == group.world.size:
            return cls(None, who, place)
        holder = group.world.control.claim(who, place)
        if holder != who:
            raise CheckpointError(
                f"{place}: the ranks [{who}] save to it, and so do the ranks [{holder}] of the same job, without "
                "knowing of each other. Where they belong together, give process_group= with all of them; else give each a path "
                "of its own"
            )
        return cls(group.world.control, who, place)

    def release(self) -> None:
        """Let others have the place, after a failure."""
        if self.control is not None:
            self.control.release(self.who, self.place)
