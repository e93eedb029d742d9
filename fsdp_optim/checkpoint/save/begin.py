"""The begin of a save: read the shards, inspect the place, decide, create; then every rank follows the leader's decision."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from msgspec import Struct

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.catalog.listing import ListedCheckpoint
from fsdp_optim.checkpoint.catalog.retention import ManagedSave
from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.formats import format_of_option
from fsdp_optim.checkpoint.common.pending import pending
from fsdp_optim.checkpoint.common.stores import Place, name_of, store_at
from fsdp_optim.checkpoint.save.decision import Agreement, SaveDecision
from fsdp_optim.checkpoint.save.file_plan import (
    BY_MACHINES,
    IN_PARTS,
    IN_PLACE,
    FilePlan,
    make_files,
    strategy_for,
)
from fsdp_optim.checkpoint.save.job import Job, LeaderSide
from fsdp_optim.checkpoint.save.save_contents import SaveContents
from fsdp_optim.formats.base.protocols import (
    Format,
    Prepared,
    WrittenFormat,
)
from fsdp_optim.move import End
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.storage.base import Capabilities, Staging, Store
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.claims import Claim
from fsdp_optim.transport.launched import warn_if_alone

log = logging.getLogger("fsdp_optim")


def begin(
    path: Place,
    reader: ModelReader,
    group: RankGroup,
    optim: Optimizers | None,
    options: SaveArguments,
    *,
    format: Format | None,
    managed: ManagedSave | None = None,
) -> tuple[Job, End]:
    """Agree with the other ranks on the files, and begin the save in the store. No tensor is written yet.

    Returns the save, and the live tensors as the source of a move. `format` None: that of the options. `managed`: the additions
    of a CheckpointManager.
    """
    written = format_of_option(format if format is not None else options.format, of_save=True)
    store = store_at(path, written, options.storage_options)
    warn_if_alone(group, store.where, has_group=options.call.process_group is not None)
    pending.settle(managed.known if managed is not None else None)
    contents = SaveContents.read(name_of(path), reader, group, optim, options, writer=written.writer())
    leads = group.rank == group.ranks[0]
    wrapper = reader.wrappers if leads else ""  # for the manifest, which the leader writes
    beginning = _Beginning(path, group, store, written, contents, managed, wrapper=wrapper)
    with ExitStack() as undo:
        job = beginning.lead(undo) if leads else beginning.follow()
        undo.pop_all()
        return job, contents.live


class _Beginning(Struct, frozen=True):
    """A save that begins, on one rank.

    `lead` and `follow` meet the other ranks in the same order: `Agreement.reach`, then `Agreement.wait_for_files`.
    """

    path: Place
    group: RankGroup
    store: Store
    format: WrittenFormat
    contents: SaveContents
    managed: ManagedSave | None
    wrapper: str

    def lead(self, undo: ExitStack) -> Job:
        """Begin the save in the store, on the lowest rank. `undo` gets the steps to undo after a failure."""
        options, managed = self.contents.options, self.managed

        # Inspect. What cannot be loaded, or must not be replaced, is refused before anything is made.
        prepared, small_files = self.contents.prepare(len(self.group.ranks))
        listed = managed.check(self.store) if managed is not None else ()

        # The claim comes before the staging, which removes leftovers: those of a save of this job that is alive are none.
        claim = Claim.acquire(self.group, self.store.where)
        undo.callback(claim.release)
        staging = self.store.begin(overwrite=options.overwrite, durable=options.durable)
        undo.callback(staging.abandon)
        if managed is not None:
            managed.known.saves(self.store.where, staging.token)

        # Decide.
        can = staging.capabilities
        strategy = strategy_for(can, options.strategy)
        durable = self._is_durable(staging, listed, prepared)

        def create_files(strategy: str) -> FilePlan:
            plan = self.contents.plan_files(self.group.ranks, strategy, shared=prepared.shared, capabilities=can)
            if strategy in (IN_PLACE, IN_PARTS):
                make_files(staging, plan.files)
            return plan

        # Create. Files are made before the ranks meet, so that one meeting does, unless the strategy depends on the machines,
        # which only the meeting shows.
        plan = create_files(strategy) if strategy != BY_MACHINES else None
        decision = SaveDecision(
            place=self.store.where,
            address=staging.address,  # after the files are made: it names their uploads
            token=staging.token,
            strategy=strategy,
            shared=prepared.shared,
            durable=durable,
            part_nbytes=can.part_nbytes,
            most_parts=can.most_parts,
        )
        agreement = self._reach(decision)
        if not agreement.one_machine:
            _warn_of_strategy(self.store.where, strategy, can)
        plan = plan or create_files(agreement.strategy)
        agreement.wait_for_files(self.group)
        return self._job(
            agreement, plan, small_files, LeaderSide(prepared, staging, claim, *self.contents.object_prints())
        )

    def follow(self) -> Job:
        """Take part in the save that the leader has begun, on every other rank."""
        agreement = self._reach(None)
        decision = agreement.decision
        agreement.wait_for_files(self.group)
        plan = self.contents.plan_files(
            self.group.ranks, agreement.strategy, shared=decision.shared, capabilities=decision.capabilities
        )
        return self._job(agreement, plan, self.contents.small_files, None)

    def _reach(self, decision: SaveDecision | None) -> Agreement:
        storage_options = self.contents.options.storage_options
        return Agreement.reach(self.group, self.path, self.store, self.format, storage_options, decision=decision)

    def _is_durable(self, staging: Staging, listed: Sequence[ListedCheckpoint], prepared: Prepared) -> bool:
        """Whether the save must be on the disk when it ends: also where it replaces, or removes, a checkpoint that is there."""
        options, managed = self.contents.options, self.managed
        if options.durable or staging.replaces or managed is None:
            return options.durable or staging.replaces
        content = prepared.content
        if managed.with_outdated_optim(self.store, listed, content):
            return True
        return bool(managed.outdated(self.store, listed, content, options.step or 0))

    def _job(
        self, agreement: Agreement, plan: FilePlan, small_files: Mapping[str, bytes], leader: LeaderSide | None
    ) -> Job:
        decision, contents = agreement.decision, self.contents
        return Job(
            group=self.group,
            options=replace(contents.options, durable=decision.durable),
            store=agreement.store,
            format=self.format,
            address=decision.address,
            token=decision.token,
            plan=plan,
            absent=contents.absent,
            writer=contents.writer,
            extras=small_files,
            leader=leader,
            managed=self.managed,
            wrapper=self.wrapper,
        )


def _warn_of_strategy(place: str, strategy: str, capabilities: Capabilities) -> None:
    """Warn where several machines write ranges of one file because the caller wants that, and the store may lose some."""
    if strategy == IN_PLACE and capabilities.writes_ranges == "on one machine":
        log.warning(
            '%s: strategy="in_place" lets ranks on several machines write into one file. If this file system keeps a copy of '
            'the file, or of its pages, on each machine, bytes are lost: with strategy="auto" each rank writes its own files',
            place,
        )
