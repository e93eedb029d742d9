"""From files to tensors: which bytes each rank reads, how they come to the ranks that need them, and whether they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.checkpoint import Checkpoint, Stored
from fsdp_optim.formats.extents import Extent
from fsdp_optim.layout import Layout, Placement, Whole
from fsdp_optim.memory import dtype_named, empty
from fsdp_optim.plan import Copy, part_from, part_into, plan, plan_into
from fsdp_optim.transport.callers import Callers
from fsdp_optim.transport.collective import Failure, Item, exchange
from fsdp_optim.verbs.filing import FILE, batches_of, has_short_rows, in_runs, windows_of
from fsdp_optim.verbs.runs import LocalMemory, Run, bytes_of, in_host_memory, runs_of

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
    def itemsize(self) -> int:
        return self.wanted.stored.entry.itemsize


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

    def did_read(more: int) -> None:
        nonlocal nbytes
        nbytes += more
        progress(nbytes)

    try:
        reads = _Reads()
        for one, side in zip(wanted, sides, strict=True):
            if side is None:
                reads.add(one.stored, runs_in(one.stored, one.placement, one.flat, callers.rank))
        reads.read(checkpoint, max(callers.bucket_nbytes // 2, 1), did_read)
    except Exception as error:
        failure.note(error)
    half = replace(callers, bucket_nbytes=max(callers.bucket_nbytes // 2, 1))
    moved = [_Moved(one, side) for one, side in zip(wanted, sides, strict=True) if side is not None]
    for these in batches_of(moved, half.bucket_nbytes):
        _read_and_move(half, checkpoint, these, failure, did_read)
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

    def read(self, checkpoint: Checkpoint, most_nbytes: int, did_read: Callable[[int], None]) -> None:
        for by_file in self._rounds:
            for name, runs in by_file.items():
                for batch in in_host_memory(runs, most_nbytes):
                    checkpoint.read({name: batch.extents}, did_read)
                    batch.put()


def runs_in(
    stored: Stored, placement: Placement, flat: torch.Tensor | None, rank: int, first: int = 0
) -> Iterator[Run]:
    """Where in the file this rank's elements are, and the memory that they belong to: all, or those from `first` on."""
    if placement.shard_of(rank) is None or placement.numel_on(rank) <= first:
        return
    if flat is None:
        raise CheckpointError(f"{stored.entry.key}: rank {rank} has no memory for it")
    memory = LocalMemory(flat)
    for there, here, numel in elements_in(stored, placement, rank, first, flat.numel()):
        yield memory.run(stored.entry.start + there * stored.entry.itemsize, here, numel)


def elements_in(
    stored: Stored, placement: Placement, rank: int, first: int, num: int
) -> Iterator[tuple[int, int, int]]:
    """(offset in the stored tensor, offset from `first` on this rank, how many) of `num` of this rank's elements."""
    source = Layout({"": Whole(placement.shape, (FILE,))})
    for copy in plan_into(source, Layout({"": placement}), rank):
        for part in part_into(copy, first, first + num):
            yield from runs_of(part)


def _read_and_move(
    callers: Callers,
    checkpoint: Checkpoint,
    moved: Sequence[_Moved],
    failure: Failure,
    did_read: Callable[[int], None],
) -> None:
    """Read some tensors in the cut in which they are read best, and send them to where they are needed."""
    rank = callers.rank
    copies: list[tuple[Copy, ...]] = []
    try:
        for one in moved:
            copies.append(plan(Layout({"": one.side}), Layout({"": one.wanted.placement}), rank=rank))
    except Exception as error:
        failure.note(error)
    for window in windows_of(moved, callers.bucket_nbytes):
        items = []
        reads = _Reads()
        try:
            for one, its in zip(moved, copies, strict=True):
                stored, wanted = one.wanted.stored, one.wanted
                dtype, numel = dtype_named(stored.entry.dtype), window.of(one.side.numel_on(rank))
                flat = empty((numel,), dtype, _CPU) if numel else None
                if flat is not None:
                    reads.add(stored, runs_in(stored, one.side, flat, rank, window.start))
                mine = [part for copy in its for part in part_from(copy, window.start, window.stop)]
                items.append(Item(mine, dtype, flat, wanted.flat))
            if failure.error is None:
                reads.read(checkpoint, callers.bucket_nbytes, did_read)
        except Exception as error:
            failure.note(error)
        exchange(callers, items, failure)


def read_constants(checkpoint: Checkpoint, stored: Sequence[Stored]) -> list[torch.Tensor]:
    """All of some small tensors, on this rank."""
    values = [torch.empty(one.entry.shape, dtype=dtype_named(one.entry.dtype), device=_CPU) for one in stored]
    extents: dict[str, list[Extent]] = {}
    for one, value in zip(stored, values, strict=True):
        extents.setdefault(one.file.name, []).append(Extent(one.entry.start, bytes_of(value.view(-1))))
    checkpoint.read(extents)
    return values
