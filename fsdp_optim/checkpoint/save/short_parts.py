"""The short parts of a save: the elements of many small values, copied side by side, and one table of where they belong.

What depends on the structure is computed once per kind of value (values that are cut alike), the rest for all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from fsdp_optim.formats.base.packed import PackedExtents
from fsdp_optim.plan import Copy, runs_of
from fsdp_optim.tensors.rows import rows_of_kinds
from fsdp_optim.tensors.side_by_side import side_by_side

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.int64]

SHORT_NBYTES = 32 << 10
"""The most bytes of a local tensor that is copied with others. Longer ones are written from where they are."""


class Kind(NamedTuple):
    """What a rank writes of values that are cut alike, one row for each range, in bytes.

    `targets`: where each range begins, counted from the value's first byte in the file. `sources`: where it begins in the local
    part, which has all elements [start, start + numel) of the local tensor, in `part_nbytes`.
    """

    start: int
    numel: int
    part_nbytes: int
    targets: Numbers
    sources: Numbers
    nbytes: Numbers

    @classmethod
    def of(cls, copies: Sequence[tuple[int, Copy]], itemsize: int, start: int, stop: int) -> Kind:
        """Return the ranges of some copies, each with the element of the value to which its target offsets are relative.

        [start, stop): the elements of the local tensor that belong to the value.
        """
        rows = [
            (base + target, source - start, numel) for base, copy in copies for source, target, numel in runs_of(copy)
        ]
        columns = numpy.array(rows, numpy.int64).reshape(-1, 3).T * itemsize
        return cls(start, stop - start, (stop - start) * itemsize, columns[0], columns[1], columns[2])


class ShortParts:
    """Short parts of one file, as they are collected."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._parts: list[torch.Tensor] = []
        self._of_kind: list[int] = []
        self._kinds: dict[int, tuple[int, Kind]] = {}  # by id, which the reference keeps unique

    def add(self, begin: int, kind: Kind, part: torch.Tensor) -> None:
        """Add a local tensor, of any shape and strides, of a value that begins at byte `begin` of the data section."""
        number, _ = self._kinds.setdefault(id(kind), (len(self._kinds), kind))
        self._begins.append(begin)
        self._parts.append(part)
        self._of_kind.append(number)

    def packed(self) -> PackedExtents:
        """Copy the elements into one buffer on the host."""
        begins, kinds = numpy.array(self._begins, numpy.int64), [kind for _, kind in self._kinds.values()]
        of_kind = numpy.array(self._of_kind, numpy.intp)
        of_part = numpy.array([kind.part_nbytes for kind in kinds], numpy.int64)[of_kind]
        memory, bases = side_by_side(self._parts, of_part)
        # One row for each range of each value: `of` is the value, `row` the range among those of all kinds.
        lengths = numpy.array([len(kind.nbytes) for kind in kinds], numpy.int64)
        of, row = rows_of_kinds(lengths, of_kind)
        targets = numpy.concatenate([kind.targets for kind in kinds])
        sources = numpy.concatenate([kind.sources for kind in kinds])
        nbytes = numpy.concatenate([kind.nbytes for kind in kinds])
        return PackedExtents.of(begins[of] + targets[row], nbytes[row], bases[of] + sources[row], memory)
