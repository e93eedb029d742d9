"""Many Views by the names that they are of: those of one parameter each are found in a dict, patterns are tried one by one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fsdp_optim.layout.views.fusion import View
from fsdp_optim.layout.views.patterns import fields_of


class ViewsByName:
    """Views, found by the name of a live parameter in a time that does not depend on how many are of one parameter each.

    Of the patterns, those are tried whose last text between dots is that of the name, or is a pattern itself.
    """

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views
        self._literal: dict[str, list[View]] = {}
        self._patterns: dict[str, list[View]] = {}
        for view in views:
            last = view.name.rpartition(".")[2]
            if not fields_of(view.name):
                self._literal.setdefault(view.name, []).append(view)
            else:
                self._patterns.setdefault("" if fields_of(last) else last, []).append(view)

    def of(self, name: str) -> list[View]:
        """Return the Views of a live parameter."""
        last = name.rpartition(".")[2]
        patterns = [*self._patterns.get(last, ()), *(self._patterns.get("", ()) if last else ())]
        return [*self._literal.get(name, ()), *(view for view in patterns if view.matches(name))]

    def unmatched(self, names: Collection[str]) -> list[View]:
        """Return the Views that are of none of these names, and have a part of none."""
        known = frozenset(names)
        return [view for view in self._views if not _is_among(view, known)]


def _is_among(view: View, names: frozenset[str]) -> bool:
    patterns = [view.name, *(part for part, _ in view.parts)]
    if any(pattern in names for pattern in patterns):
        return True
    return any(fields_of(each) for each in patterns) and any(view.matches(n) or view.has_part(n) for n in names)
