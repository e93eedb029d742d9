"""The `Control` over the rendezvous store of the job: any set of ranks can agree, and a missing rank leaves nothing pending."""

from __future__ import annotations

import hashlib

from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import INTERRUPTS
from fsdp_optim.transport.job.job_store import JobStore
from fsdp_optim.transport.meeting import Meeting
from fsdp_optim.transport.verdict import Statement, Verdict

_CLAIMS = "fsdp_optim/claims"


class StoreControl:
    """The `Control` of torch.distributed's ranks. `calls`: the store for meetings; `board`: the store that any thread may use."""

    def __init__(self, calls: JobStore, board: JobStore) -> None:
        self._calls, self._board = calls, board

    def meet(self, group: RankGroup, statement: Statement) -> Verdict:
        """Meet as `Control.meet` says."""
        while True:
            meeting = Meeting.enter(group, self._calls)
            record, interrupt = meeting.conclude(statement)
            if group.rank not in record.missing or not meeting.catch_up(record):
                break
        try:
            self._board.neighbours = self._calls.note_neighbours()
        except INTERRUPTS as error:
            interrupt = interrupt or error
        return Verdict(
            all_equal=record.all_equal,
            reasons=record.reasons,
            missing=record.missing,
            text=record.text,
            is_early=record.is_early,
            flags=record.flags,
            content_of=meeting.reader(record),
            interrupt=interrupt,
        )

    def claim(self, who: str, place: str) -> str:
        """Claim as `Control.claim` says. The store keeps two keys for each `who`, whatever the number of earlier places."""
        store = self._board
        # compare_set, so that of two owners that claim a place at once exactly one gets it, and both learn which.
        holder = store.compare_set(place_key(place), "", who).decode()
        if holder == who:
            last_place_key = f"{_CLAIMS}/by/{who}"
            previous = store.read(last_place_key)
            if previous is not None and previous.decode() != place:
                store.delete_key(place_key(previous.decode()))
            store.set(last_place_key, place)
        return holder

    def release(self, who: str, place: str) -> None:
        """Release as `Control.release` says."""
        store = self._board
        store.delete_key(place_key(place))
        store.delete_key(f"{_CLAIMS}/by/{who}")


def place_key(place: str) -> str:
    """Return the key of a claimed place in the store."""
    return f"{_CLAIMS}/at/{hashlib.blake2b(place.encode(errors='surrogateescape'), digest_size=16).hexdigest()}"
