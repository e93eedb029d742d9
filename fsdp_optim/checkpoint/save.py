"""Save: from the live wrapper to whole, in files. Every rank writes its own bytes to their place; nothing is gathered."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.alone import warn_if_alone
from fsdp_optim.checkpoint.catalog import Series, keep_newest, next_sequence, outdated
from fsdp_optim.checkpoint.contents import RECORDS, Half, HalvesEnd, SavedValue, read_state, read_weights
from fsdp_optim.checkpoint.described import describe
from fsdp_optim.checkpoint.files import File, cut_into_files
from fsdp_optim.checkpoint.module_values import FILE as MODULE_VALUES
from fsdp_optim.checkpoint.pending import pending
from fsdp_optim.checkpoint.progress import Progress
from fsdp_optim.checkpoint.proving import prove_loadable
from fsdp_optim.checkpoint.results import Saved
from fsdp_optim.checkpoint.stores import Place, folder_of, name_of, store_at, store_told
from fsdp_optim.checkpoint.writing import FilesEnd, Writer
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.brief import content_of
from fsdp_optim.formats.checksums import Rows, hex_of, join_tables, rows_from, rows_nbytes, sums_of
from fsdp_optim.formats.description import encoded, written
from fsdp_optim.formats.extras import encode_extra, info_of
from fsdp_optim.formats.marker import NAME, FileInfo, Marker, file_info
from fsdp_optim.move import End, Part, move
from fsdp_optim.options import SaveOptions
from fsdp_optim.state.local import Optimizers
from fsdp_optim.storage.base import Completion, Staging, Store
from fsdp_optim.storage.base import Writer as StoreWriter
from fsdp_optim.transport.agree import Told, agree, tell
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.claims import Claim
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import calling
from fsdp_optim.verbs.ends import LiveEnd

_LENGTH = 8  # bytes of a number in a note
_BY_MACHINES = "by machines"  # in place on one machine, a file per rank on several
_STRATEGIES = {"anywhere": "in_place", "on one machine": _BY_MACHINES, "no": "per_rank_files"}

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class Job:
    """A save that all ranks have agreed on: what goes where."""

    callers: RankGroup
    options: SaveOptions
    store: Store
    address: str  # of the save that is under way in the store
    files: tuple[File, ...]
    absent: tuple[str, ...]
    extras: Mapping[str, bytes] = field(default_factory=dict)  # this rank's own small files
    said: Mapping[str, Any] = field(default_factory=dict)  # what the marker will say
    staging: Staging | None = None  # on the rank that made the folder
    claim: Claim | None = None  # on the same rank
    owners: Mapping[str, int] = field(
        default_factory=dict
    )  # by file, the rank that makes and writes it alone, where one does

    @property
    def leads(self) -> bool:
        return self.callers.rank == self.callers.ranks[0]

    @property
    def path(self) -> Path:
        return Path(self.store.where)

    def completion(self) -> Completion:
        callers = self.callers
        return self.store.completion(self.address, callers.rank, callers.ranks, callers.timeout)

    def writer(self) -> Writer:
        return Writer(
            self.store.join(self.address, durable=self.options.durable, who=f"rank {self.callers.rank}"),
            self.files,
            self.callers.rank,
            checksums=self.options.checksums,
            budget=self.callers.budget.share(2, "what lies on a device, by way of the host"),
        )

    @property
    def values(self) -> tuple[SavedValue, ...]:
        return tuple(value for file in self.files for value in file.tensors)

    @property
    def own_files(self) -> list[File]:
        """Those that this rank makes and writes alone."""
        return [file for file in self.files if self.owners.get(file.name) == self.callers.rank]

    def target(self, take: Callable[[Sequence[Part]], None]) -> FilesEnd:
        """The files as an end, whose parts on this rank go to `take`."""
        owned = {
            value.key: self.owners[file.name]
            for file in self.files
            if file.name in self.owners
            for value in file.tensors
        }
        return FilesEnd(take, owned)

    def saved(self, nbytes_written: int) -> Saved:
        nbytes = sum(file.header.data_nbytes for file in self.files)
        return Saved(self.path, len(self.values), nbytes, nbytes_written, self.absent)


def save(path: Place, model: nn.Module, optim: Optimizers | None, options: SaveOptions) -> Saved:
    """Write one full checkpoint. Called by all ranks of the model."""
    with calling("save", [model], options, options.call, all_of_plain=True) as ((reader,), callers):
        job, live = begin(path, reader, callers, optim, options)
        with abandoned_on_failure(job):
            writer = job.writer()
            with Progress(job.options.progress, "saving", job.saved(0).nbytes, shown=job.leads) as progress:
                told, failure = _write(job, live, writer, progress), Failure()
                with failure:
                    if job.leads:
                        finish(job, [told.by(rank) for rank in job.callers.ranks])
                agree(job.callers, "committed", failure.error)
                progress.done()
    log_saved(job)
    return job.saved(writer.nbytes)


def _write(job: Job, live: End, writer: Writer, progress: Progress) -> Told:
    """Write this rank's part, and tell the segments; the failure of any rank is raised on all, when all have stopped."""
    failure = Failure()

    def write(parts: Sequence[Part]) -> None:
        writer.write(writer.runs_of(parts))
        progress.up_to(writer.nbytes * len(job.callers.ranks))

    try:
        with failure:
            make_files(writer.hand, job.own_files)
            write_extras(job, writer.hand)
        with failure:
            move(job.values, live, job.target(write), job.callers, job.callers.budget, failure)
        with failure:
            if failure.error is None:
                writer.finish()
    finally:
        writer.discard()
    return tell(job.callers, "written", encode_note(job, writer), error=failure.error, fatal=failure.fatal)


def begin(
    path: Place,
    reader: ModelReader,
    callers: RankGroup,
    optim: Optimizers | None,
    options: SaveOptions,
) -> tuple[Job, End]:
    """Meet the other ranks, decide what goes where, and make the folder. Nothing is written yet. The end has what is live."""
    store = store_at(path)
    warn_if_alone(callers, store.where, was_told=options.call.process_group is not None)
    pending.settle()
    about = f"{name_of(path)!r}, {'an' if optim is not None else 'no'} optimizer"
    weights = read_weights(reader, callers, options, options.call, about)
    state = read_state(reader, optim, callers, options, options.call, about) if optim is not None else None
    extras = _encode_extras(options, callers)
    said: Mapping[str, Any] = {}
    staging, claim, content = None, None, b""
    try:
        if callers.rank == callers.ranks[0]:
            said = _said(options, callers, weights, state, extras)
            claim = Claim.lay(callers, store.where)
            staging = store.begin(overwrite=options.overwrite, durable=options.durable)
            strategy, groups = _strategy(staging, options), _plain_groups(state) if state is not None else ""
            if strategy == "in_place":
                make_files(staging, _files(options, weights, state, callers, strategy, groups)[0])
            durable = options.durable or _removes(store, staging, options, said)
            content = json.dumps([store.where, staging.address, strategy, groups, durable]).encode()
        told = tell(callers, "folder", content, said=store.machine().encode())
        leaders_place, address, strategy, groups, durable = json.loads(told.by(callers.ranks[0]))
        store, options = store_told(path, store, leaders_place), replace(options, durable=durable)
        if strategy == _BY_MACHINES:
            strategy = "in_place" if told.alike else "per_rank_files"
            if strategy == "in_place":
                if staging is not None:
                    make_files(staging, _files(options, weights, state, callers, strategy, groups)[0])
                agree(callers, "files are made")
        files, owners = _files(options, weights, state, callers, strategy, groups)
        job = Job(
            callers,
            options,
            store,
            address,
            tuple(files),
            _absent(state),
            extras,
            said,
            staging,
            claim,
            owners,
        )
        return job, HalvesEnd(LiveEnd(weights.local), LiveEnd(state.local) if state is not None else None)
    except BaseException:
        if staging is not None:
            staging.abandon()
        if claim is not None:
            claim.release()
        raise


def _absent(state: Half | None) -> tuple[str, ...]:
    params = state.picture.params.values() if state is not None else ()
    return tuple(param.fqn for param in params if param.summary is None)


def _removes(store: Store, staging: Staging, options: SaveOptions, said: Mapping[str, Any]) -> bool:
    """Whether an older checkpoint goes for this one, which is brought to the disk first then: the older one may be on it."""
    if staging.replaces or options.keep_last is None:
        return staging.replaces
    content = content_of(said["model"]["params"], has_optim=said["has_optim"])
    path = folder_of(store, "keep_last=")
    return bool(outdated(path, Series.of(path, content, options.step, options.keep_last), options.keep_last))


def _strategy(staging: Staging, options: SaveOptions) -> str:
    """How to write to a store. Where several machines cannot write to one file, it depends on where the ranks are."""
    if options.strategy != "auto":
        if options.strategy == "in_place" and staging.can.part_nbytes:
            raise CheckpointError('strategy="in_place" needs a store in which several ranks can write to one file')
        return options.strategy
    return _STRATEGIES[staging.can.writes_ranges]


def _files(
    options: SaveOptions, weights: Half, state: Half | None, callers: RankGroup, strategy: str, groups: str
) -> tuple[list[File], dict[str, int]]:
    """The files, and by name the rank that makes and writes each alone, where one does."""
    num = len(callers.ranks)
    halves = [("model", weights.tensors, {"format": "pt"})]
    if state is not None:
        halves.append(("optim", state.tensors, {"format": "pt", "param_groups": groups}))
    files = []
    for stem, tensors, metadata in halves:
        most = options.max_file_size
        if strategy == "per_rank_files":
            total = sum(tensor.nbytes for tensor in tensors)
            most = min(most, max(-(-total // num), 1))
        files += cut_into_files(stem, tensors, most, metadata, num)
    if strategy != "per_rank_files":
        return files, {}
    load = dict.fromkeys(callers.ranks, 0)
    owners = {}
    for file in files:
        owner = min(load, key=lambda rank: (load[rank], rank))
        load[owner] += file.nbytes
        owners[file.name] = owner
    return files, owners


def _plain_groups(state: Half) -> str:
    """The param groups for readers without this library: names and numbers; exact ones are in the marker."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else str(value)

    def named(value: Any) -> Any:
        """With keys that JSON has."""
        if isinstance(value, Mapping):
            return {key if isinstance(key, (str, int, float)) else str(key): named(item) for key, item in value.items()}
        return [named(item) for item in value] if isinstance(value, (list, tuple)) else value

    groups = [
        {**named(hyper), "params": list(state.picture.group_fqns(index))}
        for index, hyper in enumerate(state.local.optim.groups)
    ]
    return json.dumps(groups, default=plain)


def _encode_extras(options: SaveOptions, callers: RankGroup) -> dict[str, bytes]:
    """This rank's small files. Refuses what cannot be saved before anything is written; `extra` counts on the lowest rank."""
    found = {}
    if callers.rank == callers.ranks[0] and options.extra is not None:
        found["extra/common.safetensors"] = encode_extra("extra", options.extra, allow_pickle=options.allow_pickle)
    if options.per_rank_extra is not None:
        name = f"extra/rank-{callers.position:05}.safetensors"
        found[name] = encode_extra("per_rank_extra", options.per_rank_extra, allow_pickle=options.allow_pickle)
    return found


def make_files(maker: Staging | StoreWriter, files: Sequence[File]) -> None:
    """Files with their headers, in their full length."""
    for file in files:
        maker.create(file.name, file.nbytes, file.head)


def write_extras(job: Job, hand: StoreWriter) -> None:
    """Write this rank's small files."""
    for name, data in job.extras.items():
        hand.put(name, data)


def finish(job: Job, notes: Sequence[bytes]) -> None:
    """On the leader, when all ranks have written and left a note of it: checksums, index, marker, and the folder's name."""
    if job.staging is None:
        raise CheckpointError("only the rank that made the folder finishes it")
    infos: dict[str, FileInfo] = {}
    tables, receipts, durable = [], [], job.options.durable
    for note in notes:
        receipt, extras, table = decode_note(job.files, note)
        receipts.append(receipt)
        infos.update(extras)
        tables.append(table)
    job.staging.seal([file.name for file in job.files], receipts, durable=durable)
    for file in job.files:
        joined = join_tables(file.name, [table[file.name] for table in tables], file.header.data_nbytes)
        sums = None
        if job.options.checksums:
            encoded = joined.encoded()
            job.staging.put(sums_of(file.name), encoded, durable=durable)
            sums = hex_of(encoded)
        infos[file.name] = FileInfo(file.nbytes, hex_of(file.head), sums)
    for stem in ("model", "optim"):
        infos.update(_write_index(job, job.staging, stem))
    said = {**job.said, "created_ns": time.time_ns(), "token": job.staging.token}
    step, keep_last = (
        None if n is None else int(n) for n in (job.options.step, job.options.keep_last)
    )  # as JSON has them
    marker = Marker.of(said, infos, sequence=next_sequence(job.store), step=step, keep_last=keep_last)
    job.staging.commit(NAME, marker.encoded(), durable=durable)
    if keep_last is not None and durable:  # else there was nothing to remove when it began
        keep_newest(folder_of(job.store, "keep_last="), marker.brief, keep_last)


def _write_index(job: Job, staging: Staging, stem: str) -> dict[str, FileInfo]:
    """Which file of a split half has which tensor, as Hugging Face writes it."""
    files = [file for file in job.files if file.name.startswith(f"{stem}-")]
    if not files:
        return {}
    name = f"{stem}.safetensors.index.json"
    said = {
        "metadata": {"total_size": sum(file.header.data_nbytes for file in files)},
        "weight_map": {tensor.stored_name: file.name for file in files for tensor in file.tensors},
    }
    text = json.dumps(said, indent=2).encode() + b"\n"
    staging.put(name, text, durable=job.options.durable)
    return {name: FileInfo(len(text), hex_of(text), None)}


def _said(
    options: SaveOptions, callers: RankGroup, weights: Half, state: Half | None, extras: dict[str, bytes]
) -> dict[str, Any]:
    """What the marker says. What it cannot hold needs a file of its own, which is added to `extras`."""
    optim = None
    if weights.module_values:
        extras[MODULE_VALUES] = encode_extra(
            "state_dict()", dict(weights.module_values), allow_pickle=options.allow_pickle
        )
    if state is not None:
        description = describe(state)
        optim, tensors = encoded("optim", description, allow_pickle=options.allow_pickle, records=RECORDS)
        prove_loadable(state, optim, tensors, allow_pickle=options.allow_pickle)
        if tensors:
            name, value = "extra/optim.safetensors", written(description)
            extras[name] = encode_extra("optim", value, allow_pickle=options.allow_pickle, records=RECORDS)
            optim = None
    return {
        "world_size": len(callers.ranks),
        "model": {
            "params": {tensor.fqn: {"shape": list(tensor.placement.shape)} for tensor in weights.tensors},
            "aliases": {**weights.local.view.aliases, **weights.local.module_values.aliases},
        },
        "optim": optim,
        "has_optim": state is not None,
    }


def encode_note(job: Job, writer: Writer) -> bytes:
    """What a rank says when it has written its part: the store's receipt, its extra files, and its segments of each file."""
    extras = json.dumps({name: info_of(data).said() for name, data in job.extras.items()}).encode()
    parts = [writer.receipt, extras]
    rows = [len(its).to_bytes(_LENGTH, "little") + its.tobytes() for its in writer.rows.values()]
    return b"".join([*(len(part).to_bytes(_LENGTH, "little") + part for part in parts), *rows])


def decode_note(files: Sequence[File], note: bytes) -> tuple[bytes, dict[str, FileInfo], dict[str, Rows]]:
    """The inverse of `encode_note`."""
    left = memoryview(note)

    def take(nbytes: int) -> memoryview:
        nonlocal left
        taken, left = left[:nbytes], left[nbytes:]
        return taken

    def number() -> int:
        return int.from_bytes(take(_LENGTH), "little")

    receipt = bytes(take(number()))
    extras = {name: file_info(said) for name, said in json.loads(bytes(take(number()))).items()}
    return receipt, extras, {file.name: rows_from(take(rows_nbytes(number()))) for file in files}


@contextmanager
def abandoned_on_failure(job: Job) -> Iterator[None]:
    """Remove the folder of a save that fails."""
    try:
        yield
    except BaseException:
        if job.staging is not None:
            job.staging.abandon()
        if job.claim is not None:
            job.claim.release()
        raise


def log_saved(job: Job) -> None:
    """One line about what was saved."""
    done = job.saved(0)
    if job.leads:
        log.info(
            "saved %s: %d tensors, %d bytes, from %d ranks; without optimizer state: %s",
            job.path,
            done.num_tensors,
            done.nbytes,
            len(job.callers.ranks),
            ", ".join(done.absent[:8]) or "none",
        )
