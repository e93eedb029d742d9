"""The begin of a save: the ranks read their shards, agree on the files, and the leader begins in the store."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.catalog.newest import Series, outdated
from fsdp_optim.checkpoint.catalog.retention import ManagedSave
from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.contents import LEFT_OUT, RECORDS, HalvesEnd, SavedHalf, read_state, read_weights
from fsdp_optim.checkpoint.common.formats import format_named
from fsdp_optim.checkpoint.common.optim_description import describe
from fsdp_optim.checkpoint.common.pending import pending
from fsdp_optim.checkpoint.common.seen_by_all import check_seen_by_all
from fsdp_optim.checkpoint.common.single_rank_warning import warn_if_alone
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
from fsdp_optim.checkpoint.save.upload import FolderUpload
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base.protocols import (
    COMMON,
    MODULES,
    CheckpointContents,
    Format,
    FormatWriter,
    Prepared,
    rank_extra_name,
)
from fsdp_optim.memory import dtype_name
from fsdp_optim.move import End
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.storage.base import Capabilities, Staging, Store
from fsdp_optim.storage.posix.store import Folder
from fsdp_optim.transport.agree import agree, all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.claims import Claim
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
    if format is None:
        format = format_named(options.format)
    to_store = options.storage_options if options.upload_to is None else None  # else they are of the second place
    store = store_at(path, format, to_store)
    if options.upload_to is not None and not isinstance(store, Folder):
        raise CheckpointError(f"{store.where}: upload_to= is for saves to a folder")
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
        store = store_of_leader(path, store, agreed.place, format, to_store)
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
            group,
            options,
            store,
            format,
            agreed.address,
            agreed.token,
            plan,
            saved.absent,
            saved.writer,
            leading.small_files if leading is not None else saved.small_files,
            leading.prepared if leading is not None else None,
            leading.staging if leading is not None else None,
            leading.claim if leading is not None else None,
            FolderUpload.begin(group, options, format, plan.files, agreed.token),
            managed,
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
    writer: FormatWriter
    names: SavedNames
    weights: SavedHalf
    state: SavedHalf | None
    small_files: Mapping[str, bytes]

    @classmethod
    def read(
        cls,
        name: str,
        reader: ModelReader,
        group: RankGroup,
        optim: Optimizers | None,
        options: SaveArguments,
        writer: FormatWriter,
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
        return cls(options, writer, names, weights, state, _encode_extras(writer, options, group))

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

    def contents(self, world_size: int) -> CheckpointContents:
        """The contents of the checkpoint, without tensor elements."""
        global_state, local = self.weights.global_state, self.weights.local
        left_out = {fqn for fqn, param in global_state.params.items() if param.group_index == LEFT_OUT}
        aliases = {alias: fqn for alias, fqn in local.view.aliases.items() if fqn not in left_out}
        dtype = self.options.weights_dtype
        made = CheckpointContents(
            world_size=world_size,
            params={
                **{tensor.fqn: tensor.placement.shape for tensor in self.weights.tensors},
                **{fqn: param.placement.shape for fqn, param in global_state.params.items() if fqn in left_out},
            },
            aliases={**aliases, **local.module_values.aliases},
            optim=describe(self.state) if self.state is not None else None,
            weights=self.options.weights,
            weights_dtype=dtype_name(dtype) if dtype is not None else None,
        )
        return self.names.of_contents(made)


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
        claim = Claim.lay(group, store.where)
        undo.callback(claim.release)
        staging = store.begin(overwrite=options.overwrite, durable=options.durable)
        undo.callback(staging.abandon)
        if managed is not None:
            managed.known.saves(store.where, staging.token)
        can, durable = staging.capabilities, options.durable or staging.replaces
        if not durable and managed is not None:
            durable = bool(managed.outdated(store, listed, prepared.content, options.step or 0))
        elif not durable:
            durable = _removes(store, options, prepared.content)
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
    small_files, allow_pickle = dict(saved.small_files), saved.options.allow_pickle
    contents = saved.contents(world_size)
    if saved.weights.module_values:
        name, data = saved.writer.extra(MODULES, dict(saved.weights.module_values), allow_pickle=allow_pickle)
        small_files[name] = data
    prepared = saved.writer.prepare(contents, allow_pickle=allow_pickle, records=RECORDS)
    if saved.state is not None and prepared.description is not None:
        prove_loadable(saved.state, prepared.description, saved.names.given)
    return prepared, {**small_files, **prepared.files}


def _removes(store: Store, options: SaveArguments, content: str) -> bool:
    """Whether keep_last removes a checkpoint. Then the new one is flushed to the disk first, even with durable=False."""
    if options.keep_last is None:
        return False
    series = Series.of(store.where, content, options.step, options.keep_last)
    return bool(outdated(store, series, options.keep_last))


def _encode_extras(writer: FormatWriter, options: SaveArguments, group: RankGroup) -> dict[str, bytes]:
    """The values of `state=` as files of this rank; those in common are the lowest rank's. Called by all ranks.

    Raises an error for an unsavable value.
    """
    encoded = []
    common, own = options.state.saved()
    if group.rank == group.ranks[0] and common is not None:
        encoded.append(writer.extra(COMMON, common, allow_pickle=options.allow_pickle))
    if own is not None:
        encoded.append(writer.extra(rank_extra_name(group.position), own, allow_pickle=options.allow_pickle))
    return dict(encoded)
