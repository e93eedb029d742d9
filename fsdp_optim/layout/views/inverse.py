"""A View read the other way: parts that are all there, seen as the one live parameter that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsdp_optim.errors import LayoutError, shortened
from fsdp_optim.layout.boxes import Shape
from fsdp_optim.layout.views.axes import read_axes, size_of, sizes_for
from fsdp_optim.layout.views.patterns import Bindings, fields_of, fill, match

if TYPE_CHECKING:
    from fsdp_optim.layout.views.fusion import BoundView, View


@dataclass(frozen=True, repr=False)
class InverseView:
    """The inverse of a `View`, for checkpoints: `convert` and `diff` see its parts as the parameter that they make.

    It is no View, so that no call takes it for one. Its `repr` is Python: `View(...).inverse`.

    Attributes:
        view: the View.
    """

    view: View

    def __repr__(self) -> str:
        return f"{self.view!r}.inverse"

    @property
    def inverse(self) -> View:
        """The View."""
        return self.view

    def joined(self, shapes: Mapping[str, Shape]) -> dict[str, BoundView]:
        """Return the live parameters that canonical ones make, by name, each with the parts that were found.

        Args:
            shapes: the shapes of all parameters that there are, by name.

        Raises:
            LayoutError: a part is missing, or the shapes of parts do not belong together.
        """
        found: dict[str, _Found] = {}
        for name in shapes:
            for pattern, bindings in self._patterns_of(name):
                live = fill(self.view.name, bindings)
                parts = found.setdefault(live, _Found(live))
                if name in parts.parts:
                    raise LayoutError(f"{name}: may be two parts of {live} by {self!r}: give its parts other names")
                parts.parts[name] = pattern, bindings
        return {live: self._bound(parts, shapes) for live, parts in found.items()}

    def _patterns_of(self, name: str) -> Iterator[tuple[str, Bindings]]:
        """Yield each part whose name this may be. What stands for an axis is a number."""
        for pattern, _ in self.view.parts:
            bindings = match(pattern, name)
            if bindings is not None and all(_is_index(bindings[axis]) for axis in self._indexed(pattern)):
                yield pattern, bindings

    def _indexed(self, pattern: str) -> tuple[str, ...]:
        given = fields_of(self.view.name)
        return tuple(axis for axis in fields_of(pattern) if axis not in given)

    def _bound(self, found: _Found, shapes: Mapping[str, Shape]) -> BoundView:
        """Return a live parameter with its parts, from the shapes of these."""
        sizes = self._sizes_of(found, shapes)
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
        bound = self.view.bind(found.live, tuple(shape))
        missing = [name for name, _ in bound.parts if name not in found.parts]
        if missing:
            raise LayoutError(
                f"{found.live}: {self._where} makes it of {len(bound.parts)} parts, and {shortened(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not there, beside {next(iter(found.parts))}: leave the View out, or "
                "give its parts names that others do not have"
            )
        for name, part in bound.parts:
            if tuple(shapes[name]) != part.shape:
                first = bound.parts[0][0]
                raise LayoutError(
                    f"{found.live}: its parts do not belong together: {name} has shape {list(shapes[name])}, and would be "
                    f"{list(part.shape)} beside {first} of shape {list(shapes[first])}, by {self._where}"
                )
        return bound

    def _sizes_of(self, found: _Found, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """Return the sizes of the axes that parts have."""
        sizes = dict(self.view.sizes)
        for pattern, bindings in found.parts.values():
            for axis in self._indexed(pattern):
                sizes[axis] = max(sizes.get(axis, 0), int(bindings[axis]) + 1)
        texts = dict(self.view.parts)
        known: dict[str, str] = {}
        for name, (pattern, _) in found.parts.items():
            if pattern in known and shapes[known[pattern]] == shapes[name]:
                continue  # another index of the same part
            known[pattern] = name
            where = f"{name}: a part of {found.live} by {self._where}"
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


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and text == str(int(text))
