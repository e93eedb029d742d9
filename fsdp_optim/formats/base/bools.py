"""Checks of the bytes of bool tensors. A byte other than 0 and 1 is True for some operations and equal to nothing for others."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

import numpy
import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.tensors.memory import is_plain

BOOL = "BOOL"
"""The name of the bool dtype in a header."""


class BoolRanges:
    """The bytes of the bool tensors of one file, as ranges that do not overlap: a read looks at those alone that it meets."""

    def __init__(self, ranges: Iterable[tuple[int, int, str]]) -> None:
        """`ranges`: the bytes [start, stop) of each tensor, and its key. Tensors may share bytes."""
        self._tensors = sorted(ranges)
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop, _ in self._tensors:
            if not self._stops or start >= self._stops[-1]:
                self._starts.append(start)
                self._stops.append(stop)
            else:
                self._stops[-1] = max(stop, self._stops[-1])

    def check(self, path: str, extents: Iterable[Extent]) -> None:
        """Refuse bytes other than 0 and 1 in ranges of the file. Raises CheckpointError that names the file and the tensor."""
        for begin, data in self._others(extents):
            odd = begin + int((numpy.frombuffer(data, numpy.uint8) > 1).argmax())
            key = next(key for start, stop, key in self._tensors if start <= odd < stop)
            raise _damaged(path, key, data[odd - begin])

    def have_only_bools(self, extents: Iterable[Extent]) -> bool:
        """Return whether all bytes are 0 or 1 that lie both in ranges of the file and in these."""
        return next(self._others(extents), None) is None

    def _others(self, extents: Iterable[Extent]) -> Iterator[tuple[int, memoryview]]:
        """Yield the parts of what was read that have a byte other than 0 and 1, each with its first byte in the file."""
        for extent in extents if self._starts else ():
            first = bisect.bisect_right(self._stops, extent.start)
            last = bisect.bisect_left(self._starts, extent.stop)
            for start, stop in zip(self._starts[first:last], self._stops[first:last], strict=True):
                begin = max(start, extent.start)
                data = extent.memory[begin - extent.start : stop - extent.start]
                if _largest(data) > 1:
                    yield begin, data


def check_bytes(path: str, key: str, data: bytes | bytearray | memoryview) -> None:
    """Refuse bytes other than 0 and 1 in the data of one bool tensor. Raises CheckpointError."""
    largest = _largest(data)
    if largest > 1:
        raise _damaged(path, key, largest)


def _largest(data: bytes | bytearray | memoryview) -> int:
    return int(numpy.frombuffer(data, dtype=numpy.uint8).max(initial=0))


def _damaged(path: str, key: str, byte: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: {key} is a bool tensor, and one of its bytes is {byte}, neither 0 nor 1: the file was damaged or is not "
        "written as it should be; load another checkpoint"
    )


def check_bools_of(where: str, value: torch.Tensor) -> None:
    """Refuse to save a bool tensor that no load would accept. Raises CheckpointError that names the tensor."""
    local = value.to_local() if hasattr(value, "to_local") else value
    if value.dtype is torch.bool and is_plain(local) and bool((local.detach().view(torch.uint8) > 1).any()):
        raise CheckpointError(
            f"{where}: is a bool tensor with bytes other than 0 and 1, which no load accepts: save value.view(torch.uint8) != 0"
        )
