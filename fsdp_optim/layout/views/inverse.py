"""What a View gives: its parts bound to a shape, and its inverse, parts that are all there as the parameter that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from fsdp_optim.errors import LayoutError, shortened
from fsdp_optim.layout.boxes import Shape
from fsdp_optim.layout.placement import PickledByFields
from fsdp_optim.layout.views.axes import read_axes, size_of, sizes_for
from fsdp_optim.layout.views.part import Part
from fsdp_optim.layout.views.patterns import Bindings, Template, fields_of, is_index, match


class SomeView(Protocol):
    """A `View`, as the values know it that it gives."""

    @property
    def name(self) -> str: ...
    @property
    def axes(self) -> str: ...
    @property
    def parts(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def sizes(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def inverse(self) -> InverseView: ...

    def bind(self, name: str, shape: Shape) -> BoundView:
        """Return the parts of a live parameter."""

    def parts_for(self, shape: Shape) -> Iterator[tuple[str, Bindings, Part]]:
        """Yield the parts of any live parameter of a shape."""


@dataclass(frozen=True)
class BoundView(PickledByFields):
    """The canonical parts of one live parameter, by name, in the order of its View."""

    view: SomeView
    name: str
    parts: tuple[tuple[str, Part], ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the parts."""
        return tuple(name for name, _ in self.parts)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the parts by name."""
        return {name: part.shape for name, part in self.parts}

    @property
    def live_shape(self) -> Shape:
        """The shape of the live parameter."""
        return self.parts[0][1].live_shape


@dataclass(frozen=True, repr=False)
class InverseView(PickledByFields):
    """The inverse of a `View`, for checkpoints: `convert` and `diff` see its parts as the parameter that they make.

    It is no View, so that no call takes it for one. Its `repr` is Python: `View(...).inverse`.

    Attributes:
        view: the View.
    """

    view: SomeView

    def __repr__(self) -> str:
        return f"{self.view!r}.inverse"

    @cached_property
    def _live(self) -> Template:
        return Template.of(self.view.name, {})

    @property
    def inverse(self) -> SomeView:
        """The View."""
        return self.view

    def has_part(self, name: str) -> bool:
        """Return whether a name may be that of a part.

        Args:
            name: the name of a parameter in a checkpoint.
        """
        return any(True for _ in self._patterns_of(name))

    def joined(self, shapes: Mapping[str, Shape]) -> dict[str, BoundView]:
        """Return the live parameters that canonical ones make, by name, each with the parts that were found.

        Args:
            shapes: the shapes of all parameters that there are, by name.

        Raises:
            LayoutError: a part is missing, or the shapes of parts do not belong together.
        """
        named: dict[str, _Found] = {}
        for name in shapes:
            for pattern, bindings in self._patterns_of(name):
                live = self._live.fill(bindings)
                parts = named.setdefault(live, _Found(live))
                if name in parts.parts:
                    raise LayoutError(f"{name}: may be two parts of {live} by {self!r}: give its parts other names")
                parts.parts[name] = pattern, bindings
        return {live: self._bound(parts, shapes) for live, parts in named.items()}

    def _patterns_of(self, name: str) -> Iterator[tuple[str, Bindings]]:
        """Yield each part whose name this may be. What stands for an axis is a number."""
        for pattern, _ in self.view.parts:
            bindings = match(pattern, name)
            if bindings is not None and all(is_index(bindings[axis]) for axis in self._indexed(pattern)):
                yield pattern, bindings

    def _indexed(self, pattern: str) -> tuple[str, ...]:
        given = fields_of(self.view.name)
        return tuple(axis for axis in fields_of(pattern) if axis not in given)

    def _bound(self, named: _Found, shapes: Mapping[str, Shape]) -> BoundView:
        """Return a live parameter with its parts, from the shapes of these."""
        there = {pattern for pattern, _ in named.parts.values()}
        lacking = [
            Template.of(pattern, {}).fill(named.fields(pattern))
            for pattern, _ in self.view.parts
            if pattern not in there
        ]
        if lacking:
            raise self._missing(named, lacking)
        sizes = self._sizes_of(named, shapes)
        dims = read_axes(self._where, self.view.axes)
        for factors in dims:
            for factor in factors:
                for axis in factor:
                    sizes.setdefault(axis, 1)  # left out of the parts, as a View allows it for one index
        shape = []
        for factors in dims:
            length = 1
            for factor in factors:
                length *= size_of(factor, sizes)
            shape.append(length)
        bound = self.view.bind(named.live, tuple(shape))
        missing = [name for name, _ in bound.parts if name not in named.parts]
        if missing:
            raise self._missing(named, missing)
        for name, part in bound.parts:
            if tuple(shapes[name]) != part.shape:
                first = bound.parts[0][0]
                raise LayoutError(
                    f"{named.live}: its parts do not belong together: {name} has shape {list(shapes[name])}, and would be "
                    f"{list(part.shape)} beside {first} of shape {list(shapes[first])}, by {self._where}"
                )
        return bound

    def _missing(self, named: _Found, missing: Sequence[str]) -> LayoutError:
        return LayoutError(
            f"{named.live}: {self._where} makes it of parts of which {shortened(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"not there, beside {next(iter(named.parts))}: leave the View out, or give its parts names that others do not have"
        )

    def _sizes_of(self, named: _Found, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """Return the sizes of the axes that parts have."""
        sizes = dict(self.view.sizes)
        for pattern, bindings in named.parts.values():
            for axis in self._indexed(pattern):
                sizes[axis] = max(sizes.get(axis, 0), int(bindings[axis]) + 1)
        texts = dict(self.view.parts)
        known: dict[str, str] = {}
        for name, (pattern, _) in named.parts.items():
            if pattern in known and shapes[known[pattern]] == shapes[name]:
                continue  # another index of the same part
            known[pattern] = name
            where = f"{name}: a part of {named.live} by {self._where}"
            sizes = sizes_for(where, read_axes(where, texts[pattern]), tuple(shapes[name]), sizes)
        return sizes

    @property
    def _where(self) -> str:
        return f"the View of {self.view.name}"


@dataclass(frozen=True)
class _Found:
    """The parts of one live parameter that were found: by name, the name of the View's part and what stands for its fields."""

    live: str
    parts: dict[str, tuple[str, Bindings]] = field(default_factory=dict)

    def fields(self, pattern: str) -> Bindings:
        """Return what stands for the fields of another part: what stands for them in these; an axis stands for itself."""
        bindings = dict(next(iter(self.parts.values()))[1])
        return {field: bindings.get(field, f"{{{field}}}") for field in fields_of(pattern)}
