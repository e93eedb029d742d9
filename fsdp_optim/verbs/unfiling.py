"""From files to tensors: which bytes each rank reads, how they come to the ranks that need them, and whether they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy
import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.checkpoint import Checkpoint, Stored
from fsdp_optim.formats.extents import Extent
from fsdp_optim.layout import Layout, Placement, Whole
from fsdp_optim.memory import empty
from fsdp_optim.plan import plan, plan_into
from fsdp_optim.state.values import dtype_named
from fsdp_optim.transport.callers import Callers
from fsdp_optim.transport.collective import Failure, Item, exchange
from fsdp_optim.transport.reports import exchange_reports
from fsdp_optim.verbs.filing import FILE, batches_of, has_short_rows, in_runs
from fsdp_optim.verbs.runs import Local, Run, bytes_of, in_host_memory, runs_of

_CPU = torch.device("cpu")
_CUT_FROM = 256 << 10  # bytes; a smaller tensor that several ranks need is read by one of them


@dataclass(frozen=True)
class Wanted:
    """One stored tensor, where its elements are needed, and this rank's local tensor for them (None: it needs none)."""

    fqn: str
    name: str
    stored: Stored
    placement: Placement
    flat: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.stored.entry.stop - self.stored.entry.start

    def nbytes_on(self, rank: int) -> int:
        return self.placement.numel_on(rank) * self.stored.entry.itemsize


@dataclass(frozen=True)
class _Moved:
    """A tensor that is read in another cut than it is needed in."""

    wanted: Wanted
    side: Placement

    @property
    def most_nbytes(self) -> int:
        return -(-self.wanted.nbytes // max(self.side.num_shards, 1))


def fetch(
    callers: Callers,
    checkpoint: Checkpoint,
    wanted: Sequence[Wanted],
    failure: Failure,
    progress: Callable[[int], None],
) -> int:
    """Fill the local tensors of all of `wanted`; returns the bytes that this rank read. Called by all ranks.

    What goes wrong on this rank is put into `failure`; the ranks must agree afterwards whether all went well. Holds at most
    `callers.bucket_nbytes` beyond the local tensors.
    """
    sides = list(_sides(wanted))
    nbytes = 0
    try:
        reads = _Reads()
        for one, side in zip(wanted, sides, strict=True):
            if side is None:
                reads.add(one.stored, _runs(one.stored, one.placement, one.flat, callers.rank))
        nbytes = reads.read(checkpoint, max(callers.bucket_nbytes // 2, 1), progress)
    except Exception as error:
        failure.note(error)
    half = replace(callers, bucket_nbytes=max(callers.bucket_nbytes // 2, 1))
    moved = [_Moved(one, side) for one, side in zip(wanted, sides, strict=True) if side is not None]
    for these in batches_of(moved, half.bucket_nbytes):
        nbytes += _read_and_move(half, checkpoint, these, failure)
        progress(nbytes)
    return nbytes


def _sides(wanted: Sequence[Wanted]) -> Iterator[Placement | None]:
    """The cut in which each tensor is read: None where it is that in which it is needed.

    What several ranks need is read once, each rank its share; rows of a few bytes are read in long runs.
    """
    load = 0
    for one in wanted:
        placement = one.placement
        replicated = placement.num_shards > 0 and len(placement.holders(0)) > 1
        if not one.nbytes or not (
            replicated
            or placement.overlapping
            or has_short_rows(placement, one.stored.entry.itemsize, one.stored.file.short_nbytes)
        ):
            yield None
        elif one.nbytes >= _CUT_FROM:
            yield in_runs(placement, placement.ranks)
        else:
            ranks = placement.ranks
            yield Whole(placement.shape, (ranks[load // _CUT_FROM % len(ranks)],))
            load += one.nbytes


class _Reads:
    """What to read of each file. A tensor that is wanted twice, because it was tied when saved, is read in two rounds."""

    def __init__(self) -> None:
        self._rounds: list[dict[str, list[Run]]] = []
        self._times: dict[tuple[str, str], int] = {}

    def add(self, stored: Stored, runs: Iterator[Run]) -> None:
        key = (stored.file.name, stored.entry.key)
        times = self._times.get(key, 0)
        self._times[key] = times + 1
        if times == len(self._rounds):
            self._rounds.append({})
        self._rounds[times].setdefault(stored.file.name, []).extend(runs)

    def read(
        self, checkpoint: Checkpoint, most_nbytes: int, progress: Callable[[int], None] = lambda nbytes: None
    ) -> int:
        nbytes = 0
        for by_file in self._rounds:
            for name, runs in by_file.items():
                for batch in in_host_memory(runs, most_nbytes):
                    nbytes += checkpoint.read({name: batch.extents})
                    batch.put()
                    progress(nbytes)
        return nbytes


def _runs(stored: Stored, placement: Placement, flat: torch.Tensor | None, rank: int) -> Iterator[Run]:
    """Where in the file this rank's elements are, and the memory that they belong to."""
    if placement.shard_of(rank) is None or not placement.numel_on(rank):
        return
    if flat is None:
        raise CheckpointError(f"{stored.entry.key}: rank {rank} has no memory for it")
    memory = Local(flat)
    source = Layout({"": Whole(placement.shape, (FILE,))})
    for copy in plan_into(source, Layout({"": placement}), rank):
        for there, here, numel in runs_of(copy):
            yield memory.run(stored.entry.start + there * stored.entry.itemsize, here, numel)


def _read_and_move(callers: Callers, checkpoint: Checkpoint, moved: Sequence[_Moved], failure: Failure) -> int:
    """Read some tensors in the cut in which they are read best, and send them to where they are needed."""
    items, nbytes, rank = [], 0, callers.rank
    reads = _Reads()
    try:
        for one in moved:
            stored, wanted = one.wanted.stored, one.wanted
            dtype, numel = dtype_named(stored.entry.dtype), one.side.numel_on(rank)
            flat = empty((numel,), dtype, _CPU) if numel else None
            reads.add(stored, _runs(stored, one.side, flat, rank))
            copies = plan(Layout({"": one.side}), Layout({"": wanted.placement}), rank=rank)
            items.append(Item(copies, dtype, flat, wanted.flat))
        if failure.error is None:
            nbytes = reads.read(checkpoint, callers.bucket_nbytes)
    except Exception as error:
        failure.note(error)
    exchange(callers, items, failure)
    return nbytes


def read_constants(checkpoint: Checkpoint, stored: Sequence[Stored]) -> list[torch.Tensor]:
    """All of some small tensors, on this rank."""
    values = [torch.empty(one.entry.shape, dtype=dtype_named(one.entry.dtype)) for one in stored]
    extents: dict[str, list[Extent]] = {}
    for one, value in zip(stored, values, strict=True):
        extents.setdefault(one.file.name, []).append(Extent(one.entry.start, bytes_of(value.view(-1))))
    checkpoint.read(extents)
    return values


def check_installed(
    callers: Callers, checkpoint: Checkpoint, live: Sequence[tuple[Wanted, torch.Tensor | None]], failure: Failure
) -> None:
    """Compare what this rank's model and optimizer hold, bit for bit, with what the checkpoint has. Called by all ranks.

    Raises CheckpointError on all ranks where they differ, or where an element of `live` was held by no rank.
    """
    compared = 0
    try:
        for wanted, flat in live:
            if flat is not None:
                _compare(checkpoint, wanted, flat, callers.rank)
                compared += _counts(wanted, callers.rank)
    except Exception as error:
        failure.note(error)
    told = exchange_reports(callers, b"%d" % compared, failure.error)
    total, expected = sum(map(int, told)), sum(wanted.nbytes for wanted, _ in live)
    if total != expected:
        raise CheckpointError(
            f"{checkpoint.folder}: {total} of {expected} bytes were found in the live model and optimizer"
        )


def _counts(wanted: Wanted, rank: int) -> int:
    """The bytes that count as this rank's: of replicas the first counts."""
    shard = wanted.placement.shard_of(rank)
    return wanted.nbytes_on(rank) if shard is not None and wanted.placement.holders(shard)[0] == rank else 0


def _compare(checkpoint: Checkpoint, wanted: Wanted, flat: torch.Tensor, rank: int) -> None:
    held = flat.to(_CPU).contiguous()
    read, kept = (_extents(wanted, memory, rank) for memory in (torch.empty_like(held), held))
    checkpoint.read({wanted.stored.file.name: read})
    for saved, live in zip(read, kept, strict=True):
        a, b = (numpy.frombuffer(one.memory, dtype=numpy.uint8) for one in (saved, live))
        if not numpy.array_equal(a, b):
            at = int(numpy.flatnonzero(a != b)[0])
            raise CheckpointError(
                f"{wanted.fqn}: {wanted.name} on rank {rank} is not what {checkpoint.folder / wanted.stored.file.name} has: the "
                f"first difference is at byte {saved.start + at} of its data"
            )


def _extents(wanted: Wanted, flat: torch.Tensor, rank: int) -> list[Extent]:
    return [run for run in _runs(wanted.stored, wanted.placement, flat, rank) if isinstance(run, Extent)]
