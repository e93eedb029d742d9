"""Checks of the bytes of bool tensors. A byte other than 0 and 1 is True for some operations and equal to nothing for others."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy
import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.header_entries import HeaderEntry
from fsdp_optim.tensors.memory import is_plain

BOOL = "BOOL"
"""The name of the bool dtype in a header."""


def check_bools(path: str, entries: Sequence[HeaderEntry], extents: Sequence[Extent]) -> None:
    """Refuse bytes other than 0 and 1 in ranges of a file's data section. `entries`: the bool tensors in the order of their
    bytes.

    Raises CheckpointError that names the file and the tensor.
    """
    for extent in extents if entries else ():
        first = bisect.bisect_right(entries, extent.start, key=lambda entry: entry.stop)
        for entry in entries[first:]:
            if entry.start >= extent.stop:
                break
            check_bytes(path, entry.key, extent.memory[max(entry.start - extent.start, 0) : entry.stop - extent.start])


def check_bytes(path: str, key: str, data: bytes | memoryview) -> None:
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
