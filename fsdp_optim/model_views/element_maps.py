"""Which element of a live parameter is where in the files: a conversion, run on element numbers in place of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from fsdp_optim.errors import LayoutError, shortened
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views.numbered import Numbers
from fsdp_optim.model_views.conversions import Conversion, without_elements


@dataclass(frozen=True)
class ElementMap:
    """A tensor that is made of others: of each element of these, its row-major number in the tensor.

    The tensor is a live parameter, and the others are in the files; or the reverse, where several live parameters are one
    tensor of the files.
    """

    name: str
    shape: Shape
    parts: Mapping[str, Numbers]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the parts."""
        return {name: tuple(numbers.shape) for name, numbers in self.parts.items()}


def element_maps(conversion: Conversion, shapes: Mapping[str, Shape], renamed: Mapping[str, Shape]) -> list[ElementMap]:
    """Run a conversion on the numbers of the elements of some parameters.

    Args:
        shapes: the parameters by name, with the shapes that they are to have.
        renamed: the parameters that are only renamed. Their names are given with them, because renamings may depend on others.

    Raises:
        LayoutError: an element is lost, repeated or computed, or elements of several parameters are mixed in several tensors.
    """
    given: dict[str, Tensor] = {name: without_elements(shape) for name, shape in renamed.items()}
    starts, start = list[int](), 0
    for name, shape in shapes.items():
        starts.append(start)
        given[name] = torch.arange(start, start + prod(shape), device="cpu").reshape(shape)
        start += prod(shape)
    others = {id(given[name]) for name in renamed}
    run = _Run(conversion, shapes, tuple(starts), start)
    stored = {name: tensor for name, tensor in conversion.on(given).items() if id(tensor) not in others}
    return run.maps({name: run.numbers_in(name, tensor) for name, tensor in stored.items()})


@dataclass(frozen=True)
class _Run:
    """One run of a conversion. `starts`: the number of the first element of each parameter; `num`: of all elements."""

    conversion: Conversion
    shapes: Mapping[str, Shape]
    starts: Shape
    num: int

    def numbers_in(self, stored: str, tensor: Tensor) -> Numbers:
        """Return what a tensor of the files has as numbers."""
        if tensor.dtype != torch.int64 or tensor.is_meta:
            raise self._refused(
                self.conversion.source_of(stored, self.shapes),
                f"computes {stored} ({tensor.dtype}) instead of moving elements",
            )
        return tensor.contiguous().numpy()

    def maps(self, numbers: Mapping[str, Numbers]) -> list[ElementMap]:
        """Return one map for each parameter that is cut, and for each tensor of the files that is made of several parameters."""
        self._check_once(numbers)
        names = list(self.shapes)
        sources = {stored: [names[number] for number in self._owners(values)] for stored, values in numbers.items()}
        targets: dict[str, list[str]] = {name: [] for name in names}
        for stored, owners in sources.items():
            for owner in owners:
                targets[owner].append(stored)
        maps = list[ElementMap]()
        for name, start in zip(names, self.starts, strict=True):
            if all(len(sources[stored]) == 1 for stored in targets[name]):
                parts = {stored: numbers[stored] - start if start else numbers[stored] for stored in targets[name]}
                maps.append(ElementMap(name, self.shapes[name], parts))
                continue
            (joined, *more) = targets[name]
            if more or any(len(targets[owner]) > 1 for owner in sources[joined]):
                several = shortened(targets[name])
                raise self._refused(
                    name, f"has elements of this parameter and of others together in several tensors, {several}"
                )
            if name == sources[joined][0]:
                maps.append(self._inverse(joined, numbers[joined], sources[joined]))
        return maps

    def _check_once(self, numbers: Mapping[str, Numbers]) -> None:
        """Every element must be in the files once."""
        seen = np.zeros(self.num, np.bool_)
        for name, values in numbers.items():
            if values.size and (values.min() < 0 or values.max() >= self.num):
                source = self.conversion.source_of(name, self.shapes)
                raise self._refused(source, f"computes the elements of {name} instead of moving them")
            seen[values.reshape(-1)] = True
        if seen.all() and sum(values.size for values in numbers.values()) == self.num:
            return
        counts = sum(np.bincount(values.reshape(-1), minlength=self.num) for values in numbers.values())
        wrong = int(np.flatnonzero(counts != 1)[0])
        number = int(np.searchsorted(np.array(self.starts), wrong, side="right")) - 1
        many = "nowhere" if not seen[wrong] else "several times"
        at = wrong - self.starts[number]
        raise self._refused(list(self.shapes)[number], f"puts its element {at} into the files {many}, and not once")

    def _owners(self, values: Numbers) -> Numbers:
        """Return the positions of the parameters that have elements among these."""
        if not values.size:
            return np.empty(0, np.int64)
        starts = np.array(self.starts)
        first, last = np.searchsorted(starts, (values.min(), values.max()), side="right") - 1
        if first == last:  # as of all that is cut; searching each element takes long
            return np.array([first])
        return np.unique(np.searchsorted(starts, values.reshape(-1), side="right") - 1)

    def _inverse(self, stored: str, numbers: Numbers, owners: Sequence[str]) -> ElementMap:
        flat = numbers.reshape(-1)
        order = np.argsort(flat)
        starts = dict(zip(self.shapes, self.starts, strict=True))
        parts: dict[str, Numbers] = {}
        for name in owners:
            first = int(np.searchsorted(flat, starts[name], sorter=order))
            shape = self.shapes[name]
            parts[name] = order[first : first + prod(shape)].astype(np.int64).reshape(shape)
        return ElementMap(stored, tuple(numbers.shape), parts)

    def _refused(self, name: str, why: str) -> LayoutError:
        return LayoutError(
            f"{name}: transformers' conversion of this parameter ({self.conversion.operations(name)}) {why}, so that no View "
            "has it: save it under its own name, by a list of Views without it"
        )
