"""The boxes of one rank on their way into the files: each is resolved by torch's planner, and written to its rows.

Only what a rank has is written, from where it is: a box on a device, or one with strides, is copied in windows.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy
import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_optim.checkpoint.common.local_extents import bytes_of, lies_on_host
from fsdp_optim.dcp.storage.planned_boxes import ItemBox, ItemName, box_of
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.bools import check_bools_of
from fsdp_optim.formats.base.checksums import Rows, rows_of
from fsdp_optim.formats.base.extents import DataSection, Extent, write_extents
from fsdp_optim.formats.base.packed import PackedExtents, write_packed
from fsdp_optim.layout import Shape
from fsdp_optim.layout.boxes import row_major_strides
from fsdp_optim.storage.base import StoreWriter
from fsdp_optim.tensors.memory import Budget

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_EXTENTS = 4096  # written together
_SHORT_NBYTES, _FEW = 32 << 10, 16  # runs of fewer bytes than this are written as a table, unless they are few


@dataclass(frozen=True)
class FilePlace:
    """What a rank must know about a file to write into it. `offset`: the byte of the file at which the data begin."""

    name: str
    offset: int
    segment_nbytes: int


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor: the number of its file, the byte of the data at which it begins, and what it is."""

    file: int
    start: int
    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class WrittenRows:
    """The report of a rank: the store's receipt, and the segments of each file by its number, as bytes of `Rows`."""

    receipt: bytes
    rows: Mapping[int, bytes]


class BoxWriter:
    """Writes the items of one rank. `places`: where the tensors are that this rank writes a box of, by key."""

    def __init__(
        self,
        store_writer: StoreWriter,
        files: Sequence[FilePlace],
        places: Mapping[str, TensorPlace],
        *,
        checksums: bool,
        budget: Budget,
    ) -> None:
        self._writer, self._files, self._places = store_writer, files, places
        self._checksums, self._budget = checksums, budget
        self._rows: dict[int, list[Rows]] = {}
        self._extents: list[Extent] = []
        self._nbytes, self._file = 0, 0

    def write(self, plan: SavePlan, planner: SavePlanner, skipped: frozenset[ItemName]) -> list[WriteResult]:
        """Write all items of a plan; return torch's result of each. Values that are no tensors are in the results."""
        values = [item for item in plan.items if item.type is WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        results = []
        for item in sorted(tensors, key=self._order):
            nbytes = 0
            if (item.index.fqn, box_of(item)[0]) not in skipped:
                nbytes = self._write(item, planner)
            results.append(WriteResult(item.index, nbytes, None))
        self._flush()
        for item in values:
            data = _bytes_of_value(item, planner)
            results.append(WriteResult(item.index, len(data), data))
        return results

    def report(self) -> WrittenRows:
        """Return when all writes are complete, and on the disk if the save is durable."""
        receipt = self._writer.finish()
        return WrittenRows(receipt, {number: numpy.concatenate(rows).tobytes() for number, rows in self._rows.items()})

    def _order(self, item: WriteItem) -> tuple[int, int, Shape]:
        place = self._place(item)
        return place.file, place.start, box_of(item)[0]

    def _place(self, item: WriteItem) -> TensorPlace:
        place = self._places.get(item.index.fqn)
        if place is None:
            raise CheckpointError(
                f"{item.index.fqn}: finish_plan of the planner has added this item, which was not in the global plan: add it in "
                "create_local_plan"
            )
        return place

    def _write(self, item: WriteItem, planner: SavePlanner) -> int:
        """Write one box; return the number of its bytes."""
        place, (offsets, sizes) = self._place(item), box_of(item)
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{item.index.fqn}: the planner gives a {type(tensor).__name__} for a tensor")
        tensor = tensor.detach()
        if (tensor.dtype, tuple(tensor.shape)) != (place.dtype, sizes):
            raise CheckpointError(
                f"{item.index.fqn}: the planner gives a {tensor.dtype} tensor of {list(tensor.shape)}, and its plan says "
                f"{place.dtype} of {list(sizes)}: change elements in create_local_plan and in resolve_data alike"
            )
        if not tensor.numel():
            return 0
        if place.file != self._file:
            self._flush()
            self._file = place.file
        for first, window in windows(tensor, self._budget.nbytes):
            if window.dtype is torch.bool:
                check_bools_of(item.index.fqn, window)
            at = tuple(o + f for o, f in zip(offsets, first, strict=True))
            self._add(place, (at, tuple(window.shape)), window)
        return tensor.numel() * tensor.itemsize

    def _add(self, place: TensorPlace, box: ItemBox, window: torch.Tensor) -> None:
        starts, width = runs(place.shape, box)
        memory = bytes_of(window.reshape(-1))
        begins, nbytes = place.start + starts * window.itemsize, width * window.itemsize
        if nbytes < _SHORT_NBYTES and len(starts) > _FEW:
            self._flush()  # segments at the border of two calls are written by both, each its bytes
            at = numpy.arange(len(starts), dtype=numpy.int64) * nbytes
            self._write_table(PackedExtents.of(begins, numpy.full_like(begins, nbytes), at, memory))
            return
        for number, begin in enumerate(begins.tolist()):
            self._extents.append(Extent(begin, memory[number * nbytes : (number + 1) * nbytes]))
        self._nbytes += len(memory)
        if self._nbytes >= self._budget.nbytes or len(self._extents) >= _MOST_EXTENTS:
            self._flush()

    def _write_table(self, packed: PackedExtents) -> None:
        section, grid = self._section()
        self._rows.setdefault(self._file, []).append(write_packed(packed, grid, section.move, section.offset))

    def _flush(self) -> None:
        if self._extents:
            section, grid = self._section()
            self._rows.setdefault(self._file, []).append(write_extents(section, self._extents, grid))
        self._extents, self._nbytes = [], 0

    def _section(self) -> tuple[DataSection, int]:
        file = self._files[self._file]
        section = DataSection(file.name, partial(self._write_pieces, file.name), file.offset, _no_names)
        return section, file.segment_nbytes if self._checksums else 0

    def _write_pieces(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        self._writer.write(name, pieces, offset)


def _no_names(start: int, stop: int) -> str:
    return "a tensor"


def _bytes_of_value(item: WriteItem, planner: SavePlanner) -> bytes:
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise CheckpointError(
            f"{item.index.fqn}: the planner gives a {type(data).__name__} for a value, and a save takes BytesIO"
        )
    return data.getvalue()


def windows(tensor: torch.Tensor, most_nbytes: int) -> Iterator[tuple[Shape, torch.Tensor]]:
    """Yield a tensor in parts that are contiguous on the host, each with the index of its first element.

    A tensor that is so already is one part, without a copy; a copy has at most `most_nbytes`.
    """
    nbytes, dims = tensor.numel() * tensor.itemsize, tensor.dim()
    is_plain = not (tensor.is_conj() or tensor.is_neg())
    if lies_on_host(tensor) and tensor.is_contiguous() and is_plain:
        yield (0,) * dims, tensor
    elif nbytes <= most_nbytes or not dims:
        yield (0,) * dims, tensor.resolve_conj().resolve_neg().to("cpu").contiguous()
    else:
        rows = most_nbytes // (nbytes // tensor.shape[0])
        for first in range(0, tensor.shape[0], max(rows, 1)):
            if rows:
                for inner, part in windows(tensor[first : first + rows], most_nbytes):
                    yield (first + inner[0], *inner[1:]), part
            else:
                for inner, part in windows(tensor[first], most_nbytes):
                    yield (first, *inner), part.unsqueeze(0)


def runs(shape: Shape, box: ItemBox) -> tuple[NDArray[numpy.int64], int]:
    """Return the elements of a tensor at which the contiguous runs of a box begin, in order, and the elements of each run."""
    offsets, sizes = box
    strides = row_major_strides(shape)
    cut = max((dim for dim, (n, full) in enumerate(zip(sizes, shape, strict=True)) if n < full), default=0)
    starts = numpy.array([sum(o * s for o, s in zip(offsets, strides, strict=True))], numpy.int64)
    for dim in range(cut):
        steps = numpy.arange(sizes[dim], dtype=numpy.int64) * strides[dim]
        starts = (starts[:, None] + steps).reshape(-1)
    return starts, prod(sizes[cut:])


def joined_rows(reports: Sequence[WrittenRows], number: int) -> list[Rows]:
    """Return the segments of one file by rank."""
    return [
        numpy.frombuffer(report.rows[number], dtype="<u8").reshape(-1, 3) if number in report.rows else rows_of(())
        for report in reports
    ]
