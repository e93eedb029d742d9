"""What is asked once for each object: parameters of equal layers share their placements, meshes and cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from fsdp_optim.layout.placement import Placement

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


def first_equal() -> Callable[[Placement], Placement]:
    """Return a function that returns the first of the placements it has been given that equals its argument."""
    firsts: dict[Placement, Placement] = {}

    def first_of(placement: Placement) -> Placement:
        return firsts.setdefault(placement, placement)

    return once_each(first_of)
