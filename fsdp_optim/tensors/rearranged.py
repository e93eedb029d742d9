"""The elements of a tensor in another order of its dimensions, in the memory that they are in.

A copy of a large tensor would take as much memory again. A matrix is transposed where it is in three passes, each over single
columns or single rows, so that one column or row is the least that is held beside it (Catanzaro, Keller and Garland 2014, "A
Decomposition for In-place Matrix Transposition").
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

import torch

_AT_ONCE_NBYTES = 8 << 20  # up to here a copy is made: it takes a tenth of the time
_SCRATCH_NBYTES = 1 << 20  # of columns or rows of a larger matrix, at least one
_SCRATCH_SHARE = 64  # of the largest: few columns at a time would use little of each cache line
_INDEX_NBYTES = 16  # of an element that is moved: its place, twice where this is computed
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def rearrange(flat: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> None:
    """Rearrange the elements of a tensor of `shape`, which are contiguous in `flat`, of any shape, in row-major order.

    `order`: the dimensions as memory has them afterwards, the outermost first.
    """
    if flat.nbytes <= _AT_ONCE_NBYTES:  # nearly always
        value = flat.view(tuple(shape)).permute(tuple(order))
        flat.view(-1).copy_(value.clone(memory_format=torch.contiguous_format).view(-1))
        return
    itemsize = min(flat.itemsize, 8)
    elements = flat.view(_INTEGERS[itemsize])  # all dtypes can be copied so, and not all can be indexed
    words = elements.numel() // flat.numel()
    now = list(range(len(shape)))
    for place, dim in enumerate(order):
        start = now.index(dim)
        if start == place:
            continue
        stop = start + 1
        while stop < len(now) and now[stop] == order[place + stop - start]:
            stop += 1
        outer, rows, columns, inner = (
            prod(shape[dim] for dim in dims) for dims in (now[:place], now[place:start], now[start:stop], now[stop:])
        )
        _transpose(elements.view(outer, rows, columns, inner * words))
        now[place:stop] = [*now[start:stop], *now[place:start]]


def _transpose(matrices: torch.Tensor) -> None:
    """Transpose the two middle dimensions of a contiguous tensor where it is."""
    outer, rows, columns, inner = matrices.shape
    num = _AT_ONCE_NBYTES // matrices[0].nbytes
    if not num:
        for matrix in matrices:
            _transpose_large(matrix)
        return
    memory = torch.empty_like(matrices[:num])
    for first in range(0, outer, num):
        some = matrices[first : first + num]
        some.view(-1, columns, rows, inner).copy_(memory[: len(some)].copy_(some).transpose(1, 2))


def _transpose_large(matrix: torch.Tensor) -> None:
    """Transpose a matrix, whose elements may be runs of some numbers, in the memory of its columns or rows."""
    rows, columns, inner = matrix.shape
    scratch = max(_SCRATCH_NBYTES, matrix.nbytes // _SCRATCH_SHARE)
    at_a_time = max(1, scratch // (max(rows, columns) * matrix.itemsize))
    for first in range(0, inner, at_a_time):
        _transpose_elements(matrix[..., first : first + at_a_time], scratch)


def _transpose_elements(matrix: torch.Tensor, scratch: int) -> None:
    rows, columns, inner = matrix.shape
    common = gcd(rows, columns)
    high, wide = rows // common, columns // common
    row = torch.arange(rows, device=matrix.device)[:, None]
    column = torch.arange(columns, device=matrix.device)
    nbytes = inner * matrix.itemsize + _INDEX_NBYTES
    strips = _split(columns, scratch // (rows * nbytes))
    if common > 1:
        for strip in strips:
            _take(matrix[:, strip], (row + column[strip] // wide) % rows)
    for strip in _split(rows, scratch // (columns * nbytes)):
        some = matrix[strip]
        to = ((row[strip] + column // wide) % rows + column * rows) % columns
        some.scatter_(1, to[..., None].expand(some.shape), some.clone())
    for strip in strips:
        _take(matrix[:, strip], (column[strip] + row * columns - row // high) % rows)


def _take(some: torch.Tensor, places: torch.Tensor) -> None:
    """Replace each element of some columns by that of the row in `places`."""
    some.copy_(some.gather(0, places[..., None].expand(some.shape)))


def _split(length: int, num: int) -> list[slice]:
    return [slice(first, first + max(1, num)) for first in range(0, length, max(1, num))]
