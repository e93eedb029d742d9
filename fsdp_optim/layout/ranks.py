"""Ranks in the order of their group, and replicas: groups of ranks that are cut equally."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol, SupportsIndex, TypeVar

import numpy
from numpy.typing import NDArray

from fsdp_optim.errors import LayoutError

STORAGE = -1
"""In a plan, storage is modelled as ranks with negative numbers; this is the highest of them."""

Ranks = Sequence[int]
"""Global ranks in the order of their group: a range wherever they are evenly spaced, so thousands of ranks need no memory."""


class _ListedRanks(tuple[int, ...]):
    """Ranks that no range has. Keeps its hash and the place of each rank: every cut over these ranks asks for them."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _places(self) -> dict[int, int]:
        # The first place of a rank that is listed twice, which is refused later.
        return {rank: place for place, rank in reversed(list(enumerate(self)))}

    def index(self, rank: int, *bounds: SupportsIndex) -> int:
        if bounds:
            return super().index(rank, *bounds)
        place = self._places.get(rank)
        if place is None:
            raise ValueError(rank)
        return place

    def __contains__(self, rank: object) -> bool:
        return rank in self._places

    @cached_property
    def numbers(self) -> NDArray[numpy.int64]:
        """These ranks as an array, which nobody changes."""
        numbers = numpy.array(tuple(self), numpy.int64)
        numbers.flags.writeable = False
        return numbers

    def __reduce__(self) -> tuple[object, ...]:
        return ranks_in_order, (tuple(self),)  # without what it keeps


def ranks_in_order(ranks: Iterable[int]) -> Ranks:
    """Return ranks as a range where they are evenly spaced, else as a tuple, so that equal ranks are equal values.

    Raises TypeError for numbers that are no integers.
    """
    if isinstance(ranks, range) and ranks.step > 0:
        return ranks if ranks else range(0)
    return ranks if isinstance(ranks, _ListedRanks) else _in_order(tuple(map(operator.index, ranks)))


@functools.lru_cache(maxsize=256)
def _in_order(listed: tuple[int, ...]) -> Ranks:
    """Return ranks as `ranks_in_order` does. Cached: all cuts over the same ranks share one list."""
    if not listed:
        return range(0)
    step = listed[1] - listed[0] if len(listed) > 1 else 1
    if step > 0:
        evenly = range(listed[0], listed[-1] + 1, step)
        if len(evenly) == len(listed) and all(a == b for a, b in zip(evenly, listed, strict=True)):
            return evenly
    return _ListedRanks(listed)


def check_distinct(groups: tuple[Ranks, ...]) -> None:
    """Refuse a rank that is listed twice, because a rank holds at most one shard."""
    if not (len(groups) == 1 and isinstance(groups[0], range)) and not _are_distinct(groups):
        raise LayoutError(f"each rank may be listed only once, but a rank is listed twice in {groups}")


@functools.lru_cache(maxsize=64)
def _are_distinct(groups: tuple[Ranks, ...]) -> bool:
    """Return whether no rank is listed twice. Cached: parameters share their groups, which may list thousands of ranks."""
    return sum(map(len, groups)) == len(set().union(*groups))


def ranks_at(group: Ranks, places: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """Return the ranks at some places of a group."""
    if isinstance(group, range):
        return group.start + group.step * places
    return number_array(group)[places]


@functools.lru_cache(maxsize=64)
def sorted_ranks(groups: tuple[Ranks, ...]) -> NDArray[numpy.int64]:
    """Return all ranks of some groups, in order. Cached: parameters share their groups."""
    return numpy.unique(numpy.concatenate([number_array(group) for group in groups]))


def number_array(numbers: Sequence[int]) -> NDArray[numpy.int64]:
    """Return ranks or shard numbers as an array, made quickly for a range. That of a group may be shared, and is read-only."""
    if isinstance(numbers, range):
        return numpy.arange(numbers.start, numbers.stop, numbers.step)
    if isinstance(numbers, _ListedRanks):
        return numbers.numbers
    return numpy.array(numbers, numpy.int64)


class _HasReplicas(Protocol):
    @property
    def replicas(self) -> tuple[Ranks, ...]: ...


_Replicated = TypeVar("_Replicated", bound=_HasReplicas)


def join_replicas(first: _Replicated, other: _Replicated) -> _Replicated | None:
    """A Placement with the replicas of both; None where a rank would be in two replicas."""
    groups = tuple(dict.fromkeys((*first.replicas, *other.replicas)))
    if not _are_distinct(groups):
        return None
    joined: _Replicated = replace(first, replicas=tuple(sorted(groups, key=lambda group: group[0])))  # type: ignore[type-var]
    return joined
