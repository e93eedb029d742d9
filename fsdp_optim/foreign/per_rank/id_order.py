"""Which live parameter each id of an optimizer's dict is, where the dict has ids and sizes but no names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MOST_STEPS = 200_000


def live_of_ids(
    groups: Sequence[Sequence[Any]], num_live: int, fits: Callable[[Any, int], bool]
) -> Mapping[Any, int] | None:
    """Return the place of each id's live parameter in the model's order; None if the sizes allow several answers, or none.

    An optimizer counts its parameters group by group, and lists the parameters of a group in the order of the model, from which
    frozen parameters may be left out. So the ids of a group are a part of the model's order, and two groups have no parameter in
    common.

    Args:
        groups: the ids of each group, in the order of the group.
        num_live: the number of live parameters of the model.
        fits: whether the values of an id may be those of the live parameter at a place.
    """
    ids = [key for group in groups for key in group]
    if len(groups) == 1 and len(ids) == num_live:
        return dict(zip(ids, range(num_live), strict=True)) if all(map(fits, ids, range(num_live))) else None
    if len(ids) > num_live or len(set(ids)) != len(ids):
        return None
    return _only_answer(groups, num_live, fits)


def _only_answer(
    groups: Sequence[Sequence[Any]], num_live: int, fits: Callable[[Any, int], bool]
) -> Mapping[Any, int] | None:
    """Return the only way to give the places to the ids, or None. Walks through the places, and gives up after many steps."""
    start = (0,) * len(groups)
    # For each number of ids that the groups have used up: how many ways lead there, at most 2, and the last step of one of them.
    layers: list[dict[tuple[int, ...], tuple[int, int | None]]] = [{start: (1, None)}]
    num_ids = sum(map(len, groups))
    num_steps = 0
    for place in range(num_live):
        following: dict[tuple[int, ...], tuple[int, int | None]] = {}
        for used, (ways, _) in layers[-1].items():
            num_steps += len(groups) + 1
            if num_steps > _MOST_STEPS:
                return None
            for group, step in _steps(groups, used, place, fits):
                if num_ids - sum(step) <= num_live - place - 1:
                    known, last = following.get(step, (0, group))
                    following[step] = (min(known + ways, 2), last)
        layers.append(following)
    end = tuple(map(len, groups))
    if layers[-1].get(end, (0, None))[0] != 1:
        return None
    places: dict[Any, int] = {}
    for place in range(num_live - 1, -1, -1):
        last = layers[place + 1][end][1]
        if last is not None:
            end = (*end[:last], end[last] - 1, *end[last + 1 :])
            places[groups[last][end[last]]] = place
    return places


def _steps(
    groups: Sequence[Sequence[Any]], used: tuple[int, ...], place: int, fits: Callable[[Any, int], bool]
) -> list[tuple[int | None, tuple[int, ...]]]:
    """Return the groups whose next id may have a place, or none of them, each with the numbers of ids that are used then."""
    steps: list[tuple[int | None, tuple[int, ...]]] = [(None, used)]
    for group, ids in enumerate(groups):
        if used[group] < len(ids) and fits(ids[used[group]], place):
            steps.append((group, (*used[:group], used[group] + 1, *used[group + 1 :])))
    return steps
