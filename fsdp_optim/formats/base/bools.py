"""Checks of the bytes of bool tensors. A byte other than 0 and 1 is True for some operations and equal to nothing for others."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable

import numpy
import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.tensors.memory import is_plain

BOOL = "BOOL"
"""The name of the bool dtype in a header."""


class BoolRanges:
    """The bytes of the bool tensors of one file. Looked up by bisection: thousands of reads may meet thousands of tensors."""

    def __init__(self, ranges: Iterable[tuple[int, int, str]]) -> None:
        """`ranges`: the bytes [start, stop) of each tensor, and its key. Tensors may share bytes."""
        self._ranges = sorted(ranges)
        self._starts = [start for start, *_ in self._ranges]
        self._reached = list(itertools.accumulate((stop for _, stop, _ in self._ranges), max))

    def check(self, path: str, extents: Iterable[Extent]) -> None:
        """Refuse bytes other than 0 and 1 in ranges of the file. Raises CheckpointError that names the file and the tensor."""
        for extent in extents if self._ranges else ():
            first = bisect.bisect_right(self._reached, extent.start)
            last = bisect.bisect_left(self._starts, extent.stop)
            for start, stop, key in self._ranges[first:last]:
                check_bytes(path, key, extent.memory[max(start - extent.start, 0) : max(stop - extent.start, 0)])


def check_bytes(path: str, key: str, data: bytes | bytearray | memoryview) -> None:
    """Refuse bytes other than 0 and 1 in the data of one bool tensor. Raises CheckpointError."""
    largest = int(numpy.frombuffer(data, dtype=numpy.uint8).max(initial=0))
    if largest > 1:
        raise CheckpointError(
            f"{path}: {key} is a bool tensor, and one of its bytes is {largest}, neither 0 nor 1: the file was damaged or is not "
            "written as it should be; load another checkpoint"
        )


def check_bools_of(where: str, value: torch.Tensor) -> None:
    """Refuse to save a bool tensor that no load would accept. Raises CheckpointError that names the tensor."""
    local = value.to_local() if hasattr(value, "to_local") else value
    if value.dtype is torch.bool and is_plain(local) and bool((local.detach().view(torch.uint8) > 1).any()):
        raise CheckpointError(
            f"{where}: is a bool tensor with bytes other than 0 and 1, which no load accepts: save value.view(torch.uint8) != 0"
        )
