"""Convert: writes a checkpoint again, in another format or in other files, without a model and in bounded memory.

All processes that make the call read the description of the source, plan the same files and units, and copy a share of the units
each, in several threads. The new files are written aside and committed like a save. In a folder, and in a bucket that takes
parts, what a killed conversion has left is recognised by a digest of the source and of the plan, and the next call goes on there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fsdp_optim.buckets.schemes import scheme_of
from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.contents import SavedValue
from fsdp_optim.checkpoint.common.files import File, files_of_both
from fsdp_optim.checkpoint.common.formats import FormatChoices, format_named
from fsdp_optim.checkpoint.common.progress import Progress
from fsdp_optim.checkpoint.common.seen_by_all import check_seen_by_all
from fsdp_optim.checkpoint.common.single_rank_warning import warn_if_alone
from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, store_at, store_of_leader
from fsdp_optim.checkpoint.load.opening import open_on_all
from fsdp_optim.checkpoint.save.file_plan import BY_MACHINES, IN_PARTS, IN_PLACE, FilePlan, make_files, strategy_for
from fsdp_optim.checkpoint.save.finish import finish
from fsdp_optim.checkpoint.save.job import Job, encode_written
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base.checksums import hex_of
from fsdp_optim.formats.base.protocols import Format, FormatReader, FormatWriter, Half
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.memory import Budget
from fsdp_optim.offline.arguments import ConvertArguments
from fsdp_optim.offline.convert_file import named, place_of
from fsdp_optim.offline.copy_ranges import DIGEST_NBYTES, CopyRange, plan_units
from fsdp_optim.offline.source_contents import SourceContents, SourceNaming, describe_source
from fsdp_optim.offline.workers import JOURNAL, RankWork, num_lanes_in, unit_nbytes_in
from fsdp_optim.options import CallArguments, Model
from fsdp_optim.results import SaveResult
from fsdp_optim.storage.base import (
    Opened,
    ResumableStaging,
    ResumableStore,
    Staging,
    Store,
    can_be_left,
    is_resumable,
    keeps_parts,
    resumes_parts,
)
from fsdp_optim.transport.agree import agree, all_equal, all_gather_bytes, all_hear, in_turn
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.claims import Claim
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import world_here

log = logging.getLogger("fsdp_optim")


def convert(
    source: Place,
    target: Place,
    options: ConvertArguments,
    model: Model | None = None,
    *,
    source_format: Format | None = None,
    target_format: Format | None = None,
) -> SaveResult:
    """Verify a checkpoint and write it again. Called by all ranks of the process group.

    `source_format` None: the format is recognised. `target_format` None: the format that the options name.
    """
    group = _callers(options.call)
    with in_turn(group), all_hear(group):
        options.validate()
        format = target_format or format_named(
            options.format,
            FormatChoices(options.world_size, options.key_by, units=options.units, flattens=options.flatten_parameters),
        )
        its = store_at(source, source_format or OURS, _options_of(source, options.storage_options))
        with closing(open_on_all(group, its, "", verify=True, format=source_format)) as checkpoint:
            naming, writer = SourceNaming(options.param_names, model), format.writer()
            transcript = describe_source(checkpoint, writer, naming, allow_pickle=options.allow_pickle)
            work = _Work.of(group, checkpoint, transcript, writer, format, options)
            if not all_equal(group, "read", work.compared.encode()):
                raise StateError(
                    f"{checkpoint.where}: the processes that convert it see different checkpoints, or have other options: give "
                    "all of them the same path and options"
                )
            for why in transcript.left_out if work.leads else ():
                log.warning("left out of the new checkpoint: %s", why)
            if work.leads:
                target, options = place_of(target, format, options)
            saved = replace(work, options=options).run(target)
            return named(group, saved, durable=options.durable)


def _callers(options: CallArguments) -> RankGroup:
    """The ranks that make the call: those of the process group, or all ranks of the job."""
    world, group = world_here(), options.process_group
    ranks = world.ranks_of(group) if group is not None else range(world.size)
    return world.group("convert", ranks, group, options.seconds, options.bucket_nbytes)


def _options_of(place: Place, options: StorageOptions) -> StorageOptions:
    """The options of a place: a path has none, because the other place of the call may be a URL."""
    return options if isinstance(place, str) and scheme_of(place) is not None else None


@dataclass(frozen=True)
class _Begun:
    """The place of the new files, on every rank. `staging`: on the leader. `staged`, `noted`: those of a killed process."""

    store: Store
    strategy: str
    address: str
    durable: bool
    part_nbytes: Mapping[str, int]
    staging: Staging | None = None
    claim: Claim | None = None
    staged: Opened | None = None
    noted: Mapping[tuple[str, int], tuple[str, bytes]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Work:
    """A conversion as all ranks plan it."""

    group: RankGroup
    checkpoint: FormatReader
    transcript: SourceContents
    writer: FormatWriter
    format: Format
    options: ConvertArguments
    files: tuple[File, ...]

    @classmethod
    def of(
        cls,
        group: RankGroup,
        checkpoint: FormatReader,
        transcript: SourceContents,
        writer: FormatWriter,
        format: Format,
        options: ConvertArguments,
    ) -> _Work:
        shared, most = transcript.prepared.shared, options.max_file_size
        halves: dict[Half, Sequence[SavedValue]] = {}
        if transcript.weights != "none":
            halves["model"] = transcript.model
        if transcript.has_optim:
            halves["optim"] = transcript.optim
        files = files_of_both(writer, halves, shared, most_nbytes=most, num_ranks=1)
        return cls(group, checkpoint, transcript, writer, format, options, tuple(files))

    @property
    def compared(self) -> str:
        """The text that ranks compare: the source, the options and the files."""
        return f"{self.options.compared_text()} {self._described}"

    @cached_property
    def _described(self) -> str:
        """The source, the new files and the cut of both, as text."""
        files = [[file.name, file.plan.nbytes, hex_of(file.plan.head), self._frames_of(file)] for file in self.files]
        small = {name: hex_of(data) for name, data in self.transcript.files.items()}
        described = [self.format.name, self.unit_nbytes, files, small, self.checkpoint.identity]
        return json.dumps(described, sort_keys=True, default=str)

    def _frames_of(self, file: File) -> str:
        return hex_of(b"".join(b"%d %d " % (at, len(content)) + content for at, content in file.plan.between))

    @property
    def note(self) -> str:
        """The text by which the next call recognises the files of this call, if this call is killed."""
        digests = [hex_of(f"{salt}{self._described}{self.checkpoint.versions()}".encode()) for salt in ("a", "b")]
        return f"fsdp_optim.convert {''.join(digests)}"

    @property
    def leads(self) -> bool:
        return self.group.rank == self.group.ranks[0]

    @property
    def budget(self) -> Budget:
        return Budget(self.options.bucket_nbytes, "the elements of a checkpoint that a process converts")

    @property
    def unit_nbytes(self) -> int:
        """The length of units: it depends on nothing that may differ when a conversion goes on."""
        return unit_nbytes_in(self.budget)

    def run(self, target: Place) -> SaveResult:
        """Write the new files and commit them."""
        begun = self._begin(target)
        job = self._job(begun)
        with _given_up(job), ExitStack() as stack:
            if begun.staged is not None:
                stack.enter_context(begun.staged)
            total = sum(file.plan.nbytes_of_data for file in self.files)
            progress = stack.enter_context(Progress(self.options.progress, "converting", total, shown=self.leads))
            share, failure = self._share(begun, progress), Failure()
            with failure:
                first = self._join(begun)
                job.start(first)
                share.run(first, self._num_lanes(begun))
            with failure:
                if failure.error is None:
                    self.checkpoint.check_unchanged()
            result = all_gather_bytes(
                self.group, "written", encode_written(job, share), error=failure.error, fatal=failure.fatal
            )
            with failure:
                if self.leads:
                    finish(job, [result.content_of(rank) for rank in self.group.ranks])
            agree(self.group, "committed", failure.error)
            progress.done()
        return job.saved(share.nbytes_written)

    # --------------------------------------------------------------------------------------- the place of the new files

    def _begin(self, target: Place) -> _Begun:
        """Agree on the place and on the writer of each file. In a folder, go on where a killed conversion has stopped."""
        group, for_target = self.group, _options_of(target, self.options.storage_options)
        store = store_at(target, self.format, for_target)
        warn_if_alone(group, store.where, has_group=self.options.call.process_group is not None)
        is_one_machine = all_equal(group, "machines", store.machine_id().encode())
        staging: Staging | None = None
        claim: Claim | None = None
        content = b""
        try:
            if self.leads:
                claim = Claim.lay(group, store.where)
                staging, strategy, is_resumed = self._stage(store, is_one_machine=is_one_machine)
                can = staging.capabilities
                durable = self.options.durable or staging.replaces
                parts = {file.name: can.part_nbytes_of(file.plan.nbytes) for file in self.files if strategy == IN_PARTS}
                content = json.dumps([store.where, staging.address, strategy, is_resumed, durable, parts]).encode()
            result = all_gather_bytes(group, "folder", content)
            where, address, strategy, is_resumed, durable, parts = json.loads(result.content_of(group.ranks[0]))
            store = store_of_leader(target, store, where, self.format, for_target)
            if not is_one_machine:
                check_seen_by_all(group, store, address)
            staged = store.staged(address) if is_resumed and is_resumable(store) else None
            noted = store.noted(address) if is_resumed and resumes_parts(store) else {}
            return _Begun(store, strategy, address, durable, parts, staging, claim, staged, noted)
        except BaseException:
            if staging is not None:
                staging.abandon()
            if claim is not None:
                claim.release()
            raise

    def _stage(self, store: Store, *, is_one_machine: bool) -> tuple[Staging, str, bool]:
        """Begin the save of the new files, on the leader: (the save, the strategy, whether it is a killed one that goes on)."""
        if is_resumable(store):
            resumed = store.resume(self.note, overwrite=self.options.overwrite)
            if resumed is not None:
                try:
                    if self._strategy(resumed, is_one_machine) == IN_PLACE and self._fits(resumed, store):
                        return resumed, IN_PLACE, True
                except BaseException:
                    resumed.leave()
                    raise
                resumed.abandon()
        elif resumes_parts(store):
            parts = store.resume(self.note, overwrite=self.options.overwrite)
            if parts is not None:
                wanted = {file.name: file.plan.nbytes for file in self.files}
                sizes = {name: parts.capabilities.part_nbytes_of(nbytes) for name, nbytes in wanted.items()}
                if parts.has_parts_of(wanted, sizes):
                    return parts, IN_PARTS, True
                parts.abandon()
        staging = store.begin(overwrite=self.options.overwrite, durable=self.options.durable)
        try:
            if self.format.needs_names and staging.replaces and not staging.capabilities.renames:
                raise CheckpointError(
                    f"{store.where}: has objects, and this store would keep the new files of the format {self.format.name} in a "
                    "folder beside them, where no other tool looks: convert into a new place, or remove the objects first"
                )
            strategy = self._strategy(staging, is_one_machine)
            if strategy in (IN_PLACE, IN_PARTS):
                make_files(staging, self.files)
            if strategy == IN_PLACE and can_be_left(staging):
                staging.create(JOURNAL, len(self._units({})) * DIGEST_NBYTES, b"")
                staging.keep(self.note)  # the last step: now all files are there
            if strategy == IN_PARTS and keeps_parts(staging):
                staging.keep_parts(self.note)
        except BaseException:
            staging.abandon()
            raise
        return staging, strategy, False

    def _strategy(self, staging: Staging, is_one_machine: bool) -> str:
        strategy, is_alone = strategy_for(staging.capabilities, "auto"), len(self.group.ranks) == 1
        if can_be_left(staging) and is_alone:
            return IN_PLACE
        return strategy if strategy != BY_MACHINES else IN_PLACE if is_one_machine else "per_rank_files"

    def _fits(self, staging: ResumableStaging, store: ResumableStore) -> bool:
        """Whether all planned files are there with their sizes and heads. Other files are removed: they are written again."""
        wanted = {file.name: file.plan.nbytes for file in self.files}
        wanted[JOURNAL] = len(self._units({})) * DIGEST_NBYTES
        there = staging.names()
        if not wanted.keys() <= set(there):
            return False
        staging.drop([name for name in there if name not in wanted])
        with store.staged(staging.address) as files:
            heads = (files.read(file.name, 0, len(file.plan.head)) == file.plan.head for file in self.files)
            return all(files.size_of(name) == nbytes for name, nbytes in wanted.items()) and all(heads)

    # --------------------------------------------------------------------------------------- this rank's share

    def _job(self, begun: _Begun) -> Job:
        """The conversion as a save, which ends like any other."""
        ranks, options = self.group.ranks, self.options
        loads, owners = dict.fromkeys(ranks, 0), {}
        for file in self.files if begun.strategy not in (IN_PLACE, IN_PARTS) else ():
            owner = owners[file.name] = min(loads, key=lambda rank: (loads[rank], rank))
            loads[owner] += file.plan.nbytes
        as_save = SaveArguments(
            process_group=options.process_group,
            timeout=options.timeout,
            step=self.checkpoint.step,
            max_file_size=options.max_file_size,
            overwrite=options.overwrite,
            durable=begun.durable,
        )
        return Job(
            self.group,
            as_save,
            begun.store,
            self.format,
            begun.address,
            "",
            FilePlan(self.files, owners, is_alone=len(ranks) == 1),
            (),
            self.writer,
            self.transcript.files if self.leads else {},
            self.transcript.prepared if self.leads else None,
            begun.staging,
            begun.claim,
        )

    def _units(self, part_nbytes: Mapping[str, int]) -> list[CopyRange]:
        return plan_units(self.files, self.unit_nbytes, part_nbytes)

    def _share(self, begun: _Begun, progress: Progress) -> RankWork:
        units, num, position = self._units(begun.part_nbytes), len(self.group.ranks), self.group.position
        owners = self._job(begun).plan.owners
        if owners:
            mine: Sequence[CopyRange] = [unit for unit in units if owners[unit.file.name] == self.group.rank]
        else:
            mine = units[len(units) * position // num : len(units) * (position + 1) // num]
        return RankWork(
            self.checkpoint,
            self.transcript.stored,
            self.files,
            mine,
            join=lambda: self._join(begun),
            staged=begun.staged,
            has_journal=begun.strategy == IN_PLACE and is_resumable(begun.store),
            notes_parts=begun.strategy == IN_PARTS and resumes_parts(begun.store),
            noted=begun.noted,
            unit_nbytes=max((unit.nbytes for unit in mine), default=0),
            shown=lambda nbytes: progress.up_to(nbytes * num),
        )

    def _join(self, begun: _Begun) -> Any:
        who = f"rank {self.group.rank}"
        budget = self.budget.share(2, "units, and their bytes that the store keeps")
        return begun.store.join(begun.address, durable=begun.durable, who=who, budget_nbytes=budget.nbytes)

    def _num_lanes(self, begun: _Begun) -> int:
        """The number of threads of this rank: several only where a store keeps ranges that are written in any order."""
        if not is_resumable(begun.store):
            return 1
        return num_lanes_in(self.budget, self.unit_nbytes, self.transcript.stored)


@contextmanager
def _given_up(job: Job) -> Iterator[None]:
    """Remove the new files after an error; leave them for the next call where a user has interrupted this one."""
    try:
        yield
    except BaseException as error:
        if job.staging is not None:
            if not isinstance(error, Exception) and can_be_left(job.staging):
                job.staging.leave()
            elif not isinstance(error, Exception) and keeps_parts(job.staging):
                job.staging.leave_parts()
            else:
                job.staging.abandon()
        if job.claim is not None:
            job.claim.release()
        raise
