"""The View of a live parameter, from the numbers of its elements in each part, as hooks and converters give them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from fsdp_optim.errors import LayoutError, counted_noun, shortened
from fsdp_optim.layout.boxes import Shape
from fsdp_optim.layout.views.axes import Factor, axes_text
from fsdp_optim.layout.views.fusion import View
from fsdp_optim.layout.views.numbered import Numbers, numbers_of_part, parts_of_numbers
from fsdp_optim.layout.views.part import Part

_PLAIN_AXES = "cdfghjkmnopqrstuvwxyz"
"""Names of axes, the last axis first. Without `i` and `l`, which are usual for layers, and `a`, `b` and `e`."""


def fitted_view(name: str, shape: Shape, parts: Mapping[str, Numbers]) -> View:
    """Return the View of a live parameter whose parts have these elements.

    Sizes that follow from the live shape are left out, so that layers of different width may have one View. Parts whose names
    differ in an index alone are one part with an axis in its name.

    Args:
        name: the name of the live parameter.
        shape: its unsharded shape.
        parts: by the name of each part, in the shape of the part, the row-major numbers of its elements in the live parameter.

    Raises:
        LayoutError: an element is in no part, or in two; the elements of a part are not those of axes in some order.
    """
    _check_numbers(name, shape, parts)
    by_name = parts_of_numbers(name, shape, parts)
    for indexed in (_indices_in_names(by_name), {}):
        patterns = _patterns(by_name, indexed)
        view = _Fitted(name, patterns, frozenset(indexed)).view() if patterns is not None else None
        if view is not None and _has_parts(view, name, shape, parts):
            return view
    raise LayoutError(
        f"{name}: of shape {list(shape)}, no axes give its parts {shortened(f'{n} {list(p.shape)}' for n, p in parts.items())}"
    )


def _check_numbers(name: str, shape: Shape, parts: Mapping[str, Numbers]) -> None:
    """Every element of the live parameter must be in one part."""
    numel = prod(shape)
    where = f"{name}: of shape {list(shape)}, with the parts {shortened(parts)}"
    seen = np.zeros(numel, np.bool_)
    for part, numbers in parts.items():
        if numbers.size and (numbers.min() < 0 or numbers.max() >= numel):
            wrong = int(numbers.min() if numbers.min() < 0 else numbers.max())
            raise LayoutError(f"{where}: {part} has element {wrong}, and there are {numel}")
        seen[numbers.reshape(-1)] = True
    if not seen.all():
        num_lacking = numel - int(np.count_nonzero(seen))
        raise LayoutError(
            f"{where}: {counted_noun(num_lacking, 'element')} of {numel} are in no part; the first is {int(np.argmin(seen))}"
        )
    total = sum(numbers.size for numbers in parts.values())
    if total != numel:
        raise LayoutError(f"{where}: the parts have {total} elements and the live parameter {numel}: some are in two")


def _has_parts(view: View, name: str, shape: Shape, parts: Mapping[str, Numbers]) -> bool:
    """Whether a View gives these parts: the same names, and the same elements in the same places."""
    bound = dict(view.bind(name, shape).parts)
    return bound.keys() == parts.keys() and all(
        bound[part].shape == numbers.shape and np.array_equal(numbers_of_part(bound[part]), numbers)
        for part, numbers in parts.items()
    )


# ------------------------------------------------------------------------------------------------ indices in names


def _indices_in_names(parts: Mapping[str, Part]) -> dict[int, int]:
    """Return the factors whose index is in the names of all parts, each with its position among the texts between dots."""
    indexed = dict[int, int]()
    first = next(iter(parts.values()))
    depth = min(len(name.split(".")) for name in parts)
    for factor in range(len(first.lows)):
        if any(part.sizes[factor] > 1 for part in parts.values()) or not any(p.lows[factor] for p in parts.values()):
            continue
        for at in range(depth):
            named = all(name.split(".")[at] == str(part.lows[factor]) for name, part in parts.items())
            if named and at not in indexed.values():
                indexed[factor] = at
                break
    return indexed


def _patterns(parts: Mapping[str, Part], indexed: Mapping[int, int]) -> dict[str, Part] | None:
    """Return the first part of each pattern of names, in which axes stand for `indexed`. None where parts of one differ."""
    fields = dict(zip(indexed.values(), _index_axes(indexed), strict=True))
    patterns: dict[str, Part] = {}
    for name, part in parts.items():
        texts = [f"{{{fields[at]}}}" if at in fields else text for at, text in enumerate(name.split("."))]
        first = patterns.setdefault(".".join(texts), part)
        lows = [low for factor, low in enumerate(part.lows) if factor not in indexed]
        if (lows, part.sizes, part.dims) != (
            [low for factor, low in enumerate(first.lows) if factor not in indexed],
            first.sizes,
            first.dims,
        ):
            return None
    return patterns


def _index_axes(indexed: Mapping[int, int] | frozenset[int]) -> list[str]:
    return ["e" if number == 0 else f"e{number}" for number in range(len(indexed))]


# --------------------------------------------------------------------------------------------------- axes as text


@dataclass(frozen=True)
class _Fitted:
    """Parts of one live parameter by the pattern of their names. `indexed`: the factors whose index is in names."""

    name: str
    parts: Mapping[str, Part]
    indexed: frozenset[int]

    @cached_property
    def _first(self) -> Part:
        return next(iter(self.parts.values()))

    @cached_property
    def _sizes(self) -> Shape:
        """The sizes of all factors of the live parameter."""
        return tuple(size for factors in self._first.factors for size in factors)

    @cached_property
    def _ranges(self) -> list[list[tuple[int, int]]]:
        """By factor, the ranges of its indices that parts have: the first and the number, ascending."""
        return [
            sorted({(part.lows[factor], part.sizes[factor]) for part in self.parts.values()})
            for factor in range(len(self._sizes))
        ]

    def _is_sum(self, factor: int) -> bool:
        return factor not in self.indexed and self._ranges[factor] != [(0, self._sizes[factor])]

    @cached_property
    def _labels(self) -> list[Factor]:
        """By factor, the names of its ranges, ascending: of an axis that is no sum, one."""
        plain, sums = iter(_PLAIN_AXES), 0
        by_factor = dict(zip(sorted(self.indexed), _index_axes(self.indexed), strict=True))
        labels: list[Factor] = []
        for factor in range(len(self._sizes) - 1, -1, -1):
            if self._is_sum(factor):
                labels.insert(0, self._names_of_ranges(factor) or _letters(sums, len(self._ranges[factor])))
                sums += 1
            else:
                labels.insert(0, (by_factor[factor] if factor in by_factor else next(plain),))
        return labels

    def _names_of_ranges(self, factor: int) -> Factor | None:
        """Return names for the ranges of the only sum, from what differs in the names of its parts."""
        ranges = self._ranges[factor]
        by_range = {(part.lows[factor], part.sizes[factor]): name.split(".") for name, part in self.parts.items()}
        if len(self.parts) != len(ranges) or len({len(texts) for texts in by_range.values()}) > 1:
            return None
        for texts in zip(*(by_range[taken] for taken in ranges), strict=True):
            if len(set(texts)) == len(texts) and all(re.fullmatch(r"[A-Za-z_]\w+", text) for text in texts):
                return tuple(texts)
        return None

    def view(self) -> View | None:
        """Return the View. None where its language has no form for the parts."""
        if any(self._is_sum(factor) and not _is_cut(self._ranges[factor], n) for factor, n in enumerate(self._sizes)):
            return None
        texts, num_more = dict[str, str](), 0
        for name, part in self.parts.items():
            dims = self._dims_of(part)
            if dims is None:
                return None
            num_more = max(num_more, sum(axis.startswith("more") for dim in dims for axis in dim))
            texts[name] = axes_text(tuple(tuple((axis,) for axis in dim) for dim in dims))
        more = [(axis,) for axis in _more_axes(num_more)]
        live = [list(factors) for factors in self._live_dims()]
        if more and not live:
            return None
        for axis in more:
            live[0].append(axis)
        sizes = {axis: 1 for (axis,) in more} | dict(self._sizes_to_give())
        return View(self.name, axes_text(tuple(map(tuple, live))), texts, **sizes)

    def _live_dims(self) -> Iterator[Sequence[Factor]]:
        labels = iter(self._labels)
        for factors in self._first.factors:
            yield [next(labels) for _ in factors]

    def _dims_of(self, part: Part) -> list[list[str]] | None:
        """Return the axes of a part's dimensions, the slowest first. None for a range that has no dimension to be in."""
        label = {factor: self._label(part, factor) for factor in range(len(self._sizes))}
        dims = [[label[factor] for factor in dim] for dim in part.dims]
        free = [factor for factor in label if part.sizes[factor] == 1 and factor not in self.indexed]
        ranges = [factor for factor in free if self._is_sum(factor)]
        spare = [label[factor] for factor in free if self._sizes[factor] == 1]
        more = iter(_more_axes(len(dims)))
        for dim in dims:
            if not dim:  # a dimension of one index
                dim.append(label[ranges.pop(0)] if ranges else spare.pop(0) if spare else next(more))
        for factor in ranges:
            if not dims:
                return None
            self._insert(dims, part, factor)
        return dims

    def _label(self, part: Part, factor: int) -> str:
        if not self._is_sum(factor):
            return self._labels[factor][0]
        return self._labels[factor][self._ranges[factor].index((part.lows[factor], part.sizes[factor]))]

    def _insert(self, dims: list[list[str]], part: Part, factor: int) -> None:
        """Put a range of one index behind the axis of the next slower factor that the part has, or before all others."""
        label = self._label(part, factor)
        slower = [self._label(part, other) for other in range(factor)]
        for axis in reversed(slower):
            for dim in dims:
                if axis in dim:
                    dim.insert(dim.index(axis) + 1, label)
                    return
        dims[0].insert(0, label)

    def _sizes_to_give(self) -> Iterator[tuple[str, int]]:
        """Yield the sizes of axes that do not follow from the live shape."""
        at = 0
        for factors in self._first.factors:
            numbers = range(at, at + len(factors))
            at += len(factors)
            follows = [factor for factor in numbers if not self._is_sum(factor)] or [
                factor for factor in numbers if len({size for _, size in self._ranges[factor]}) == 1
            ]
            for factor in numbers:
                if factor not in follows[:1]:
                    sizes = (
                        [size for _, size in self._ranges[factor]] if self._is_sum(factor) else [self._sizes[factor]]
                    )
                    yield from zip(self._labels[factor], sizes, strict=True)


def _is_cut(ranges: list[tuple[int, int]], size: int) -> bool:
    """Whether ranges follow one another from the first index to the last."""
    ends = [0, *(low + length for low, length in ranges)]
    return [low for low, _ in ranges] == ends[:-1] and ends[-1] == size


def _letters(number: int, length: int) -> Factor:
    """Return names for the ranges of a sum: `a0 + a1`, of the next `b0 + b1`."""
    return tuple(f"{'ab'[number % 2]}{number // 2 or ''}_{at}" for at in range(length))


def _more_axes(number: int) -> list[str]:
    """Return names for axes of one index that the live parameter has no dimension for."""
    return [f"more{at or ''}" for at in range(number)]
