"""The elements of many small tensors in one piece of memory on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.tensors.allocation import empty
from fsdp_optim.tensors.memory import copy_all
from fsdp_optim.tensors.rows import copy_bytes, copy_rows, places_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.int64]
    Indices = NDArray[numpy.intp]

_CPU = torch.device("cpu")


def side_by_side(parts: Sequence[torch.Tensor], nbytes: Numbers) -> tuple[memoryview, Numbers]:
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
    memory: memoryview = buffer.numpy().data
    return memory, bases


def empty_side_by_side(
    numels: Sequence[int], dtypes: Sequence[torch.dtype]
) -> tuple[torch.Tensor, list[torch.Tensor], Numbers]:
    """Return uninitialised host memory (1-D, uint8), a 1-D view of it for each number of elements, and where each begins."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, dtype in enumerate(dtypes):
        by_dtype.setdefault(dtype, []).append(number)
    itemsizes = numpy.array([dtype.itemsize for dtype in dtypes], numpy.int64)
    memory = empty((int((numpy.array(numels, numpy.int64) * itemsizes).sum()),), torch.uint8, _CPU)
    flats, bases, at = [memory] * len(numels), numpy.zeros(len(numels), numpy.int64), 0
    for dtype in sorted(by_dtype, key=lambda dtype: -dtype.itemsize):  # so that each begins at a multiple of its size
        numbers = by_dtype[dtype]
        sizes = [numels[number] for number in numbers]
        nbytes = numpy.array(sizes, numpy.int64) * dtype.itemsize
        stop = at + int(nbytes.sum())
        bases[numbers] = at + places_of(nbytes)
        views = memory[at:stop].view(dtype).split_with_sizes(sizes)
        for number, view in zip(numbers, views, strict=True):
            flats[number] = view
        at = stop
    return memory, flats, bases


def put_rows(
    rows: torch.Tensor,
    places: Numbers,
    parts: Sequence[torch.Tensor | None],
    of: Indices,
    part_places: Numbers,
    nbytes: Numbers,
) -> None:
    """Copy rows of bytes from host memory (1-D, uint8) to contiguous tensors. Rows of a part that is None are dropped.

    `places`: where each row begins in `rows`. `of`: the index of its part. `part_places`: the byte of the part where it belongs.
    """
    on_host = numpy.array([part is not None and part.is_cpu for part in parts], bool)[of]
    addresses = numpy.array([part.data_ptr() if part is not None and part.is_cpu else 0 for part in parts], numpy.int64)
    copy_bytes(rows.data_ptr() + places[on_host], (addresses[of] + part_places)[on_host], nbytes[on_host])
    by_device: dict[torch.device, list[int]] = {}
    for row in (~on_host).nonzero()[0].tolist():
        part = parts[of[row]]
        if part is not None:
            by_device.setdefault(part.device, []).append(row)
    for device, chosen in by_device.items():  # one copy to the device, and then copies on it
        lengths, begins = nbytes[chosen], part_places[chosen]
        together = empty((int(lengths.sum()),), torch.uint8, _CPU)
        copy_rows(rows.numpy(), places[chosen], together.numpy(), places_of(lengths), lengths)
        targets = [
            part.view(-1).view(torch.uint8)[begin : begin + length]
            for index, begin, length in zip(of[chosen].tolist(), begins.tolist(), lengths.tolist(), strict=True)
            if (part := parts[index]) is not None
        ]
        sources = together.to(device).split_with_sizes(lengths.tolist())
        copy_all(list(zip(targets, sources, strict=True)))
