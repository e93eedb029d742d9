"""Save: from a live model and optimizer to whole tensors in files. Every rank writes its own bytes; nothing is gathered."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.alone import warn_if_alone
from fsdp_optim.checkpoint.catalog import Series, keep_newest, next_sequence, outdated
from fsdp_optim.checkpoint.contents import (
    LEFT_OUT,
    RECORDS,
    HalvesEnd,
    SavedHalf,
    SavedValue,
    read_state,
    read_weights,
)
from fsdp_optim.checkpoint.described import describe
from fsdp_optim.checkpoint.file_plan import (
    BY_MACHINES,
    IN_PARTS,
    IN_PLACE,
    PER_RANK,
    FilePlan,
    FilesEnd,
    make_files,
    strategy_for,
)
from fsdp_optim.checkpoint.files import File
from fsdp_optim.checkpoint.formats import SAVED, format_named
from fsdp_optim.checkpoint.keeping import ManagedSave
from fsdp_optim.checkpoint.pending import SaveHandle, pending
from fsdp_optim.checkpoint.progress import Progress
from fsdp_optim.checkpoint.proving import prove_loadable
from fsdp_optim.checkpoint.renaming import SavedNames
from fsdp_optim.checkpoint.results import Saved
from fsdp_optim.checkpoint.stores import Place, name_of, path_of, store_at, store_of_leader
from fsdp_optim.checkpoint.upload import Upload
from fsdp_optim.checkpoint.writing import RankWriter
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base import (
    COMMON,
    MODULES,
    CheckpointContents,
    Format,
    FormatWriter,
    Prepared,
    Stamp,
    WrittenFiles,
    rank_extra_name,
)
from fsdp_optim.formats.checksums import Rows, rows_from, rows_nbytes
from fsdp_optim.memory import Budget, dtype_name
from fsdp_optim.move import End, Key, Slice, move
from fsdp_optim.options import Model, SaveOptions
from fsdp_optim.speed import speed_of
from fsdp_optim.state.local import Optimizers
from fsdp_optim.storage.base import Capabilities, Completion, Staging, Store
from fsdp_optim.storage.posix.store import Folder
from fsdp_optim.transport.agree import MeetingResult, agree, tell
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.claims import Claim
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import calling
from fsdp_optim.verbs.ends import LiveEnd

_LENGTH = 8  # bytes of a number in `encode_written`

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class Job:
    """A save that all ranks have agreed on: its files, and the rank and place of each value."""

    callers: RankGroup
    options: SaveOptions
    store: Store
    format: Format
    address: str  # of the staging in the store
    plan: FilePlan
    absent: tuple[str, ...]
    writer: FormatWriter
    extras: Mapping[str, bytes] = field(default_factory=dict)  # the small files of this rank
    prepared: Prepared | None = None  # on the lowest rank
    staging: Staging | None = None  # on the rank that began the save in the store
    claim: Claim | None = None  # on the same rank
    upload: Upload | None = None  # of the finished checkpoint to another store
    managed: ManagedSave | None = None
    begun: float = field(default_factory=time.monotonic, compare=False)

    @property
    def files(self) -> tuple[File, ...]:
        return self.plan.files

    @property
    def budget(self) -> Budget:
        """The budget for elements on their way to the ranks that write them. Uploads of parts take the other half."""
        whole = self.callers.budget
        if self.cast:
            grown = max(-(-value.dtype.itemsize // value.live.dtype.itemsize) for value in self.cast.values())
            whole = whole.share(1 + grown, "elements, and what they are cast to")
        return (
            whole.share(2, "elements on their way, and parts that are sent to the store") if self.plan.parted else whole
        )

    @property
    def content(self) -> str:
        """What checkpoints of one series have in common, on the lowest rank."""
        return self.prepared.content if self.prepared is not None else ""

    @property
    def leads(self) -> bool:
        return self.callers.rank == self.callers.ranks[0]

    @property
    def path(self) -> Path | str:
        return path_of(self.store)

    def completion(self) -> Completion:
        callers = self.callers
        return self.store.completion(self.address, callers.rank, callers.ranks, callers.timeout)

    def rank_writer(self) -> RankWriter:
        rank, budget = self.callers.rank, self.budget
        store_writer = self.store.join(
            self.address, durable=self.options.durable, who=f"rank {rank}", budget_nbytes=budget.nbytes
        )
        return RankWriter(
            store_writer,
            self.files,
            rank,
            checksums=self.options.checksums,
            budget=budget.share(2, "copies of device memory on the host"),
            stretches=self.plan.stretches_on(rank),
            frames=self.plan.frames_on(rank),
        )

    @property
    def values(self) -> tuple[SavedValue, ...]:
        return tuple(value for file in self.files for value in file.values)

    @cached_property
    def cast(self) -> Mapping[Key, SavedValue]:
        """The values that are cast as they are written."""
        return {value.key: value for value in self.values if value.cast_from is not None}

    @property
    def moved(self) -> Sequence[SavedValue]:
        """The values as they are in the live model and optimizer, which the ranks send to those that write them."""
        return [value.live for value in self.values] if self.cast else self.values

    def target(self, take: Callable[[Sequence[Slice]], None]) -> FilesEnd:
        """The files as the target of a move. `take` gets this rank's elements."""
        return FilesEnd(self.plan, take, self.cast)

    def start(self, writer: RankWriter) -> None:
        """Write the bytes of this rank besides tensors: new files, heads, and small files."""
        make_files(writer.store_writer, self.plan.own_files(self.callers.rank))
        self.plan.write_heads(writer.store_writer, self.callers.rank)
        for name, data in self.extras.items():
            writer.store_writer.put(name, data)

    def saved(self, nbytes_written: int) -> Saved:
        nbytes = sum(file.plan.nbytes_of_data for file in self.files)
        return Saved(self.path, len(self.values), nbytes, nbytes_written, self.absent)


def save(
    path: Place, model: Model, optim: Optimizers | None, options: SaveOptions, format: Format | None = None
) -> Saved:
    """Write one full checkpoint. Called by all ranks of the model. `format` None: that of the options."""
    with calling("save", [model], options, options.call, all_of_plain=True) as ((reader,), callers):
        job, live = begin(path, reader, callers, optim, options, format)
        with abandoned_on_failure(job):
            writer = job.rank_writer()
            with Progress(job.options.progress, "saving", job.saved(0).nbytes, shown=job.leads) as progress:
                told, failure = _write(job, live, writer, progress), Failure()
                small: Sequence[str] = ()
                with failure:
                    if job.leads:
                        small = finish(job, [told.content_of(rank) for rank in job.callers.ranks])
                agree(job.callers, "committed", failure.error)
                progress.done()
    log_saved(job)
    saved = job.saved(writer.nbytes)
    return saved if job.upload is None else replace(saved, upload=_upload(job, job.upload, saved, small))


def _upload(job: Job, upload: Upload, saved: Saved, small: Sequence[str]) -> SaveHandle:
    """Begin to send the finished checkpoint. The next save of this process waits for the end."""

    def run() -> Saved:
        upload.run(job.store, small, job.content)
        return saved

    handle = SaveHandle(upload.store.where, run, logs_waits=job.leads)
    pending.begin(handle)
    return handle


def _write(job: Job, live: End, writer: RankWriter, progress: Progress) -> MeetingResult:
    """Write this rank's part, and send the results to all ranks. If any rank fails, all raise its error when all have stopped."""
    failure = Failure()

    def write(parts: Sequence[Slice]) -> None:
        writer.write(writer.extents_of(parts))
        progress.up_to(writer.nbytes * len(job.callers.ranks))

    try:
        with failure:
            job.start(writer)
        with failure:
            move(job.moved, live, job.target(write), job.callers, job.budget, failure)
        with failure:
            if failure.error is None:
                writer.finish()
    finally:
        writer.discard()
    return tell(job.callers, "written", encode_written(job, writer), error=failure.error, fatal=failure.fatal)


def begin(
    path: Place,
    reader: ModelReader,
    callers: RankGroup,
    optim: Optimizers | None,
    options: SaveOptions,
    format: Format | None,
    managed: ManagedSave | None = None,
) -> tuple[Job, End]:
    """Agree with the other ranks on the files, and begin the save in the store. No tensor is written yet.

    Returns the save, and the live tensors as the source of a move. `managed`: what a CheckpointManager adds.
    """
    if format is None:
        format = format_named(options.format)
    to_store = options.storage_options if options.upload_to is None else None  # else they are of the second place
    store, writer = store_at(path, format, to_store), format.writer()
    if options.upload_to is not None and not isinstance(store, Folder):
        raise CheckpointError(f"{store.where}: upload_to= is for saves to a folder")
    warn_if_alone(callers, store.where, has_group=options.call.process_group is not None)
    pending.settle()
    about = f"{name_of(path)!r}, {'an' if optim is not None else 'no'} optimizer"
    if options.weights == "none" and optim is None:
        raise StateError(
            'weights="none" without an optimizer leaves nothing to save: give optim= too, or other weights='
        )
    weights = read_weights(reader, callers, options, options.call, about, options.weights, options.weights_dtype)
    state = read_state(reader, optim, callers, options, options.call, about) if optim is not None else None
    names = SavedNames.of(callers, options.rename, weights, state)
    weights, state = names.of_half(weights), names.of_half(state) if state is not None else None
    extras = _encode_extras(writer, options, callers)
    prepared: Prepared | None = None
    plan: FilePlan | None = None
    staging, claim, content = None, None, b""

    def planned(strategy: str, shared: str, can: Capabilities) -> FilePlan:
        return FilePlan.of(writer, options, weights, state, callers.ranks, strategy, shared, can)

    try:
        if callers.rank == callers.ranks[0]:
            contents = names.of_contents(_contents(callers, options, weights, state))
            prepared = _prepared(writer, contents, options, weights, state, names, extras)
            listed = managed.check(store) if managed is not None else ()
            claim = Claim.lay(callers, store.where)
            staging = store.begin(overwrite=options.overwrite, durable=options.durable)
            can = staging.capabilities
            strategy, shared = strategy_for(can, options.strategy), prepared.shared
            if strategy in (IN_PLACE, IN_PARTS):
                plan = planned(strategy, shared, can)
                make_files(staging, plan.files)
            durable = options.durable or staging.replaces
            if managed is not None:
                durable = durable or bool(managed.outdated(store, listed, prepared.content, options.step or 0))
            else:
                durable = durable or _removes(store, options, prepared.content)
            parts = can.part_nbytes, can.most_parts
            content = json.dumps([store.where, staging.address, strategy, shared, durable, *parts]).encode()
        told = tell(callers, "folder", content, compared=store.machine_id().encode())
        leaders_place, address, strategy, shared, durable, part_nbytes, most_parts = json.loads(
            told.content_of(callers.ranks[0])
        )
        can = Capabilities(part_nbytes=part_nbytes, most_parts=most_parts)
        store = store_of_leader(path, store, leaders_place, format, to_store)
        options = replace(options, durable=durable)
        if strategy == BY_MACHINES:
            strategy = IN_PLACE if told.alike else PER_RANK
            if strategy == IN_PLACE:
                if staging is not None:
                    plan = planned(strategy, shared, can)
                    make_files(staging, plan.files)
                agree(callers, "files are made")
        plan = planned(strategy, shared, can) if plan is None else plan
        token = staging.token if staging is not None else ""
        upload = Upload.begin(callers, options, format, plan.files, token)
        job = Job(
            callers,
            options,
            store,
            format,
            address,
            plan,
            _absent(state),
            writer,
            extras,
            prepared,
            staging,
            claim,
            upload,
            managed,
        )
        return job, HalvesEnd(LiveEnd(weights.local), LiveEnd(state.local) if state is not None else None)
    except BaseException:
        if staging is not None:
            staging.abandon()
        if claim is not None:
            claim.release()
        raise


def _absent(state: SavedHalf | None) -> tuple[str, ...]:
    params = state.picture.params.values() if state is not None else ()
    return tuple(param.fqn for param in params if param.summary is None)


def _removes(store: Store, options: SaveOptions, content: str) -> bool:
    """Whether keep_last removes a checkpoint. Then the new one is flushed to the disk first, even with durable=False."""
    if options.keep_last is None:
        return False
    series = Series.of(store.where, content, options.step, options.keep_last)
    return bool(outdated(store, series, options.keep_last))


def _encode_extras(writer: FormatWriter, options: SaveOptions, callers: RankGroup) -> dict[str, bytes]:
    """The extras of this rank as files; `extra` is taken from the lowest rank. Raises CheckpointError for an unsavable value."""
    encoded = []
    if callers.rank == callers.ranks[0] and options.extra is not None:
        encoded.append(writer.extra(COMMON, options.extra, allow_pickle=options.allow_pickle))
    if options.per_rank_extra is not None:
        name = rank_extra_name(callers.position)
        encoded.append(writer.extra(name, options.per_rank_extra, allow_pickle=options.allow_pickle))
    return dict(encoded)


def finish(job: Job, written: Sequence[bytes]) -> list[str]:
    """Write the remaining files and commit, on the leader. `written`: the results of `encode_written` of all ranks.

    Returns the names of the files without those of tensors and the manifest.
    """
    if job.staging is None or job.prepared is None:
        raise CheckpointError("only the rank that began the save in the store can finish it")
    staging, durable, step, keep_last = job.staging, job.options.durable, job.options.step, job.options.keep_last
    decoded = [decode_written(job.files, data) for data in written]
    staging.seal([file.name for file in job.files], [receipt for receipt, _, _ in decoded], durable=durable)
    extras = {name: info for _, infos, _ in decoded for name, info in infos.items()}
    rows = {file.name: [table[file.name] for _, _, table in decoded] for file in job.files}
    stores = [job.store] if job.upload is None else [job.store, job.upload.store]  # it is the newest in both
    stamp = Stamp(
        token=staging.token,
        sequence=max(next_sequence(store, {job.format, *SAVED}) for store in stores),
        step=None if step is None else int(step),  # JSON has no numpy integers
        keep_last=None if keep_last is None else int(keep_last),
        checksums=job.options.checksums,
        folder=staging.inner_folder,
        manager=job.managed.record if job.managed is not None else None,
    )
    small = list(extras)
    for name, data in job.writer.last(
        job.prepared, [file.plan for file in job.files], WrittenFiles(rows, extras), stamp
    ):
        if name != job.format.judge.manifest:
            staging.put(name, data, durable=durable)
            small.append(name)
        else:
            staging.commit(name, data, durable=durable)
    if job.managed is not None and durable:  # otherwise there was nothing to remove at the beginning
        job.managed.remove_outdated(job.store, job.prepared.content, stamp.step or 0, stamp.sequence)
    elif stamp.keep_last is not None and durable:
        series = Series.of(job.store.where, job.prepared.content, stamp.step, stamp.keep_last)
        keep_newest(job.store, series, stamp.keep_last)
    return small


def _contents(
    callers: RankGroup, options: SaveOptions, weights: SavedHalf, state: SavedHalf | None
) -> CheckpointContents:
    """The contents of the checkpoint, without tensor elements."""
    left_out = {fqn for fqn, param in weights.picture.params.items() if param.group_index == LEFT_OUT}
    aliases = {alias: fqn for alias, fqn in weights.local.view.aliases.items() if fqn not in left_out}
    return CheckpointContents(
        world_size=len(callers.ranks),
        params={
            **{tensor.fqn: tensor.placement.shape for tensor in weights.tensors},
            **{fqn: weights.picture.params[fqn].placement.shape for fqn in weights.picture.params if fqn in left_out},
        },
        aliases={**aliases, **weights.local.module_values.aliases},
        optim=describe(state) if state is not None else None,
        weights=options.weights,
        weights_dtype=dtype_name(options.weights_dtype) if options.weights_dtype is not None else None,
    )


def _prepared(
    writer: FormatWriter,
    contents: CheckpointContents,
    options: SaveOptions,
    weights: SavedHalf,
    state: SavedHalf | None,
    names: SavedNames,
    extras: dict[str, bytes],
) -> Prepared:
    """Prepare the save on the lowest rank, and add its small files to `extras`. Refuses values that could not be loaded."""
    if weights.module_values:
        name, data = writer.extra(MODULES, dict(weights.module_values), allow_pickle=options.allow_pickle)
        extras[name] = data
    prepared = writer.prepare(contents, allow_pickle=options.allow_pickle, records=RECORDS)
    if state is not None and prepared.description is not None:
        prove_loadable(state, prepared.description, names.given)
    extras.update(prepared.files)
    return prepared


class Written(Protocol):
    """What a rank has written: the receipt of the store, and the segments of each file, in the order of the files."""

    @property
    def receipt(self) -> bytes: ...
    @property
    def rows(self) -> Mapping[str, Rows]: ...


def encode_written(job: Job, writer: Written) -> bytes:
    """The results of a rank for the leader: the receipt of the store, its small files, and its segments of each file."""
    extras = json.dumps({name: job.writer.info_of(data) for name, data in job.extras.items()}).encode()
    parts = [writer.receipt, extras]
    tables = [len(rows).to_bytes(_LENGTH, "little") + rows.tobytes() for rows in writer.rows.values()]
    return b"".join([*(len(part).to_bytes(_LENGTH, "little") + part for part in parts), *tables])


def decode_written(files: Sequence[File], data: bytes) -> tuple[bytes, dict[str, Any], dict[str, Rows]]:
    """The inverse of `encode_written`."""
    left = memoryview(data)

    def take(nbytes: int) -> memoryview:
        nonlocal left
        taken, left = left[:nbytes], left[nbytes:]
        return taken

    def number() -> int:
        return int.from_bytes(take(_LENGTH), "little")

    receipt = bytes(take(number()))
    extras = json.loads(bytes(take(number())))
    return receipt, extras, {file.name: rows_from(take(rows_nbytes(number()))) for file in files}


@contextmanager
def abandoned_on_failure(job: Job) -> Iterator[None]:
    """Remove the files of a save that fails inside the block, and release the claim on its path."""
    try:
        yield
    except BaseException:
        if job.staging is not None:
            job.staging.abandon()
        if job.upload is not None:
            job.upload.abandon()
        if job.claim is not None:
            job.claim.release()
        raise


def log_saved(job: Job) -> None:
    """Log one line about a save."""
    saved = job.saved(0)
    if job.leads:
        log.info(
            "saved %s: %d tensors, %d bytes, from %d ranks, in %s; without optimizer state: %s",
            job.path,
            saved.num_tensors,
            saved.nbytes,
            len(job.callers.ranks),
            speed_of(saved.nbytes, job.begun),
            ", ".join(saved.absent[:8]) or "none",
        )
