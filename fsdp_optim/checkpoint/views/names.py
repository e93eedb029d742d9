"""Which names of a checkpoint a View is of, and what they become: fused ones their parts, parts the fused one that they make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fsdp_optim.errors import LayoutError, StateError
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import BoundView, InverseView, SomeView, View, ViewsByName, run_in_live


@dataclass(frozen=True)
class Seen:
    """Names of a checkpoint that Views change.

    Attributes:
        split: by name, the parts of each fused parameter.
        joined: by the name that it gets, the parts of each parameter that parts make.
    """

    split: Mapping[str, BoundView] = field(default_factory=dict)
    joined: Mapping[str, BoundView] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether no name changes."""
        return not self.split and not self.joined

    @cached_property
    def joined_of(self) -> Mapping[str, str]:
        """By name of a part, the parameter that it is joined into."""
        return {part: live for live, bound in self.joined.items() for part in bound.names}

    @cached_property
    def names(self) -> frozenset[str]:
        """All names that the parameters that Views change have before and after."""
        bound = {**self.split, **self.joined}
        return frozenset([*bound, *(part for each in bound.values() for part in each.names)])

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes that parameters get, by the names that they get."""
        of_parts = {name: shape for bound in self.split.values() for name, shape in bound.shapes.items()}
        return of_parts | {live: bound.live_shape for live, bound in self.joined.items()}

    def order(self, names: Iterable[str]) -> Iterator[str]:
        """Yield names with parts in place of a fused one, in their order; and a joined one in place of its first part."""
        done: set[str] = set()
        for name in names:
            joined = self.joined_of.get(name)
            if name in self.split:
                yield from self.split[name].names
            elif joined is None:
                yield name
            elif joined not in done:
                done.add(joined)
                yield joined

    def aliases(self, where: str, aliases: Mapping[str, str], through: Through) -> dict[str, str]:
        """Return other names of tied parameters. Those of a fused one become those of its parts, in their order."""
        seen: dict[str, str] = {}
        for alias, name in aliases.items():
            if name in self.joined_of or alias in self.joined_of:
                raise StateError(
                    f"{where}: {alias} and {name} are one tied parameter, which is a part of "
                    f"{self.joined_of.get(name, self.joined_of.get(alias))}: a part that has another name cannot be joined: "
                    "leave the View out"
                )
            view = through.view_of(where, alias)
            if name not in self.split and view is None:
                seen[alias] = name
                continue
            if name not in self.split or view is None:
                lacking, other = (name, alias) if name not in self.split else (alias, name)
                raise StateError(
                    f"{where}: {alias} and {name} are one tied parameter, and no View is of {lacking}, while one is of {other}: "
                    "give a View whose name fits both, or one for each"
                )
            bound = self.split[name]
            parts = view.bind(alias, bound.live_shape).parts
            if [part for _, part in parts] != [part for _, part in bound.parts]:
                raise StateError(
                    f"{where}: {alias} and {name} are one tied parameter, and their Views have different parts, "
                    f"{list(view.parts)} and {list(bound.view.parts)}: give both the same axes"
                )
            seen |= {other: own for (other, _), own in zip(parts, bound.names, strict=True) if other != own}
        self._check_aliases(where, seen)
        return seen

    def _check_aliases(self, where: str, aliases: Mapping[str, str]) -> None:
        """Refuse the other name of a tied parameter that a part gets too."""
        for alias, name in aliases.items():
            if alias in self.shapes:
                raise StateError(
                    f"{where}: {alias}: two parameters would have this name, {name}, which is tied to it, and one that the Views "
                    "make: give the parts of the View other names"
                )


@dataclass(frozen=True)
class Through:
    """The Views of a call on a checkpoint.

    Attributes:
        views: of fused parameters that are seen as their parts.
        inverses: of parts that are seen as the parameter that they make.
        named: a function from a name in the checkpoint to that which Views have.
        whole: fused parameters that stay as they are.
        recorded: the Views of the save; None where all names are known to be canonical, or those of fused parameters.
    """

    views: tuple[View, ...] = ()
    inverses: tuple[InverseView, ...] = ()
    named: Callable[[str], str] = str
    whole: frozenset[str] = frozenset()
    recorded: tuple[View, ...] | None = None
    _known: dict[str, list[View]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        views: Sequence[View | InverseView],
        named: Callable[[str], str] = str,
        whole: frozenset[str] = frozenset(),
        recorded: tuple[View, ...] | None = None,
    ) -> Through:
        """Return the Views in a list of both kinds."""
        forward = tuple(view for view in views if isinstance(view, View))
        return cls(forward, tuple(view for view in views if isinstance(view, InverseView)), named, whole, recorded)

    def view_of(self, where: str, name: str) -> View | None:
        """Return the View of a fused name; None where there is none. The name of a part is a canonical name already.

        Raises StateError for a name with two Views.
        """
        matching = self._matching(name)
        if not matching or any(view.has_part(name) for view in self.views):
            return None
        if len(matching) > 1:
            raise StateError(
                f"{where}: {name}: two Views are of this parameter, {matching[0]} and {matching[1]}: give one of them names "
                "that the other does not have"
            )
        return matching[0]

    @cached_property
    def _by_name(self) -> ViewsByName:
        return ViewsByName(self.views)

    def _matching(self, name: str) -> list[View]:
        """Return the Views of a name, each name looked for once: the weights and the state have the same names."""
        matching = self._known.get(name)
        if matching is None:
            matching = self._known[name] = self._by_name.of(name) if name not in self.whole else []
        return matching

    def find(self, where: str, shapes: Mapping[str, Shape], listed: Collection[str] | None = None) -> Seen:
        """Return which of some names change.

        Args:
            shapes: of all parameters that there are, by the names that Views have.
            listed: the names of which no two may become one; None: all. Those of an optimizer are looked at without those of
                the weights, because a program's own hooks may have cut the weights alone.

        Raises:
            LayoutError: a View does not fit the shape of a parameter, or parts of one are missing.
            StateError: two parameters would have one name; two Views are of one parameter.
        """
        split = {}
        for name, shape in shapes.items():
            view = self.view_of(where, name)
            if view is not None:
                split[name] = view.bind(name, shape)
            else:
                self._check_sure(where, name, shapes)
        joined: dict[str, BoundView] = {}
        for inverse in self.inverses:
            for name, bound in inverse.joined(shapes).items():
                if name in joined:
                    raise StateError(
                        f"{where}: {name}: two Views make this parameter, {joined[name].view} and {bound.view}"
                    )
                joined[name] = bound
        seen = Seen(split, joined)
        _check_names(where, shapes if listed is None else listed, seen)
        return seen

    def _check_sure(self, where: str, name: str, shapes: Mapping[str, Shape]) -> None:
        """Refuse a name that may be that of a fused parameter, or of a part, as those are which a View only permutes.

        A part it is where a View of the save has it, or where the parts that the fused one would have are there.
        """
        matching = self._matching(name)
        if not matching or self.recorded is None or any(view.has_part(name) for view in self.recorded):
            return
        for view in matching:
            bound = _fitting(view, name, shapes[name])
            if bound is None or any(part in shapes and not self._is_fused(part) for part in bound.names):
                continue
            own = dict(bound.parts).get(name)
            if own is None or (own.shape == shapes[name] and run_in_live(own) != 0):
                raise _unsure(where, name, view)

    def check_joined(self, where: str, seen: Seen) -> None:
        """Refuse a name in the checkpoint that may be that of a part, or of the fused parameter itself."""
        for live, bound in seen.joined.items():
            own = dict(bound.parts).get(live)
            is_recorded = any(view.has_part(live) for view in self.recorded or ())
            if own is not None and own.shape == bound.live_shape and run_in_live(own) != 0 and not is_recorded:
                raise _unsure(where, live, bound.view)

    def _is_fused(self, name: str) -> bool:
        return any(view.matches(name) for view in self.views)

    def unused(self, seen: Iterable[Seen]) -> tuple[View | InverseView, ...]:
        """Return the Views that none of these has used."""
        used = list[SomeView | InverseView]()
        for each in seen:
            used += [bound.view for bound in each.split.values()]
            used += [bound.view.inverse for bound in each.joined.values()]
        known = frozenset(used)
        given: list[View | InverseView] = [*self.views, *self.inverses]
        return tuple(view for view in given if view not in known)


def _unsure(where: str, name: str, view: SomeView) -> StateError:
    return StateError(
        f"{where}: {name}: is the name of a fused parameter and of a part by the Views, and the save has recorded neither: leave "
        f"{view} out if it was saved without Views, as the live parameter is; if it is the part, make the fused one of it first, "
        "by convert with the View's .inverse, and then leave the View out"
    )


def _fitting(view: View, name: str, shape: Shape) -> BoundView | None:
    """Return the parts of a parameter; None for a name or a shape that the View is not of."""
    try:
        return view.bind(name, shape) if view.matches(name) else None
    except LayoutError:
        return None


def _check_names(where: str, listed: Collection[str], seen: Seen) -> None:
    """Refuse a name that two parameters would have, of those that are listed."""
    parts: dict[str, str] = {}
    for live, bound in seen.split.items():
        if live not in listed:
            continue
        for part in bound.names:
            other = parts.get(
                part, "a parameter of the checkpoint" if part in listed and part not in seen.split else None
            )
            if other is not None:
                raise StateError(
                    f"{where}: {part}: two parameters would have this name, {other} and a part of {live}: give the parts of the "
                    "View other names"
                )
            parts[part] = f"a part of {live}"
    used: dict[str, str] = {}
    for live, bound in seen.joined.items():
        if not any(part in listed for part in bound.names):
            continue
        if live in parts or (live in listed and live not in seen.joined_of):
            raise StateError(
                f"{where}: {live}: is in the checkpoint, beside its part {bound.names[0]}: give the View another name"
            )
        for part in bound.names:
            if part in used or part in seen.split:
                raise StateError(
                    f"{where}: {part}: is a part of two parameters by the Views, {live} and {used.get(part, part)}: leave one of "
                    "them out"
                )
            used[part] = live
