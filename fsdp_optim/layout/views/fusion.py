"""A View: the canonical parameters that a live one is made of, named and checked on axes, before any element is looked at."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from fsdp_optim.errors import LayoutError, shortened
from fsdp_optim.layout.boxes import Shape
from fsdp_optim.layout.placement import PickledByFields, hash_once
from fsdp_optim.layout.views.axes import Dims, Factor, axes_of, axes_text, read_axes, size_of, sizes_for
from fsdp_optim.layout.views.inverse import BoundView, InverseView
from fsdp_optim.layout.views.part import Part
from fsdp_optim.layout.views.patterns import Bindings, Template, check_pattern, fields_of, is_index, match
from fsdp_optim.layout.views.rows import row_blocks_of


@hash_once
@dataclass(frozen=True, init=False, repr=False)
class View(PickledByFields):
    """A live parameter that trainers have fused, stacked, interleaved or transposed, and the canonical parameters in it.

    View("layers.{i}.attention.wqkv.weight", "(g (q + k + v) d) c", {
        "layers.{i}.attention.wq.weight": "(g q d) c",
        "layers.{i}.attention.wk.weight": "(g k d) c",
        "layers.{i}.attention.wv.weight": "(g v d) c"}, q=4, k=1, v=1, d=128)

    Axes are words. Each dimension is an axis or, in parentheses, a product of axes, the slowest first. A sum in parentheses
    lays ranges end to end, each with a name. A part has one range of every sum, by its name, and all other axes, in any order:
    its dimensions are axes or products. An axis whose name is in braces in the name of a part gives one part per index. An axis
    of one index may be left out of a part, if it is no range of a sum.

    Names: `{i}` stands for a text between two dots, `*` for any text; what stands for them goes into the names of the parts.

    Sizes: one unknown size of each dimension is inferred from the shape of the live parameter, as are the ranges of one sum, if
    all ranges without a size are equal. The `repr` is Python that makes the same View (`View.from_text`).

    Args:
        name: the name of the live parameter, as `model.named_parameters()` has it without the parts of wrappers.
        axes: the axes of the live parameter.
        parts: the names of the canonical parameters, each with its axes. Their order is that in which they take the place of
            the live parameter in param groups.
        sizes: the sizes of axes.

    Raises:
        LayoutError: the text of axes or names cannot be read; an element of the live parameter is in no part, or in two.
    """

    name: str
    axes: str
    parts: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[str, int], ...]

    def __init__(self, name: str, axes: str, parts: Mapping[str, str], /, **sizes: int) -> None:
        check_pattern("the name of a View", name)
        where = f"the View of {name}"
        if not isinstance(parts, Mapping) or not parts:
            raise LayoutError(f"{where}: parts must be a dict of names, each with its axes, not {parts!r}")
        for part, text in parts.items():
            check_pattern(f"{where}: a part", part)
            if not isinstance(text, str):
                raise LayoutError(f"{where}: the axes of {part} must be text, such as '(g q d) c', not {text!r}")
        if not isinstance(axes, str):
            raise LayoutError(f"{where}: axes must be text, such as '(g (q + k + v) d) c', not {axes!r}")
        for axis, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise LayoutError(f"{where}: the size of the axis {axis} must be at least 1, an integer, not {size!r}")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "axes", axes_text(read_axes(where, axes)))
        object.__setattr__(self, "parts", tuple((part, _part_text(where, part, text)) for part, text in parts.items()))
        object.__setattr__(self, "sizes", tuple(sorted(sizes.items())))
        self._check()

    def __repr__(self) -> str:
        sizes = "".join(f", {axis}={size}" for axis, size in self.sizes)
        return f"View({self.name!r}, {self.axes!r}, {dict(self.parts)!r}{sizes})"

    @classmethod
    def from_text(cls, text: str) -> View:
        """Return the View of a `repr`, without running code.

        Args:
            text: the `repr` of a View, such as `inspect` shows.

        Raises:
            LayoutError: the text is no `repr` of a View.
        """
        try:
            call = ast.parse(text.strip(), mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "View":
                raise ValueError("no call of View")
            arguments = [ast.literal_eval(argument) for argument in call.args]
            sizes = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
            name, axes, parts = arguments
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise LayoutError(f"{text!r} is no View: {error}") from None
        return cls(name, axes, parts, **sizes)

    @cached_property
    def _dims(self) -> Dims:
        return read_axes(self._where, self.axes)

    @cached_property
    def _part_dims(self) -> Mapping[str, tuple[tuple[str, ...], ...]]:
        """By part, the axes of each of its dimensions."""
        return {
            part: tuple(tuple(axis for (axis,) in factors) for factors in read_axes(self._where, text))
            for part, text in self.parts
        }

    @property
    def _where(self) -> str:
        return f"the View of {self.name}"

    @cached_property
    def _sums(self) -> tuple[Factor, ...]:
        return tuple(factor for factors in self._dims for factor in factors if len(factor) > 1)

    def _indexed(self, part: str) -> tuple[str, ...]:
        """Return the axes of which the part has an index in its name."""
        return tuple(field for field in fields_of(part) if field not in fields_of(self.name))

    def _has(self, part: str) -> list[str]:
        """Return the axes that a part has, in its dimensions and in its name."""
        return [*(axis for dim in self._part_dims[part] for axis in dim), *self._indexed(part)]

    # -------------------------------------------------------------------------------------------------- checks of axes

    def _check(self) -> None:
        known = axes_of(self._dims)
        unknown = [axis for axis, _ in self.sizes if axis not in known]
        if unknown:
            raise LayoutError(f"{self._where}: has a size for {unknown[0]}, which is no axis of {self.axes!r}")
        for part, _ in self.parts:
            self._check_fields(part, known)
            self._check_axes(part, known)
        self._check_cover()

    def _check_fields(self, part: str, known: list[str]) -> None:
        own, given = fields_of(part), fields_of(self.name)
        lacking = [field for field in given if field not in own]
        if lacking:
            text = "'*'" if lacking[0].startswith("*") else f"{{{lacking[0]}}}"
            raise LayoutError(
                f"{self._where}: the part {part} has no {text}, so two live parameters would have parts of one name"
            )
        for field in own:
            if field not in given and field not in known:
                text = "a '*' more than the live name" if field.startswith("*") else f"{{{field}}}, which is no axis"
                raise LayoutError(f"{self._where}: the part {part} has {text}, and nothing stands for it")
            if field in given and field in known:
                raise LayoutError(
                    f"{self._where}: {field} is an axis of {self.axes!r} and {{{field}}} a placeholder of the live name: "
                    "give one of the two another name"
                )

    def _check_axes(self, part: str, known: list[str]) -> None:
        has, sizes = self._has(part), dict(self.sizes)
        for axis in has:
            if axis not in known:
                raise LayoutError(f"{self._where}: the part {part} has the axis {axis}, which is none of {self.axes!r}")
            if has.count(axis) > 1:
                raise LayoutError(f"{self._where}: the part {part} has the axis {axis} in its name and in its axes")
        for ranges in self._sums:
            taken = [axis for axis in has if axis in ranges]
            if len(taken) != 1:
                what = "none" if not taken else f"{' and '.join(taken)}, and no element is in both,"
                raise LayoutError(
                    f"{self._where}: the part {part} must have one range of ({' + '.join(ranges)}), and has {what} of them"
                )
        for axis in known:
            if sizes.get(axis, 1) > 1 and axis not in has and not any(axis in ranges for ranges in self._sums):
                raise self._lacks(part, axis, sizes[axis])

    def _lacks(self, part: str, axis: str, size: int) -> LayoutError:
        return LayoutError(
            f"{self._where}: the part {part} has no axis {axis}, which has {size} indices: add it to its axes, or {{{axis}}} "
            "to its name for one part per index"
        )

    def _check_cover(self) -> None:
        """Every combination of ranges, one of each sum, is in exactly one part."""
        by_ranges: dict[tuple[str, ...], str] = {}
        for part, _ in self.parts:
            has = self._has(part)
            ranges = tuple(axis for among in self._sums for axis in among if axis in has)
            if ranges in by_ranges:
                where = f"the elements of {' and '.join(ranges)}" if ranges else "all elements"
                raise LayoutError(
                    f"{self._where}: {where} are in two parts, {by_ranges[ranges]} and {part}, and must be in one"
                )
            by_ranges[ranges] = part
        for ranges in itertools.product(*self._sums):
            if ranges not in by_ranges:
                raise LayoutError(
                    f"{self._where}: the elements of {' and '.join(ranges)} in {self.axes!r} are in no part; the parts are "
                    f"{shortened(part for part, _ in self.parts)}"
                )

    # ----------------------------------------------------------------------------------------------- live parameters

    def matches(self, name: str) -> bool:
        """Return whether a live parameter is seen through the View.

        Args:
            name: the name of the live parameter.
        """
        return match(self.name, name) is not None

    def has_part(self, name: str) -> bool:
        """Return whether a name may be that of a part.

        Args:
            name: a canonical name.
        """
        for part, _ in self.parts:
            texts = match(part, name)
            if texts is not None and all(is_index(texts[axis]) for axis in self._indexed(part)):
                return True
        return False

    @property
    def inverse(self) -> InverseView:
        """The same, read the other way, for checkpoints: `convert` and `diff` see the parts as the parameter that they make."""
        return InverseView(self)

    def row_blocks(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        """Return which part the rows of a live matrix belong to, as blocks of rows: those that an optimizer must not mix.

        An optimizer that updates a matrix as a whole, such as Muon, does so for each part where its split sizes are these.

        Args:
            shape: the unsharded shape of the live parameter.

        Returns:
            The name of a part, as the View has it, and a number of rows, for each block in the order of the rows.

        Raises:
            LayoutError: the shape is none that the axes can have; a part has some columns of a row and not others.
        """
        return row_blocks_of(self, tuple(shape))

    def bind(self, name: str, shape: Shape) -> BoundView:
        """Return the parts of a live parameter, each with its name and shape.

        Args:
            name: the name of the live parameter.
            shape: its unsharded shape.

        Raises:
            LayoutError: the View is not of this name; the shape is none that the axes can have.
        """
        bindings = match(self.name, name)
        if bindings is None:
            raise LayoutError(f"{self._where}: {name} has another name")
        try:
            named = [(template.fill(bindings), part) for template, part in _named_parts(self, tuple(shape))]
        except LayoutError as error:
            raise LayoutError(f"{name}: {error}") from None
        names = {filled for filled, _ in named}
        if len(names) < len(named):
            filled = next(each for each, _ in named if [other for other, _ in named].count(each) > 1)
            raise LayoutError(f"{name}: {self._where}: two of its parts are called {filled}")
        return BoundView(self, name, tuple(named))

    def parts_for(self, shape: Shape) -> Iterator[tuple[str, Bindings, Part]]:
        """Yield the parts of any live parameter of a shape.

        Args:
            shape: its unsharded shape.

        Yields:
            The name of a part, as the View has it; what stands for the axes in it; the part.

        Raises:
            LayoutError: the shape is none that the axes can have.
        """
        sizes = sizes_for(self._where, self._dims, shape, dict(self.sizes))
        for pattern, _ in self.parts:
            yield from ((pattern, texts, part) for texts, part in self._parts_of(pattern, sizes))

    def _parts_of(self, pattern: str, sizes: Mapping[str, int]) -> Iterator[tuple[Bindings, Part]]:
        """Yield the parts with one pattern: one for each index of the axes in it."""
        has, indexed = self._has(pattern), self._indexed(pattern)
        factors = [factor for dim in self._dims for factor in dim]
        places: dict[str, int] = {axis: number for number, factor in enumerate(factors) for axis in factor}
        for factor in factors:
            if len(factor) == 1 and factor[0] not in has and sizes[factor[0]] > 1:
                raise self._lacks(pattern, factor[0], sizes[factor[0]])
        shapes = tuple(tuple(size_of(factor, sizes) for factor in dim) for dim in self._dims)
        dims = tuple(tuple(places[axis] for axis in dim) for dim in self._part_dims[pattern])
        for index in itertools.product(*(range(sizes[axis]) for axis in indexed)):
            at = dict(zip(indexed, index, strict=True))
            lows, taken = [], []
            for factor in factors:
                axis = next((axis for axis in factor if axis in has), factor[0])
                before = sum(sizes[other] for other in factor[: factor.index(axis)])
                lows.append(before + at.get(axis, 0))
                taken.append(1 if axis in at else sizes[axis])
            texts = {axis: str(number) for axis, number in at.items()}
            yield texts, Part(shapes, tuple(lows), tuple(taken), dims)


@functools.lru_cache(maxsize=1024)
def _named_parts(view: View, shape: Shape) -> tuple[tuple[Template, Part], ...]:
    """Return the parts of a live parameter, from a cache: those of equal layers differ in their names alone.

    Raises LayoutError, which does not begin with the name of the live parameter.
    """
    return tuple((Template.of(pattern, texts), part) for pattern, texts, part in view.parts_for(shape))


def _part_text(where: str, part: str, text: str) -> str:
    """Return the axes of a part as `axes_text` writes them. Raises LayoutError for a sum among them."""
    dims = read_axes(f"{where}: the part {part}", text)
    for factors in dims:
        for factor in factors:
            if len(factor) > 1:
                raise LayoutError(
                    f"{where}: the part {part} has the sum ({' + '.join(factor)}), and a part has one range of a sum: name "
                    "all of them by one axis where they stay together"
                )
    return axes_text(dims)
