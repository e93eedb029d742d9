"""Bytes of tensors of bools: each is 0 or 1. Another one is true for some operations and equal to nothing for others."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy
import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.extents import Extent
from fsdp_optim.formats.header import Entry
from fsdp_optim.memory import is_plain

BOOL = "BOOL"
"""How a header calls their dtype."""


def check_bools(path: str, entries: Sequence[Entry], extents: Sequence[Extent]) -> None:
    """Refuse other bytes in ranges of a file's data section. `entries`: its tensors of bools, in the order of their bytes.

    Raises CheckpointError that names the file and the tensor.
    """
    for extent in extents if entries else ():
        first = bisect.bisect_right(entries, extent.start, key=lambda entry: entry.stop)
        for entry in entries[first:]:
            if entry.start >= extent.stop:
                break
            check_bytes(path, entry.key, extent.memory[max(entry.start - extent.start, 0) : entry.stop - extent.start])


def check_bytes(path: str, key: str, data: bytes | memoryview) -> None:
    """Refuse other bytes in one tensor. Raises CheckpointError."""
    found = int(numpy.frombuffer(data, dtype=numpy.uint8).max(initial=0))
    if found > 1:
        raise CheckpointError(
            f"{path}: {key} is of bools, and a byte of it is {found}, neither 0 nor 1: it was damaged, or is not written as it "
            "should be; load another checkpoint"
        )


def check_bools_of(where: str, value: torch.Tensor) -> None:
    """Refuse to save what would not be loaded. Raises CheckpointError that names it."""
    local = value.to_local() if hasattr(value, "to_local") else value
    if value.dtype is torch.bool and is_plain(local) and bool((local.detach().view(torch.uint8) > 1).any()):
        raise CheckpointError(
            f"{where}: is a tensor of bools with bytes other than 0 and 1, which no load takes: save value.view(torch.uint8) != 0"
        )
