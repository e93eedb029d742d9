"""Which element of a live parameter is where in the files: a conversion that is run on element numbers in place of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import Part
from fsdp_optim.model_views.conversions import Conversion

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ElementMap:
    """A tensor that is made of others: of each element of these, its row-major number in the tensor.

    The tensor is a live parameter, and the others are in the files; or the reverse, where several live parameters are one
    tensor of the files.
    """

    name: str
    shape: Shape
    parts: Mapping[str, Numbers]


def element_maps(conversion: Conversion, shapes: Mapping[str, Shape], renamed: Mapping[str, Shape]) -> list[ElementMap]:
    """Run a conversion on the numbers of the elements of some parameters.

    Args:
        shapes: the parameters by name, with the shapes that they are to have.
        renamed: the parameters that are only renamed. Their names are given with them, because renamings may depend on others.

    Raises:
        LayoutError: an element is lost, repeated or computed, or elements of several parameters are mixed in several tensors.
    """
    given: dict[str, Tensor] = {name: torch.empty(shape, device="meta") for name, shape in renamed.items()}
    starts, start = list[int](), 0
    for name, shape in shapes.items():
        starts.append(start)
        given[name] = torch.arange(start, start + prod(shape)).reshape(shape)
        start += prod(shape)
    others = {id(given[name]) for name in renamed}
    found = {name: tensor for name, tensor in conversion.on(given).items() if id(tensor) not in others}
    numbers = {name: _numbers_in(name, tensor, conversion, shapes) for name, tensor in found.items()}
    names = list(shapes)
    sources: dict[str, list[str]] = {}
    counts = np.zeros(start, np.int8)
    for stored, values in numbers.items():
        flat = values.reshape(-1)
        if flat.size and (flat.min() < 0 or flat.max() >= start):
            raise _computed(names[0], conversion)
        np.add.at(counts, flat, 1) if _repeats(flat) else counts.__setitem__(flat, counts[flat] + 1)
        owners = np.unique(np.searchsorted(np.array(starts), flat, side="right") - 1)
        sources[stored] = [names[number] for number in owners]
    _check_once(counts, names, starts, conversion)
    return _joined(numbers, sources, shapes, dict(zip(names, starts, strict=True)), conversion)


def _repeats(flat: Numbers) -> bool:
    return len(np.unique(flat)) != len(flat)


def _numbers_in(stored: str, tensor: Tensor, conversion: Conversion, shapes: Mapping[str, Shape]) -> Numbers:
    if tensor.dtype != torch.int64 or tensor.is_meta:
        name = next(iter(shapes))
        raise LayoutError(
            f"{name}: transformers' conversion to {stored} ({conversion.operations(name)}) computes its elements, here "
            f"{tensor.dtype}, instead of moving them, so no View has it: save it under its own name, without that View"
        )
    found: Numbers = tensor.contiguous().numpy()
    return found


def _check_once(counts: npt.NDArray[np.int8], names: list[str], starts: list[int], conversion: Conversion) -> None:
    wrong = np.flatnonzero(counts != 1)
    if wrong.size:
        number = int(np.searchsorted(np.array(starts), wrong[0], side="right")) - 1
        what = f"{int(counts[wrong[0]])} times" if counts[wrong[0]] else "nowhere"
        name = names[number]
        raise LayoutError(
            f"{name}: transformers' conversion ({conversion.operations(name)}) has its element {int(wrong[0]) - starts[number]} "
            f"{what} in the files, and every element must be there once: save it under its own name, without that View"
        )


def _joined(
    numbers: Mapping[str, Numbers],
    sources: Mapping[str, list[str]],
    shapes: Mapping[str, Shape],
    starts: Mapping[str, int],
    conversion: Conversion,
) -> list[ElementMap]:
    """Return one map for each parameter that is cut, and for each tensor of the files that is made of several parameters."""
    targets: dict[str, list[str]] = {name: [] for name in shapes}
    for stored, owners in sources.items():
        for owner in owners:
            targets[owner].append(stored)
    maps = list[ElementMap]()
    for name, stored in targets.items():
        if all(len(sources[each]) == 1 for each in stored):
            parts = {each: numbers[each] - starts[name] for each in stored}
            maps.append(ElementMap(name, shapes[name], parts))
            continue
        (joined, *more) = stored
        owners = sources[joined]
        if more or any(len(targets[owner]) > 1 for owner in owners):
            raise LayoutError(
                f"{name}: transformers' conversion ({conversion.operations(name)}) mixes it with {owners[owners[0] == name]} in "
                f"several tensors, such as {joined}, and a View is of one tensor: save it under its own name, without that View"
            )
        if name == owners[0]:
            maps.append(_inverse(joined, numbers[joined], {owner: shapes[owner] for owner in owners}, starts))
    return maps


def _inverse(stored: str, numbers: Numbers, shapes: Mapping[str, Shape], starts: Mapping[str, int]) -> ElementMap:
    flat = numbers.reshape(-1)
    order = np.argsort(flat)
    parts: dict[str, Numbers] = {}
    for name, shape in shapes.items():
        first = int(np.searchsorted(flat, starts[name], sorter=order))
        parts[name] = order[first : first + prod(shape)].astype(np.int64).reshape(shape)
    return ElementMap(stored, tuple(numbers.shape), parts)


def _computed(name: str, conversion: Conversion) -> LayoutError:
    return LayoutError(
        f"{name}: transformers' conversion ({conversion.operations(name)}) computes elements instead of moving them, so no View "
        "has it: save it under its own name, without that View"
    )


def numbers_of(part: Part) -> Numbers:
    """Return, of each element of a part, its row-major number in the live parameter."""
    sizes = [size for dim in part.factors for size in dim]
    numbers = np.arange(prod(sizes), dtype=np.int64).reshape(sizes)
    taken = numbers[tuple(slice(low, low + size) for low, size in zip(part.lows, part.sizes, strict=True))]
    order = [factor for dim in part.dims for factor in dim]
    return taken.transpose([*order, *(n for n in range(len(sizes)) if n not in order)]).reshape(part.shape)
