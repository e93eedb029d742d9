"""The elements of many small tensors in one piece of memory on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.tensors.allocation import empty

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.int64]

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
