"""The copies from one Layout to another, as plain values. No torch: one process can plan for any world size."""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Block, Box, Layout, Placement, Run, Shape, bounds_of_box
from fsdp_optim.plan.copies import Copy
from fsdp_optim.plan.rows import copy_of_part, parts_of
from fsdp_optim.plan.runs import BULK_FROM, Runs, runs_into, runs_out_of


def plan(source: Layout, target: Layout, *, rank: int | None = None) -> tuple[Copy, ...]:
    """The copies that fill every Piece of `target` from `source`.

    Each target element is filled exactly once: from the target rank itself where that rank holds the element, else from one
    of the replicas (`replica_of`). Padding is never copied. With `rank`, the result has only the copies that this rank sends
    or receives, and takes time in proportion to their number; the copies between any two ranks are the same, in the same
    order, as in the whole plan. `source` may have more parameters than `target`.

    Raises:
        LayoutError: a parameter of `target` is missing from `source`, or has another shape in `source`.
    """
    return tuple(copy for parameter in _parameters(source, target) for copy in parameter.copies(rank))


def copies_of(source: Placement, target: Placement, *, rank: int | None = None, replica: int = 0) -> Sequence[Copy]:
    """The same as `plan` for a single parameter; the copies have no FQN.

    Args:
        replica: the number of the replica (modulo the number of replicas) that sends to ranks which do not hold an element
            themselves; consecutive shards and target ranks take the next replicas in turn.
    """
    parameter = _parameter("", source, target, replica)
    if not source.numel:
        return ()
    bulk = parameter.in_bulk(rank) if rank is not None else None
    return tuple(parameter.copies(rank)) if bulk is None else bulk


def copies_into(source: Placement, target: Placement, rank: int, replica: int = 0) -> Sequence[Copy]:
    """Those copies of `copies_of` that this rank receives, from itself or from other ranks."""
    parameter = _parameter("", source, target, replica)
    if not source.numel:
        return ()
    bulk = parameter.in_bulk(rank, sends=False)
    return tuple(parameter.into(rank)) if bulk is None else bulk


def replica_of(name: str) -> int:
    """The number of the replica that sends the value with this name: a function of the name alone.

    The other values of a plan do not matter, so batches and windows change no sender. Consecutive shards are sent by
    consecutive replicas, and many names are spread evenly over the replicas.
    """
    return zlib.crc32(name.encode(errors="surrogatepass"))


def _parameters(source: Layout, target: Layout) -> Iterator[_Parameter]:
    for fqn, to in target.placements.items():
        from_ = source.placements.get(fqn)
        if from_ is None:
            raise LayoutError(f"{fqn}: the target has this parameter, the source does not")
        parameter = _parameter(fqn, from_, to, replica_of(fqn))
        if from_.numel:
            yield parameter


def _parameter(fqn: str, source: Placement, target: Placement, replica: int) -> _Parameter:
    if source.shape != target.shape:
        where = f"{fqn}: " if fqn else ""
        raise LayoutError(f"{where}shape {list(source.shape)} in the source, {list(target.shape)} in the target")
    return _Parameter(fqn, source, target, replica)


@dataclass(frozen=True)
class _Parameter:
    """The copies of one parameter, from `source` to `target`."""

    fqn: str
    source: Placement
    target: Placement
    replica: int

    def in_bulk(self, rank: int, *, sends: bool = True) -> Runs | None:
        """The copies of one rank as arrays; None where the copies are few or strided, and so are made one by one.

        `sends`: include the copies that the rank sends to others.
        """
        mine, held = self.target.shard_of(rank), self.source.shard_of(rank) if sends else None
        if self.source.overlapping or not self._are_many(mine, held):
            return None
        into = runs_into(self.source, self.target, mine, rank, self.replica) if mine is not None else Runs.none()
        out = runs_out_of(self.source, self.target, held, rank, self.replica) if held is not None else Runs.none()
        return into.joined(out) if into is not None and out is not None else None

    def _are_many(self, mine: int | None, held: int | None) -> bool:
        """Whether a rank with the shard `mine` of the target and `held` of the source may take part in many copies."""
        here = _bounds(self.target, mine) if mine is not None else None
        there = _bounds(self.source, held) if held is not None else None
        num_received = len(self.source.shards_over(*here)) if here is not None else 0
        num_sent = len(self.target.shards_over(*there)) * self.target.num_replicas if there is not None else 0
        return num_received + num_sent >= BULK_FROM

    def copies(self, rank: int | None) -> Iterator[Copy]:
        if rank is None or self.source.overlapping:
            pairs: Iterable[tuple[int, int]] = (
                (shard, holder) for shard in range(self.target.num_shards) for holder in self.target.holders(shard)
            )
            for shard, target_rank in pairs:
                for copy in self._into(shard, target_rank):
                    if rank is None or rank in (copy.source_rank, target_rank):
                        yield copy
            return
        yield from self.into(rank)
        held = self.source.shard_of(rank)
        if held is not None:
            yield from self._out_of(held, rank)

    def into(self, rank: int) -> Iterator[Copy]:
        """All copies that fill the shard of the target that one rank holds."""
        mine = self.target.shard_of(rank)
        if mine is not None:
            yield from self._into(mine, rank)

    def _into(self, shard: int, target_rank: int) -> Iterator[Copy]:
        """All copies that fill a shard on one target rank."""
        bounds = _bounds(self.target, shard)
        if bounds is None:
            return
        if self.source.overlapping:
            yield from self._into_from_overlapping(shard, target_rank)
            return
        for source_shard in self.source.shards_over(*bounds):
            source_rank = self._sender(source_shard, target_rank)
            yield from self._between(source_shard, source_rank, shard, target_rank)

    def _out_of(self, shard: int, source_rank: int) -> Iterator[Copy]:
        """All copies of a shard that one source rank sends to other ranks."""
        bounds = _bounds(self.source, shard)
        if bounds is None:
            return
        is_only_holder = self.source.num_replicas == 1
        for target_shard in self.target.shards_over(*bounds):
            for target_rank in self.target.holders(target_shard):
                if target_rank != source_rank and (is_only_holder or self._sender(shard, target_rank) == source_rank):
                    yield from self._between(shard, source_rank, target_shard, target_rank)

    def _sender(self, source_shard: int, target_rank: int) -> int:
        holders = self.source.holders(source_shard)
        if len(holders) == 1 or target_rank in holders:
            return target_rank if target_rank in holders else holders[0]
        return holders[(self.replica + source_shard + self._target_index(target_rank)) % len(holders)]

    def _target_index(self, rank: int) -> int:
        """The index of a rank among the target's ranks: ranks that need the same shard take it from the replicas in turn."""
        return bisect.bisect_left(self._target_ranks, rank)

    @cached_property
    def _target_ranks(self) -> tuple[int, ...]:
        return self.target.ranks

    def _between(self, source_shard: int, source_rank: int, target_shard: int, target_rank: int) -> Iterator[Copy]:
        source_run, target_run = self.source.run(source_shard), self.target.run(target_shard)
        if source_run is not None and target_run is not None:
            copy = _run_copy(self.fqn, source_run, source_rank, target_run, target_rank)
            if copy is not None:
                yield copy
            return
        run = target_run if source_run is None else source_run
        if run is not None and len(self.target.shape) == 2:
            blocks = self.source.blocks(source_shard) if source_run is None else self.target.blocks(target_shard)
            if len(blocks) == 1 and blocks[0].strides is None:
                ends = self.fqn, source_rank, target_rank
                for part in parts_of(self.target.shape[1], blocks[0], run):
                    yield copy_of_part(part, self.target.shape, blocks[0], *ends, is_from_block=source_run is None)
                return
        copies = [
            _block_copy(self.fqn, common, source, source_rank, target, target_rank)
            for target in self.target.blocks(target_shard)
            for source in self.source.blocks(source_shard)
            if (common := source.box.intersect(target.box)) is not None
        ]
        # Both ranks have to list the copies between them in the same order, so the order does not depend on the side.
        yield from sorted(copies, key=lambda copy: (copy.target_offset, copy.source_offset))

    def _into_from_overlapping(self, shard: int, target_rank: int) -> Iterator[Copy]:
        """All copies from overlapping source shards: each shard fills what is still missing, the rank's own shard first."""
        order = sorted(range(self.source.num_shards), key=lambda s: target_rank not in self.source.holders(s))
        copies = []
        for target in self.target.blocks(shard):
            missing: tuple[Box, ...] = (target.box,)
            for source_shard in order:
                source_rank = self._sender(source_shard, target_rank)
                for source in self.source.blocks(source_shard):
                    found = [common for box in missing if (common := box.intersect(source.box)) is not None]
                    copies += [_block_copy(self.fqn, box, source, source_rank, target, target_rank) for box in found]
                    missing = tuple(rest for box in missing for rest in box.subtract(source.box))
        yield from sorted(copies, key=lambda copy: (copy.target_offset, copy.source_offset))


def _bounds(placement: Placement, shard: int) -> tuple[int, int] | None:
    """The smallest row-major range of elements that covers a shard; None for a shard without elements."""
    run = placement.run(shard)
    if run is not None:
        return (run.start, run.stop) if run.start < run.stop else None
    bounds = [bounds_of_box(placement.shape, block.box) for block in placement.blocks(shard) if block.box.numel]
    return (min(b[0] for b in bounds), max(b[1] for b in bounds)) if bounds else None


def _run_copy(fqn: str, source: Run, source_rank: int, target: Run, target_rank: int) -> Copy | None:
    start, stop = max(source.start, target.start), min(source.stop, target.stop)
    if start >= stop:
        return None
    source_offset = source.offset + start - source.start
    target_offset = target.offset + start - target.start
    return Copy(fqn, source_rank, target_rank, (stop - start,), source_offset, (1,), target_offset, (1,))


def _block_copy(fqn: str, common: Box, source: Block, source_rank: int, target: Block, target_rank: int) -> Copy:
    """The copy of one common Box; dimensions over which both sides are contiguous are merged."""
    source_strides, target_strides = source.local_strides, target.local_strides
    source_offset = source.offset + _index(common, source.box, source_strides)
    target_offset = target.offset + _index(common, target.box, target_strides)
    joined: list[tuple[int, int, int]] = []
    for size, s, t in zip(common.sizes, source_strides, target_strides, strict=True):
        if size == 1:
            continue
        if joined and joined[-1][1] == s * size and joined[-1][2] == t * size:
            joined[-1] = (joined[-1][0] * size, s, t)
        else:
            joined.append((size, s, t))
    sizes, s_strides, t_strides = zip(*(joined or [(1, 1, 1)]), strict=True)
    return Copy(fqn, source_rank, target_rank, sizes, source_offset, s_strides, target_offset, t_strides)


def _index(common: Box, box: Box, strides: Shape) -> int:
    return sum((c - o) * stride for c, o, stride in zip(common.offsets, box.offsets, strides, strict=True))
