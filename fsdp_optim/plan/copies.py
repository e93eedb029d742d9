"""One copy of a plan: a strided block of elements from one local tensor into another, and the copy clipped to a window."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from fsdp_optim.layout import Shape


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided block of elements, from the local tensor of `source_rank` into the local tensor of `target_rank`.

    Element `i` (an index into `sizes`) moves from `source_offset + i . source_strides` to
    `target_offset + i . target_strides`, in elements of the flattened local tensors. Dimensions that are contiguous on
    both sides are merged, so a block that is contiguous on both sides has a single size and is called a run.
    """

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


def runs_of(copy: Copy) -> Iterator[tuple[int, int, int]]:
    """Yield (source offset, target offset, numel) of each run of a copy."""
    if copy.is_run:
        yield copy.source_offset, copy.target_offset, copy.sizes[0]
        return
    *outer, last = zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True)
    width = last[0] if last[1] == last[2] == 1 else 1
    if width == 1 and last[0] > 1:
        outer.append(last)
    for index in itertools.product(*(range(size) for size, _, _ in outer)):
        source = sum(i * s for i, (_, s, _) in zip(index, outer, strict=True))
        target = sum(i * t for i, (_, _, t) in zip(index, outer, strict=True))
        yield copy.source_offset + source, copy.target_offset + target, width


def clip_to_target(copy: Copy, start: int, stop: int) -> Iterator[Copy]:
    """Yield the part of a copy that fills elements [start, stop) of the target's local tensor, as copies into that slice."""
    if copy.is_run:
        yield from _run(copy, copy.target_offset, start, stop, in_target=True)
        return
    for clipped in _clipped(copy, start, stop):
        yield replace(clipped, target_offset=clipped.target_offset - start)


def clip_to_source(copy: Copy, start: int, stop: int) -> Iterator[Copy]:
    """Yield the part of a copy that reads elements [start, stop) of the source's local tensor, as copies from that slice."""
    if copy.is_run:
        yield from _run(copy, copy.source_offset, start, stop, in_target=False)
        return
    for clipped in _clipped(_reversed(copy), start, stop):
        yield _reversed(replace(clipped, target_offset=clipped.target_offset - start))


def _run(copy: Copy, at: int, start: int, stop: int, *, in_target: bool) -> Iterator[Copy]:
    """Yield the part of a run, which begins at `at` on one side, in the slice [start, stop) of that side. Most lie inside."""
    first, last = max(at, start), min(at + copy.sizes[0], stop)
    if first >= last:
        return
    if not start and last - first == copy.sizes[0]:
        yield copy
        return
    source, target = copy.source_offset + first - at, copy.target_offset + first - at
    yield Copy(
        copy.source_rank,
        copy.target_rank,
        (last - first,),
        source if in_target else source - start,
        (1,),
        target - start if in_target else target,
        (1,),
    )


def _reversed(copy: Copy) -> Copy:
    """Return the copy with source and target swapped."""
    return Copy(
        copy.target_rank,
        copy.source_rank,
        copy.sizes,
        copy.target_offset,
        copy.target_strides,
        copy.source_offset,
        copy.source_strides,
    )


def _clipped(copy: Copy, start: int, stop: int) -> Iterator[Copy]:
    """Yield the parts of a copy with target elements in [start, stop): in each dimension part of a row, full rows, a rest."""
    copy = _outermost_first(copy)
    size, inner = copy.sizes[0], copy.sizes[1:]
    stride, first = copy.target_strides[0], copy.target_offset
    span = 1 + sum((n - 1) * step for n, step in zip(inner, copy.target_strides[1:], strict=True))  # length of one row
    low = min(max(-(-(start - first) // stride), 0), size)  # rows [low, high) lie inside
    high = max(min((stop - first - span) // stride + 1, size), low)
    if low > 0 and first + (low - 1) * stride + span > start:
        yield from _clipped(_rows(copy, low - 1, low, whole=False), start, stop)
    if low < high:
        yield _rows(copy, low, high, whole=True)
    if low <= high < size and first + high * stride < stop:
        yield from _clipped(_rows(copy, high, high + 1, whole=False), start, stop)


def _outermost_first(copy: Copy) -> Copy:
    """Return the copy with its dimensions in the order of the target's strides: a transposed part has another order."""
    strides = copy.target_strides
    if all(a >= b for a, b in itertools.pairwise(strides)):
        return copy
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    sizes, source, target = (
        tuple(numbers[dim] for dim in order) for numbers in (copy.sizes, copy.source_strides, strides)
    )
    return replace(copy, sizes=sizes, source_strides=source, target_strides=target)


def _rows(copy: Copy, low: int, high: int, *, whole: bool) -> Copy:
    """Return rows [low, high) of a copy; with `whole` False, row `low` as a copy with a dimension less."""
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
