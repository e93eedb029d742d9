"""Boxes of a parameter, and the runs of row-major elements that make them up. All numbers count elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from fsdp_optim.errors import LayoutError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """An n-dimensional box of one parameter: element `i` is inside when `offsets <= i < offsets + sizes`.

    torch.distributed.checkpoint and TensorStore use the same words. A 0-dimensional Box holds one element.
    """

    offsets: Shape
    sizes: Shape

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise LayoutError(
                f"a box needs as many offsets as sizes, not offsets {self.offsets} and sizes {self.sizes}"
            )
        if min(self.offsets + self.sizes, default=0) < 0:
            raise LayoutError(f"a box needs numbers of at least 0, not offsets {self.offsets} and sizes {self.sizes}")

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def as_index(self) -> str:
        """The Box as an index of the parameter: `[8:16, 0:4]`."""
        return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(self.offsets, self.sizes, strict=True))}]"

    def intersect(self, other: Box) -> Box | None:
        """Return the elements that both boxes have; None when they have none in common."""
        offsets = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = (
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return Box(offsets, sizes) if all(n > 0 for n in sizes) else None

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """Return the elements of this box that are not in `other`: at most two boxes per dimension, which do not overlap."""
        common = self.intersect(other)
        if common is None:
            return (self,) if self.numel else ()
        rest = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (offset, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
            end, common_end = offsets[dim] + sizes[dim], offset + size
            for first, last in ((offsets[dim], offset), (common_end, end)):
                if first < last:
                    rest.append(
                        Box(
                            (*offsets[:dim], first, *offsets[dim + 1 :]),
                            (*sizes[:dim], last - first, *sizes[dim + 1 :]),
                        )
                    )
            offsets[dim], sizes[dim] = offset, size
        return tuple(rest)


@dataclass(frozen=True, slots=True)
class Block:
    """One Box of a parameter, row-major, `offset` elements into a rank's local tensor.

    `strides`: the strides of the Box in the local tensor; None for a Box that is contiguous there.
    """

    box: Box
    offset: int
    strides: Shape | None = None

    @property
    def local_strides(self) -> Shape:
        """The strides of the Box in the local tensor, in elements."""
        return row_major_strides(self.box.sizes) if self.strides is None else self.strides

    @property
    def end(self) -> int:
        """The index behind the last element of the Box in the local tensor."""
        if self.strides is None or not self.box.numel:
            return self.offset + self.box.numel
        return self.offset + 1 + sum((n - 1) * step for n, step in zip(self.box.sizes, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, stop) of a parameter in row-major order, `offset` elements into a rank's local tensor."""

    start: int
    stop: int
    offset: int


def row_major_strides(sizes: Shape) -> Shape:
    """Return strides, in elements, of a contiguous tensor of these sizes."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)


def boxes_of_run(shape: Shape, start: int, stop: int) -> tuple[Box, ...]:
    """Return the row-major elements [start, stop) of a parameter as Boxes, in order; at most 2n-1 Boxes for n dimensions.

    # shape (4, 3), elements [2, 10):   . . a      head: the rest of a row
    #                                   b b b      whole rows
    #                                   b b b
    #                                   c . .      tail: the beginning of a row
    """
    if start >= stop:
        return ()
    if not shape:
        return (Box((), ()),)
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        inner = boxes_of_run(shape[1:], start - first * row, stop - first * row)
        return tuple(Box((first, *box.offsets), (1, *box.sizes)) for box in inner)
    boxes: list[Box] = []
    if start > first * row:
        boxes += boxes_of_run(shape, start, (first + 1) * row)
        first += 1
    whole_end = stop // row
    if whole_end > first:
        boxes.append(Box((first, *([0] * (len(shape) - 1))), (whole_end - first, *shape[1:])))
    boxes += boxes_of_run(shape, whole_end * row, stop)
    return tuple(boxes)


def bounds_of_box(shape: Shape, box: Box) -> tuple[int, int]:
    """Return the row-major range [start, stop) from the first to the last element of a Box that is not empty."""
    first = last = 0
    for length, offset, size in zip(shape, box.offsets, box.sizes, strict=True):
        first, last = first * length + offset, last * length + offset + size - 1
    return first, last + 1


def runs_of_box(shape: Shape, box: Box) -> Iterator[tuple[int, int]]:
    """Yield the row-major ranges [start, stop) that make up a Box, row by row."""
    strides = row_major_strides(shape)
    width = box.sizes[-1] if shape else 1
    for index in itertools.product(*(range(o, o + n) for o, n in zip(box.offsets[:-1], box.sizes[:-1], strict=True))):
        start = sum(i * stride for i, stride in zip((*index, *box.offsets[-1:]), strides, strict=True))
        yield start, start + width
