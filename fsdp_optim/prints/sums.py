"""The sums of a fingerprint over rows of bytes, on the device where the rows are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isfinite

import numpy
import torch
from numpy.typing import NDArray

from fsdp_optim.prints.coefficients import (
    NUM_HALVES,
    ROW_NBYTES,
    SIGN_ROW,
    coefficients_on,
    row_signs,
    rows_at,
    signs_on,
)

_MOST_ROWS = 1024  # of one product: 2 MiB
_LEAST_ROWS = 32  # of one product; cuBLAS refuses 16
_NUMEL_TOGETHER = 1 << 18  # elements that are made float64 on a CPU
_EXACT = 1024  # products of two int8, whose sum float32 has exactly
_HALF_MASK = (1 << 64) - 1

_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True, eq=False)
class LocalSums:
    """What ranks add up, for each of some values: a row of each array.

    Attributes:
        bits: int64 [values, 2]; the sums wrap.
        squares: float64 [values]: of the finite elements.
        num_nonfinite: int64 [values].
        projections: float64 [values, projections].
    """

    bits: NDArray[numpy.int64]
    squares: NDArray[numpy.float64]
    num_nonfinite: NDArray[numpy.int64]
    projections: NDArray[numpy.float64]

    @classmethod
    def zeros(cls, num_values: int, num_projections: int) -> LocalSums:
        """Return the sums over nothing."""
        return cls(
            numpy.zeros((num_values, NUM_HALVES), numpy.int64),
            numpy.zeros(num_values),
            numpy.zeros(num_values, numpy.int64),
            numpy.zeros((num_values, num_projections)),
        )

    def __add__(self, other: LocalSums) -> LocalSums:
        return LocalSums(
            self.bits + other.bits,
            self.squares + other.squares,
            self.num_nonfinite + other.num_nonfinite,
            self.projections + other.projections,
        )

    def to_bytes(self) -> bytes:
        """Return the sums for other ranks."""
        return b"".join(array.tobytes() for array in (self.bits, self.squares, self.num_nonfinite, self.projections))

    @classmethod
    def from_bytes(cls, data: bytes, num_values: int, num_projections: int) -> LocalSums:
        """Return the sums that another rank has sent."""
        arrays, at = [], 0
        for zeros in vars(cls.zeros(num_values, num_projections)).values():
            arrays.append(numpy.frombuffer(data, zeros.dtype, zeros.size, at).reshape(zeros.shape))
            at += zeros.nbytes
        return cls(*arrays)

    def bits_of(self, index: int) -> int:
        """Return the 128 bits of a value."""
        low, high = (int(half) & _HALF_MASK for half in self.bits[index])
        return high << 64 | low


class RowSums:
    """The sums of some values over rows on one device."""

    def __init__(self, num_values: int, device: torch.device, num_projections: int = 0) -> None:
        self._device, self._num_projections = device, num_projections
        self._bits = torch.zeros((num_values, NUM_HALVES), dtype=torch.int64, device=device)
        self._squares = torch.zeros(num_values, dtype=torch.float64, device=device)
        self._num_nonfinite = torch.zeros(num_values, dtype=torch.int64, device=device)
        self._projections = torch.zeros((num_values, num_projections), dtype=torch.float64, device=device)
        is_cpu = device.type == "cpu"
        self._numbers = (
            torch.empty(2 * _NUMEL_TOGETHER, dtype=torch.float64) if is_cpu else None
        )  # twice: of complex elements

    def add(self, rows: torch.Tensor, numbers: torch.Tensor, dtype: torch.dtype, owners: torch.Tensor) -> None:
        """Add rows of some values.

        Args:
            rows: uint8 [m, 2048] on the device, with zeros where this rank has no bytes.
            numbers: int64 [m]: the number of each row in its value.
            dtype: that of the elements in the rows.
            owners: int64 [m]: the index of the value of each row; or int64 [1], of all rows.
        """
        for start, stop in _chunks(len(rows)):
            sums = _joined(rows[start:stop]) * rows_at(numbers[start:stop])
            self._add_to(self._bits, sums, owners, slice(start, stop))
        step = _NUMEL_TOGETHER * dtype.itemsize // ROW_NBYTES if self._device.type == "cpu" else _MOST_ROWS
        if dtype.itemsize == 1 and dtype.is_floating_point and len(owners) == 1 and not self._num_projections:
            self._add_small_floats(rows, dtype, owners)
            return
        for start in range(0, len(rows), step):
            where = slice(start, min(start + step, len(rows)))
            elements = self._as_numbers(rows[where], dtype)
            if elements is not None:
                elements = self._add_squares(elements, owners, where, width=2 if dtype.is_complex else 1)
                if self._num_projections:
                    self._add_projections(elements, numbers[where], owners, where)

    def _add_small_floats(self, rows: torch.Tensor, dtype: torch.dtype, owners: torch.Tensor) -> None:
        """Add the squares of elements of a byte each, by counting: to convert each of them takes ten times as long."""
        values = self._as_numbers(torch.arange(256, dtype=torch.uint8, device=self._device), dtype)
        if values is not None:
            counts, finite = torch.bincount(rows.view(-1), minlength=256), torch.isfinite(values)
            squares = (torch.where(finite, values, 0.0).square() * counts).sum()
            self._squares.index_add_(0, owners, squares[None])
            self._num_nonfinite.index_add_(0, owners, counts[~finite].sum()[None])

    def _as_numbers(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the elements in rows as float64 [rows, numbers], complex ones as pairs; None for elements that are no numbers.

        The result is overwritten by the next call.
        """
        elements = rows.view(_REAL.get(dtype, dtype))
        numbers = self._numbers[: elements.numel()] if self._numbers is not None else None
        try:
            if numbers is None or numbers.numel() < elements.numel():
                return elements.to(torch.float64)
            if dtype is torch.float16:
                elements = elements.to(torch.float32)  # both steps are vectorised, and one is not
            return numbers.view(elements.shape).copy_(elements)
        except (RuntimeError, NotImplementedError):  # two numbers in a byte, or bits without a meaning
            return None

    def _add_squares(self, elements: torch.Tensor, owners: torch.Tensor, where: slice, width: int) -> torch.Tensor:
        """Add the squares of float64 [rows, numbers], and return them with zeros for elements that are not finite.

        `width`: the numbers of an element.
        """
        flat = elements.view(-1)
        whole = torch.dot(flat, flat) if self._device.type == "cpu" else None
        if whole is not None and len(owners) == 1 and isfinite(whole.item()):
            self._squares.index_add_(0, owners, whole[None])
            return elements
        squares = torch.linalg.vecdot(elements, elements)
        if whole is None or not isfinite(whole.item()):
            finite = torch.isfinite(elements).view(len(elements), -1, width).all(-1, keepdim=True)
            self._add_to(self._num_nonfinite, (~finite).sum((1, 2)), owners, where)
            elements = torch.where(finite, elements.view(len(elements), -1, width), 0.0).flatten(1)
            squares = torch.linalg.vecdot(elements, elements)
        self._add_to(self._squares, squares, owners, where)
        return elements

    def _add_projections(
        self, elements: torch.Tensor, numbers: torch.Tensor, owners: torch.Tensor, where: slice
    ) -> None:
        """Add the projections of float64 [rows, numbers]. `numbers`: int64 [rows]: the number of each row."""
        num, per_row = self._num_projections, elements.shape[1] // SIGN_ROW
        places = numbers[:, None] * per_row + torch.arange(per_row, device=self._device)
        products = elements.view(-1, SIGN_ROW) @ signs_on(self._device, num)
        signed = products * row_signs(places.view(-1), num)
        self._add_to(self._projections, signed.view(len(elements), per_row, num).sum(1), owners, where)

    @staticmethod
    def _add_to(sums: torch.Tensor, by_row: torch.Tensor, owners: torch.Tensor, where: slice) -> None:
        if len(owners) == 1:
            sums.index_add_(0, owners, by_row.sum(0, keepdim=True))
        else:
            sums.index_add_(0, owners[where], by_row)

    def local(self) -> LocalSums:
        """Return the sums on the host."""
        arrays = (self._bits, self._squares, self._num_nonfinite, self._projections)
        return LocalSums(*(array.cpu().numpy() for array in arrays))


def _chunks(num: int) -> list[tuple[int, int]]:
    """Return ranges of rows whose lengths are few different ones: libraries compile a product for each shape."""
    chunks, start = [], 0
    while start < num:
        left = num - start
        length = min(1 << (left.bit_length() - 1), _MOST_ROWS) if left >= _LEAST_ROWS else left
        chunks.append((start, start + length))
        start += length
    return chunks


def _joined(rows: torch.Tensor) -> torch.Tensor:
    """Return for each row the sums of column(w, k) * s(k): int64 [m, 2]."""
    table, join, columns = coefficients_on(rows.device)
    signed = rows.view(torch.int8)
    if len(rows) >= _LEAST_ROWS:
        way = _way_on(rows.device)
        if way == "int8":
            return (torch._int_mm(signed, table).to(torch.int64)[:, None] * join).sum(-1)
        if way == "float32":
            parts = range(0, ROW_NBYTES, _EXACT)
            products = [signed[:, at : at + _EXACT].float() @ table[at : at + _EXACT].float() for at in parts]
            return (torch.stack(products).to(torch.int64).sum(0)[:, None] * join).sum(-1)
    return torch.stack([_by_columns(signed, columns[w]) for w in range(NUM_HALVES)], dim=1)


def _by_columns(signed: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return the sums of rows in 64-bit arithmetic, without a product of matrices."""
    starts = range(0, len(signed), _LEAST_ROWS)
    return torch.cat([(signed[at : at + _LEAST_ROWS].to(torch.int64) * column).sum(1) for at in starts])


@lru_cache(maxsize=8)
def _way_on(device: torch.device) -> str:
    """Return how products of int8 matrices are made on a device: "int8", "float32", or "" for 64-bit arithmetic.

    Only what is exact here for the largest sums is used.
    """
    if device.type == "cpu" and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return "float32"  # the product of int8 is not vectorised
    table = coefficients_on(device).table
    low = torch.full((_LEAST_ROWS, ROW_NBYTES), -128, dtype=torch.int8, device=device)
    signed = torch.where(table.T.repeat(2, 1) < 0, low, low.new_full((), 127))
    expected = (signed.to(torch.int64)[:, :, None] * table.to(torch.int64)).sum(1)
    try:
        if torch.equal(torch._int_mm(signed, table).to(torch.int64), expected):
            return "int8"
    except (AttributeError, RuntimeError, NotImplementedError):
        pass
    if device.type == "cpu":
        return "float32"
    return ""
