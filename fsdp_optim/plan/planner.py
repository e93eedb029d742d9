"""The copies from one Layout to another, as plain values. No torch: one process can plan for any world size."""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Block, Box, Layout, Placement, Run, Shape, bounds_of_box
from fsdp_optim.plan.bulk import Pairs, copies_between
from fsdp_optim.plan.copies import Copy
from fsdp_optim.plan.table import CopyTable

RUNS_FROM, BOXES_FROM = 48, 4
"""The number of pairs of shards from which arrays are quicker than single copies: pairs of runs, and pairs with Boxes."""


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
    return parameter.of_rank(rank, sends=True) if rank is not None else tuple(parameter.copies(None))


def copies_into(source: Placement, target: Placement, rank: int, replica: int = 0) -> Sequence[Copy]:
    """Those copies of `copies_of` that this rank receives, from itself or from other ranks."""
    parameter = _parameter("", source, target, replica)
    return parameter.of_rank(rank, sends=False) if source.numel else ()


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


_Shards = tuple[int | None, Sequence[int], int | None, Sequence[int]]
"""A rank's shard of the target, shards of the source, the rank's shard of the source, and shards of the target."""


@dataclass(frozen=True)
class _Parameter:
    """The copies of one parameter, from `source` to `target`."""

    fqn: str
    source: Placement
    target: Placement
    replica: int

    def of_rank(self, rank: int, *, sends: bool) -> Sequence[Copy]:
        """The copies that a rank receives and, with `sends`, those that it sends: at once where they may be many."""
        if self.source.overlapping:
            mine = self.target.shard_of(rank)
            if sends or mine is None:
                return tuple(self.copies(rank)) if sends else ()
            return tuple(self._into_from_overlapping(mine, rank))
        its = self._shards_of(rank, sends=sends)
        if self.source.has_tables and self.target.has_tables:
            _, into, _, out = its
            fewest = RUNS_FROM if self.source.in_runs and self.target.in_runs else BOXES_FROM
            if len(into) + len(out) * self.target.num_replicas >= fewest:
                return self._in_bulk(rank, *its)
        return tuple(self._singly(rank, *its))

    def _shards_of(self, rank: int, *, sends: bool) -> _Shards:
        """The shards of a rank, each with those of the other side that may have elements in common with it."""
        mine, held = self.target.shard_of(rank), self.source.shard_of(rank) if sends else None
        return mine, self._shards_into(mine), held, self._shards_out_of(held)

    def _singly(
        self, rank: int, mine: int | None, into: Sequence[int], held: int | None, out: Sequence[int]
    ) -> Iterator[Copy]:
        """The same copies as `_in_bulk`, one by one."""
        if mine is not None:
            yield from self._into(mine, rank, into)
        if held is not None:
            yield from self._out_of(held, rank, out)

    def _in_bulk(
        self, rank: int, mine: int | None, into: Sequence[int], held: int | None, out: Sequence[int]
    ) -> CopyTable:
        """The copies between the shard `mine` of the target and the shards `into`, and between `held` and the shards `out`."""
        pairs = Pairs.none()
        if mine is not None and into:
            pairs = Pairs.into(self.source, into, self.target, mine, rank, self.replica)
        if held is not None and out:
            pairs = pairs.joined(Pairs.out_of(self.source, held, self.target, out, rank, self.replica))
        return copies_between(self.source, self.target, pairs)

    def _shards_into(self, shard: int | None) -> Sequence[int]:
        """The shards of the source that may have elements of a shard of the target."""
        bounds = _bounds(self.target, shard) if shard is not None else None
        return self.source.shards_over(*bounds) if bounds is not None else ()

    def _shards_out_of(self, shard: int | None) -> Sequence[int]:
        """The shards of the target that may have elements of a shard of the source."""
        bounds = _bounds(self.source, shard) if shard is not None else None
        return self.target.shards_over(*bounds) if bounds is not None else ()

    def copies(self, rank: int | None) -> Iterator[Copy]:
        if rank is None or self.source.overlapping:
            pairs: Iterable[tuple[int, int]] = (
                (shard, holder) for shard in range(self.target.num_shards) for holder in self.target.holders(shard)
            )
            for shard, target_rank in pairs:
                if self.source.overlapping:
                    copies = self._into_from_overlapping(shard, target_rank)
                else:
                    copies = self._into(shard, target_rank, self._shards_into(shard))
                for copy in copies:
                    if rank is None or rank in (copy.source_rank, target_rank):
                        yield copy
            return
        yield from self._singly(rank, *self._shards_of(rank, sends=True))

    def _into(self, shard: int, target_rank: int, source_shards: Sequence[int]) -> Iterator[Copy]:
        """All copies that fill a shard on one target rank, from some shards that do not overlap."""
        for source_shard in source_shards:
            source_rank = self._sender(source_shard, target_rank)
            yield from self._between(source_shard, source_rank, shard, target_rank)

    def _out_of(self, shard: int, source_rank: int, target_shards: Sequence[int]) -> Iterator[Copy]:
        """All copies of a shard that one source rank sends to other ranks, which hold some shards."""
        is_only_holder = self.source.num_replicas == 1
        for target_shard in target_shards:
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
