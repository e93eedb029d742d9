"""The short parts of a save: the elements of many small values, copied side by side, and one table of where they belong.

What depends on the structure is computed once per kind of value (values that are cut alike), the rest for all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from fsdp_optim.checkpoint.common.local_extents import bytes_of, ranges_of
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.packed import PackedExtents
from fsdp_optim.plan import Copy
from fsdp_optim.tensors.allocation import empty

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.int64]

SHORT_NBYTES = 32 << 10
"""The most bytes of a local tensor that is copied with others. Longer ones are written from where they are."""

_CPU = torch.device("cpu")


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
            (base + target, source - start, numel) for base, copy in copies for source, target, numel in ranges_of(copy)
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
        memory, bases = _side_by_side(self._parts, of_part)
        # One row for each range of each value: `of` is the value, `row` the range among those of all kinds.
        lengths = numpy.array([len(kind.nbytes) for kind in kinds], numpy.int64)
        counts = lengths[of_kind]
        of = numpy.arange(len(begins)).repeat(counts)
        row = numpy.arange(len(of)) + ((lengths.cumsum() - lengths)[of_kind] - (counts.cumsum() - counts))[of]
        targets = numpy.concatenate([kind.targets for kind in kinds])
        sources = numpy.concatenate([kind.sources for kind in kinds])
        nbytes = numpy.concatenate([kind.nbytes for kind in kinds])
        return PackedExtents.of(begins[of] + targets[row], nbytes[row], bases[of] + sources[row], memory)


def _side_by_side(parts: Sequence[torch.Tensor], nbytes: Numbers) -> tuple[memoryview, Numbers]:
    """Return a copy of the elements of some tensors on the host, row-major, and the byte at which those of each begin.

    `nbytes`: of each tensor.
    Tensors of one dtype on one device that have the same shape but for the first dimension are copied in one call of torch.
    """
    groups: dict[tuple[torch.dtype, torch.device, tuple[int, ...] | None], list[int]] = {}
    last, group_of_last = None, list[int]()
    for number, part in enumerate(parts):
        alike = part.dtype, part.device, part.shape
        if alike != last:  # neighbours are mostly alike, and take longer to hash than to compare
            dtype, device, shape = last = alike
            group_of_last = groups.setdefault((dtype, device, shape[1:] if shape else None), [])
        group_of_last.append(number)
    buffer = empty((int(nbytes.sum()),), torch.uint8, _CPU)
    bases, at = numpy.zeros(len(parts), numpy.int64), 0
    by_size = sorted(groups, key=lambda group: -group[0].itemsize)  # so that each begins at a multiple of its size
    with torch.no_grad():
        for group in by_size:
            dtype, device, rest = group
            numbers = numpy.array(groups[group], numpy.intp)
            sizes = nbytes[numbers]
            bases[numbers] = at + sizes.cumsum() - sizes
            stop = at + int(sizes.sum())
            target = buffer[at:stop].view(dtype)
            tensors = [parts[number] for number in groups[group]]
            if stop == at:
                continue
            if rest is None:
                target.copy_(torch.stack(tensors))
            elif device.type == "cpu":
                made = target.view(-1, *rest)
                num = len(made)
                torch.cat(tensors, out=made)
                if len(made) != num:  # torch gives `made` other memory then
                    raise CheckpointError(
                        f"values of {dtype} are of another size than the model says: {num}, {len(made)}"
                    )
            else:
                target.view(-1, *rest).copy_(torch.cat(tensors))
            at = stop
    return bytes_of(buffer), bases
