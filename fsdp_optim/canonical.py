"""A model seen through Views: each live parameter that a View names is replaced by its canonical parts, where it stands.

A part has a Placement in the local tensor of the live parameter, as an original of a flat parameter has. So what reads, moves,
saves and loads the originals of flat parameters does so with parts, and writes into the storage of the live parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from msgspec import structs

from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import Placement
from fsdp_optim.layout.views import BoundView, Part, View, ViewsByName, placement_of_part
from fsdp_optim.view import ModelView, NamedHandle, Original

IsWhole: TypeAlias = Callable[[BoundView], bool]
"""Whether a live parameter stays as it is, in spite of its View: its state could not be cut into its parts."""


def seen_through(
    view: ModelView, views: Sequence[View], others: Collection[str] = (), is_whole: IsWhole | None = None
) -> ModelView:
    """Return a model as it is seen through Views. No communication; nothing of the model is touched.

    Views that name neither a live parameter nor a part of this rank's model are `unmatched`: they may match on other ranks.

    Args:
        others: names of the model that are not in `view`, such as buffers, for which there may be Views too.
        is_whole: whether a live parameter stays as it is; None: none does.

    Raises:
        LayoutError: a View does not fit the shape of a parameter.
        WrapperError: two parameters would have one name; two Views are of one parameter; a part would be tied.
    """
    if not views:
        return view
    bound: dict[str, BoundView] = {}
    by_name = ViewsByName(views)
    places: _Places = {}
    whole: set[str] = set()

    def bind(fqn: str, original: Original) -> BoundView | None:
        seen = _view_of(fqn, by_name)
        seen_as = seen.bind(fqn, original.placement.shape) if seen is not None else None
        if seen_as is not None and is_whole is not None and is_whole(seen_as):
            whole.add(fqn)
            return None
        return seen_as

    handles = tuple([_split(named, bind, bound, places) for named in view.handles])
    aliases = _aliases(view.aliases, by_name, bound, whole)
    _check_names(handles, bound, aliases)
    return replace(
        view,
        handles=handles,
        order=tuple(_parts_of(view.order, bound)),
        aliases=aliases,
        unit_order=tuple(_parts_of(view.unit_order, bound)) if view.unit_order is not None else None,
        mixed=tuple((tuple(_parts_of(taken, bound)), tuple(_parts_of(left, bound))) for taken, left in view.mixed),
        unmatched=tuple(map(repr, by_name.unmatched((*view.order, *view.aliases, *others)))),
        seen_through=tuple(map(repr, views)),
    )


_Places: TypeAlias = dict[tuple[int, int], tuple[Placement, Part, Placement]]
"""The Placement of each part of a live one, by the ids of the two: equal layers share them, and to compare them takes long."""


def _split(
    named: NamedHandle,
    bind: Callable[[str, Original], BoundView | None],
    bound: dict[str, BoundView],
    places: _Places,
) -> NamedHandle:
    """Return a live parameter with the parts of those originals that Views name. Adds these to `bound`."""
    originals, fqns, fused = list[Original](), list[str](), list[str]()
    for fqn, original in zip(named.fqns, named.handle.originals, strict=True):
        seen_as = bind(fqn, original)
        if seen_as is None:
            originals.append(original)
            fqns.append(fqn)
            continue
        live, bound[fqn] = original.placement, seen_as
        fused.append(fqn)
        for name, part in seen_as.parts:
            known = places.get((id(live), id(part)))
            if known is None:  # with references that keep the ids unique
                known = places[id(live), id(part)] = live, part, placement_of_part(live, part)
            originals.append(Original(original.module, original.attribute, known[2], original.place))
            fqns.append(name)
    if not fused:
        return named
    handle = replace(named.handle, originals=tuple(originals), aliases=(), fused=tuple(fused))
    return structs.replace(named, handle=handle, fqns=tuple(fqns))


def _view_of(fqn: str, views: ViewsByName) -> View | None:
    """Return the View of a name; None where there is none."""
    matching = views.of(fqn)
    if len(matching) > 1:
        raise WrapperError(
            f"{fqn}: two Views are of this parameter, {matching[0]} and {matching[1]}: give one of them names that the other "
            "does not have"
        )
    return matching[0] if matching else None


def _parts_of(fqns: Iterable[str], bound: Mapping[str, BoundView]) -> Iterable[str]:
    """Return names with the parts in place of their live parameters, in the order of the parts."""
    return chain.from_iterable(bound[fqn].names if fqn in bound else (fqn,) for fqn in fqns)


def _check_names(handles: Sequence[NamedHandle], bound: Mapping[str, BoundView], aliases: Mapping[str, str]) -> None:
    """Refuse a part that has the name of another part or parameter, or the other name of a tied one."""
    fqns = list(chain.from_iterable(named.fqns for named in handles))
    if len({*fqns, *aliases}) == len(fqns) + len(aliases):
        return
    known = {alias: f"the tied parameter {fqn}" for alias, fqn in aliases.items()}
    for named in handles:
        for fqn in named.fqns:
            parts_of = [live for live in named.handle.fused if fqn in bound[live].names]
            what = f"a part of {parts_of[0]}" if parts_of else "a parameter of the model"
            if fqn in known:
                raise WrapperError(
                    f"{fqn}: two parameters would have this name, {known[fqn]} and {what}: give the parts of the View other names"
                )
            known[fqn] = what


def _aliases(
    aliases: Mapping[str, str], views: ViewsByName, bound: Mapping[str, BoundView], whole: Collection[str]
) -> dict[str, str]:
    """Return the other names of parameters. Those of a live parameter become those of its parts, in their order."""
    seen: dict[str, str] = {}
    for alias, fqn in aliases.items():
        view = _view_of(alias, views)
        if fqn in whole or (fqn not in bound and view is None):
            seen[alias] = fqn
            continue
        if fqn not in bound or view is None:
            lacking, other = (fqn, alias) if fqn not in bound else (alias, fqn)
            raise WrapperError(
                f"{alias} and {fqn} are one tied parameter, and no View is of {lacking}, while one is of {other}: "
                "give a View whose name fits both, or one for each"
            )
        shape = _live_shape(bound[fqn])
        parts = view.bind(alias, shape).parts
        if [part for _, part in parts] != [part for _, part in bound[fqn].parts]:
            raise WrapperError(
                f"{alias} and {fqn} are one tied parameter, and their Views have different parts, {list(view.parts)} and "
                f"{list(bound[fqn].view.parts)}: give both the same axes"
            )
        for (other, _), name in zip(parts, bound[fqn].names, strict=True):
            if seen.get(other, name) != name:
                raise WrapperError(
                    f"{other}: two tied parameters would have this name, {seen[other]} and {name}: give the parts of the Views "
                    "other names"
                )
            if other != name:
                seen[other] = name
    return seen


def _live_shape(seen: BoundView) -> tuple[int, ...]:
    return seen.parts[0][1].live_shape
