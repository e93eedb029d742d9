"""Views of parameters too large to number: learned from two small twins, whose dimensions are multiples of 3 and of 5.

Hooks could do otherwise at another size, so the operations that they make of the full shapes, on the meta device, must be those
that they make of both twins, with the same arguments where these do not depend on sizes.

A dimension that the hooks divide by attributes of the module (heads, say) becomes a small multiple of what they divide by; one
that has a fixed length stays. Both twins must have one View, which must give the shapes that the hooks make of the full ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import prod

import torch

from fsdp_optim.adapters.state_dict_hooks import HookedUnit
from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import View
from fsdp_optim.layout.views.axes import read_axes
from fsdp_optim.model_views.running import HookFailed, HookRun, refusal, run_load, run_save

_TIMES = (3, 5)
"""By how many units the dimensions of the two twins are long: primes that are rare as numbers of parts or heads."""

_MOST_NBYTES = 32 << 20
"""The most bytes of the numbers of a twin."""

ViewsAt = Callable[[HookedUnit, Mapping[str, Shape], list[str]], dict[str, View]]
"""Views by live parameter, as hooks make them of parameters with these shapes."""


@dataclass(frozen=True, eq=False)
class Twins:
    """Two small twins of a unit of modules.

    Attributes:
        full: the run of the hooks on the full shapes, on the meta device.
        touched: the parameters that the hooks change.
        views_at: learns from one twin.
    """

    full: HookRun
    touched: list[str]
    views_at: ViewsAt

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self.full.given.items()}

    def views(self) -> list[View]:
        """Return the Views of both twins. Raises WrapperError where they are two, or the twins are too large."""
        unit = self.full.unit
        self._check_operations()
        made: list[tuple[dict[str, View], dict[str, Shape]]] = []
        for times in _TIMES:
            shapes = self._shrunk({size: times * base for size, base in self._bases.items()})
            nbytes = 8 * sum(prod(shapes[name]) for name in self.touched)
            if nbytes > _MOST_NBYTES:
                raise refusal(
                    unit, f"{nbytes} bytes of numbers are too many, and they take no smaller shapes", self.touched
                )
            made.append((self.views_at(unit, shapes, self.touched), shapes))
        (first, _), (second, _) = made
        if first.keys() != second.keys():
            names = sorted(first.keys() ^ second.keys())
            raise refusal(unit, f"they change {names[0]} at some sizes and not at others", names)
        return [self._general(name, [(views[name], shapes[name]) for views, shapes in made]) for name in first]

    @cached_property
    def _bases(self) -> dict[int, int]:
        """By size of a dimension, the smallest divisor of it whose multiples the hooks take in its place."""
        bases: dict[int, int] = {}
        for size in sorted({size for name in self.touched for size in self._shapes[name]}, reverse=True):
            for base in _divisors(size):
                if _TIMES[-1] * base > size:
                    break
                tried = {**bases, size: base}
                if all(self._works({size: times * base for size, base in tried.items()}) for times in _TIMES):
                    bases = tried
                    break
        return bases

    def _check_operations(self) -> None:
        """Refuse hooks that do other operations at full size than at the sizes of the twins."""
        runs = [self._run(self._shrunk({size: times * base for size, base in self._bases.items()})) for times in _TIMES]
        for (name, full), *small in zip(self.full.trace, *(run.trace for run in runs), strict=True):
            (_, first), (_, second) = small
            is_other = len(full) != len(first) or len(full) != len(second)
            for at_full, *at_small in zip(full, first, second, strict=False):
                if is_other or at_small[0] == at_small[1] != at_full:
                    raise refusal(
                        self.full.unit,
                        f"they do {name} with {at_full}, and with {at_small[0]} at smaller sizes",
                        self.touched,
                    )

    def _run(self, shapes: Mapping[str, Shape]) -> HookRun:
        given = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name, shape in shapes.items()}
        return run_save(self.full.unit, given)

    def _shrunk(self, sizes: Mapping[int, int]) -> dict[str, Shape]:
        return {name: tuple(sizes.get(size, size) for size in shape) for name, shape in self._shapes.items()}

    def _works(self, sizes: Mapping[int, int]) -> bool:
        """Return whether the hooks make the same tensors of shapes with other sizes, and can load them again."""
        shapes, unit = self._shrunk(sizes), self.full.unit
        try:
            run = self._run(shapes)
            loaded = run_load(run, run.state)
        except HookFailed:
            return False
        if run.state.keys() != self.full.state.keys() or run.touched != self.touched:
            return False
        if [name for name, _ in run.trace] != [name for name, _ in self.full.trace]:
            return False
        has_load = any(hooked.load for hooked in unit.hooked)
        if has_load and any(_shape_of(loaded.get(name)) not in (None, shapes[name]) for name in self.touched):
            return False
        of_full = {name: _shape_of(value) for name, value in self.full.state.items()}
        made = {name: _shape_of(value) for name, value in run.state.items()}
        return all(_are_alike(made[name], of_full[name], sizes) for name in made)

    def _general(self, name: str, twins: Sequence[tuple[View, Shape]]) -> View:
        """Return the View that both twins have, for the full shape."""
        unit, full = self.full.unit, self._shapes[name]
        (first, first_shape), (second, second_shape) = twins
        axes = [[axis for axis, _ in view.sizes] for view in (first, second)]
        if (first.axes, first.parts, axes[0]) != (second.axes, second.parts, axes[1]):
            raise refusal(unit, f"they make {first} of {name} at one size, and {second} at another", [name])
        at = {axis: d for d, dim in enumerate(read_axes(name, first.axes)) for factor in dim for axis in factor}
        sizes: dict[str, int] = {}
        for (axis, size), (_, other) in zip(first.sizes, second.sizes, strict=True):
            scaled = size * full[at[axis]], other * full[at[axis]]
            wanted = scaled[0] // first_shape[at[axis]]
            if size == other:
                sizes[axis] = size
            elif scaled == (wanted * first_shape[at[axis]], wanted * second_shape[at[axis]]):
                sizes[axis] = wanted
            else:
                raise refusal(unit, f"the size of {axis} in {first} does not follow from the shape of {name}", [name])
        view = View(name, first.axes, dict(first.parts), **sizes)
        try:
            shapes = view.bind(name, full).shapes
        except LayoutError as error:
            raise refusal(unit, f"what they do at smaller sizes does not fit: {error}", [name]) from None
        for part, shape in shapes.items():
            if shape != _shape_of(self.full.state.get(part)):
                raise refusal(unit, f"{part} would have shape {list(shape)} by {view}, and they make another", [name])
        return view


def _divisors(size: int) -> Iterator[int]:
    return (base for base in range(1, size + 1) if size % base == 0)


def _shape_of(value: object) -> Shape | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _are_alike(made: Shape | None, full: Shape | None, sizes: Mapping[int, int]) -> bool:
    """Return whether each dimension is as long as at full size, or shorter by what the sizes of dimensions are."""
    if made is None or full is None:
        return made is full
    scales = {Fraction(small, size) for size, small in sizes.items()} | {Fraction(1)}
    scales = {scale * other for scale, other in itertools.product(scales, scales)}
    return len(made) == len(full) and all(
        length == small == 0 or (length > 0 and Fraction(small, length) in scales)
        for small, length in zip(made, full, strict=True)
    )
