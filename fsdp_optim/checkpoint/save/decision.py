"""The decision of the leader about a save, which all ranks follow, and the meeting in which they learn it."""

from __future__ import annotations

from msgspec import Struct

from fsdp_optim.checkpoint.common.seen_by_all import check_seen_by_all
from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, store_of_leader
from fsdp_optim.checkpoint.save.file_plan import BY_MACHINES, IN_PLACE, PER_RANK
from fsdp_optim.formats.base.protocols import WrittenFormat
from fsdp_optim.storage.base import Capabilities, Store
from fsdp_optim.transport.agree import agree, all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.wire import decode, encode


class SaveDecision(Struct, array_like=True, frozen=True, kw_only=True):
    """The decision of the leader about a save, as it is sent to the other ranks.

    `place`, `address`, `token`: the store, and the staging in it. `strategy`: may depend on the machines, as in `Agreement`.
    `shared`: the string from `Prepared`. `part_nbytes`, `most_parts`: as in `Capabilities`.
    """

    place: str
    address: str
    token: str
    strategy: str
    shared: str
    durable: bool
    part_nbytes: int
    most_parts: int

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the store, as far as the plan of the files needs them."""
        return Capabilities(part_nbytes=self.part_nbytes, most_parts=self.most_parts)


class Agreement(Struct, frozen=True):
    """A decision that all ranks have, and the store on which it acts. `one_machine`: all ranks are on one machine."""

    decision: SaveDecision
    store: Store
    one_machine: bool

    @classmethod
    def reach(
        cls,
        group: RankGroup,
        place: Place,
        store: Store,
        format: WrittenFormat,
        storage_options: StorageOptions,
        *,
        decision: SaveDecision | None,
    ) -> Agreement:
        """Meet the other ranks, and check that all see what the leader has made. Called by all ranks.

        `decision`: on the leader; None on the others.
        """
        # One meeting for both: the leader need not know the machines to decide, except where the strategy depends on them.
        content = encode(decision).encode() if decision is not None else b""
        result = all_gather_bytes(group, "folder", content, compared=store.machine_id().encode())
        agreed = decode(SaveDecision, result.content_of(group.ranks[0]))
        store = store_of_leader(place, store, agreed.place, format, storage_options)
        if not result.all_equal:
            check_seen_by_all(group, store, agreed.address)
        return cls(agreed, store, result.all_equal)

    @property
    def strategy(self) -> str:
        """The strategy on these machines."""
        if self.decision.strategy != BY_MACHINES:
            return self.decision.strategy
        return IN_PLACE if self.one_machine else PER_RANK

    def wait_for_files(self, group: RankGroup) -> None:
        """Wait until the leader has made the shared files. Called by all ranks.

        Files of a strategy that depends on no machines were made before the meeting in `reach`.
        """
        if self.decision.strategy == BY_MACHINES and self.one_machine:
            agree(group, "files are made")
