"""Views from element numbers: of a parameter itself, or of small twins of it where its numbers would take gigabytes.

A twin has other, smaller sizes. What a conversion does with two twins of different sizes, with twins that have one dimension in
full each, and with the names and shapes of the parameter itself, is what it does with the parameter; else it depends on
sizes, and the twins keep one more dimension in full.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import prod

import numpy as np

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import View
from fsdp_optim.layout.views.axes import read_axes, sizes_for
from fsdp_optim.layout.views.fitted import fitted_view
from fsdp_optim.layout.views.numbered import numbers_of_part
from fsdp_optim.model_views.conversions import Conversion
from fsdp_optim.model_views.element_maps import ElementMap, element_maps

FEW = 1 << 20
"""As many elements are numbered as they are: 8 MiB of numbers."""

_MANY = 1 << 25
"""No more elements are numbered at a time: 256 MiB of numbers."""

_LEAST, _STEP = 8, 12
"""Sizes up to `_LEAST` stay as they are in a twin; the others become multiples of `_STEP`, which 2, 3, 4 and 6 divide."""


def learned_views(
    conversion: Conversion,
    shapes: Mapping[str, Shape],
    renamed: Mapping[str, Shape],
    stored: Mapping[str, Shape],
    few: int = FEW,
) -> list[View]:
    """Return the Views of some parameters that a conversion cuts, joins or transposes.

    Args:
        shapes: the parameters, with their shapes. No other parameter is converted together with them.
        renamed: the parameters that are only renamed.
        stored: the shapes of all tensors in the files, by name.
        few: the number of elements up to which no twins are made.

    Raises:
        LayoutError: the conversion is none that Views have, or it would take too much memory to find out.
    """
    if sum(map(prod, shapes.values())) <= few:
        return [fitted_view(each.name, each.shape, each.parts) for each in element_maps(conversion, shapes, renamed)]
    errors = list[LayoutError]()
    for kept in ((), (0,), (1,), (2,), (0, 1)):
        try:
            return _of_twins(conversion, shapes, renamed, stored, kept)
        except LayoutError as error:
            errors.append(error)
    if sum(map(prod, shapes.values())) <= _MANY:
        return [fitted_view(each.name, each.shape, each.parts) for each in element_maps(conversion, shapes, renamed)]
    raise errors[0]


def _of_twins(
    conversion: Conversion,
    shapes: Mapping[str, Shape],
    renamed: Mapping[str, Shape],
    stored: Mapping[str, Shape],
    kept: Collection[int],
) -> list[View]:
    """Return the Views that are those of twins of all sizes. `kept`: the dimensions that are as they are in all twins."""
    first, second, *others = ([*_maps(conversion, twin, renamed)] for twin in _twins(shapes, kept))
    views = {each.name: view for each in first if (view := _common(each, second)) is not None}
    if len(views) != len(first) or any({each.name for each in maps} != views.keys() for maps in (second, *others)):
        raise LayoutError(f"{next(iter(shapes))}: transformers' conversion of this parameter depends on its sizes")
    learned = list[View]()
    for name, view in views.items():
        twins = [each for maps in (first, second, *others) for each in maps if each.name == name]
        if not all(_is_of(view, each) for each in twins):
            if not all(_is_of(_with_ranges(view, each.shapes), each) for each in twins):
                raise LayoutError(f"{name}: transformers' conversion of this parameter depends on its sizes")
            view = _with_ranges(view, stored if name in shapes else shapes)
        check_stored(view, shapes, stored)
        learned.append(view)
    return learned


def _maps(conversion: Conversion, twin: Mapping[str, Shape], renamed: Mapping[str, Shape]) -> list[ElementMap]:
    num = sum(map(prod, twin.values()))
    if num > _MANY:
        raise LayoutError(
            f"{next(iter(twin))}: transformers' conversion of this parameter depends on its sizes, and {num:,} elements are too "
            f"many to number ({_MANY:,} at most): give its View by hand"
        )
    return element_maps(conversion, twin, renamed)


def _twins(shapes: Mapping[str, Shape], kept: Collection[int]) -> Iterator[dict[str, Shape]]:
    """Yield two twins of small sizes, and for each dimension one that has it in full."""
    first: dict[tuple[int, int], int] = {}
    second: dict[tuple[int, int], int] = {}
    for dim in range(max(map(len, shapes.values()))):
        sizes = sorted({shape[dim] for shape in shapes.values() if len(shape) > dim})
        first |= {(dim, size): _STEP * (number + 1) for number, size in enumerate(sizes)}
        second |= {(dim, size): _STEP * (2 * len(sizes) - number) for number, size in enumerate(sizes)}
    yield _resized(shapes, first, kept)
    yield _resized(shapes, second, kept)
    for dim in range(max(map(len, shapes.values()))):
        if dim not in kept:
            yield _resized(shapes, first, {*kept, dim})


def _resized(
    shapes: Mapping[str, Shape], sizes: Mapping[tuple[int, int], int], kept: Collection[int]
) -> dict[str, Shape]:
    return {
        name: tuple(
            size if dim in kept or size <= _LEAST else min(size, sizes[dim, size]) for dim, size in enumerate(shape)
        )
        for name, shape in shapes.items()
    }


def _common(first: ElementMap, others: list[ElementMap]) -> View | None:
    """Return the View that a tensor has in two twins. None where the twins differ in more than sizes."""
    other = next((each for each in others if each.name == first.name), None)
    if other is None:
        return None
    view, second = (fitted_view(each.name, each.shape, each.parts) for each in (first, other))
    if (view.axes, view.parts) != (second.axes, second.parts):
        return None
    dims = read_axes(view.name, view.axes)
    sizes, others_sizes = (
        sizes_for(view.name, dims, each.shape, dict(fitted.sizes)) for each, fitted in ((first, view), (other, second))
    )
    given = dict(view.sizes)
    equal = {axis: size for axis, size in sizes.items() if others_sizes[axis] == size}
    for factors in dims:  # a dimension has one size that is inferred: that which differs, or that which is not given
        axes = [axis for factor in factors for axis in factor]
        if all(axis in equal for axis in axes):
            equal = {axis: size for axis, size in equal.items() if axis not in axes or axis in given}
    return View(view.name, view.axes, dict(view.parts), **equal)


def _with_ranges(view: View, shapes: Mapping[str, Shape]) -> View:
    """Return a View with the sizes of unequal ranges of sums, which the shapes of its parts show."""
    dims = read_axes(view.name, view.axes)
    ranges = {axis for factors in dims for factor in factors if len(factor) > 1 for axis in factor}
    sizes = dict(view.sizes)
    for part, text in view.parts:
        for factors, length in zip(read_axes(part, text), shapes.get(part, ()), strict=False):
            unknown = [axis for (axis,) in factors if axis not in sizes]
            if len(unknown) == 1 and unknown[0] in ranges:
                sizes[unknown[0]] = max(1, length // prod(sizes[axis] for (axis,) in factors if axis in sizes))
    return View(view.name, view.axes, dict(view.parts), **sizes)


def _is_of(view: View, twin: ElementMap) -> bool:
    """Whether a View gives the parts of a twin: the same elements in the same places."""
    try:
        bound = dict(view.bind(twin.name, twin.shape).parts)
    except LayoutError:
        return False
    return bound.keys() == twin.parts.keys() and all(
        bound[name].shape == numbers.shape and np.array_equal(numbers_of_part(bound[name]), numbers)
        for name, numbers in twin.parts.items()
    )


def check_stored(view: View, shapes: Mapping[str, Shape], stored: Mapping[str, Shape]) -> None:
    """Raise LayoutError for a View that gives other names or shapes than the files have.

    Args:
        shapes: the shapes of the model's parameters, by name.
        stored: the shapes of the tensors in the files, by name.
    """
    known, parts = (shapes, stored) if view.name in shapes else (stored, shapes)
    if view.name not in known:
        raise LayoutError(f"{view.name}: transformers' files have no tensor of this name")
    for name, shape in view.bind(view.name, known[view.name]).shapes.items():
        if parts.get(name) != shape:
            raise LayoutError(
                f"{view.name}: {view} makes {name} of shape {list(shape)}, and in transformers' files it has "
                f"{list(parts[name]) if name in parts else 'another name'}"
            )
