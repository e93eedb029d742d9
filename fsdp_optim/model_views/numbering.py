"""Numbers in place of elements: what hooks do to them says which element goes where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch

from fsdp_optim.layout import Shape
from fsdp_optim.layout.views.numbered import Numbers

FIRST = 1 << 40
"""The number of the first element. So large that a number which was computed with, or cast, is none of an element."""


@dataclass(frozen=True)
class Numbering:
    """The numbers of the elements of several live parameters, in ranges that follow one another.

    Attributes:
        shapes: the shapes of the live parameters by name.
    """

    shapes: Mapping[str, Shape]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The first number of each parameter, and the number after the last."""
        starts = [FIRST]
        for shape in self.shapes.values():
            starts.append(starts[-1] + prod(shape))
        return tuple(starts)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    @property
    def nbytes(self) -> int:
        """The bytes of all numbers."""
        return 8 * (self._starts[-1] - FIRST)

    def numbers_of(self, name: str) -> torch.Tensor:
        """Return the numbers of a live parameter, in its shape."""
        start = self._starts[self._names.index(name)]
        shape = self.shapes[name]
        return torch.arange(start, start + prod(shape), dtype=torch.int64, device="cpu").view(shape)

    def is_whole(self, name: str, value: object) -> bool:
        """Return whether a value is what `numbers_of` gives."""
        if type(value) is not torch.Tensor or value.dtype != torch.int64 or value.device.type == "meta":
            return False
        return tuple(value.shape) == tuple(self.shapes[name]) and torch.equal(value.cpu(), self.numbers_of(name))

    def owners(self, numbers: Numbers) -> Sequence[str] | None:
        """Return the live parameters that numbers are of. None where some are numbers of no element."""
        if not numbers.size:
            return ()
        low, high = int(numbers.min()), int(numbers.max())
        if low < FIRST or high >= self._starts[-1]:
            is_any = bool(np.any((numbers >= FIRST) & (numbers < self._starts[-1])))
            return None if is_any else ()
        first, last = (int(np.searchsorted(self._starts, number, side="right")) - 1 for number in (low, high))
        if first == last:
            return self._names[first : first + 1]
        places = np.unique(np.searchsorted(self._starts, numbers.reshape(-1), side="right") - 1)
        return [self._names[place] for place in places]

    def within(self, name: str, numbers: Numbers) -> Numbers:
        """Return numbers of one live parameter as they count in it: from 0 on."""
        return numbers - self._starts[self._names.index(name)]
