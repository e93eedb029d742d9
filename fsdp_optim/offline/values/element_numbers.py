"""Numbers about elements, chunk by chunk: sums in float64, integers exactly, and differing bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import torch

Array: TypeAlias = numpy.ndarray[Any, Any]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # itemsize -> integer dtype
_BY_NUMPY: Mapping[torch.dtype, type[numpy.generic]] = {
    **dict.fromkeys((torch.float16, torch.float32, torch.float64), numpy.float64),
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16), numpy.int64),
    **dict.fromkeys((torch.uint32, torch.bool), numpy.int64),
    torch.uint64: numpy.uint64,
    **dict.fromkeys((torch.complex64, torch.complex128), numpy.complex128),
}


@functools.cache
def _is_number(dtype: torch.dtype) -> bool:
    """Return whether torch can say which numbers the elements of a dtype are."""
    try:
        torch.zeros(1, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype).to(torch.float64)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def numbers_of(flat: torch.Tensor) -> Array:
    """Return the elements of a 1-D tensor as float64, complex128, int64 or uint64, exactly.

    Elements that are no numbers for torch, such as pairs of 4-bit floats, give their bytes as integers.
    """
    wanted = _BY_NUMPY.get(flat.dtype)
    if wanted is not None:
        array: Array = flat.numpy().astype(wanted)
        return array
    if flat.dtype is torch.bfloat16:
        words = flat.view(torch.int16).numpy().view(numpy.uint16).astype(numpy.uint32) << 16
        return words.view(numpy.float32).astype(numpy.float64)
    if _is_number(flat.dtype):
        return flat.to(torch.complex128 if flat.dtype.is_complex else torch.float64).numpy()
    return flat.view(_WORDS[flat.itemsize]).numpy().astype(numpy.int64)


def _is_float(numbers: Array) -> bool:
    return numbers.dtype.kind in "fc"


class ChunkMemory:
    """Memory for the numbers of two chunks of real floats. A thread fills it again for each pair: new memory costs page faults.

    `numel`: the most elements of a chunk.
    """

    def __init__(self, numel: int) -> None:
        self._numbers = numpy.empty((2, numel), numpy.float64)
        self._words = numpy.empty(numel, numpy.uint32)
        self._differ = numpy.empty(numel, numpy.bool_)

    def numbers_of(self, side: int, flat: torch.Tensor) -> Array | None:
        """Return the elements of a chunk as float64, until the next chunk of this side; None for other dtypes."""
        numbers: Array = self._numbers[side, : len(flat)]
        if _BY_NUMPY.get(flat.dtype) is numpy.float64:
            numpy.copyto(numbers, flat.numpy())
        elif flat.dtype is torch.bfloat16:
            words = self._words[: len(flat)]
            numpy.left_shift(flat.view(torch.int16).numpy().view(numpy.uint16), 16, out=words, dtype=numpy.uint32)
            numpy.copyto(numbers, words.view(numpy.float32))
        else:
            return None
        return numbers

    def num_differing(self, a: Array, b: Array) -> int:
        """Return in how many places two arrays of integers differ."""
        return int(numpy.count_nonzero(numpy.not_equal(a, b, out=self._differ[: len(a)])))


@dataclass(frozen=True, slots=True)
class SideSums:
    """Sums over one side of a chunk, or over more chunks. `squares`: of the absolute values of finite elements."""

    squares: float
    num_nans: int = 0
    num_infinities: int = 0

    @classmethod
    def of(cls, numbers: Array) -> SideSums:
        """Return the sums over one chunk."""
        squares = _sum_of_squares(numbers)
        if not _is_float(numbers) or math.isfinite(squares):
            return cls(squares)
        finite, nans = numpy.isfinite(numbers), int(numpy.count_nonzero(numpy.isnan(numbers)))
        num_others = len(numbers) - int(numpy.count_nonzero(finite))
        return cls(_sum_of_squares(numbers[finite]), nans, num_others - nans)

    @classmethod
    def of_finite(cls, numbers: Array) -> SideSums | None:
        """Return the sums over float64 numbers; None where the sum of their squares is not finite."""
        squares = _dot(numbers)
        return cls(squares) if math.isfinite(squares) else None


def _dot(numbers: Array) -> float:
    """Return the sum of squares of float64 numbers: without a copy, in one thread, and so the same whatever the cores."""
    with numpy.errstate(over="ignore", invalid="ignore"):
        return float(numpy.einsum("i,i->", numbers, numbers))


def _sum_of_squares(numbers: Array) -> float:
    with numpy.errstate(all="ignore"):
        if numbers.dtype.kind == "c":
            return float(numpy.square(numbers.real).sum() + numpy.square(numbers.imag).sum())
    return _dot(numbers.astype(numpy.float64, copy=False))


@dataclass(frozen=True, slots=True)
class ChunkDifference:
    """How two chunks differ. `max_abs`, `squares`: of `a - b`; infinite as `ValueDiff.max_abs` says."""

    num_differing: int
    max_abs: float
    squares: float
    a: SideSums
    b: SideSums

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, memory: ChunkMemory) -> ChunkDifference:
        """Compare two chunks of equal length."""
        return cls._of_finite(a, b, memory) or cls._of_any(a, b)

    @classmethod
    def _of_finite(cls, a: torch.Tensor, b: torch.Tensor, memory: ChunkMemory) -> ChunkDifference | None:
        """Compare real floats in memory that is there. None where an element is no such float, is not finite, or is huge."""
        numbers_a = memory.numbers_of(0, a)
        sums_a = SideSums.of_finite(numbers_a) if numbers_a is not None else None
        if numbers_a is None or sums_a is None:
            return None
        if a.dtype == b.dtype and not memory.num_differing(*_words_of(a, b)):
            return cls(0, 0, 0.0, sums_a, sums_a)
        numbers_b = memory.numbers_of(1, b)
        sums_b = SideSums.of_finite(numbers_b) if numbers_b is not None else None
        if numbers_b is None or sums_b is None:
            return None
        num = memory.num_differing(numbers_a.view(numpy.int64), numbers_b.view(numpy.int64))
        apart = numpy.subtract(numbers_a, numbers_b, out=numbers_a)
        return cls(num, float(max(apart.max(), -apart.min(), 0)), _dot(apart), sums_a, sums_b)

    @classmethod
    def _of_any(cls, a: torch.Tensor, b: torch.Tensor) -> ChunkDifference:
        numbers_a, differ = numbers_of(a), None
        if a.dtype == b.dtype:
            differ = _bits_differ(a, b)
            if not differ.any():
                sums = SideSums.of(numbers_a)
                return cls(0, 0, 0.0, sums, sums)
        numbers_b = numbers_of(b)
        if differ is None:
            differ = _numbers_differ(numbers_a, numbers_b)
        num = int(numpy.count_nonzero(differ))
        max_abs, squares = _difference(numbers_a[differ], numbers_b[differ]) if num else (0, 0.0)
        return cls(num, max_abs, squares, SideSums.of(numbers_a), SideSums.of(numbers_b))

    @classmethod
    def over(cls, chunks: Iterable[ChunkDifference]) -> ChunkDifference:
        """Return the difference over several chunks, the same in any order."""
        listed = list(chunks)
        return cls(
            sum(chunk.num_differing for chunk in listed),
            max((chunk.max_abs for chunk in listed), default=0),
            _sum_of(chunk.squares for chunk in listed),
            sums_over(chunk.a for chunk in listed),
            sums_over(chunk.b for chunk in listed),
        )


def _sum_of(values: Iterable[float]) -> float:
    """Return the exact sum of floats, rounded once; infinity where it is longer than a float, NaN where infinities cancel out."""
    listed = list(values)
    try:
        return math.fsum(listed)
    except OverflowError:  # of an intermediate sum: the sum of halves of halves fits
        return math.fsum(math.ldexp(value, -64) for value in listed) * 2.0**64
    except ValueError:
        return math.nan


def sums_over(sides: Iterable[SideSums]) -> SideSums:
    """Return the sums over several chunks, the same in any order."""
    listed = list(sides)
    return SideSums(
        _sum_of(side.squares for side in listed),
        sum(side.num_nans for side in listed),
        sum(side.num_infinities for side in listed),
    )


def _words_of(a: torch.Tensor, b: torch.Tensor) -> tuple[Array, Array]:
    return a.view(_WORDS[a.itemsize]).numpy(), b.view(_WORDS[b.itemsize]).numpy()


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> Array:
    words_a, words_b = _words_of(a, b)
    differ: Array = words_a != words_b
    if a.itemsize == 16:
        differ = numpy.any(differ.reshape(len(a), 2), axis=1)
    return differ


def _numbers_differ(a: Array, b: Array) -> Array:
    """Return which elements are other numbers; all NaNs are one number, and 0 and -0 are two."""
    differ: Array = a != b
    if _is_float(a) and _is_float(b):
        differ &= ~(numpy.isnan(a) & numpy.isnan(b))
        if "c" not in (a.dtype.kind, b.dtype.kind):
            differ |= (a == 0) & (b == 0) & (numpy.signbit(a) != numpy.signbit(b))
    return differ


def _difference(a: Array, b: Array) -> tuple[float, float]:
    """Return the largest `|a - b|` and the sum of its squares, of elements that differ."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":  # exactly: the difference of two int64 fits into an uint64
        high, low = numpy.maximum(a, b).view(numpy.uint64), numpy.minimum(a, b).view(numpy.uint64)
        exact = high - low
        return int(exact.max()), float(numpy.square(exact.astype(numpy.float64)).sum())
    if not all(numpy.isfinite(side).all() for side in (a, b)):
        return math.inf, math.inf
    with numpy.errstate(over="ignore"):
        apart = numpy.abs(_as_float(a) - _as_float(b))
        return float(apart.max()), float(numpy.square(apart).sum())


def _as_float(numbers: Array) -> Array:
    return numbers if _is_float(numbers) else numbers.astype(numpy.float64)


@dataclass(frozen=True, slots=True)
class ChunkStatistics:
    """Figures about one chunk, or about more chunks. `low`, `high`, `total`: of finite elements; None where there are none."""

    sums: SideSums
    num_finite: int
    num_zeros: int
    low: float | None
    high: float | None
    total: float

    @classmethod
    def of(cls, flat: torch.Tensor) -> ChunkStatistics:
        """Return the figures about one chunk."""
        numbers = finite_numbers(flat)
        return cls(
            SideSums.of(numbers_of(flat)),
            len(numbers),
            int(len(numbers) - numpy.count_nonzero(numbers)),
            numbers.min().item() if len(numbers) else None,
            numbers.max().item() if len(numbers) else None,
            _sum_in_float(numbers),
        )

    @classmethod
    def over(cls, chunks: Iterable[ChunkStatistics]) -> ChunkStatistics:
        """Return the figures about several chunks."""
        listed = list(chunks)
        return cls(
            sums_over(chunk.sums for chunk in listed),
            sum(chunk.num_finite for chunk in listed),
            sum(chunk.num_zeros for chunk in listed),
            min((chunk.low for chunk in listed if chunk.low is not None), default=None),
            max((chunk.high for chunk in listed if chunk.high is not None), default=None),
            _sum_of(chunk.total for chunk in listed),
        )


def _sum_in_float(numbers: Array) -> float:
    with numpy.errstate(over="ignore", invalid="ignore"):  # huge or infinite elements
        return float(numbers.sum(dtype=numpy.float64))


def finite_numbers(flat: torch.Tensor) -> Array:
    """Return the finite elements of a 1-D tensor as numbers; of complex elements, their absolute values."""
    numbers = numbers_of(flat)
    if numbers.dtype.kind == "c":
        numbers = numpy.abs(numbers)
    if numbers.dtype.kind == "f" and not math.isfinite(_sum_in_float(numbers)):
        numbers = numbers[numpy.isfinite(numbers)]
    return numbers
