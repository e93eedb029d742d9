"""The fixed numbers of a fingerprint, and what they are good for.

The bytes of a value, in row-major order of the unsharded tensor, are cut into rows of 2048 bytes; the last row ends in zeros.
With s(q, k) the byte k of row q as a signed number, the two halves w of the bits are sums of wrapping 64-bit integers:

    bits[w]      = sum over q, k of row(w, q) * column(w, k) * s(q, k)
    column(w, k) = sum over n < 16 of join(w, n) * table(k, n)

It is linear in the bytes. So each rank adds its own bytes and the sums of ranks are added, whatever rank has which byte, and
bytes that nobody has count as zeros: no cut, no border and no order matters. And it is one product of matrices of int8, which
processors and accelerators do as fast as they read memory: 16 sums of 2048 products for each row.

How likely two different values have equal bits, for numbers as good as random:

- In a row with a difference d, the 16 sums over n differ by sums of table(k, n) * d(k): plain integers, none of them wraps. Each
  is zero for at most 1 of 256 tables, so that all are zero with a probability of 2**-128.
- `join` and `row` are odd 64-bit numbers. A difference whose lowest bit is bit v (at most 7 for bytes, and higher by m with a
  probability of 2**-16m) gets lost in a sum that wraps with a probability of at most 58 * 2**-55 for both factors, in each of the
  two halves: together under 2**-96.
- A single byte that differs is seen for certain: no `column(w, k)` of these numbers is a multiple of 2**56. Values that were
  exchanged, shifted, negated or scaled are no special case: nothing about the bytes is assumed. Nobody is kept from making a
  collision on purpose: these numbers are public.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray

ROW_NBYTES = 2048
"""The bytes of a row. A product of int8 matrices takes longer for shorter rows, and rows that ranks share for longer ones."""

NUM_SUMS, NUM_HALVES = 16, 2
SIGN_ROW = 64
"""Elements that share the random sign of their row in a projection; each has a sign of its column too."""

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TABLE, _JOIN, _SIGNS, _ROWS, _SIGN_ROWS = (number << 56 for number in range(1, 6))  # the beginnings of the sequences
_MASK = (1 << 64) - 1


class Coefficients(NamedTuple):
    """The numbers on one device.

    Attributes:
        table: int8 [2048, 16].
        join: int64 [2, 16].
        columns: int64 [2, 2048].
    """

    table: torch.Tensor
    join: torch.Tensor
    columns: torch.Tensor


@lru_cache(maxsize=16)
def coefficients_on(device: torch.device) -> Coefficients:
    """Return the coefficients on a device, the same on all."""
    table = _numbers(_TABLE, ROW_NBYTES * NUM_SUMS).view(numpy.uint64) >> numpy.uint64(56)
    int8 = torch.from_numpy(table.astype(numpy.uint8).view(numpy.int8).reshape(ROW_NBYTES, NUM_SUMS))
    join = torch.from_numpy(_numbers(_JOIN, NUM_HALVES * NUM_SUMS) | 1).view(NUM_HALVES, NUM_SUMS)
    columns = (int8.to(torch.int64)[None] * join[:, None]).sum(-1)
    return Coefficients(int8.to(device), join.to(device), columns.to(device))


@lru_cache(maxsize=16)
def signs_on(device: torch.device, num: int) -> torch.Tensor:
    """Return the signs of the columns of `num` projections: float64 [64, num]."""
    signs = torch.from_numpy(_numbers(_SIGNS, num * SIGN_ROW)).view(num, SIGN_ROW).T
    return torch.where(signs < 0, -1.0, 1.0).to(torch.float64).to(device).contiguous()


def rows_at(numbers: torch.Tensor) -> torch.Tensor:
    """Return `row(w, q)` for the numbers of some rows: odd int64 [m, 2]. `numbers`: int64 [m]."""
    return torch.stack([_mixed(numbers * 2 + w, _ROWS) | 1 for w in range(NUM_HALVES)], dim=1)


def row_signs(numbers: torch.Tensor, num: int) -> torch.Tensor:
    """Return the signs of some rows of 64 elements in `num` projections: float64 [m, num]. `numbers`: int64 [m]."""
    mixed = torch.stack([_mixed(numbers, _SIGN_ROWS + (j << 48)) for j in range(num)], dim=1)
    return torch.where(mixed < 0, -1.0, 1.0).to(torch.float64)


def _numbers(begin: int, num: int) -> NDArray[numpy.int64]:
    """Return the first numbers of a sequence."""
    return _mixed(torch.arange(num), begin).numpy()


def _mixed(numbers: torch.Tensor, begin: int) -> torch.Tensor:
    """Return a 64-bit mix of each int64: a finalizer of two multiplications, as of splitmix64."""
    mixed = numbers * _signed(_GOLDEN) + _signed(begin + _GOLDEN)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(_SECOND)
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: torch.Tensor, num: int) -> torch.Tensor:
    """Return the numbers shifted right, with zeros from the left."""
    return (numbers >> num) & ((1 << (64 - num)) - 1)


def _signed(number: int) -> int:
    """Return the signed 64-bit number with the same bits."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number
