"""Axes as text: `(g (q + k + v) d) c` are two dimensions, the first a product of three factors, of which the second is a sum."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from fsdp_optim.errors import LayoutError, counted_noun, shortened
from fsdp_optim.layout.boxes import Shape

Factor = tuple[str, ...]
"""The axes of a factor: a single axis; or the ranges of a sum, which follow one another."""

Dims = tuple[tuple[Factor, ...], ...]
"""The factors of each dimension, the slowest first."""

_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|[()+])")


def read_axes(where: str, text: str) -> Dims:
    """Return the dimensions of an axes text. Raises LayoutError, which begins with `where`, for a text that is none."""
    tokens, at = list[str](), 0
    while at < len(text.rstrip()):
        token = _TOKEN.match(text, at)
        if token is None:
            raise _wrong(where, text, f"{text[at:].strip()[0]!r} is no axis: axes are names, such as 'g' or 'heads'")
        tokens.append(token[1])
        at = token.end()
    reader = _Reader(where, text, tokens)
    dims = tuple(reader.dims())
    names = axes_of(dims)
    for name in names:
        if names.count(name) > 1:
            raise _wrong(where, text, f"the axis {name} is there twice")
    return dims


class _Reader:
    """The tokens of an axes text, read from the left."""

    def __init__(self, where: str, text: str, tokens: Sequence[str]) -> None:
        self._where, self._text, self._tokens, self._at = where, text, tokens, 0

    def dims(self) -> Iterator[tuple[Factor, ...]]:
        while self._at < len(self._tokens):
            yield self._product() if self._next == "(" else (self._axis(),)

    @property
    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, token: str) -> None:
        if self._next != token:
            raise _wrong(
                self._where, self._text, f"{token!r} is missing{f' before {self._next!r}' if self._next else ''}"
            )
        self._at += 1

    def _axis(self) -> Factor:
        name = self._next
        if not name or name in "()+":
            raise _wrong(self._where, self._text, f"an axis is missing{f' before {name!r}' if name else ' at its end'}")
        self._at += 1
        return (name,)

    def _product(self) -> tuple[Factor, ...]:
        """Read what is between parentheses: a product, or a sum, which is a product of one factor."""
        self._take("(")
        factors = list[Factor]()
        while self._next != ")":
            if self._next == "(":
                factors += self._inner_sum()
                continue
            factor = self._axis()
            while self._next == "+":
                self._take("+")
                factor += self._axis()
            if len(factor) > 1 and (factors or self._next != ")"):
                raise _wrong(self._where, self._text, f"put ({' + '.join(factor)}) into parentheses of its own")
            factors.append(factor)
        self._take(")")
        if not factors:
            raise _wrong(self._where, self._text, "there is nothing between '(' and ')'")
        return tuple(factors)

    def _inner_sum(self) -> tuple[Factor, ...]:
        inner = self._product()
        if len(inner) != 1 or len(inner[0]) < 2:
            raise _wrong(self._where, self._text, "inside parentheses only a sum has parentheses of its own")
        return inner


def _wrong(where: str, text: str, why: str) -> LayoutError:
    return LayoutError(f"{where}: the axes {text!r} cannot be read: {why}")


def axes_of(dims: Dims) -> list[str]:
    """Return all axes in their order."""
    return [axis for factors in dims for factor in factors for axis in factor]


def axes_text(dims: Dims) -> str:
    """Return dimensions as text, which `read_axes` reads."""
    return " ".join(
        _factor_text(factors[0]) if len(factors) == 1 else f"({' '.join(map(_factor_text, factors))})"
        for factors in dims
    )


def _factor_text(factor: Factor) -> str:
    return factor[0] if len(factor) == 1 else f"({' + '.join(factor)})"


def size_of(factor: Factor, sizes: Mapping[str, int]) -> int:
    """Return the number of indices of a factor: of a sum, those of all its ranges."""
    return sum(sizes[axis] for axis in factor)


def sizes_for(where: str, dims: Dims, shape: Shape, known: Mapping[str, int]) -> dict[str, int]:
    """Return the size of every axis, from those that are known and a shape.

    One unknown axis of a dimension is inferred, and the unknown ranges of one sum, if these are equal.

    Raises LayoutError, which begins with `where`, for a shape that the axes cannot have, and for too few known sizes.
    """
    text = axes_text(dims)
    if len(shape) != len(dims):
        raise LayoutError(
            f"{where}: has shape {list(shape)}, {counted_noun(len(shape), 'dimension')}, and the axes {text!r} are "
            f"{len(dims)}"
        )
    sizes = dict(known)
    for number, (factors, length) in enumerate(zip(dims, shape, strict=True)):
        unknown = [factor for factor in factors if any(axis not in sizes for axis in factor)]
        if len(unknown) > 1:
            axes = [axis for factor in unknown for axis in factor if axis not in sizes]
            raise LayoutError(
                f"{where}: dimension {number} of {text!r} has {len(axes)} axes of unknown size, {shortened(axes)}, of which "
                f"one can be inferred from {length}: give the others, as in View(..., {axes[0]}=4)"
            )
        rest = prod(size_of(factor, sizes) for factor in factors if factor not in unknown)
        if unknown:
            _infer(where, text, unknown[0], sizes, number=number, length=length, rest=rest)
        elif rest != length:
            raise LayoutError(
                f"{where}: dimension {number} of shape {list(shape)} is {length}, and the axes {text!r} make it {rest}: "
                f"{_known_text(factors, sizes)}"
            )
    return sizes


def _infer(
    where: str, text: str, factor: Factor, sizes: dict[str, int], *, number: int, length: int, rest: int
) -> None:
    """Add the unknown sizes of a factor of dimension `number`. `rest`: the product of the other factors."""
    unknown = [axis for axis in factor if axis not in sizes]
    left, remainder = divmod(length, rest)
    each, uneven = divmod(left - sum(sizes.get(axis, 0) for axis in factor), len(unknown))
    if remainder:
        raise LayoutError(
            f"{where}: dimension {number} is {length}, which is no multiple of {rest}, so {' + '.join(factor)} of {text!r} "
            "has no size"
        )
    if uneven or each < 1:
        known = {axis: sizes[axis] for axis in factor if axis in sizes}
        beside = f" beside {_known_text([factor], sizes)}" if known else ""
        raise LayoutError(
            f"{where}: {' + '.join(factor)} of {text!r} is {left}, which leaves no equal size of at least 1 for "
            f"{shortened(unknown)}{beside}: give their sizes, as in View(..., {unknown[0]}=4)"
        )
    sizes.update(dict.fromkeys(unknown, each))


def _known_text(factors: Sequence[Factor], sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={sizes[axis]}" for factor in factors for axis in factor if axis in sizes)
