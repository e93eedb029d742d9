"""A save that all ranks have agreed on, and the report of each rank to the leader about its part."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from fsdp_optim.checkpoint.catalog.listing import next_sequence
from fsdp_optim.checkpoint.catalog.retention import ManagedSave
from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.contents import SavedValue
from fsdp_optim.checkpoint.common.files import File
from fsdp_optim.checkpoint.common.formats import listed_formats
from fsdp_optim.checkpoint.common.printing import Place
from fsdp_optim.checkpoint.common.stores import path_of
from fsdp_optim.checkpoint.save.file_plan import FilePlan, FilesEnd, make_files
from fsdp_optim.checkpoint.save.trace import Span, Trace
from fsdp_optim.checkpoint.save.writing import RankWriter
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.checksums import Rows, rows_from, rows_nbytes
from fsdp_optim.formats.base.protocols import Prepared, Writer, WrittenFormat
from fsdp_optim.move import Key, Taken
from fsdp_optim.results.calls import SaveResult
from fsdp_optim.results.fingerprints import ValueFingerprint
from fsdp_optim.storage.base import Staging, Store, StoreWriter
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.claims import Claim
from fsdp_optim.transport.completion import Completion
from fsdp_optim.wire import decode, encode

_LENGTH = 8  # bytes of the number before a header

log = logging.getLogger("fsdp_optim")


class LeaderSide(Struct, frozen=True):
    """What the lowest rank alone has of a save: the prepared format, the staging in the store, and the claim on the path.

    `prints`: the fingerprints of values that are not in files, if the save has fingerprints. `names`: the FQNs of the model, each
    with the name in the checkpoint.
    """

    prepared: Prepared
    staging: Staging
    claim: Claim
    prints: Mapping[Place, ValueFingerprint] = {}
    names: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A save that all ranks have agreed on: its files, and the rank and place of each value."""

    group: RankGroup
    options: SaveArguments
    store: Store
    format: WrittenFormat
    address: str  # of the staging in the store
    token: str  # of the checkpoint
    plan: FilePlan
    absent: tuple[str, ...]
    writer: Writer
    extras: Mapping[str, bytes] = field(default_factory=dict)  # the small files of this rank
    leader: LeaderSide | None = None  # on the lowest rank, which began the save in the store
    managed: ManagedSave | None = None
    wrapper: str = ""  # what wraps the model, for users
    fingerprint: bytes = b""  # of a conversion: the fingerprints that the source has, as JSON
    begun: float = field(default_factory=time.monotonic, compare=False)
    _sequence: list[int] = field(default_factory=list, compare=False)

    @property
    def files(self) -> tuple[File, ...]:
        return self.plan.files

    @property
    def _cast_budget(self) -> Budget:
        return self.group.budget.share(4, "what elements are cast to, part by part")

    @property
    def _whole_budget(self) -> Budget:
        whole = self.group.budget
        return Budget(whole.nbytes - self._cast_budget.nbytes, "all but what is cast") if self.cast else whole

    @property
    def budget(self) -> Budget:
        """The budget for elements on their way to the ranks that write them. Uploads of parts take seven times as much.

        Stores limit each connection, so that a rank is as fast as it has parts under way.
        """
        whole = self._whole_budget
        return (
            whole.share(8, "elements on their way, and parts that are sent to the store") if self.plan.parted else whole
        )

    @property
    def leads(self) -> bool:
        return self.group.rank == self.group.ranks[0]

    @property
    def path(self) -> Path | str:
        return path_of(self.store)

    @property
    def sequence(self) -> int:
        """The place of this save in the order of the checkpoints beside it, on the leader."""
        return self.choose_sequence()

    def choose_sequence(self) -> int:
        """Choose that place when this is called first, before the leader writes; return it.

        A leader may be stopped, or cut off, and finish the save when another job has long gone on from an older checkpoint. What
        that one has saved meanwhile is newer.
        """
        if not self._sequence:  # no cached_property, which lets saves of other threads wait for this one's listing
            known = self.managed.known.sequence + 1 if self.managed is not None else 0
            sequence = max(known, next_sequence(self.store, [self.format, *listed_formats()]))
            if self.managed is not None:
                self.managed.known.sequence = sequence
            self._sequence.append(sequence)
        return self._sequence[0]

    def completion(self) -> Completion:
        return Completion.join(self.group, self.token[-16:], str(self.path))

    def rank_writer(self, trace: Trace) -> RankWriter:
        rank, budget = self.group.rank, self.budget
        of_writer = self._whole_budget.nbytes - budget.nbytes if self.plan.parted else budget.nbytes
        store_writer = self.store.join(
            self.address, durable=self.options.durable, who=f"rank {rank}", budget_nbytes=of_writer
        )
        return RankWriter(
            store_writer,
            self.plan,
            rank,
            checksums=self.options.checksums,
            budget=budget.share(2, "copies of device memory on the host"),
            plans=self.group.world.plans,
            trace=trace,
        )

    @cached_property
    def values(self) -> tuple[SavedValue, ...]:
        return tuple([value for file in self.files for value in file.values])

    @cached_property
    def cast(self) -> Mapping[Key, SavedValue]:
        """The values that are cast as they are written."""
        return {value.key: value for value in self.values if value.cast_from is not None}

    @cached_property
    def printed(self) -> Sequence[SavedValue]:
        """The values with fingerprints: all but those that are cast."""
        return [value for value in self.values if value.cast_from is None]

    @property
    def moved(self) -> Sequence[SavedValue]:
        """The values as they are in the live model and optimizer, which the ranks send to those that write them."""
        return [value.live for value in self.values] if self.cast else self.values

    def target(self, take: Callable[[Taken], None], *, keeps: bool = True) -> FilesEnd:
        """The files as the target of a move. `take` gets this rank's elements. `keeps`: whether it may keep their memory."""
        return FilesEnd(self.plan, take, self.cast, self._cast_budget, keeps)

    def start(self, writer: StoreWriter) -> None:
        """Write the bytes of this rank besides tensors and the frames between them: new files, and small files.

        On the leader, fix the `sequence` of the save.
        """
        if self.leads:
            self.choose_sequence()
        make_files(writer, self.plan.own_files(self.group.rank))
        for name, data in self.extras.items():
            writer.put(name, data)

    def saved(self, nbytes_written: int) -> SaveResult:
        nbytes = sum(file.plan.nbytes_of_data for file in self.files)
        return SaveResult(self.path, len(self.values), nbytes, nbytes_written, self.absent)


@contextmanager
def abandoned_on_failure(job: Job) -> Iterator[None]:
    """Remove the files of a save that fails inside the block, and release the claim on its path."""
    try:
        yield
    except BaseException as error:
        if job.leader is not None:
            # After a CheckpointError all ranks have stopped; after another error some may still write.
            may_write = len(job.group.ranks) > 1 and not isinstance(error, CheckpointError)
            job.leader.staging.abandon(late=may_write)
            job.leader.claim.release()
        raise


class Written(Protocol):
    """The report of a rank about its writes: the receipts of the store, and the segments of each file, in the files' order."""

    @property
    def receipts(self) -> Sequence[bytes]: ...
    @property
    def rows(self) -> Mapping[str, Rows]: ...


class _ReportHeader(Struct, array_like=True, frozen=True):
    """The header of a report. The receipts, the rows and the sums of fingerprints follow it as bytes, in this order.

    `infos`: by small file, what its writer tells the leader about it. `receipts_nbytes`: the length of each receipt.
    `num_rows`: the number of rows of each file. `seconds`: how long the rank has written. `spans`: its timeline, if asked for.
    """

    infos: dict[str, Any]
    receipts_nbytes: tuple[int, ...]
    num_rows: tuple[int, ...]
    seconds: float = 0.0
    spans: tuple[Span, ...] = ()
    sums_nbytes: int = 0


class RankReport(NamedTuple):
    """The report of a rank to the leader about its writes.

    `infos`, `seconds`, `spans`: as in the header. `rows`: the segments of each file. `sums`: those of fingerprints.
    """

    receipts: list[bytes]
    infos: dict[str, Any]
    rows: dict[str, Rows]
    seconds: float = 0.0
    spans: Sequence[Span] = ()
    sums: bytes = b""


def encode_written(
    job: Job, writer: Written, seconds: float = 0.0, spans: Sequence[Span] = (), sums: bytes = b""
) -> bytes:
    """Encode the report of this rank for the leader. `seconds`, `spans`, `sums`: as in `RankReport`."""
    tables = list(writer.rows.values())
    header = encode(
        _ReportHeader(
            infos={name: job.writer.info_of(data) for name, data in job.extras.items()},
            receipts_nbytes=tuple(map(len, writer.receipts)),
            num_rows=tuple(map(len, tables)),
            seconds=seconds,
            spans=tuple(spans),
            sums_nbytes=len(sums),
        )
    ).encode()
    # Rows are many: as bytes they take a fraction of what JSON takes.
    return b"".join(
        [len(header).to_bytes(_LENGTH, "little"), header, *writer.receipts, *(rows.tobytes() for rows in tables), sums]
    )


def decode_written(files: Sequence[File], data: bytes) -> RankReport:
    """Decode the report of a rank, the inverse of `encode_written`."""
    left = memoryview(data)

    def take(nbytes: int) -> memoryview:
        nonlocal left
        taken, left = left[:nbytes], left[nbytes:]
        return taken

    header = decode(_ReportHeader, bytes(take(int.from_bytes(take(_LENGTH), "little"))))
    receipts = [bytes(take(nbytes)) for nbytes in header.receipts_nbytes]
    tables = [rows_from(take(rows_nbytes(num))) for num in header.num_rows]
    by_file = {file.name: rows for file, rows in zip(files, tables, strict=True)}
    sums = bytes(take(header.sums_nbytes))
    return RankReport(receipts, header.infos, by_file, header.seconds, header.spans, sums)
