"""Parts from the numbers of their elements, and back: what a hook does to element numbers, as arithmetic on the sizes of axes.

numbers of a part -> base, and a size and step for each factor of its dimensions     # or an error: no arithmetic
steps of all parts -> factors of the live parameter                                  # each step divides the next
-> Part
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.boxes import Shape, row_major_strides
from fsdp_optim.layout.views.part import Part

Numbers = npt.NDArray[np.int64]
"""The row-major numbers of a part's elements in the live parameter, in the shape of the part."""


class _Step(NamedTuple):
    """A factor of a dimension of a part: each of `size` indices is `step` elements of the live parameter after the one before."""

    size: int
    step: int


@dataclass(frozen=True)
class _Steps:
    """A part as arithmetic: the number of its first element, and the factors of its dimensions, the slowest first."""

    base: int
    dims: tuple[tuple[_Step, ...], ...]


def parts_of_numbers(name: str, shape: Shape, parts: Mapping[str, Numbers]) -> dict[str, Part]:
    """Return the parts that have these elements, all with the same factors of the live parameter.

    Raises LayoutError, which names the part: its elements are not those of axes in some order.
    """
    steps = {part: _steps_of(f"{name}: its part {part}", numbers) for part, numbers in parts.items()}
    bounds = _bounds(name, shape, steps)
    factors = tuple(_factors_of_dim(bounds, stride, size) for stride, size in _strides_and_sizes(shape))
    return {part: _part(f"{name}: its part {part}", factors, bounds, steps[part]) for part in parts}


def numbers_of_part(part: Part) -> Numbers:
    """Return the numbers of a part's elements in the live parameter, in the shape of the part."""
    strides = [
        stride * step
        for stride, factors in zip(row_major_strides(part.live_shape), part.factors, strict=True)
        for step in row_major_strides(factors)
    ]
    numbers = np.full((), sum(low * step for low, step in zip(part.lows, strides, strict=True)), np.int64)
    for factor in (factor for dim in part.dims for factor in dim):
        numbers = numbers[..., None] + np.arange(part.sizes[factor], dtype=np.int64) * strides[factor]
    return numbers.reshape(part.shape)


def _strides_and_sizes(shape: Shape) -> Iterator[tuple[int, int]]:
    return zip(row_major_strides(shape), shape, strict=True)


# ------------------------------------------------------------------------------------------------- numbers to steps


def _steps_of(where: str, numbers: Numbers) -> _Steps:
    """Return numbers as a base and steps. Raises LayoutError, which begins with `where`, for numbers that are none of these."""
    if not numbers.size:
        raise LayoutError(f"{where}: has no elements, so nothing shows what it is of")
    base = int(numbers.reshape(-1)[0])
    lines = [
        numbers[(0,) * dim + (slice(None),) + (0,) * (numbers.ndim - dim - 1)] - base for dim in range(numbers.ndim)
    ]
    sums = np.full((), base, np.int64)
    for line in lines:
        sums = sums[..., None] + line
    if not np.array_equal(sums, numbers):
        raise LayoutError(f"{where}: the order of its elements is not one of axes: its dimensions depend on each other")
    return _Steps(base, tuple(tuple(_steps_of_line(where, dim, line)) for dim, line in enumerate(lines)))


def _steps_of_line(where: str, dim: int, line: Numbers) -> list[_Step]:
    """Return the factors of one dimension, the slowest first. `line`: the distances of its indices from the first."""
    steps = list[_Step]()
    while len(line) > 1:
        step = int(line[1])
        if step < 1:
            raise LayoutError(f"{where}: its dimension {dim} runs backwards through the live parameter")
        is_even = line == np.arange(len(line), dtype=np.int64) * step
        run = len(line) if is_even.all() else int(np.argmin(is_even))
        outer = line[::run]
        if len(line) % run or not np.array_equal(line.reshape(-1, run), outer[:, None] + line[:run]):
            raise LayoutError(
                f"{where}: its dimension {dim} has no constant step: {run} indices are {step} elements apart, and "
                f"the others do not repeat this"
            )
        steps.insert(0, _Step(run, step))
        line = outer
    return steps


# ------------------------------------------------------------------------------------------------- steps to factors


def _bounds(name: str, shape: Shape, parts: Mapping[str, _Steps]) -> list[int]:
    """Return the steps of the live parameter's factors, ascending, and its number of elements at the end."""
    steps = {step for part in parts.values() for dim in part.dims for _, step in dim}
    bounds = sorted({1, prod(shape)} | {stride for stride, size in _strides_and_sizes(shape) if size > 1} | steps)
    for inner, outer in itertools.pairwise(bounds):
        if outer % inner:
            raise LayoutError(
                f"{name}: of shape {list(shape)}, its parts have elements {inner} and {outer} apart, and no axes have both: "
                f"{outer} is no multiple of {inner}"
            )
    return bounds


def _factors_of_dim(bounds: list[int], stride: int, size: int) -> Shape:
    """Return the factors of a live dimension, the slowest first. A dimension of one index has one factor."""
    inside = [bound for bound in bounds if stride <= bound <= stride * size] if size > 1 else [stride, stride]
    return tuple(outer // inner for inner, outer in itertools.pairwise(inside))[::-1]


def _part(where: str, factors: tuple[Shape, ...], bounds: list[int], steps: _Steps) -> Part:
    """Return a part whose steps are among `bounds`."""
    sizes = [size for dim in factors for size in dim]
    by_bound = _factor_by_bound(sizes)
    lows, taken, left = [0] * len(sizes), [1] * len(sizes), steps.base
    for bound in reversed(bounds[:-1]):
        lows[by_bound[bound]], left = divmod(left, bound)
    dims = []
    for dim in steps.dims:
        numbers = list[int]()
        for size, step in reversed(dim):
            numbers += _cover(where, by_bound, sizes, lows, taken, size=size, step=step)
        dims.append(tuple(reversed(numbers)))
    return Part(factors, tuple(lows), tuple(taken), tuple(dims))


def _factor_by_bound(sizes: list[int]) -> dict[int, int]:
    """Return the number of each factor by its step. Factors of one index are left out."""
    step, by_bound = 1, dict[int, int]()
    for number in range(len(sizes) - 1, -1, -1):
        if sizes[number] > 1:
            by_bound[step] = number
            step *= sizes[number]
    return by_bound


def _cover(
    where: str,
    by_bound: Mapping[int, int],
    sizes: list[int],
    lows: list[int],
    taken: list[int],
    *,
    size: int,
    step: int,
) -> Iterator[int]:
    """Yield the factors that `size` indices with a step cover, the fastest first. Notes in `taken` how much of each."""
    while size > 1:
        factor = by_bound.get(step)
        if factor is None or taken[factor] > 1:
            raise LayoutError(f"{where}: its elements are no axes of the live parameter: it leaves its dimensions")
        if lows[factor] + size <= sizes[factor]:
            taken[factor] = size
            yield factor
            return
        if lows[factor] or size % sizes[factor]:
            raise LayoutError(
                f"{where}: {size} indices, {step} elements apart, do not end where another part's axes do, after each "
                f"{sizes[factor]} from {lows[factor]}"
            )
        taken[factor] = sizes[factor]
        yield factor
        size, step = size // sizes[factor], step * sizes[factor]
