"""The new files of a conversion: planned by all ranks alike, written in units by several threads, and committed like a save."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.contents import SavedValue
from fsdp_optim.checkpoint.common.files import File, planned_files
from fsdp_optim.checkpoint.common.progress import Progress
from fsdp_optim.checkpoint.common.seen_by_all import check_seen_by_all
from fsdp_optim.checkpoint.common.stores import Place, options_of, store_at, store_of_leader
from fsdp_optim.checkpoint.save.file_plan import (
    BY_MACHINES,
    IN_PARTS,
    IN_PLACE,
    PER_RANK,
    FilePlan,
    make_files,
    strategy_for,
)
from fsdp_optim.checkpoint.save.finish import finish
from fsdp_optim.checkpoint.save.job import Job, LeaderSide, abandoned_on_failure, encode_written
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.checksums import hex_of
from fsdp_optim.formats.base.protocols import Half, Reader, Writer, WrittenFormat
from fsdp_optim.offline.conversion.arguments import ConvertArguments
from fsdp_optim.offline.conversion.copy_ranges import CopyRange, plan_units
from fsdp_optim.offline.conversion.source_contents import SourceContents
from fsdp_optim.offline.conversion.unit_sources import UnitSource
from fsdp_optim.offline.conversion.workers import RankWork, num_threads_in, unit_nbytes_in
from fsdp_optim.results.calls import SaveResult
from fsdp_optim.storage.base import (
    Staging,
    Store,
)
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.transport.agree import agree, all_equal, all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.claims import Claim
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.launched import warn_if_alone
from fsdp_optim.wire import decode, encode


class _Decision(Struct, array_like=True, frozen=True, kw_only=True):
    """The decision of the leader about the new files, as it is sent to the other ranks. `part_nbytes`: of files in parts."""

    place: str
    address: str
    strategy: str
    durable: bool
    part_nbytes: dict[str, int]


@dataclass(frozen=True)
class _Begun:
    """The place of the new files, on every rank. `leader`: on the leader."""

    store: Store
    decision: _Decision
    leader: LeaderSide | None


@dataclass(frozen=True)
class NewFiles:
    """A conversion as all ranks plan it.

    Attributes:
        checkpoint: the source, whose facts the new checkpoint gets.
        contents: those of the source, as a save would produce them.
        source: where the elements come from.
        doing: what a bar of progress calls this.
        fingerprint: the fingerprints of the values, which are those of the source, as JSON; empty if there are none.
    """

    group: RankGroup
    checkpoint: Reader
    contents: SourceContents
    source: UnitSource
    writer: Writer
    format: WrittenFormat
    options: ConvertArguments
    files: tuple[File, ...]
    doing: str = "converting"
    fingerprint: bytes = b""

    @classmethod
    def of(
        cls,
        group: RankGroup,
        checkpoint: Reader,
        contents: SourceContents,
        format: WrittenFormat,
        options: ConvertArguments,
        *,
        writer: Writer,
        source: UnitSource,
    ) -> NewFiles:
        shared, most = contents.prepared.shared, options.max_file_size
        halves: dict[Half, Sequence[SavedValue]] = {}
        if contents.weights != "none":
            halves["model"] = contents.model
        if contents.has_optim:
            halves["optim"] = contents.optim
        if contents.trees:
            halves["state"] = contents.trees
        files = planned_files(writer, halves, shared, most_nbytes=most, num_ranks=1)
        return cls(
            group=group,
            checkpoint=checkpoint,
            contents=contents,
            source=source,
            writer=writer,
            format=format,
            options=options,
            files=tuple(files),
        )

    @property
    def compared(self) -> str:
        """The text that ranks compare: the source, the options and the files."""
        files = [[file.name, file.plan.nbytes, hex_of(file.plan.head), self._frames_of(file)] for file in self.files]
        small = {name: hex_of(data) for name, data in self.contents.prepared.files.items()}
        described = [self.format.name, self.unit_nbytes, files, small, self.checkpoint.index.identity]
        return f"{self.options.compared_text()} {json.dumps(described, sort_keys=True, default=str)}"

    def _frames_of(self, file: File) -> str:
        return hex_of(b"".join(b"%d %d " % (at, len(content)) + content for at, content in file.plan.between))

    @property
    def leads(self) -> bool:
        return self.group.rank == self.group.ranks[0]

    @property
    def budget(self) -> Budget:
        return Budget(self.options.bucket_nbytes, "the elements of a checkpoint that a process converts")

    @property
    def unit_nbytes(self) -> int:
        return unit_nbytes_in(self.budget, self.source.num_extra_units)

    def run(self, target: Place) -> SaveResult:
        """Write the new files and commit them."""
        begun = self._begin(target)
        job = self._job(begun)
        total = sum(file.plan.nbytes_of_data for file in self.files)
        progress = Progress(self.options.progress, self.doing, total, shown=self.leads)
        with abandoned_on_failure(job), progress:
            share, failure = self._share(job, begun, progress), Failure()
            with failure:
                first = self._join(begun)
                job.start(first)
                share.run(first, self._num_threads(begun))
            with failure:
                if failure.error is None:
                    self.source.check_unchanged()
            result = all_gather_bytes(
                self.group, "written", encode_written(job, share), error=failure.error, fatal=failure.fatal
            )
            with failure:
                if self.leads:
                    finish(job, [result.content_of(rank) for rank in self.group.ranks])
            agree(self.group, "committed", failure.error)
            progress.done()
        return job.saved(share.nbytes_done)

    # --------------------------------------------------------------------------------------- the place of the new files

    def _begin(self, target: Place) -> _Begun:
        """Agree on the place and on the writer of each file."""
        group, for_target = self.group, options_of(target, self.options.storage_options)
        store = store_at(target, self.format, for_target)
        warn_if_alone(group, store.where, has_group=self.options.call.process_group is not None)
        is_one_machine = all_equal(group, "machines", store.machine_id().encode())
        with ExitStack() as undo:
            leader, content = None, b""
            if self.leads:
                # The claim comes before the staging, which removes leftovers: those of a live save of this job are none.
                claim = Claim.acquire(group, store.where)
                undo.callback(claim.release)
                staging = store.begin(overwrite=self.options.overwrite, durable=self.options.durable)
                undo.callback(staging.abandon)
                leader = LeaderSide(self.contents.prepared, staging, claim)
                content = encode(self._decide(store, staging, is_one_machine=is_one_machine)).encode()
            result = all_gather_bytes(group, "folder", content)
            decision = decode(_Decision, result.content_of(group.ranks[0]))
            store = store_of_leader(target, store, decision.place, self.format, for_target)
            if not is_one_machine:
                check_seen_by_all(group, store, decision.address)
            undo.pop_all()
            return _Begun(store, decision, leader)

    def _decide(self, store: Store, staging: Staging, *, is_one_machine: bool) -> _Decision:
        """Decide how the ranks write, and create the files that several of them write. On the leader."""
        can = staging.capabilities
        if self.format.needs_names and staging.replaces and not can.renames:
            raise CheckpointError(
                f"{store.where}: has objects, and this store would keep the new files of the format {self.format.name} in a "
                "folder beside them, where no other tool looks: convert into a new place, or remove the objects first"
            )
        strategy = strategy_for(can, "auto")
        if strategy == BY_MACHINES:
            strategy = IN_PLACE if is_one_machine else PER_RANK
        if strategy in (IN_PLACE, IN_PARTS):
            make_files(staging, self.files)
        return _Decision(
            place=store.where,
            address=staging.address,  # after the files are made: it names their uploads
            strategy=strategy,
            durable=self.options.durable or staging.replaces,
            part_nbytes={
                file.name: can.part_nbytes_of(file.plan.nbytes) for file in self.files if strategy == IN_PARTS
            },
        )

    # --------------------------------------------------------------------------------------- this rank's share

    def _job(self, begun: _Begun) -> Job:
        """The conversion as a save, which ends like any other."""
        ranks, options = self.group.ranks, self.options
        loads, owners = dict.fromkeys(ranks, 0), {}
        for file in self.files if begun.decision.strategy not in (IN_PLACE, IN_PARTS) else ():
            owner = owners[file.name] = min(loads, key=lambda rank: (loads[rank], rank))
            loads[owner] += file.plan.nbytes
        as_save = SaveArguments(
            process_group=options.process_group,
            timeout=options.timeout,
            step=self.checkpoint.index.facts.step,
            max_file_size=options.max_file_size,
            overwrite=options.overwrite,
            durable=begun.decision.durable,
        )
        return Job(
            group=self.group,
            options=as_save,
            store=begun.store,
            format=self.format,
            address=begun.decision.address,
            token="",
            plan=FilePlan(self.files, owners, ranks=ranks),
            absent=(),
            writer=self.writer,
            extras=self.contents.prepared.files if self.leads else {},
            leader=begun.leader,
            wrapper=self.checkpoint.index.facts.wrapper,
            fingerprint=self.fingerprint,
        )

    def _share(self, job: Job, begun: _Begun, progress: Progress) -> RankWork:
        units = plan_units(self.files, self.unit_nbytes, begun.decision.part_nbytes)
        num, position = len(self.group.ranks), self.group.position
        owners = job.plan.owners
        if owners:
            own_units: Sequence[CopyRange] = [unit for unit in units if owners[unit.file.name] == self.group.rank]
        else:
            own_units = units[len(units) * position // num : len(units) * (position + 1) // num]
        return RankWork(
            self.source,
            self.files,
            own_units,
            join=lambda: self._join(begun),
            unit_nbytes=max((unit.nbytes for unit in own_units), default=0),
            shown=lambda nbytes: progress.up_to(nbytes * num),
        )

    def _join(self, begun: _Begun) -> Any:
        who = f"rank {self.group.rank}"
        budget = self.budget.share(2, "units, and their bytes that the store keeps")
        address, durable = begun.decision.address, begun.decision.durable
        return begun.store.join(address, durable=durable, who=who, budget_nbytes=budget.nbytes)

    def _num_threads(self, begun: _Begun) -> int:
        """The number of threads of this rank: several only where the store takes ranges of one file from several writers."""
        if begun.decision.strategy != IN_PLACE:
            return 1
        return num_threads_in(self.budget, self.unit_nbytes, self.source)
