"""What is asked once for each object: parameters of equal layers share their placements, meshes and cuts.

What an object has cached stays in its process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from fsdp_optim.layout.placement import Placement

T = TypeVar("T")
R = TypeVar("R")


class PickledByFields:
    """A dataclass whose pickle has its fields alone: equal values are equal bytes, and a hash counts in one process only.

    `hash(None)` is an address before Python 3.12, and the hash of a range of one element has it inside.
    """

    def __getstate__(self) -> dict[str, Any]:
        fields = getattr(type(self), "__dataclass_fields__", self.__dict__)
        return {name: value for name, value in self.__dict__.items() if name in fields}


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
