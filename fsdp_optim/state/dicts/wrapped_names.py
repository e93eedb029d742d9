"""Names with components that wrappers insert, where no module shows whether a component is a wrapper's or the model's own."""

from __future__ import annotations

from collections.abc import Iterable


def cut(name: str, parts: frozenset[str]) -> str:
    """Return a name without the components `parts`."""
    return ".".join(part for part in name.split(".") if part not in parts)


class WrappedNames:
    """An index of a model's names, searched by names that may have components of wrappers, or lack components of the model.

    A module of the model may have the name of a wrapper's component (`_orig_mod`). So a name itself comes first, then the name
    that needs the fewest components cut. Where this leaves two names, neither is taken.
    """

    def __init__(self, known: Iterable[str], parts: frozenset[str]) -> None:
        self._known, self._parts = frozenset(known), parts
        self._by_cut: dict[str, list[str]] = {}
        for name in sorted(self._known):
            self._by_cut.setdefault(cut(name, parts), []).append(name)

    def find(self, name: str) -> str | None:
        """Return the name in the model, or None."""
        if name in self._known:
            return name
        candidates = self._by_cut.get(cut(name, self._parts), [])
        if len(candidates) > 1:
            inside = [candidate for candidate in candidates if self._is_inside(candidate, name)]
            most = max((candidate.count(".") for candidate in inside), default=0)
            candidates = [candidate for candidate in inside if candidate.count(".") == most]
        return candidates[0] if len(candidates) == 1 else None

    def _is_inside(self, short: str, long: str) -> bool:
        """Return whether `short` is `long` without some of the wrappers' components."""
        left = short.split(".")
        for part in long.split("."):
            if left and part == left[0]:
                left.pop(0)
            elif part not in self._parts:
                return False
        return not left
