"""The copies that lead from one Layout to another, as plain values. No torch: every world size is planned in one process."""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Block, Box, Layout, Placement, Run, Shape, bounds_of_box, row_major_strides


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided block of elements of `fqn`, from `source_rank`'s local tensor into `target_rank`'s.

    Element `i` (an index into `sizes`) moves from `source_offset + i . source_strides` to
    `target_offset + i . target_strides`, all in elements of the two local tensors seen flat. Dimensions that are
    contiguous on both sides are one, so a block that is contiguous on both sides has one size: it is a run.
    """

    fqn: str
    source_rank: int
    target_rank: int
    sizes: Shape
    source_offset: int
    source_strides: Shape
    target_offset: int
    target_strides: Shape

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def is_run(self) -> bool:
        return len(self.sizes) == 1 and self.source_strides == (1,) == self.target_strides


def part_into(copy: Copy, start: int, stop: int) -> Iterator[Copy]:
    """What of a copy goes to elements [start, stop) of the target's local tensor, as copies into those alone."""
    for part in _clipped(copy, start, stop):
        yield replace(part, target_offset=part.target_offset - start)


def part_from(copy: Copy, start: int, stop: int) -> Iterator[Copy]:
    """What of a copy comes from elements [start, stop) of the source's local tensor, as copies from those alone."""
    for part in _clipped(_turned(copy), start, stop):
        yield _turned(replace(part, target_offset=part.target_offset - start))


def _turned(copy: Copy) -> Copy:
    return Copy(
        copy.fqn,
        copy.target_rank,
        copy.source_rank,
        copy.sizes,
        copy.target_offset,
        copy.target_strides,
        copy.source_offset,
        copy.source_strides,
    )


def _clipped(copy: Copy, start: int, stop: int) -> Iterator[Copy]:
    """The parts of a copy whose target elements are in [start, stop): a first row, whole rows, a last row, at every level."""
    size, inner = copy.sizes[0], copy.sizes[1:]
    stride, first = copy.target_strides[0], copy.target_offset
    span = 1 + sum((n - 1) * step for n, step in zip(inner, copy.target_strides[1:], strict=True))  # of one row
    low = min(max(-(-(start - first) // stride), 0), size)  # rows [low, high) are inside
    high = max(min((stop - first - span) // stride + 1, size), low)
    if low > 0 and first + (low - 1) * stride + span > start:
        yield from _clipped(_rows(copy, low - 1, low, whole=False), start, stop)
    if low < high:
        yield _rows(copy, low, high, whole=True)
    if low <= high < size and first + high * stride < stop:
        yield from _clipped(_rows(copy, high, high + 1, whole=False), start, stop)


def _rows(copy: Copy, low: int, high: int, *, whole: bool) -> Copy:
    """Rows [low, high) of a copy; with `whole` False one of them, with a dimension less."""
    source = copy.source_offset + low * copy.source_strides[0]
    target = copy.target_offset + low * copy.target_strides[0]
    if whole:
        return replace(copy, sizes=(high - low, *copy.sizes[1:]), source_offset=source, target_offset=target)
    return replace(
        copy,
        sizes=copy.sizes[1:],
        source_offset=source,
        source_strides=copy.source_strides[1:],
        target_offset=target,
        target_strides=copy.target_strides[1:],
    )


def plan(source: Layout, target: Layout, *, rank: int | None = None) -> tuple[Copy, ...]:
    """The copies that fill every Piece of `target` from `source`.

    Each target element is filled exactly once: from the target rank itself where it holds the element, else from one of
    the replicas (`replica_of`). Padding is on neither side. With `rank`, only the copies that this rank
    sends or receives, which cost only their own number to compute; between any two ranks they are the same, in the
    same order, as in the whole plan. `source` may have more parameters than `target`.

    Raises:
        LayoutError: a parameter of `target` is missing from `source`, or has another shape there.
    """
    return tuple(copy for parameter in _parameters(source, target) for copy in parameter.copies(rank))


def copies_of(source: Placement, target: Placement, *, rank: int | None = None, replica: int = 0) -> tuple[Copy, ...]:
    """As `plan`, of one parameter, whose copies have no FQN.

    Args:
        replica: ranks that do not hold an element themselves take it from the replica of this number, modulo how many there
            are, or from one of the next.
    """
    return tuple(_parameter("", source, target, replica).copies(rank)) if source.numel else ()


def copies_into(source: Placement, target: Placement, rank: int, replica: int = 0) -> tuple[Copy, ...]:
    """Of `copies_of`, only the copies that this rank receives, from itself or from others."""
    return tuple(_parameter("", source, target, replica).into(rank)) if source.numel else ()


def replica_of(name: str) -> int:
    """A number for the replica that sends what has this name: a function of the name alone.

    What is planned beside it does not matter, so batches and windows change no sender. Consecutive shards are sent by
    consecutive replicas, and many names are spread evenly over them.
    """
    return zlib.crc32(name.encode(errors="surrogatepass"))


def _parameters(source: Layout, target: Layout) -> Iterator[_Parameter]:
    for fqn, to in target.placements.items():
        from_ = source.placements.get(fqn)
        if from_ is None:
            raise LayoutError(f"{fqn}: the target has this parameter, the source does not")
        one = _parameter(fqn, from_, to, replica_of(fqn))
        if from_.numel:
            yield one


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
        """All copies that fill what one rank holds of the target."""
        mine = self.target.shard_of(rank)
        if mine is not None:
            yield from self._into(mine, rank)

    def _into(self, shard: int, target_rank: int) -> Iterator[Copy]:
        """All copies that fill one shard of one target rank."""
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
        """All copies that one source rank sends to others."""
        bounds = _bounds(self.source, shard)
        if bounds is None:
            return
        for target_shard in self.target.shards_over(*bounds):
            for target_rank in self.target.holders(target_shard):
                if target_rank != source_rank and self._sender(shard, target_rank) == source_rank:
                    yield from self._between(shard, source_rank, target_shard, target_rank)

    def _sender(self, source_shard: int, target_rank: int) -> int:
        holders = self.source.holders(source_shard)
        if len(holders) == 1 or target_rank in holders:
            return target_rank if target_rank in holders else holders[0]
        return holders[(self.replica + source_shard + self._target_index(target_rank)) % len(holders)]

    def _target_index(self, rank: int) -> int:
        """Which of the target's ranks it is: ranks that take the same shard take it from replicas in turn."""
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
        # Both ends list the copies between two ranks in this order, whichever end they start from.
        yield from sorted(copies, key=lambda copy: (copy.target_offset, copy.source_offset))

    def _into_from_overlapping(self, shard: int, target_rank: int) -> Iterator[Copy]:
        """Sources that overlap: take from each what is still missing, this rank's own first."""
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
    """The smallest row-major range of elements that has all of a shard; None for a shard that holds nothing."""
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
    """The copy of one common Box, its dimensions joined wherever both sides are contiguous over them."""
    source_strides, target_strides = row_major_strides(source.box.sizes), row_major_strides(target.box.sizes)
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
