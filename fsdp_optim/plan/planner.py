"""The copies from one Placement of a parameter to another, as plain values. No torch: one process plans for any world size."""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Block, Box, Placement, Run, Shape
from fsdp_optim.plan.bulk import copies_of_kind
from fsdp_optim.plan.copies import Copy
from fsdp_optim.plan.request import Request, ShardPair

RUNS_FROM, BOXES_FROM = 48, 4
"""The number of pairs of shards from which arrays are quicker than single copies: pairs of runs, and pairs with Boxes."""


def copies_of(source: Placement, target: Placement, *, rank: int | None = None, replica: int = 0) -> Sequence[Copy]:
    """Return the copies that fill `target` from `source`, all of them or those that one rank sends or receives.

    Each target element is filled exactly once: from the target rank itself where that rank holds the element, else from one
    of the replicas. Padding is never copied. With `rank`, it takes time in proportion to the copies of that rank; the copies
    between any two ranks are the same, in the same order, as in the complete plan.

    Args:
        replica: the number of the replica (modulo the number of replicas) that sends to ranks which do not hold an element
            themselves; consecutive shards and target ranks take the next replicas in turn.
    """
    if rank is not None:
        return copies_of_parts([part_of(Request(source, target, rank, replica))])[0]
    _check_shapes(source, target)
    return tuple(_Parameter(source, target, replica).of_all()) if source.numel else ()


def copies_into(source: Placement, target: Placement, rank: int, replica: int = 0) -> Sequence[Copy]:
    """Plan only the copies of `copies_of` that this rank receives, from itself or from other ranks."""
    return copies_of_parts([part_of(Request(source, target, rank, replica, sends=False))])[0]


def part_of(request: Request) -> ShardPair:
    """Return the shards of a request.

    Raises:
        LayoutError: source and target have different shapes.
    """
    source, target, rank, _, sends = request
    _check_shapes(source, target)
    target_shard, source_shard = target.shard_of(rank), source.shard_of(rank) if sends else None
    if source.overlapping or not source.numel:
        return ShardPair(request, target_shard, (), source_shard, ())
    return ShardPair(
        request,
        target_shard,
        _shards_over(target, target_shard, source),
        source_shard,
        _shards_over(source, source_shard, target),
    )


def _shards_over(placement: Placement, shard: int | None, other: Placement) -> Sequence[int]:
    """Return the shards of another placement that may have elements of a shard."""
    bounds = placement.bounds(shard) if shard is not None else None
    return other.shards_over(*bounds) if bounds is not None else ()


def copies_of_parts(parts: Sequence[ShardPair]) -> list[Sequence[Copy]]:
    """Return the copies of some parts. Parts with many pairs of shards are planned at once, parts of one kind together."""
    results: list[Sequence[Copy]] = [()] * len(parts)
    by_kind: dict[object, list[int]] = {}
    for number, part in enumerate(parts):
        kind = part.kind if len(parts) > 1 and not part.in_runs else number  # a copy between two runs is quick to make
        by_kind.setdefault(kind, []).append(number)
    for numbers in by_kind.values():
        same_kind = [parts[number] for number in numbers]
        planned = copies_of_kind(same_kind) if _are_many(same_kind) else [_one_by_one(part) for part in same_kind]
        for number, copies in zip(numbers, planned, strict=True):
            results[number] = copies
    return results


def _are_many(parts: Sequence[ShardPair]) -> bool:
    """Return whether parts of one kind are planned quicker at once than copy by copy."""
    source, target = parts[0].request[:2]
    if source.overlapping or not source.has_tables or not target.has_tables:
        return False
    return sum(part.num_pairs for part in parts) >= (RUNS_FROM if parts[0].in_runs else BOXES_FROM)


def _one_by_one(part: ShardPair) -> tuple[Copy, ...]:
    source, target, _, replica, _ = part.request
    return tuple(_Parameter(source, target, replica).of_part(part)) if source.numel else ()


def replica_of(name: str) -> int:
    """Return the number of the replica that sends the value with this name: a function of the name alone.

    The other values of a plan do not matter, so batches and windows change no sender. Consecutive shards are sent by
    consecutive replicas, and many names are spread evenly over the replicas.
    """
    return zlib.crc32(name.encode(errors="surrogatepass"))


def _check_shapes(source: Placement, target: Placement) -> None:
    if source.shape != target.shape:
        raise LayoutError(f"shape {list(source.shape)} in the source, {list(target.shape)} in the target")


@dataclass(frozen=True)
class _Parameter:
    """The copies of one parameter, from `source` to `target`."""

    source: Placement
    target: Placement
    replica: int

    def of_part(self, part: ShardPair) -> Iterator[Copy]:
        """Yield the copies of a part, one by one: first what the rank receives, then what it sends to other ranks."""
        rank = part.request.rank
        if self.source.overlapping and part.request.sends:
            yield from (copy for copy in self.of_all() if rank in (copy.source_rank, copy.target_rank))
        elif self.source.overlapping:
            yield from self._into_from_overlapping(part.target_shard, rank) if part.target_shard is not None else ()
        else:
            if part.target_shard is not None:
                yield from self._into(part.target_shard, rank, part.into)
            if part.source_shard is not None:
                yield from self._out_of(part.source_shard, rank, part.out)

    def of_all(self) -> Iterator[Copy]:
        """Yield the copies between all ranks."""
        for shard in range(self.target.num_shards):
            for rank in self.target.holders(shard):
                if self.source.overlapping:
                    yield from self._into_from_overlapping(shard, rank)
                else:
                    yield from self._into(shard, rank, _shards_over(self.target, shard, self.source))

    def _into(self, shard: int, target_rank: int, source_shards: Sequence[int]) -> Iterator[Copy]:
        """Yield all copies that fill a shard on one target rank, from some shards that do not overlap."""
        for source_shard in source_shards:
            source_rank = self._sender(source_shard, target_rank)
            yield from self._between(source_shard, source_rank, shard, target_rank)

    def _out_of(self, shard: int, source_rank: int, target_shards: Sequence[int]) -> Iterator[Copy]:
        """Yield all copies of a shard that one source rank sends to other ranks, which hold some shards."""
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
        """Return a rank's index among the target's ranks: ranks that need the same shard take it from the replicas in turn."""
        return bisect.bisect_left(self._target_ranks, rank)

    @cached_property
    def _target_ranks(self) -> tuple[int, ...]:
        return self.target.ranks

    def _between(self, source_shard: int, source_rank: int, target_shard: int, target_rank: int) -> Iterator[Copy]:
        source_run, target_run = self.source.run(source_shard), self.target.run(target_shard)
        if source_run is not None and target_run is not None:
            copy = _run_copy(source_run, source_rank, target_run, target_rank)
            if copy is not None:
                yield copy
            return
        copies = [
            _block_copy(common, source, source_rank, target, target_rank)
            for target in self.target.blocks(target_shard)
            for source in self.source.blocks(source_shard)
            if (common := source.box.intersect(target.box)) is not None
        ]
        # Both ranks must list the copies between them in the same order, so the order does not depend on the side.
        yield from sorted(copies, key=lambda copy: (copy.target_offset, copy.source_offset))

    def _into_from_overlapping(self, shard: int, target_rank: int) -> Iterator[Copy]:
        """Yield all copies from overlapping source shards: each shard fills what is still missing, the rank's own shard first."""
        order = sorted(range(self.source.num_shards), key=lambda s: target_rank not in self.source.holders(s))
        copies = []
        for target in self.target.blocks(shard):
            missing: tuple[Box, ...] = (target.box,)
            for source_shard in order:
                source_rank = self._sender(source_shard, target_rank)
                for source in self.source.blocks(source_shard):
                    overlaps = [common for box in missing if (common := box.intersect(source.box)) is not None]
                    copies += [_block_copy(box, source, source_rank, target, target_rank) for box in overlaps]
                    missing = tuple(rest for box in missing for rest in box.subtract(source.box))
        yield from sorted(copies, key=lambda copy: (copy.target_offset, copy.source_offset))


def _run_copy(source: Run, source_rank: int, target: Run, target_rank: int) -> Copy | None:
    start, stop = max(source.start, target.start), min(source.stop, target.stop)
    if start >= stop:
        return None
    source_offset = source.offset + start - source.start
    target_offset = target.offset + start - target.start
    return Copy(source_rank, target_rank, (stop - start,), source_offset, (1,), target_offset, (1,))


def _block_copy(common: Box, source: Block, source_rank: int, target: Block, target_rank: int) -> Copy:
    """Return the copy of one common Box; dimensions over which both sides are contiguous are merged."""
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
    return Copy(source_rank, target_rank, sizes, source_offset, s_strides, target_offset, t_strides)


def _index(common: Box, box: Box, strides: Shape) -> int:
    return sum((c - o) * stride for c, o, stride in zip(common.offsets, box.offsets, strides, strict=True))
