"""Windows of elements: ranges of the elements of stored tensors, read into memory of bounded size.

# elements of a value | . . . . . . . . . . . . . |
# windows             |     0     |     1     | 2 |   of whole chunks; small values share one batch
# chunks              | 0 | 1 | 2 | 3 | 4 | 5 | 6 |   of a fixed number of elements, whatever the memory and the threads

Figures are computed chunk by chunk and added exactly, so that they do not depend on the number of threads or on their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fsdp_optim.checkpoint.common.local_extents import bytes_of
from fsdp_optim.checkpoint.load.reading import elements_of
from fsdp_optim.formats.base.extents import Extent, without_overlaps
from fsdp_optim.formats.base.protocols import Reader
from fsdp_optim.layout import Block, Box, Boxes, Placement, Shape, Whole, whole_on
from fsdp_optim.offline.values.named_values import NamedValue
from fsdp_optim.plan import Plans
from fsdp_optim.tensors.allocation import in_pages
from fsdp_optim.tensors.memory import Budget, flatten

CHUNK_NUMEL = 1 << 16
"""Elements of one chunk."""

CHUNK_NBYTES = 12 * 8 * CHUNK_NUMEL
"""About the most memory for the numbers of one chunk, and for what is computed of them."""

_MOST_WINDOW, _LEAST_WINDOW = 8 << 20, 16 * CHUNK_NUMEL  # bytes; the least has one chunk of the largest elements
_ALIGNMENT = 64  # bytes
_MOST_EXTENTS = 512  # in one read, because there may be many short rows
_USES = 2  # of the memory of a window: its elements, and the bytes around these that a reader verifies


def window_nbytes_in(budget: Budget, num_checkpoints: int) -> int:
    """Return the length of windows, so that at least two threads fit into a budget."""
    thread = budget.share(2, "two threads, each with windows and the numbers of a chunk")
    nbytes = (thread.nbytes - CHUNK_NBYTES) // (_USES * num_checkpoints)
    return min(max(nbytes, _LEAST_WINDOW), _MOST_WINDOW)


def num_threads_in(budget: Budget, window_nbytes: int, num_checkpoints: int) -> int:
    """Return how many threads fit into a budget, at most one per core."""
    fitting = budget.num_fitting(window_nbytes * _USES * num_checkpoints + CHUNK_NBYTES)
    return max(min(fitting, torch.get_num_threads()), 1)


@dataclass(frozen=True, slots=True)
class ElementWindow:
    """Elements [first, first + num) of the value with the number `index`. `itemsize`: the most bytes of an element."""

    index: int
    first: int
    num: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return -(-self.num * self.itemsize // _ALIGNMENT) * _ALIGNMENT


def windows_of(values: Iterable[tuple[int, int, int]], most_nbytes: int) -> Iterator[ElementWindow]:
    """Cut values, which are given as (index, number of elements, bytes of an element), into windows of whole chunks."""
    for index, numel, itemsize in values:
        step = max(most_nbytes // (itemsize * CHUNK_NUMEL), 1) * CHUNK_NUMEL
        for first in range(0, numel, step):
            yield ElementWindow(index, first, min(step, numel - first), itemsize)


def chunks_of(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the chunks of a window."""
    for start in range(0, len(flat), CHUNK_NUMEL):
        yield flat[start : start + CHUNK_NUMEL]


class WindowReader:
    """Reads the windows of one checkpoint, in one thread, into memory of its own."""

    def __init__(self, reader: Reader, window_nbytes: int, plans: Plans) -> None:
        self._reader, self._plans = reader, plans
        self._memory = in_pages((window_nbytes + _ALIGNMENT,), torch.uint8)

    def read(self, parts: Sequence[tuple[NamedValue, Placement, int, int]]) -> list[torch.Tensor]:
        """Return elements [first, first + num) of each value as a 1-D tensor.

        Args:
            parts: (value, its cut on rank 0, first, num). Together they need no more memory than a window has.

        Returns:
            1-D tensors in memory that the next call overwrites.
        """
        flats, extents, at = list[torch.Tensor](), dict[str, list[Extent]](), 0
        for value, cut, first, num in parts:
            nbytes = num * value.dtype.itemsize
            flat = self._memory[at : at + nbytes].view(value.dtype)
            flats.append(flat)
            at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            if value.constant is not None:
                flat.copy_(_sliced(value.constant, cut)[first : first + num])
            elif num:
                self._add(extents, value, cut, first, flat)
        for file, ranges in extents.items():
            for apart in without_overlaps(ranges):  # the names of a tied weight may be asked for together
                for start in range(0, len(apart), _MOST_EXTENTS):
                    self._reader.read({file: apart[start : start + _MOST_EXTENTS]})
        return flats

    def _add(
        self, extents: dict[str, list[Extent]], value: NamedValue, cut: Placement, first: int, flat: torch.Tensor
    ) -> None:
        stored = value.stored
        if stored is None:
            return
        size, memory = value.dtype.itemsize, bytes_of(flat)
        planned = self._plans.of(stored.placement, cut, 0, sends=False)
        for rank, stored_offset, offset, numel in elements_of(planned, first, len(flat)):
            file, start = stored.place_on(rank)
            part = memory[offset * size : (offset + numel) * size]
            extents.setdefault(file, []).append(Extent(start + stored_offset * size, part))


def _sliced(constant: torch.Tensor, cut: Placement) -> torch.Tensor:
    """Return the elements of a tensor in memory that are in a cut, in a row."""
    blocks = cut.blocks(0)
    if isinstance(cut, Whole) or not blocks:
        return flatten(constant)
    box = blocks[0].box
    return flatten(constant[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))])


def all_elements(shape: Shape) -> Placement:
    """Return the cut of all elements of a shape."""
    return whole_on(shape, (0,))


def elements_in_box(shape: Shape, box: Box) -> Placement:
    """Return the cut of the elements of a box, in row-major order."""
    return Boxes(shape, ((0, (Block(box, 0),)),))


def batches_of(windows: Iterable[ElementWindow], most_nbytes: int) -> Iterator[list[ElementWindow]]:
    """Yield windows in their order, together up to a number of bytes."""
    batch, total = list[ElementWindow](), 0
    for window in windows:
        if batch and total + window.nbytes > most_nbytes:
            yield batch
            batch, total = [], 0
        batch.append(window)
        total += window.nbytes
    if batch:
        yield batch
