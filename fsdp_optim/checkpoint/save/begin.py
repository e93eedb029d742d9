"""The begin of a save: the ranks read their shards, agree on the files, and the leader begins in the store."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from typing import Any

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.catalog.retention import ManagedSave
from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.contents import LEFT_OUT, RECORDS, HalvesEnd, SavedHalf, read_state, read_weights
from fsdp_optim.checkpoint.common.formats import format_of_option
from fsdp_optim.checkpoint.common.optim_description import describe, small_values, stored_tensors
from fsdp_optim.checkpoint.common.pending import pending
from fsdp_optim.checkpoint.common.seen_by_all import check_seen_by_all
from fsdp_optim.checkpoint.common.stores import Place, name_of, store_at, store_of_leader
from fsdp_optim.checkpoint.save.file_plan import (
    BY_MACHINES,
    IN_PARTS,
    IN_PLACE,
    PER_RANK,
    FilePlan,
    make_files,
    strategy_for,
)
from fsdp_optim.checkpoint.save.job import Job
from fsdp_optim.checkpoint.save.loadable_check import prove_loadable
from fsdp_optim.checkpoint.save.renaming import SavedNames
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.index import CheckpointIndex, Facts, KnownExtra, StoredExtra, StoredOptim
from fsdp_optim.formats.base.protocols import (
    COMMON,
    MODULES,
    Format,
    Prepared,
    SavedWeights,
    Writer,
    rank_extra_name,
)
from fsdp_optim.memory import dtype_name
from fsdp_optim.move import End
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.storage.base import Capabilities, Staging, Store
from fsdp_optim.transport.agree import agree, all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.claims import Claim
from fsdp_optim.transport.launched import warn_if_alone
from fsdp_optim.verbs.ends import LiveEnd

log = logging.getLogger("fsdp_optim")


def begin(
    path: Place,
    reader: ModelReader,
    group: RankGroup,
    optim: Optimizers | None,
    options: SaveArguments,
    format: Format | None,
    managed: ManagedSave | None = None,
) -> tuple[Job, End]:
    """Agree with the other ranks on the files, and begin the save in the store. No tensor is written yet.

    Returns the save, and the live tensors as the source of a move. `managed`: the additions of a CheckpointManager.
    """
    format = format_of_option(format if format is not None else options.format, of_save=True)
    store = store_at(path, format, options.storage_options)
    warn_if_alone(group, store.where, has_group=options.call.process_group is not None)
    pending.settle(managed.known if managed is not None else None)
    saved = SaveContents.read(name_of(path), reader, group, optim, options, format.writer())
    with ExitStack() as undo:
        leading: LeaderSetup | None = None
        if group.rank == group.ranks[0]:
            leading = LeaderSetup.begin(saved, group, store, managed, undo)
        result = all_gather_bytes(
            group, "folder", leading.words if leading else b"", compared=store.machine_id().encode()
        )
        agreed = SaveDecision.decode(result.content_of(group.ranks[0]))
        if leading is not None and not result.all_equal:
            agreed.warn_of_strategy()
        store = store_of_leader(path, store, agreed.place, format, options.storage_options)
        if not result.all_equal:
            check_seen_by_all(group, store, agreed.address)
        plan = leading.plan if leading is not None else None
        if agreed.strategy == BY_MACHINES:
            agreed = replace(agreed, strategy=IN_PLACE if result.all_equal else PER_RANK)
            if agreed.strategy == IN_PLACE:
                if leading is not None:
                    plan = saved.planned(group, agreed)
                    make_files(leading.staging, plan.files)
                agree(group, "files are made")
        plan = saved.planned(group, agreed) if plan is None else plan
        options = replace(options, durable=agreed.durable)
        job = Job(
            group=group,
            options=options,
            store=store,
            format=format,
            address=agreed.address,
            token=agreed.token,
            plan=plan,
            absent=saved.absent,
            writer=saved.writer,
            extras=leading.small_files if leading is not None else saved.small_files,
            prepared=leading.prepared if leading is not None else None,
            staging=leading.staging if leading is not None else None,
            claim=leading.claim if leading is not None else None,
            managed=managed,
        )
        undo.pop_all()
        return job, saved.live


@dataclass(frozen=True)
class SaveDecision:
    """The decisions of the leader about a save, which all ranks follow.

    `place`, `address`, `token`: the store, and the staging in it. `shared`: the string from `Prepared`. `ranges`, `part_nbytes`,
    `most_parts`: as in `Capabilities`.
    """

    place: str
    address: str
    token: str
    strategy: str
    shared: str
    durable: bool
    ranges: str
    part_nbytes: int
    most_parts: int

    def warn_of_strategy(self) -> None:
        """Warn where several machines write ranges of one file because the caller wants that, and the store may lose some."""
        if self.strategy == IN_PLACE and self.ranges == "on one machine":
            log.warning(
                '%s: strategy="in_place" lets ranks on several machines write into one file. If this file system keeps a copy of '
                'the file, or of its pages, on each machine, bytes are lost: with strategy="auto" each rank writes its own files',
                self.place,
            )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(part_nbytes=self.part_nbytes, most_parts=self.most_parts)

    def encode(self) -> bytes:
        return json.dumps(astuple(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> SaveDecision:
        return cls(*json.loads(data))


@dataclass(frozen=True)
class SaveContents:
    """The content that a rank saves, as all ranks read it together: weights and state under the saved names, and small files."""

    options: SaveArguments
    writer: Writer
    names: SavedNames
    weights: SavedHalf
    state: SavedHalf | None
    common: Any  # of the values of state=, those that all ranks have in common; None: there are none
    small_files: Mapping[str, bytes]

    @classmethod
    def read(
        cls,
        name: str,
        reader: ModelReader,
        group: RankGroup,
        optim: Optimizers | None,
        options: SaveArguments,
        writer: Writer,
    ) -> SaveContents:
        about = f"{name!r}, {'an' if optim is not None else 'no'} optimizer"
        if options.weights == "none" and optim is None:
            raise StateError(
                'weights="none" without an optimizer leaves nothing to save: give optim= too, or other weights='
            )
        weights = read_weights(reader, group, options, options.call, about, options.weights, options.weights_dtype)
        state = read_state(reader, optim, group, options, options.call, about) if optim is not None else None
        names = SavedNames.of(group, options.rename, weights, state)
        weights, state = names.of_half(weights), names.of_half(state) if state is not None else None
        common, own = options.state.saved()  # on every rank: a state_dict() may be a collective call
        return cls(options, writer, names, weights, state, common, _encode_per_rank(writer, own, options, group))

    @property
    def live(self) -> HalvesEnd:
        """The live tensors as the source of a move."""
        return HalvesEnd(LiveEnd(self.weights.local), LiveEnd(self.state.local) if self.state is not None else None)

    @property
    def absent(self) -> tuple[str, ...]:
        """The parameters without optimizer state."""
        params = self.state.global_state.params.values() if self.state is not None else ()
        return tuple(param.fqn for param in params if param.summary is None)

    def planned(self, group: RankGroup, agreed: SaveDecision) -> FilePlan:
        halves = self.weights, self.state
        strategy, shared, can = agreed.strategy, agreed.shared, agreed.capabilities
        return FilePlan.of(self.writer, self.options, *halves, group.ranks, strategy, shared, can)

    def index(self, world_size: int) -> CheckpointIndex:
        """The index of the new checkpoint, as the lowest rank has it."""
        global_state, local, dtype = self.weights.global_state, self.weights.local, self.options.weights_dtype
        left_out = {fqn for fqn, param in global_state.params.items() if param.group_index == LEFT_OUT}
        aliases = {alias: fqn for alias, fqn in local.view.aliases.items() if fqn not in left_out}
        optim: StoredOptim | None = None
        if self.state is not None:
            saved = self.names.of_optim(describe(self.state))
            optim = StoredOptim(stored_tensors(self.state), lambda *_: saved, read=small_values(self.state))
        extras: dict[str, StoredExtra] = {}
        if self.common is not None:
            extras[COMMON] = KnownExtra(self.common)
        if self.weights.module_values:
            extras[MODULES] = KnownExtra(dict(self.weights.module_values))
        which = SavedWeights(self.options.weights, dtype_name(dtype) if dtype is not None else None)
        index = CheckpointIndex(
            where="the new checkpoint",
            weights=stored_tensors(self.weights),
            facts=Facts("", world_size, self.options.step, which),
            aliases={**aliases, **local.module_values.aliases},
            optim=optim,
            extras=extras,
            left_out={fqn: param.placement.shape for fqn, param in global_state.params.items() if fqn in left_out},
        )
        return self.names.of_index(index)


@dataclass(frozen=True)
class LeaderSetup:
    """The work of the lowest rank alone at the begin of a save.

    `plan`: None if the machines of the other ranks decide the strategy. `small_files`: those of `SaveContents`, and the format's.
    """

    prepared: Prepared
    small_files: Mapping[str, bytes]
    claim: Claim
    staging: Staging
    plan: FilePlan | None
    words: bytes

    @classmethod
    def begin(
        cls, saved: SaveContents, group: RankGroup, store: Store, managed: ManagedSave | None, undo: ExitStack
    ) -> LeaderSetup:
        """Begin the save in the store. Refuses values that cannot be loaded. `undo` gets the steps to undo after a failure."""
        options = saved.options
        prepared, small_files = _prepared(saved, len(group.ranks))
        listed = managed.check(store) if managed is not None else ()
        claim = Claim.acquire(group, store.where)
        undo.callback(claim.release)
        staging = store.begin(overwrite=options.overwrite, durable=options.durable)
        undo.callback(staging.abandon)
        if managed is not None:
            managed.known.saves(store.where, staging.token)
        can, durable = staging.capabilities, options.durable or staging.replaces
        if not durable and managed is not None:
            durable = bool(managed.outdated(store, listed, prepared.content, options.step or 0))
        agreed = SaveDecision(
            place=store.where,
            address=staging.address,
            token=staging.token,
            strategy=strategy_for(can, options.strategy),
            shared=prepared.shared,
            durable=durable,
            ranges=can.writes_ranges,
            part_nbytes=can.part_nbytes,
            most_parts=can.most_parts,
        )
        plan: FilePlan | None = None
        if agreed.strategy in (IN_PLACE, IN_PARTS):
            plan = saved.planned(group, agreed)
            make_files(staging, plan.files)
        agreed = replace(agreed, address=staging.address)  # which names the uploads that the new files have begun
        return cls(prepared, small_files, claim, staging, plan, agreed.encode())


def _prepared(saved: SaveContents, world_size: int) -> tuple[Prepared, Mapping[str, bytes]]:
    """The prepared save of the format, and all small files of the lowest rank. Refuses values that could not be loaded."""
    index = saved.index(world_size)
    prepared = saved.writer.prepare(index, allow_pickle=saved.options.allow_pickle, records=RECORDS)
    if saved.state is not None and index.optim is not None and prepared.description is not None:
        prove_loadable(saved.state, index.optim, prepared.description, saved.names.given)
    return prepared, {**saved.small_files, **prepared.files}


def _encode_per_rank(writer: Writer, own: Any, options: SaveArguments, group: RankGroup) -> dict[str, bytes]:
    """The values of this rank alone as files. Raises CheckpointError for an unsavable value."""
    if own is None:
        return {}
    return dict([writer.small(rank_extra_name(group.position), own, allow_pickle=options.allow_pickle)])
