"""A rank's elements as rows of bytes of the unsharded value: whole rows where they lie, the others in a scratch with zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_optim.plan import Copy, clip_to_target
from fsdp_optim.prints.coefficients import ROW_NBYTES
from fsdp_optim.prints.sums import RowSums
from fsdp_optim.tensors.memory import source_view, target_view

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By size, a dtype as which elements are copied bit by bit."""

_LEAST_ROWS = 64  # which are added where they lie; fewer are copied beside those of other values
_ROWS_TOGETHER = 2048  # of a scratch, if it has room


class RowsOfValues:
    """Cuts the elements of values into rows, on one device, and adds them. Call `flush` at the end.

    Args:
        sums: takes the rows.
        most_nbytes: of the scratch.
    """

    def __init__(self, sums: RowSums, device: torch.device, most_nbytes: int) -> None:
        num_rows = max(min(most_nbytes // ROW_NBYTES, _ROWS_TOGETHER), 2)
        self._sums, self._device = sums, device
        self._scratch = torch.zeros((num_rows, ROW_NBYTES), dtype=torch.uint8, device=device)
        self._numbers: list[int] = []
        self._owners: list[int] = []
        self._dtype = torch.uint8

    def add(self, copies: Sequence[Copy], flat: torch.Tensor, owner: int) -> None:
        """Add elements of a value.

        Args:
            copies: from elements of `flat`, 1-D and contiguous, to elements of the unsharded value in row-major order.
            owner: the index of the value.
        """
        if self._dtype != flat.dtype:
            self.flush()
            self._dtype = flat.dtype
        for copy in copies:
            if copy.is_run:
                self._add_run(flat[copy.source_offset : copy.source_offset + copy.numel], copy.target_offset, owner)
            else:
                self._add_box(copy, flat, owner)

    def flush(self) -> None:
        """Add the rows in the scratch."""
        num = len(self._numbers)
        if num:
            numbers, owners = (
                torch.tensor(listed, dtype=torch.int64).to(self._device) for listed in (self._numbers, self._owners)
            )
            self._sums.add(self._scratch[:num], numbers, self._dtype, owners)
            self._scratch[:num].zero_()
            self._numbers, self._owners = [], []

    def _add_run(self, run: torch.Tensor, start: int, owner: int) -> None:
        """Add the elements from `start` on of an unsharded value."""
        data, start = run.view(torch.uint8), start * run.itemsize
        first, last = -(-start // ROW_NBYTES), (start + len(data)) // ROW_NBYTES  # whole rows
        if last - first >= _LEAST_ROWS:
            rows = data[first * ROW_NBYTES - start : last * ROW_NBYTES - start].view(-1, ROW_NBYTES)
            numbers = torch.arange(first, last, device=self._device)
            self._sums.add(rows, numbers, run.dtype, torch.tensor([owner], device=self._device))
            self._add_short(data[: first * ROW_NBYTES - start], start, owner)
            self._add_short(data[last * ROW_NBYTES - start :], last * ROW_NBYTES, owner)
        else:
            self._add_short(data, start, owner)

    def _add_short(self, data: torch.Tensor, start: int, owner: int) -> None:
        """Add the bytes from `start` on of an unsharded value by way of the scratch."""
        while len(data):
            row, at = divmod(start, ROW_NBYTES)
            most = len(self._scratch) - len(self._numbers)
            length = min(len(data), most * ROW_NBYTES - at)
            num = -(-(at + length) // ROW_NBYTES)
            begin = len(self._numbers) * ROW_NBYTES + at
            self._scratch.view(-1)[begin : begin + length].copy_(data[:length])
            self._take(range(row, row + num), owner)
            data, start = data[length:], start + length

    def _add_box(self, copy: Copy, flat: torch.Tensor, owner: int) -> None:
        """Add strided elements."""
        if not self._add_columns(copy, flat, owner):
            self._add_windows(copy, flat, owner)

    def _add_columns(self, copy: Copy, flat: torch.Tensor, owner: int) -> bool:
        """Add a block of columns of a matrix whose rows are a multiple of 2048 bytes: each of the block's rows by itself.

        Returns False, and adds nothing, where windows are fewer bytes.
        """
        size = flat.itemsize
        if len(copy.sizes) != 2 or copy.source_strides[1] != 1 or copy.target_strides[1] != 1:
            return False
        (height, width), step = copy.sizes, copy.target_strides[0] * size
        first, at = divmod(copy.target_offset * size, ROW_NBYTES)
        per_row = -(-(at + width * size) // ROW_NBYTES)
        most = len(self._scratch) // per_row
        if step % ROW_NBYTES or not most or per_row * ROW_NBYTES >= step:
            return False
        self.flush()
        block = flat.as_strided((height, width), copy.source_strides, flat.storage_offset() + copy.source_offset)
        data = block.view(torch.uint8)
        for begin in range(0, height, most):
            num = min(most, height - begin)
            together = self._scratch[: num * per_row]
            together.view(num, -1)[:, at : at + width * size].copy_(data[begin : begin + num])
            starts = first + torch.arange(begin, begin + num, device=self._device) * (step // ROW_NBYTES)
            numbers = (starts[:, None] + torch.arange(per_row, device=self._device)).view(-1)
            self._sums.add(together, numbers, flat.dtype, torch.tensor([owner], device=self._device))
        self._scratch.zero_()
        return True

    def _add_windows(self, copy: Copy, flat: torch.Tensor, owner: int) -> None:
        """Add elements in windows of the unsharded value, each with zeros between the elements."""
        word = _WORDS[flat.itemsize]
        flat, per_row = flat.view(word), ROW_NBYTES // flat.itemsize
        scratch = self._scratch.view(-1).view(word)
        start = copy.target_offset // per_row
        stop = copy.target_offset + 1 + sum((n - 1) * s for n, s in zip(copy.sizes, copy.target_strides, strict=True))
        while start * per_row < stop:
            begin = len(self._numbers)
            num = min(len(self._scratch) - begin, -(-stop // per_row) - start)
            for piece in clip_to_target(copy, start * per_row, (start + num) * per_row):
                target_view(piece, scratch[begin * per_row :]).copy_(source_view(piece, flat))
            self._take(range(start, start + num), owner)
            start += num

    def _take(self, numbers: range, owner: int) -> None:
        self._numbers += numbers
        self._owners += [owner] * len(numbers)
        if len(self._numbers) == len(self._scratch):
            self.flush()
