"""What is asked once for each object: parameters of equal layers share their placements, meshes and cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def once_each(ask: Callable[[T], R]) -> Callable[[T], R]:
    """Return `ask` with one call for each object, found again by its identity, for as long as the function is kept."""
    known: dict[int, tuple[T, R]] = {}

    def asked(of: T) -> R:
        answer = known.get(id(of))
        if answer is None:
            answer = known[id(of)] = of, ask(of)  # the reference keeps the id unique
        return answer[1]

    return asked
